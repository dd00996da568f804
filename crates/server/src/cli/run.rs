//! `oubliette run`.

use std::{io::Read as _, time::Duration};

use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};

use super::{
    Context, Verdict,
    client::Client,
    live::{Live, Show},
    names::{self, set},
    output::{Output, say},
    turn::{Ended, Interrupts, Sent},
};

/// How long a second Ctrl-C is waited for once the first has cancelled the turn.
const SECOND_PRESS: Duration = Duration::from_millis(700);

/// What to run.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Text, tool calls and results stream to the terminal. Ctrl-C cancels the turn, twice ends the session.\n\n\
    Examples:\n  oubliette run --agent demo \"Show me around\"\n  git diff | oubliette run --agent assistant -\n  \
    oubliette run --quiet \"Summarise README.md\" > summary.txt\n  oubliette run --session last \"And now the tests\""
)]
pub struct Args {
    /// What to tell the agent; - reads it from stdin.
    prompt: String,
    /// The agent (default: the project's).
    #[arg(long, short)]
    agent: Option<String>,
    /// The project, by id or name (default: the only one).
    #[arg(long, short)]
    project: Option<String>,
    /// Go on with this session, or with the `last` one, instead of starting one.
    #[arg(long, value_name = "ID", conflicts_with_all = ["agent", "workspace", "new_workspace"])]
    session: Option<String>,
    /// Work in this workspace of the project (default: its default one).
    #[arg(long, value_name = "ID", conflicts_with = "new_workspace")]
    workspace: Option<String>,
    /// Work in a new, empty workspace.
    #[arg(long)]
    new_workspace: bool,
    /// End the session when the turn is over.
    #[arg(long)]
    end: bool,
    /// Show the agent's words alone.
    #[arg(long, short, conflicts_with = "stream_json")]
    quiet: bool,
    /// Print every event as a line of JSON, as it comes.
    #[arg(long)]
    stream_json: bool,
}

/// Runs it.
pub async fn run(args: Args, context: Context) -> Result<Verdict> {
    let client = Client::running(&context.home).await?;
    let show = match (context.output, args.stream_json, args.quiet) {
        (_, true, _) => Show::Events,
        (Output::Json, ..) => Show::Nothing,
        (Output::Text, false, true) => Show::Words,
        (Output::Text, false, false) => Show::All,
    };
    let mut interrupts = Interrupts::listen()?;
    let mut live = Live::new(show);
    let mut since = -1;
    let arguments = arguments(&args, &client, &mut since).await?;
    let sent = Sent::send(&client, arguments).await?;
    let session = sent.session().to_owned();
    let ended = sent
        .follow(&client, &mut since, &mut live, &mut interrupts, None)
        .await?;
    let mut over = matches!(ended, Ended::SessionEnded);
    let result = match ended {
        Ended::Completed { reply } => Ok(reply),
        Ended::Failed(error) => Err(error),
        Ended::Cancelled { by_key, .. } => {
            // A turn may be cancelled sooner than a finger comes down again.
            if by_key
                && tokio::time::timeout(SECOND_PRESS, interrupts.next())
                    .await
                    .is_ok()
            {
                live.note("ending the session");
                client
                    .call("session_end", json!({ "session_id": session }))
                    .await?;
                over = true;
            }
            Err(Error::conflict("the turn was cancelled"))
        }
        Ended::SessionEnded => Err(Error::conflict("the session was ended")),
    };
    if args.end && !over {
        client
            .call("session_end", json!({ "session_id": session }))
            .await?;
    }
    let reply = match result {
        Ok(reply) => reply,
        Err(error) if args.stream_json => {
            Output::Text.error(&error);
            return Ok(Verdict::Failed);
        }
        Err(error) => return Err(error),
    };
    match (context.output, args.stream_json) {
        (Output::Json, false) => say(&reply.to_string()),
        (Output::Text, false) if !args.end && !args.quiet => {
            live.note(&format!(
                "session {session} · go on with: oubliette chat --session {session}"
            ));
        }
        _ => {}
    }
    Ok(Verdict::Done)
}

async fn arguments(args: &Args, client: &Client, since: &mut i64) -> Result<Value> {
    let mut arguments = json!({ "message": prompt(&args.prompt)? });
    if let Some(given) = &args.session {
        let id = names::session(client, given).await?;
        *since = last_index(client, &id).await?;
        arguments["session_id"] = json!(id);
        set(
            &mut arguments,
            "project_id",
            names::maybe_project(client, args.project.as_deref()).await?,
        );
        return Ok(arguments);
    }
    set(&mut arguments, "agent", args.agent.as_ref());
    set(&mut arguments, "workspace_id", args.workspace.as_ref());
    set(
        &mut arguments,
        "create_workspace",
        args.new_workspace.then_some(true),
    );
    set(
        &mut arguments,
        "project_id",
        Some(names::project_or_only(client, args.project.as_deref()).await?),
    );
    Ok(arguments)
}

/// The prompt itself, or what stdin holds.
fn prompt(given: &str) -> Result<String> {
    if given != "-" {
        return Ok(given.to_owned());
    }
    let mut text = String::new();
    std::io::stdin()
        .lock()
        .read_to_string(&mut text)
        .map_err(|e| Error::invalid(format!("stdin: {e}")))?;
    match text.trim().is_empty() {
        true => Err(Error::invalid("stdin is empty: nothing to tell the agent")),
        false => Ok(text),
    }
}

/// Where a session's log ends.
pub async fn last_index(client: &Client, session: &str) -> Result<i64> {
    let mut since = -1;
    loop {
        let asked = json!({ "session_id": session, "since_index": since, "max_events": 1000 });
        let page = client.call("session_events", asked).await?;
        let last = page["last_index"].as_i64().unwrap_or(since);
        if last == since || page["events"].as_array().is_none_or(|events| events.len() < 1000) {
            return Ok(last);
        }
        since = last;
    }
}
