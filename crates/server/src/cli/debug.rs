//! Shows a session's debugger events in the terminal, with timings; and the steps of switching its agent.

use std::time::Duration;

use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};

use super::{
    client::ActionClient,
    output::{OutputFormat, field_text, try_print_line},
    style::{AnsiStyle, fold_to_line, terminal_width},
    turn_display::{format_arguments, format_result},
};

/// The kinds of events shown during a switch: building, draining and tearing down an agent's context.
const SWITCH_KINDS: [&str; 14] = [
    "build_started",
    "tool_server_starting",
    "tool_server_ready",
    "tool_server_failed",
    "tool_server_stopped",
    "memory_opened",
    "build_finished",
    "switch_requested",
    "drain_started",
    "drain_timeout",
    "drain_finished",
    "teardown_started",
    "registry_cleared",
    "teardown_finished",
];

/// Which debugger events to show.
pub(crate) struct DebugFollow {
    /// The session's id.
    pub session: String,
    /// Index of the last event not to show; advanced as events are shown.
    pub since: i64,
    /// The kinds to show; none: all.
    pub kinds: Option<Vec<String>>,
    /// Whether to wait for events to come, until the session ends.
    pub live: bool,
}

/// Prints a session's debugger events; with `live`, until the session ends or stdout is closed.
pub(crate) async fn follow(
    client: &ActionClient,
    mut following: DebugFollow,
    output: OutputFormat,
) -> Result<()> {
    let odd = |kind: &&String| kind.is_empty() || !kind.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
    if let Some(kind) = following.kinds.iter().flatten().find(odd) {
        return Err(Error::invalid(format!(
            "{} is not a kind of event",
            oubliette_protocol::id::quoted(kind)
        )));
    }
    // The session's end is in its own event log, not in the debugger. The log's last index is read before the
    // status: a session that ends in between is then seen as ended by the status or by the log's stream.
    let last = super::run::last_event_index(client, &following.session).await?;
    let session = client
        .call("session_get", json!({ "session_id": following.session }))
        .await?;
    let live = following.live && session["status"] != "ended";
    let mut clock = EventTimer::default();
    let mut show = |event: &Value| match output {
        OutputFormat::Json => try_print_line(&event.to_string()),
        OutputFormat::Text => try_print_line(&clock.format_event(event)),
    };
    if !live {
        return show_remaining(client, &mut following, &mut show).await;
    }
    if output == OutputFormat::Text {
        let agent = field_text(&session, "agent");
        output.print_hint(&format!(
            "following {} (agent {agent}, {}); Ctrl-C leaves",
            following.session,
            field_text(&session, "status")
        ));
    }
    let path = format!(
        "/api/debugger?session_id={}&since_index={}{}",
        following.session,
        following.since,
        kinds_query(&following)
    );
    let mut events = client.follow(&path).await?;
    let mut log = client
        .follow(&format!(
            "/api/sessions/{}/events?since_index={last}",
            following.session
        ))
        .await?;
    loop {
        tokio::select! {
            event = events.next() => match event? {
                Some(event) => {
                    following.since = event["index"].as_i64().unwrap_or(following.since);
                    if !show(&event) {
                        return Ok(());
                    }
                }
                None => return Err(Error::unavailable("the server stopped; start it again with `oubliette up`")),
            },
            event = log.next() => match event? {
                Some(event) if event["status"] == "ended" => {
                    wait_for_teardown(client, &following.session).await?;
                    return show_remaining(client, &mut following, &mut show).await;
                }
                Some(_) => {}
                None => return Err(Error::unavailable("the server stopped; start it again with `oubliette up`")),
            },
        }
    }
}

/// How long the tool servers of a session that has ended are waited for.
const TEARDOWN_TIMEOUT: Duration = Duration::from_secs(30);

/// Waits until a session that has ended is torn down: its end is in the log before its tool servers are stopped.
async fn wait_for_teardown(client: &ActionClient, session: &str) -> Result<()> {
    let give_up = tokio::time::Instant::now() + TEARDOWN_TIMEOUT;
    let (mut since, mut is_built) = (-1, false);
    loop {
        let asked = json!({
            "session_id": session,
            "since_index": since,
            "max_events": 1000,
            "kinds": ["build_finished", "teardown_finished"],
            "wait_ms": if is_built { 5000 } else { 0 },
        });
        let page = client.call("debugger_events", asked).await?;
        let events = page["events"].as_array().map_or(&[][..], Vec::as_slice);
        if let Some(last) = events.last() {
            is_built = last["kind"] == "build_finished";
        }
        since = page["last_index"].as_i64().unwrap_or(since);
        let torn_down = !is_built && events.len() < 1000;
        if torn_down || tokio::time::Instant::now() > give_up {
            return Ok(());
        }
    }
}

/// Shows the recorded events after `since`; stops when `show` returns false.
async fn show_remaining(
    client: &ActionClient,
    following: &mut DebugFollow,
    show: &mut impl FnMut(&Value) -> bool,
) -> Result<()> {
    loop {
        let mut asked =
            json!({ "session_id": following.session, "since_index": following.since, "max_events": 1000 });
        if let Some(kinds) = &following.kinds {
            asked["kinds"] = json!(kinds);
        }
        let page = client.call("debugger_events", asked).await?;
        let events = page["events"].as_array().map_or(&[][..], Vec::as_slice);
        if !events.iter().all(&mut *show) {
            return Ok(());
        }
        following.since = page["last_index"].as_i64().unwrap_or(following.since);
        if events.len() < 1000 {
            return Ok(());
        }
    }
}

/// The query parameter `kinds`, if any kinds were chosen.
fn kinds_query(following: &DebugFollow) -> String {
    following
        .kinds
        .as_ref()
        .map_or_else(String::new, |kinds| format!("&kinds={}", kinds.join(",")))
}

/// Switches a session's agent; `show` is given a line for each step as it happens.
pub(crate) async fn switch_agent(
    client: &ActionClient,
    session: &str,
    agent: &str,
    mut show: impl FnMut(&str),
) -> Result<Value> {
    let steps = SWITCH_KINDS.iter().map(|kind| (*kind).to_owned()).collect();
    let mut following = DebugFollow {
        session: session.to_owned(),
        since: -1,
        kinds: Some(steps),
        live: true,
    };
    show_remaining(client, &mut following, &mut |_| true).await?;
    let path = format!(
        "/api/debugger?session_id={session}&since_index={}{}",
        following.since,
        kinds_query(&following)
    );
    let mut events = client.follow(&path).await?;
    let mut clock = EventTimer::default();
    let switch = client.call(
        "session_switch_agent",
        json!({ "session_id": session, "agent": agent }),
    );
    let mut switch = std::pin::pin!(switch);
    let switched = loop {
        tokio::select! {
            switched = &mut switch => break switched,
            Ok(Some(event)) = events.next() => {
                following.since = event["index"].as_i64().unwrap_or(following.since);
                show(&clock.format_event(&event));
            }
        }
    };
    // The answer may overtake events on the stream: show those that are left before returning.
    let _ = show_remaining(client, &mut following, &mut |event| {
        show(&clock.format_event(event));
        true
    })
    .await;
    switched
}

/// Formats events with the time since the first one.
#[derive(Default)]
pub(crate) struct EventTimer {
    first: Option<jiff::Timestamp>,
}

impl EventTimer {
    /// One line: time since the first event, kind, description.
    pub(crate) fn format_event(&mut self, event: &Value) -> String {
        let ts = event["ts"]
            .as_str()
            .and_then(|text| text.parse::<jiff::Timestamp>().ok());
        let first = *self.first.get_or_insert(ts.unwrap_or_default());
        let passed = ts.map_or(0.0, |ts| ts.duration_since(first).as_secs_f64());
        let paint = AnsiStyle::stdout();
        let kind = event["kind"].as_str().unwrap_or("?");
        let padded = format!("{kind:<20}");
        let coloured = match kind {
            "tool_server_failed"
            | "tool_blocked"
            | "answer_refused"
            | "agent_without_tools"
            | "limit_exceeded" => paint.red(&padded),
            "drain_timeout" => paint.yellow(&padded),
            "tool_call" if event["ok"] == false => paint.red(&padded),
            "build_finished" | "tool_server_ready" => paint.green(&padded),
            _ => paint.cyan(&padded),
        };
        let room = terminal_width().saturating_sub(34).max(30);
        let line = format!(
            "{} {coloured} {}",
            paint.dim(&format!("{passed:>9.3}s")),
            fold_to_line(&describe_event(event), room)
        );
        line.trim_end().to_owned()
    }
}

/// Describes an event's fields in words, by its kind.
fn describe_event(event: &Value) -> String {
    let text = |name: &str| field_text(event, name);
    let ms = |name: &str| match event[name].as_f64() {
        Some(ms) if ms < 10.0 => format!("{ms:.1} ms"),
        Some(ms) => format!("{ms:.0} ms"),
        None => String::new(),
    };
    let reason = |words: String| match event["reason"].as_str() {
        Some(reason) => format!("{words}: {reason}"),
        None => words,
    };
    match event["kind"].as_str().unwrap_or_default() {
        "build_started" => {
            let servers: Vec<&str> = event["servers"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect();
            format!(
                "{} with {}",
                text("agent"),
                if servers.is_empty() {
                    "no servers".into()
                } else {
                    servers.join(", ")
                }
            )
        }
        "tool_server_starting" => format!(
            "{} ({}), attempt {}",
            text("server"),
            text("transport"),
            text("attempt")
        ),
        "tool_server_ready" => format!("{}: {} tools in {}", text("server"), text("tools"), ms("took_ms")),
        "tool_server_failed" => {
            let stderr = event["stderr"]
                .as_str()
                .map(|s| format!(" | {s}"))
                .unwrap_or_default();
            format!("{}: {}{stderr}", text("server"), text("error"))
        }
        "tool_server_stopped" => reason(text("server")),
        "tool_registered" => {
            let state = match (event["allowed"] == true, event["available"] == true) {
                (true, true) => "",
                (true, false) => ", unavailable",
                (false, _) => ", not allowed",
            };
            format!("{} = {}{state}", text("tool"), text("canonical"))
        }
        "memory_opened" => format!("{} entries of {}", text("entries"), text("agent")),
        "build_finished" => format!("{}: {} tools in {}", text("agent"), text("tools"), ms("took_ms")),
        "switch_requested" => format!("{} → {}", text("from"), text("to")),
        "drain_started" => format!("{} in flight, at most {}", text("in_flight"), ms("timeout_ms")),
        "drain_timeout" => format!("{} cancelled after {}", text("cancelled"), ms("waited_ms")),
        "drain_finished" => {
            let how = if event["drained"] == true {
                "all ended by themselves"
            } else {
                "what was left was cancelled"
            };
            format!("{how}, in {}", ms("took_ms"))
        }
        "teardown_started" => text("agent"),
        "registry_cleared" => format!("{} tools", text("tools")),
        "teardown_finished" => format!("in {}", ms("took_ms")),
        "tool_call" => {
            let outcome = match (event["ok"] == true, event["error"].as_str()) {
                (_, Some(error)) => format!("failed: {error}"),
                (true, None) => format_result(&event["result"]),
                (false, None) => format!("failed: {}", format_result(&event["result"])),
            };
            format!(
                "{} {} [{}, {}] → {outcome}",
                text("tool"),
                format_arguments(&event["arguments"]),
                text("source"),
                ms("duration_ms")
            )
        }
        "tool_blocked" => reason(text("tool")),
        "approval_requested" => format!(
            "{} for {} {}",
            text("approval_id"),
            text("tool"),
            format_arguments(&event["arguments"])
        ),
        "approval_decided" => reason(format!("{} {}", text("approval_id"), text("decision"))),
        "health_changed" => reason(format!("{}: {} → {}", text("server"), text("from"), text("to"))),
        "answer_refused" => reason(text("request_id")),
        "permission" => format!(
            "{}{}: {}",
            text("tool"),
            if event["gated"] == true {
                " (checked at the gate)"
            } else {
                ""
            },
            text("answer")
        ),
        "agent_without_tools" => text("reason"),
        "limit_exceeded" => reason(text("limit")),
        "model_request" => {
            let used = match event["input_tokens"].is_u64() {
                true => format!(
                    ", {} tokens in, {} out{}",
                    text("input_tokens"),
                    text("output_tokens"),
                    if event["estimated"] == true {
                        " (estimated)"
                    } else {
                        ""
                    }
                ),
                false => String::new(),
            };
            format!(
                "{} {} → {} in {}{used}",
                text("provider"),
                text("path"),
                text("status"),
                ms("duration_ms")
            )
        }
        "egress" => {
            let by = event["server"]
                .as_str()
                .map(|server| format!(" [{server}]"))
                .unwrap_or_default();
            let request = match event["upstream"].is_null() {
                true => String::new(),
                false => format!(
                    " {} {} {} → {}",
                    text("upstream"),
                    text("method"),
                    text("path"),
                    text("status")
                ),
            };
            let outcome = match (event["allowed"] == true, event["error"].as_str()) {
                (false, error) => format!("refused: {}", error.unwrap_or_default()),
                (true, Some(error)) => format!("failed: {error}"),
                (true, None) => format!(
                    "{} bytes in, {} out, {}",
                    text("bytes_in"),
                    text("bytes_out"),
                    ms("duration_ms")
                ),
            };
            format!("{}:{}{by}{request} {outcome}", text("host"), text("port"))
        }
        "egress_omitted" => format!(
            "{} connections, {} bytes in, {} out",
            text("connections"),
            text("bytes_in"),
            text("bytes_out")
        ),
        _ => format_arguments(event),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_time_kind_and_duration() {
        let mut clock = EventTimer::default();
        let first = json!({"kind": "build_started", "ts": "2026-01-01T00:00:00Z", "agent": "a", "servers": ["x", "y"]});
        assert_eq!(
            clock.format_event(&first),
            "    0.000s build_started        a with x, y"
        );
        let call = json!({"kind": "tool_call", "ts": "2026-01-01T00:00:01.5Z", "tool": "read", "source": "catalog",
            "arguments": {"path": "a"}, "ok": true, "duration_ms": 3.25, "result": {"content": [{"type": "text", "text": "hi"}]}});
        assert_eq!(
            clock.format_event(&call),
            "    1.500s tool_call            read path=\"a\" [catalog, 3.2 ms] → hi"
        );
        let unknown = json!({"kind": "later", "ts": "2026-01-01T00:00:02Z"});
        assert!(clock.format_event(&unknown).contains("later"));
    }
}
