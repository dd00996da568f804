//! `oubliette session …`: list, show, follow, message, switch and end sessions.

use std::collections::VecDeque;

use oubliette_protocol::{Error, Result, event::SessionStatus};
use serde_json::{Value, json};

use super::{
    CommandContext, CommandOutcome,
    approval_prompt::StdinLines,
    client::ActionClient,
    debug::{self, DebugFollow},
    output::{OutputFormat, field_text, format_fields, format_listing, print_line, try_print_line},
    resolve::{self, set_if_some},
    style::{AnsiStyle, fold_to_line, terminal_width},
    turn::{InterruptSignal, LineSource, SentMessage, TurnOutcome, TypedLines},
    turn_display::{TurnDisplay, TurnVerbosity, format_arguments, format_result},
};

/// List, follow, message, switch and end sessions. They live in the server, so it must be running.
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Where a session is asked for, `last` is the newest one.")]
pub(crate) enum SessionCommand {
    /// List sessions, newest first.
    List {
        /// Only sessions of this project, by id or name.
        #[arg(long, value_name = "PROJECT")]
        project: Option<String>,
        /// Only sessions with this status: starting, running, idle, switching, ended or failed.
        #[arg(long)]
        status: Option<SessionStatus>,
        /// List at most this many, 1 to 1000 (default: all).
        #[arg(long, value_name = "N")]
        limit: Option<u32>,
    },
    /// Show a session.
    Get {
        /// The session's id, or last.
        id: String,
    },
    /// Show a session's events.
    Events {
        /// The session's id, or last.
        id: String,
        /// Only after this index.
        #[arg(long, value_name = "INDEX", default_value_t = -1, allow_negative_numbers = true)]
        since: i64,
        /// Show at most this many, 1 to 1000 (default: all).
        #[arg(long, value_name = "N", conflicts_with = "follow")]
        max: Option<u32>,
        /// Wait for new events, until the session ends.
        #[arg(long, short)]
        follow: bool,
        /// Also show the events of sessions it started.
        #[arg(long, conflicts_with = "follow")]
        children: bool,
    },
    /// Send a message to a session.
    Message {
        /// The session's id, or last.
        id: String,
        /// What to tell the agent.
        text: String,
        /// Show the turn until it ends.
        #[arg(long, short)]
        wait: bool,
    },
    /// Cancel the running turn.
    Cancel {
        /// The session's id, or last.
        id: String,
    },
    /// End sessions, and every session they started.
    End {
        /// The sessions' ids, or last.
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Delete ended sessions, and every session they started, with their logs.
    Delete {
        /// The sessions' ids, or last.
        #[arg(required = true)]
        ids: Vec<String>,
        /// Delete their workspaces too.
        #[arg(long)]
        workspace: bool,
    },
    /// Give a session another agent, showing each step.
    Switch {
        /// The session's id, or last.
        id: String,
        /// The new agent's slug.
        agent: String,
    },
    /// Follow what happens behind a session: builds, tool calls, blocks, health, with timings.
    Debug {
        /// The session's id, or last.
        id: String,
        /// Only after this index.
        #[arg(long, value_name = "INDEX", default_value_t = -1, allow_negative_numbers = true)]
        since: i64,
        /// Only these kinds, separated by commas.
        #[arg(long, value_name = "KINDS", value_delimiter = ',')]
        kinds: Option<Vec<String>>,
        /// Show the events recorded so far, without waiting for more.
        #[arg(long)]
        no_follow: bool,
    },
}

/// Runs `oubliette session`.
pub(crate) async fn run(command: SessionCommand, context: CommandContext) -> Result<CommandOutcome> {
    let client = ActionClient::connect_running(&context).await?;
    let output = context.output;
    match command {
        SessionCommand::List {
            project,
            status,
            limit,
        } => {
            let mut arguments = json!({});
            set_if_some(
                &mut arguments,
                "project_id",
                resolve::optional_project_id(&client, project.as_deref()).await?,
            );
            set_if_some(&mut arguments, "status", status);
            let list = client.list("session_list", "sessions", arguments, limit).await?;
            output.print_result(&list, |list| {
                let columns = [
                    ("ID", "session_id"),
                    ("STATUS", "status"),
                    ("AGENT", "agent"),
                    ("TURN", "turn"),
                    ("TOKENS", "tokens"),
                    ("USD", "cost_usd"),
                    ("CREATED", "created_at"),
                    ("TITLE", "title"),
                ];
                let none = "No session yet. Start one with `oubliette run \"…\"`.";
                let mut sessions = list["sessions"].as_array().cloned().unwrap_or_default();
                sessions.iter_mut().for_each(show_usage);
                format_listing(&sessions, &columns, none)
            });
        }
        SessionCommand::Get { id } => {
            let id = resolve::session_id(&client, &id).await?;
            output.print_result(
                &client.call("session_get", json!({ "session_id": id })).await?,
                format_session,
            );
        }
        SessionCommand::Events {
            id,
            since,
            max,
            follow,
            children,
        } => {
            let id = resolve::session_id(&client, &id).await?;
            match follow {
                true => follow_events(&client, &id, since, output).await?,
                false => print_events(&client, &id, since, max, children, output).await?,
            }
        }
        SessionCommand::Message { id, text, wait } => {
            let id = resolve::session_id(&client, &id).await?;
            return send_message(&client, &id, text, wait, output).await;
        }
        SessionCommand::Cancel { id } => {
            let id = resolve::session_id(&client, &id).await?;
            let done = client.call("session_cancel", json!({ "session_id": id })).await?;
            output.print_result(&done, |done| match done["cancelled"] == true {
                true => format!("turn {} of {id} is being cancelled", field_text(done, "turn")),
                false => format!("{id} has no turn running"),
            });
        }
        SessionCommand::End { ids } => {
            for id in ids {
                let id = resolve::session_id(&client, &id).await?;
                let ended = client.call("session_end", json!({ "session_id": id })).await?;
                output.print_result(&ended, |_| format!("{id} is ended"));
            }
        }
        SessionCommand::Delete { ids, workspace } => {
            for id in ids {
                let id = resolve::session_id(&client, &id).await?;
                let arguments = json!({ "session_id": id, "workspace": workspace });
                let gone = client.call("session_delete", arguments).await?;
                output.print_result(&gone, |gone| match gone["workspace_deleted"] == true {
                    true => format!("{id} and its workspace are deleted"),
                    false => format!("{id} is deleted"),
                });
            }
        }
        SessionCommand::Switch { id, agent } => {
            let id = resolve::session_id(&client, &id).await?;
            let show = |line: &str| {
                if output == OutputFormat::Text {
                    print_line(line);
                }
            };
            let switched = debug::switch_agent(&client, &id, &agent, show).await?;
            output.print_result(&switched, format_switch);
        }
        SessionCommand::Debug {
            id,
            since,
            kinds,
            no_follow,
        } => {
            let session = resolve::session_id(&client, &id).await?;
            let following = DebugFollow {
                session,
                since,
                kinds,
                live: !no_follow,
            };
            debug::follow(&client, following, output).await?;
        }
    }
    Ok(CommandOutcome::Done)
}

/// Formats the answer of `session_switch_agent`.
pub(crate) fn format_switch(switched: &Value) -> String {
    let how = match switched["drained"] == true {
        true => "everything in flight ended by itself",
        false => "what was in flight was cancelled",
    };
    format!(
        "{} works now ({how}; {} ms)",
        field_text(switched, "agent"),
        field_text(switched, "took_ms")
    )
}

/// Adds what a session used to its row.
fn show_usage(session: &mut Value) {
    let usage = &session["usage"];
    let tokens = ["input_tokens", "output_tokens"].map(|field| usage[field].as_u64().unwrap_or(0));
    let cost = usage["cost_usd"].as_f64().map(|usd| format!("{usd:.4}"));
    let mark = if usage["estimated"] == json!(true) {
        "≈"
    } else {
        ""
    };
    let tokens = tokens.iter().sum::<u64>();
    session["tokens"] = json!(format!("{mark}{tokens}"));
    session["cost_usd"] = json!(cost.map(|usd| format!("{mark}{usd}")));
}

fn format_session(session: &Value) -> String {
    let names = [
        "session_id",
        "title",
        "status",
        "reason",
        "agent",
        "turn",
        "project_id",
        "workspace_id",
        "parent_id",
        "depth",
        "isolation",
        "relay_socket",
        "created_at",
        "updated_at",
    ];
    format_fields(session, &names)
}

async fn send_message(
    client: &ActionClient,
    id: &str,
    text: String,
    wait: bool,
    output: OutputFormat,
) -> Result<CommandOutcome> {
    let arguments = json!({ "session_id": id, "message": text });
    if !wait {
        let sent = client.call("session_message", arguments).await?;
        output.print_result(&sent, |sent| {
            format!(
                "turn {} ({}); follow it with: oubliette session events {id} --follow",
                field_text(sent, "turn"),
                field_text(sent, "status")
            )
        });
        return Ok(CommandOutcome::Done);
    }
    let mut display = TurnDisplay::new(if output == OutputFormat::Json {
        TurnVerbosity::Nothing
    } else {
        TurnVerbosity::All
    });
    let mut since = super::run::last_event_index(client, id).await?;
    let mut interrupts = InterruptSignal::listen()?;
    let sent = SentMessage::send(client, arguments).await?;
    let (mut lines, mut queued) = (StdinLines::default(), VecDeque::new());
    let typed = TypedLines {
        source: LineSource::ForApprovals(&mut lines),
        queued: &mut queued,
    };
    match sent
        .follow(client, &mut since, &mut display, &mut interrupts, typed)
        .await?
    {
        TurnOutcome::Completed { reply } => {
            if output == OutputFormat::Json {
                print_line(&reply.to_string());
            }
            Ok(CommandOutcome::Done)
        }
        TurnOutcome::Cancelled { .. } => Err(Error::conflict("the turn was cancelled")),
        TurnOutcome::Failed(error) => Err(error),
        TurnOutcome::SessionEnded | TurnOutcome::Left => Err(Error::conflict("the session was ended")),
    }
}

async fn print_events(
    client: &ActionClient,
    id: &str,
    since: i64,
    max: Option<u32>,
    children: bool,
    output: OutputFormat,
) -> Result<()> {
    let mut asked = json!({ "session_id": id, "since_index": since, "max_events": max.unwrap_or(1000) });
    if children {
        asked["include_children"] = json!(true);
    }
    let mut page = client.call("session_events", asked.clone()).await?;
    // Without --max: read page after page, and show them as one answer.
    while max.is_none() && !children {
        asked["since_index"] = page["last_index"].clone();
        let mut more = client.call("session_events", asked.clone()).await?;
        let Value::Array(events) = more["events"].take() else {
            break;
        };
        if events.is_empty() {
            break;
        }
        page["last_index"] = more["last_index"].take();
        page["status"] = more["status"].take();
        if let Some(all) = page["events"].as_array_mut() {
            all.extend(events);
        }
    }
    output.print_result(&page, |page| {
        let mut lines: Vec<String> = page["events"]
            .as_array()
            .into_iter()
            .flatten()
            .map(format_event_line)
            .collect();
        for child in page["children"].as_array().into_iter().flatten() {
            lines.push(AnsiStyle::stdout().bold(&format!("— {}", field_text(child, "session_id"))));
            lines.extend(
                child["events"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(format_event_line),
            );
        }
        match lines.is_empty() {
            true => "No events.".into(),
            false => lines.join("\n"),
        }
    });
    Ok(())
}

async fn follow_events(client: &ActionClient, id: &str, since: i64, output: OutputFormat) -> Result<()> {
    let mut events = client
        .follow(&format!("/api/sessions/{id}/events?since_index={since}"))
        .await?;
    // An ended session's stream stays open without further events, so stop at the last one.
    let over = client.call("session_get", json!({ "session_id": id })).await?["status"] == "ended";
    let last = super::run::last_event_index(client, id).await?;
    if over && last <= since {
        return Ok(());
    }
    while let Some(event) = events.next().await? {
        let listened = match output {
            OutputFormat::Json => try_print_line(&event.to_string()),
            OutputFormat::Text => try_print_line(&format_event_line(&event)),
        };
        let ends = event["type"] == "status" && event["status"] == "ended";
        if !listened || ends || (over && event["index"].as_i64() >= Some(last)) {
            return Ok(());
        }
    }
    Err(Error::unavailable(
        "the server stopped; start it again with `oubliette up`",
    ))
}

/// Formats an event as one line of the terminal.
fn format_event_line(event: &Value) -> String {
    format_event(event, AnsiStyle::stdout(), terminal_width())
}

/// Formats an event as one line: index, time, type, description, cut to about this many columns.
pub(crate) fn format_event(event: &Value, paint: AnsiStyle, width: usize) -> String {
    let text = |name: &str| field_text(event, name);
    let kind = event["type"].as_str().unwrap_or("?");
    let said = match kind {
        "status" => match event["reason"].as_str() {
            Some(reason) => format!("{}: {reason}", text("status")),
            None => text("status"),
        },
        "message" => format!("{}: {}", text("role"), text("text")),
        "delta" | "thought" => text("text"),
        "tool_call" => format!("{} {}", text("tool"), format_arguments(&event["arguments"])),
        "tool_result" => format!(
            "{} {}",
            if event["ok"] == true { "✓" } else { "✗" },
            format_result(&event["result"])
        ),
        "caller_tool_request" => format!(
            "{} {} {}",
            text("caller_id"),
            text("tool"),
            format_arguments(&event["arguments"])
        ),
        "caller_tool_done" => format!("{} {}", text("request_id"), text("outcome")),
        "turn_completed" => format!("turn {} ({})", text("turn"), text("stop_reason")),
        "error" => format!("{}: {}", text("code"), text("message")),
        _ => {
            let mut rest = event.clone();
            for name in ["index", "ts", "session_id", "type"] {
                rest.as_object_mut().map(|object| object.remove(name));
            }
            rest.to_string()
        }
    };
    let time = text("ts");
    let time = time
        .split_once('T')
        .map_or("", |(_, time)| time.get(..12).unwrap_or(time))
        .trim_end_matches('Z');
    let padded = format!("{kind:<20}");
    let kind = match kind {
        "error" => paint.red(&padded),
        _ => paint.cyan(&padded),
    };
    let room = width.saturating_sub(42).max(30);
    let line = format!(
        "{:>5} {} {kind} {}",
        text("index"),
        paint.dim(&format!("{time:<12}")),
        fold_to_line(&said, room)
    );
    line.trim_end().to_owned()
}
