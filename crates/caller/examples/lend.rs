//! Lends one function to an agent for one turn.
//!
//! `OUBLIETTE_TOKEN=oub_… cargo run -p oubliette-caller --example lend -- http://127.0.0.1:8080 "Say hello with notify"`
#![allow(missing_docs)]

use oubliette_caller::{Error, Oubliette};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Note {
    /// What to show to the user.
    message: String,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let address = args.next().unwrap_or_else(|| "http://127.0.0.1:8080".into());
    let prompt = args
        .next()
        .unwrap_or_else(|| "Tell the user hello with your notify tool.".into());
    let session = Oubliette::connect(&address, std::env::var("OUBLIETTE_TOKEN").unwrap_or_default())?
        .lend("myapp")
        .tool("notify", "Show a note to the user", async |note: Note| {
            println!("note: {}", note.message);
            Ok::<_, String>("shown")
        })
        .start(prompt)
        .await?;
    println!("{}", session.turn(session.last_turn()).await?.text);
    session.end().await
}
