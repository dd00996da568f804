//! `oubliette session …`.

use oubliette_protocol::{Error, Result, event::Status};
use serde_json::{Value, json};

use super::{
    Context, Verdict,
    client::Client,
    debug::{self, Following},
    live::{Live, Show, arguments, result},
    names::{self, set},
    output::{Output, field, fields, heard, listing, say},
    style::{Paint, fold, width},
    turn::{Ended, Interrupts, Sent},
};

/// List, follow, message, switch and end sessions. They live in the server, so it must be running.
#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Where a session is asked for, `last` is the newest one.")]
pub enum Session {
    /// List sessions, newest first.
    List {
        /// Only of this project, by id or name.
        #[arg(long, value_name = "PROJECT")]
        project: Option<String>,
        /// Only in this status: starting, running, idle, switching, ended or failed.
        #[arg(long)]
        status: Option<Status>,
        /// At most so many.
        #[arg(long, value_name = "N")]
        limit: Option<u32>,
    },
    /// Show a session.
    Get {
        /// Which.
        id: String,
    },
    /// Show a session's events.
    Events {
        /// Which.
        id: String,
        /// Only after this index.
        #[arg(long, value_name = "INDEX", default_value_t = -1, allow_negative_numbers = true)]
        since: i64,
        /// At most so many.
        #[arg(long, value_name = "N", conflicts_with = "follow")]
        max: Option<u32>,
        /// Stay for what is still to come, until the session ends.
        #[arg(long, short)]
        follow: bool,
        /// Also those of sessions it started.
        #[arg(long, conflicts_with = "follow")]
        children: bool,
    },
    /// Send a message to a session.
    Message {
        /// Which.
        id: String,
        /// What to tell the agent.
        text: String,
        /// Show the turn until it ends.
        #[arg(long, short)]
        wait: bool,
    },
    /// Cancel the running turn.
    Cancel {
        /// Which.
        id: String,
    },
    /// End sessions, and every session they started.
    End {
        /// Which; may be several.
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Give a session another agent, showing each step.
    Switch {
        /// Which.
        id: String,
        /// To which agent.
        agent: String,
    },
    /// Follow what happens behind a session: builds, tool calls, blocks, health, with timings.
    Debug {
        /// Which.
        id: String,
        /// Only after this index.
        #[arg(long, value_name = "INDEX", default_value_t = -1, allow_negative_numbers = true)]
        since: i64,
        /// Only these kinds, separated by commas.
        #[arg(long, value_name = "KINDS", value_delimiter = ',')]
        kinds: Option<Vec<String>>,
        /// Show what is there and leave.
        #[arg(long)]
        no_follow: bool,
    },
}

/// Runs it.
pub async fn run(command: Session, context: Context) -> Result<Verdict> {
    let client = Client::running(&context.home).await?;
    let output = context.output;
    match command {
        Session::List {
            project,
            status,
            limit,
        } => {
            let mut arguments = json!({});
            set(
                &mut arguments,
                "project_id",
                names::maybe_project(&client, project.as_deref()).await?,
            );
            set(&mut arguments, "status", status);
            let list = client.list("session_list", "sessions", arguments, limit).await?;
            output.result(&list, |list| {
                let columns = [
                    ("ID", "session_id"),
                    ("STATUS", "status"),
                    ("AGENT", "agent"),
                    ("TURN", "turn"),
                    ("CREATED", "created_at"),
                    ("TITLE", "title"),
                ];
                let none = "No session yet. Start one with `oubliette run \"…\"`.";
                listing(
                    list["sessions"].as_array().map_or(&[], Vec::as_slice),
                    &columns,
                    none,
                )
            });
        }
        Session::Get { id } => {
            let id = names::session(&client, &id).await?;
            output.result(
                &client.call("session_get", json!({ "session_id": id })).await?,
                shown,
            );
        }
        Session::Events {
            id,
            since,
            max,
            follow,
            children,
        } => {
            let id = names::session(&client, &id).await?;
            match follow {
                true => follow_events(&client, &id, since, output).await?,
                false => events(&client, &id, since, max, children, output).await?,
            }
        }
        Session::Message { id, text, wait } => {
            let id = names::session(&client, &id).await?;
            return message(&client, &id, text, wait, output).await;
        }
        Session::Cancel { id } => {
            let id = names::session(&client, &id).await?;
            let done = client.call("session_cancel", json!({ "session_id": id })).await?;
            output.result(&done, |done| match done["cancelled"] == true {
                true => format!("turn {} of {id} is being cancelled", field(done, "turn")),
                false => format!("{id} has no turn running"),
            });
        }
        Session::End { ids } => {
            for id in ids {
                let id = names::session(&client, &id).await?;
                let ended = client.call("session_end", json!({ "session_id": id })).await?;
                output.result(&ended, |_| format!("{id} is ended"));
            }
        }
        Session::Switch { id, agent } => {
            let id = names::session(&client, &id).await?;
            let show = |line: &str| {
                if output == Output::Text {
                    say(line);
                }
            };
            let switched = debug::switch(&client, &id, &agent, show).await?;
            output.result(&switched, said_switched);
        }
        Session::Debug {
            id,
            since,
            kinds,
            no_follow,
        } => {
            let session = names::session(&client, &id).await?;
            let following = Following {
                session,
                since,
                kinds,
                live: !no_follow,
            };
            debug::follow(&client, following, output).await?;
        }
    }
    Ok(Verdict::Done)
}

/// What came of a switch.
pub fn said_switched(switched: &Value) -> String {
    let how = match switched["drained"] == true {
        true => "everything in flight ended by itself",
        false => "what was in flight was cancelled",
    };
    format!(
        "{} works now ({how}; {} ms)",
        field(switched, "agent"),
        field(switched, "took_ms")
    )
}

fn shown(session: &Value) -> String {
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
    fields(session, &names)
}

async fn message(client: &Client, id: &str, text: String, wait: bool, output: Output) -> Result<Verdict> {
    let arguments = json!({ "session_id": id, "message": text });
    if !wait {
        let sent = client.call("session_message", arguments).await?;
        output.result(&sent, |sent| {
            format!(
                "turn {} ({}); follow it with: oubliette session events {id} --follow",
                field(sent, "turn"),
                field(sent, "status")
            )
        });
        return Ok(Verdict::Done);
    }
    let mut live = Live::new(if output == Output::Json {
        Show::Nothing
    } else {
        Show::All
    });
    let mut since = super::run::last_index(client, id).await?;
    let mut interrupts = Interrupts::listen()?;
    let sent = Sent::send(client, arguments).await?;
    match sent
        .follow(client, &mut since, &mut live, &mut interrupts, None)
        .await?
    {
        Ended::Completed { reply } => {
            if output == Output::Json {
                say(&reply.to_string());
            }
            Ok(Verdict::Done)
        }
        Ended::Cancelled { .. } => Err(Error::conflict("the turn was cancelled")),
        Ended::Failed(error) => Err(error),
        Ended::SessionEnded => Err(Error::conflict("the session was ended")),
    }
}

async fn events(
    client: &Client,
    id: &str,
    since: i64,
    max: Option<u32>,
    children: bool,
    output: Output,
) -> Result<()> {
    let mut asked = json!({ "session_id": id, "since_index": since, "max_events": max.unwrap_or(1000) });
    if children {
        asked["include_children"] = json!(true);
    }
    let mut page = client.call("session_events", asked.clone()).await?;
    // Without a limit of the person's own: all there is, as one answer.
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
    output.result(&page, |page| {
        let mut lines: Vec<String> = page["events"]
            .as_array()
            .into_iter()
            .flatten()
            .map(line)
            .collect();
        for child in page["children"].as_array().into_iter().flatten() {
            lines.push(Paint::stdout().bold(&format!("— {}", field(child, "session_id"))));
            lines.extend(child["events"].as_array().into_iter().flatten().map(line));
        }
        match lines.is_empty() {
            true => "No events.".into(),
            false => lines.join("\n"),
        }
    });
    Ok(())
}

async fn follow_events(client: &Client, id: &str, since: i64, output: Output) -> Result<()> {
    let mut events = client
        .follow(&format!("/api/sessions/{id}/events?since_index={since}"))
        .await?;
    // An ended session says nothing more: what is there is all.
    let over = client.call("session_get", json!({ "session_id": id })).await?["status"] == "ended";
    let last = super::run::last_index(client, id).await?;
    if over && last <= since {
        return Ok(());
    }
    while let Some(event) = events.next().await? {
        let listened = match output {
            Output::Json => heard(&event.to_string()),
            Output::Text => heard(&line(&event)),
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

/// An event in a line.
fn line(event: &Value) -> String {
    let paint = Paint::stdout();
    let text = |name: &str| field(event, name);
    let kind = event["type"].as_str().unwrap_or("?");
    let said = match kind {
        "status" => match event["reason"].as_str() {
            Some(reason) => format!("{}: {reason}", text("status")),
            None => text("status"),
        },
        "message" => format!("{}: {}", text("role"), text("text")),
        "delta" | "thought" => text("text"),
        "tool_call" => format!("{} {}", text("tool"), arguments(&event["arguments"])),
        "tool_result" => format!(
            "{} {}",
            if event["ok"] == true { "✓" } else { "✗" },
            result(&event["result"])
        ),
        "caller_tool_request" => format!(
            "{} {} {}",
            text("caller_id"),
            text("tool"),
            arguments(&event["arguments"])
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
    let room = width().saturating_sub(42).max(30);
    let line = format!(
        "{:>5} {} {kind} {}",
        text("index"),
        paint.dim(&format!("{time:<12}")),
        fold(&said, room)
    );
    line.trim_end().to_owned()
}
