//! Reads a session's event stream until the session ends, reconnecting after the last event seen.

use std::{sync::Arc, time::Duration};

use futures::StreamExt;
use serde_json::json;
use tokio::sync::watch;

use crate::{
    Error, Event, Lend, Turn, client::unreachable_error, request_handler::RequestHandler,
    session::SessionProgress, sse::SseParser,
};

/// The first wait before reconnecting, and the longest; it doubles in between.
const RECONNECT_WAIT: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// A stream without any bytes for this long, not even a keep-alive comment, is treated as broken.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(75);

/// The state of an existing session's log at the moment a program joins it.
#[derive(Default)]
pub(crate) struct JoinPoint {
    /// The index of the last event.
    pub(crate) last_index: Option<i64>,
    /// Requests without an answer yet, left by an earlier run of this program.
    pub(crate) open_requests: Vec<Event>,
}

/// Reads an existing session's log to its end, so that requests answered earlier are not run again.
pub(crate) async fn read_existing_log(lend: &Lend, session_id: &str) -> Result<JoinPoint, Error> {
    let mut joined = JoinPoint::default();
    loop {
        let since = joined.last_index.unwrap_or(-1);
        let ask = json!({ "session_id": session_id, "since_index": since, "max_events": 1000 });
        let mut page = lend.client.call("session_events", &ask).await?;
        let events: Vec<Event> = serde_json::from_value(page["events"].take())
            .map_err(|why| Error::Unexpected(format!("session_events: {why}")))?;
        let Some(last) = events.last() else {
            return Ok(joined);
        };
        joined.last_index = Some(last.index);
        for event in events {
            match event.kind.as_str() {
                "caller_tool_request" => joined.open_requests.push(event),
                "caller_tool_done" => {
                    joined
                        .open_requests
                        .retain(|open| open.text("request_id") != event.text("request_id"));
                }
                _ => {}
            }
        }
    }
}

/// Follows the stream until the session ends or an error is final; `state` then has the reason.
pub(crate) async fn follow_session(
    lend: Arc<Lend>,
    session_id: String,
    joined: JoinPoint,
    state: watch::Sender<SessionProgress>,
) {
    let mut desk = RequestHandler::new(lend.clone(), session_id.clone());
    joined
        .open_requests
        .iter()
        .for_each(|event| desk.start_request(event));
    let mut last = joined.last_index.unwrap_or(-1);
    let mut wait = RECONNECT_WAIT.0;
    loop {
        let began = last;
        let why = match read_stream(&lend, &session_id, &mut last, &mut desk, &state).await {
            Ok(()) => return,
            Err(why) => why,
        };
        if last > began {
            wait = RECONNECT_WAIT.0;
        }
        if !why.is_transient() {
            state.send_modify(|state| state.end_reason = Some(why));
            return;
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(RECONNECT_WAIT.1);
    }
}

/// Reads one connection until it breaks; `Ok` when the session has ended.
async fn read_stream(
    lend: &Lend,
    session_id: &str,
    last: &mut i64,
    desk: &mut RequestHandler,
    state: &watch::Sender<SessionProgress>,
) -> Result<(), Error> {
    let response = lend
        .client
        .open_event_stream(session_id, &lend.caller_id, *last)
        .await?;
    let mut bytes = response.bytes_stream();
    let mut parser = SseParser::default();
    loop {
        let piece = tokio::time::timeout(SILENCE_TIMEOUT, bytes.next()).await;
        let piece = piece.map_err(|_| Error::Unreachable("the stream fell silent".into()))?;
        let piece = piece
            .ok_or_else(|| Error::Unreachable("the stream ended".into()))?
            .map_err(unreachable_error)?;
        let found = parser
            .push(&piece)
            .map_err(|_| Error::Unexpected("an endless event".into()))?;
        for data in found {
            // A newer server may send messages that are not events.
            let Ok(event) = serde_json::from_str::<Event>(&data) else {
                continue;
            };
            // Delivery is at least once, so an index not above the last one is a repeat. A repeated request is
            // still passed on: the handler ignores those it has already seen.
            let repeat = event.index <= *last;
            *last = event.index.max(*last);
            if event.kind == "caller_tool_request" {
                desk.start_request(&event);
            }
            if repeat {
                continue;
            }
            if event.kind == "caller_tool_done" {
                desk.stop_if_unanswered(&event);
            }
            if let Some(hear) = &lend.on_event {
                hear(&event);
            }
            if update_progress(&event, state) {
                return Ok(());
            }
        }
    }
}

/// Records what the program may wait for (completed turns, errors, the end); true when the session has ended.
fn update_progress(event: &Event, state: &watch::Sender<SessionProgress>) -> bool {
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
            state.send_modify(|state| state.turn_completed(turn));
        }
        ("error", _) => {
            let error = Error::Refused {
                code: said("code"),
                message: said("message"),
            };
            state.send_modify(|state| state.turn_error = Some(error));
        }
        ("status", Some("running")) => state.send_modify(SessionProgress::turn_started),
        ("status", Some("idle")) => state.send_modify(SessionProgress::turn_stopped),
        ("status", Some(status @ ("ended" | "failed"))) => {
            let why = event.text("reason").unwrap_or(status).to_owned();
            state.send_modify(|state| state.end_reason = Some(Error::Ended(why)));
            return true;
        }
        _ => {}
    }
    false
}
