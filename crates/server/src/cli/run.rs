//! `oubliette run`: one turn, shown live.

use std::{collections::VecDeque, io::Read as _, time::Duration};

use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};

use super::{
    CommandContext, CommandOutcome,
    approval_prompt::StdinLines,
    client::ActionClient,
    folder_copy::{choose_folder, copy_into_workspace},
    output::{OutputFormat, print_line},
    resolve::{self, set_if_some},
    turn::{InterruptSignal, LineSource, SentMessage, TurnOutcome, TypedLines},
    turn_display::{TurnDisplay, TurnVerbosity},
};

/// How long to wait for a second Ctrl-C after the first has cancelled the turn.
const SECOND_INTERRUPT_WINDOW: Duration = Duration::from_millis(700);

/// Arguments of `oubliette run`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Text, tool calls and results stream to the terminal. Ctrl-C cancels the turn, twice ends the session.\n\n\
    Examples:\n  oubliette run --agent demo \"Show me around\"\n  git diff | oubliette run --agent assistant -\n  \
    oubliette run --quiet \"Summarise README.md\" > summary.txt\n  oubliette run --session last \"And now the tests\""
)]
pub struct RunArgs {
    /// What to tell the agent; - reads it from stdin.
    prompt: String,
    /// The agent (default: the project's).
    #[arg(long, short)]
    agent: Option<String>,
    /// The project, by id or name (default: the only one).
    #[arg(long, short)]
    project: Option<String>,
    /// Go on with this session, or with the `last` one, instead of starting one.
    #[arg(long, value_name = "ID", conflicts_with_all = ["agent", "workspace", "new_workspace", "here"])]
    session: Option<String>,
    /// Work in this workspace of the project (default: its default one).
    #[arg(long, value_name = "ID", conflicts_with = "new_workspace")]
    workspace: Option<String>,
    /// Work in a new, empty workspace.
    #[arg(long)]
    new_workspace: bool,
    /// Work on a copy of the present folder, in a new workspace: all but .git and what .gitignore names. Nothing is copied
    /// back: `oubliette workspace pull` does. In the folder of a git repository a terminal is asked without it.
    #[arg(long, conflicts_with_all = ["workspace", "new_workspace"])]
    here: bool,
    /// End the session when the turn is over.
    #[arg(long)]
    end: bool,
    /// Show only the agent's text.
    #[arg(long, short, conflicts_with = "stream_json")]
    quiet: bool,
    /// Print every event as a line of JSON, as it happens.
    #[arg(long)]
    stream_json: bool,
}

/// Runs `oubliette run`.
pub async fn run(args: RunArgs, context: CommandContext) -> Result<CommandOutcome> {
    let client = ActionClient::connect_running(&context).await?;
    let show = match (context.output, args.stream_json, args.quiet) {
        (_, true, _) => TurnVerbosity::JsonEvents,
        (OutputFormat::Json, ..) => TurnVerbosity::Nothing,
        (OutputFormat::Text, false, true) => TurnVerbosity::AgentText,
        (OutputFormat::Text, false, false) => TurnVerbosity::All,
    };
    let may_ask = show == TurnVerbosity::All
        && args.prompt != "-"
        && args.session.is_none()
        && args.workspace.is_none()
        && !args.new_workspace;
    // Before Ctrl-C gets another meaning than ending this command.
    let folder = choose_folder(args.here, may_ask)?;
    let mut interrupts = InterruptSignal::listen()?;
    let mut display = TurnDisplay::new(show);
    let mut since = -1;
    let mut arguments = message_arguments(&args, &client, &mut since).await?;
    let mut copied = None;
    if let Some(folder) = &folder {
        let workspace =
            copy_into_workspace(&client, &arguments["project_id"], folder, context.output).await?;
        arguments["workspace_id"] = json!(workspace);
        copied = Some(workspace);
    }
    let sent = SentMessage::send(&client, arguments).await?;
    let session = sent.session().to_owned();
    let (mut lines, mut queued) = (StdinLines::default(), VecDeque::new());
    let typed = TypedLines {
        source: LineSource::ForApprovals(&mut lines),
        queued: &mut queued,
    };
    let ended = sent
        .follow(&client, &mut since, &mut display, &mut interrupts, typed)
        .await?;
    let mut session_ended = matches!(ended, TurnOutcome::SessionEnded);
    let result = match ended {
        TurnOutcome::Completed { reply } => Ok(reply),
        TurnOutcome::Failed(error) => Err(error),
        TurnOutcome::Cancelled { by_interrupt, .. } => {
            // Cancelling may be done before the user can press Ctrl-C again.
            if by_interrupt
                && tokio::time::timeout(SECOND_INTERRUPT_WINDOW, interrupts.next())
                    .await
                    .is_ok()
            {
                display.print_note("ending the session");
                client
                    .call("session_end", json!({ "session_id": session }))
                    .await?;
                session_ended = true;
            }
            Err(Error::conflict("the turn was cancelled"))
        }
        TurnOutcome::SessionEnded | TurnOutcome::Left => Err(Error::conflict("the session was ended")),
    };
    let down = match (&result, session_ended) {
        (Ok(_), false) => servers_down(&client, &session).await,
        _ => Vec::new(),
    };
    if args.end && !session_ended {
        client
            .call("session_end", json!({ "session_id": session }))
            .await?;
    }
    let reply = match result {
        Ok(reply) => reply,
        Err(error) if args.stream_json => {
            OutputFormat::Text.print_error(&error);
            return Ok(CommandOutcome::Failed);
        }
        Err(error) => return Err(error),
    };
    if let (Some(workspace), OutputFormat::Text, false) =
        (&copied, context.output, args.stream_json || args.quiet)
    {
        display.print_note(&format!(
            "the files are in workspace {workspace} · see what changed: oubliette workspace diff {workspace} · get them: \
             oubliette workspace pull . --workspace {workspace}"
        ));
    }
    match (context.output, args.stream_json) {
        (OutputFormat::Json, false) => print_line(&reply.to_string()),
        (OutputFormat::Text, false) if !args.end && !args.quiet => {
            display.print_note(&format!(
                "session {session} · go on with: oubliette chat --session {session}"
            ));
        }
        _ => {}
    }
    for server in &down {
        OutputFormat::Text.print_error(server);
    }
    Ok(match down.is_empty() {
        true => CommandOutcome::Done,
        false => CommandOutcome::Failed,
    })
}

/// The tool servers of a session that are down, each as an error: the agent had to do without them.
async fn servers_down(client: &ActionClient, session: &str) -> Vec<Error> {
    let Ok(list) = client.call("tool_list", json!({ "session_id": session })).await else {
        return Vec::new();
    };
    let servers = list["servers"].as_array().into_iter().flatten();
    let down = servers.filter(|server| server["status"] == "red").map(|server| {
        let why = server["error"].as_str().unwrap_or("it does not run");
        let id = server["id"].as_str().unwrap_or_default();
        Error::unavailable(format!(
            "tool server {id} is down, and the agent worked without it: {why}; `oubliette tool test {id}` tries it"
        ))
    });
    down.collect()
}

async fn message_arguments(args: &RunArgs, client: &ActionClient, since: &mut i64) -> Result<Value> {
    let mut arguments = json!({ "message": read_prompt(&args.prompt)? });
    if let Some(given) = &args.session {
        let id = resolve::session_id(client, given).await?;
        *since = last_event_index(client, &id).await?;
        arguments["session_id"] = json!(id);
        set_if_some(
            &mut arguments,
            "project_id",
            resolve::optional_project_id(client, args.project.as_deref()).await?,
        );
        return Ok(arguments);
    }
    set_if_some(&mut arguments, "agent", args.agent.as_ref());
    set_if_some(&mut arguments, "workspace_id", args.workspace.as_ref());
    set_if_some(
        &mut arguments,
        "create_workspace",
        args.new_workspace.then_some(true),
    );
    set_if_some(
        &mut arguments,
        "project_id",
        Some(resolve::project_id_or_only(client, args.project.as_deref()).await?),
    );
    Ok(arguments)
}

/// The prompt given, or stdin's text for `-`.
fn read_prompt(given: &str) -> Result<String> {
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

/// The index of the last event in a session's log; -1 when it is empty.
pub async fn last_event_index(client: &ActionClient, session: &str) -> Result<i64> {
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
