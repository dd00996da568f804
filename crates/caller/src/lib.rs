//! Lend functions of your program to an agent, in ten lines.
//!
//! ```no_run
//! # #[derive(serde::Deserialize, schemars::JsonSchema)] struct Note { message: String }
//! # async fn run() -> Result<(), oubliette_caller::Error> {
//! use oubliette_caller::Oubliette;
//!
//! let oubliette = Oubliette::connect("http://127.0.0.1:8080", std::env::var("OUBLIETTE_TOKEN").unwrap_or_default())?;
//! let session = oubliette
//!     .lend("myapp")
//!     .tool("notify", "Show a note to the user", async |note: Note| {
//!         println!("{}", note.message);
//!         Ok::<_, String>("shown")
//!     })
//!     .start("Tell me hello with your notify tool.")
//!     .await?;
//! println!("{}", session.turn(1).await?.text);
//! # Ok(()) }
//! ```
//!
//! The agent sees `myapp_notify` with a schema made from `Note`. The library holds the session's event
//! stream, runs your function for each request (many at once), and sends the answer. It comes back after
//! a lost connection where it left off, and runs no request twice.
//!
//! It speaks the server's REST and SSE doors and knows nothing of the server's insides. In the order data
//! flows:
//!
//! - [`client`]: the server's address and the token; plain calls.
//! - [`lend`]: which functions are lent, and how a session begins.
//! - `sse`: bytes → server-sent events; [`event`]: what a session says.
//! - `follow`: the stream, from where it was left; `answer`: one request worked on and answered once.
//! - [`session`]: what the program holds meanwhile.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod answer;
pub mod client;
mod error;
pub mod event;
mod follow;
pub mod lend;
pub mod session;
mod sse;

pub use client::Oubliette;
pub use error::Error;
pub use event::Event;
pub use lend::{Lend, Message};
pub use session::{Session, Turn};
