//! The session's stream, from where it was left, for as long as the session lasts.

use std::{sync::Arc, time::Duration};

use futures::StreamExt;
use serde_json::json;
use tokio::sync::watch;

use crate::{Error, Event, Lend, Turn, answer::Desk, client::unreachable, session::State, sse::Parser};

/// The first wait before connecting again, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// A stream that says nothing, not even that it lives, for this long is dead.
const SILENCE: Duration = Duration::from_secs(75);

/// Where a session stands when a program joins it.
#[derive(Default)]
pub(crate) struct Joined {
    /// The last event already there.
    pub(crate) index: Option<i64>,
    /// Requests nobody has answered yet: left over from a run of this program that ended early.
    pub(crate) open: Vec<Event>,
}

/// Reads an existing session's log to its end: what was asked and answered before must not run again.
pub(crate) async fn join(lend: &Lend, session_id: &str) -> Result<Joined, Error> {
    let mut joined = Joined::default();
    loop {
        let since = joined.index.unwrap_or(-1);
        let ask = json!({ "session_id": session_id, "since_index": since, "max_events": 1000 });
        let mut page = lend.client.call("session_events", &ask).await?;
        let events: Vec<Event> = serde_json::from_value(page["events"].take())
            .map_err(|why| Error::Unexpected(format!("session_events: {why}")))?;
        let Some(last) = events.last() else {
            return Ok(joined);
        };
        joined.index = Some(last.index);
        for event in events {
            match event.kind.as_str() {
                "caller_tool_request" => joined.open.push(event),
                "caller_tool_done" => {
                    joined
                        .open
                        .retain(|open| open.text("request_id") != event.text("request_id"));
                }
                _ => {}
            }
        }
    }
}

/// Follows the stream until the session ends.
pub(crate) async fn follow(lend: Arc<Lend>, session_id: String, joined: Joined, state: watch::Sender<State>) {
    let mut desk = Desk::new(lend.clone(), session_id.clone());
    joined.open.iter().for_each(|event| desk.request(event));
    let mut last = joined.index.unwrap_or(-1);
    let mut wait = BACKOFF.0;
    loop {
        let began = last;
        let why = match read(&lend, &session_id, &mut last, &mut desk, &state).await {
            Ok(()) => return,
            Err(why) => why,
        };
        if last > began {
            wait = BACKOFF.0;
        }
        if !why.is_passing() {
            state.send_modify(|state| state.over = Some(why));
            return;
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(BACKOFF.1);
    }
}

/// One connection; `Ok` when the session has ended.
async fn read(
    lend: &Lend,
    session_id: &str,
    last: &mut i64,
    desk: &mut Desk,
    state: &watch::Sender<State>,
) -> Result<(), Error> {
    let response = lend.client.events(session_id, &lend.caller_id, *last).await?;
    let mut bytes = response.bytes_stream();
    let mut parser = Parser::default();
    loop {
        let piece = tokio::time::timeout(SILENCE, bytes.next()).await;
        let piece = piece.map_err(|_| Error::Unreachable("the stream fell silent".into()))?;
        let piece = piece
            .ok_or_else(|| Error::Unreachable("the stream ended".into()))?
            .map_err(unreachable)?;
        let found = parser
            .push(&piece)
            .map_err(|_| Error::Unexpected("an endless event".into()))?;
        for data in found {
            // Something newer than this library may send more than events.
            let Ok(event) = serde_json::from_str::<Event>(&data) else {
                continue;
            };
            // Delivery is at least once. An older index is a repeat: only a request may be worth a second
            // look, and the desk knows which it has had.
            let repeat = event.index <= *last;
            *last = event.index.max(*last);
            if event.kind == "caller_tool_request" {
                desk.request(&event);
            }
            if repeat {
                continue;
            }
            if event.kind == "caller_tool_done" {
                desk.done(&event);
            }
            if let Some(hear) = &lend.on_event {
                hear(&event);
            }
            if heard(&event, state) {
                return Ok(());
            }
        }
    }
}

/// Keeps what the program may wait for; true when the session has ended.
fn heard(event: &Event, state: &watch::Sender<State>) -> bool {
    let said = |field| event.text(field).unwrap_or_default().to_owned();
    match (event.kind.as_str(), event.text("status")) {
        ("turn_completed", _) => {
            let number = event
                .fields
                .get("turn")
                .and_then(serde_json::Value::as_u64)
                .unwrap_or_default();
            let turn = Turn {
                turn: number,
                stop_reason: said("stop_reason"),
                text: said("text"),
            };
            state.send_modify(|state| state.completed(turn));
        }
        ("error", _) => {
            let error = Error::Refused {
                code: said("code"),
                message: said("message"),
            };
            state.send_modify(|state| state.trouble = Some(error));
        }
        ("status", Some("running")) => state.send_modify(State::running),
        ("status", Some("idle")) => state.send_modify(State::idle),
        ("status", Some(status @ ("ended" | "failed"))) => {
            let why = event.text("reason").unwrap_or(status).to_owned();
            state.send_modify(|state| state.over = Some(Error::Ended(why)));
            return true;
        }
        _ => {}
    }
    false
}
