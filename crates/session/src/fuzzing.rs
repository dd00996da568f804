//! The fuzz target of what an agent writes: its lines, its requests, its reports.

use std::time::{Duration, Instant};

use agent_client_protocol::v1::schema::{
    InitializeResponse, NewSessionResponse, RequestPermissionRequest, SessionNotification,
};
use oubliette_protocol::ByteBudget;

use crate::{
    agent_process::{
        agent_error_text,
        connection::{AcpConnection, AgentMessage},
        permission::{self, PolicyAnswer},
        turn_recorder::TurnRecorder,
    },
    config::AgentOutputLimits,
};

/// Bounds that arbitrary bytes can reach.
fn small_limits() -> AgentOutputLimits {
    AgentOutputLimits {
        line_bytes: 64 * 1024,
        invalid_lines: 16,
        turn_text_bytes: 4096,
        turn_events: 64,
        delta_bytes: 64,
        ..AgentOutputLimits::default()
    }
}

/// Reads arbitrary bytes as an agent's stdout during one turn. Panics only when an invariant is broken: bounds on events
/// and text, one result for each call.
#[doc(hidden)]
pub fn fuzz_agent_output(bytes: &[u8]) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().build() else {
        return;
    };
    runtime.block_on(read_turn(bytes.to_vec()));
}

async fn read_turn(bytes: Vec<u8>) {
    let limits = small_limits();
    let output = std::io::Cursor::new(bytes);
    let budget = ByteBudget::new("session_buffer_mb", 16 * 1024 * 1024);
    let mut connection = AcpConnection::new(tokio::io::sink(), output, limits.clone(), budget.clone());
    let (mut recorder, start) = (TurnRecorder::new(limits.clone(), &budget), Instant::now());
    let mut events = Vec::new();
    let mut count = 0;
    // Ends with the bytes, and with whatever else ends a connection.
    while let Ok(message) = connection.receive().await {
        count += 1;
        let now = start + Duration::from_millis(20 * count);
        match message {
            AgentMessage::Notification { params, .. } => {
                let Ok(report) = serde_json::from_value::<SessionNotification>(params) else {
                    continue;
                };
                match recorder.record(report.update, now) {
                    Ok(new) => events.extend(new),
                    // The turn is ended with this error.
                    Err(_) => return,
                }
                if recorder.flush_due().is_some_and(|due| due <= now) {
                    events.extend(recorder.flush(now));
                }
            }
            AgentMessage::Request { id, params, .. } => {
                let asked = serde_json::from_value::<RequestPermissionRequest>(params);
                let answer = asked.map(|asked| permission::select_option(&asked, PolicyAnswer::Allow).1);
                let answer = answer.ok().and_then(|answer| serde_json::to_value(answer).ok());
                if connection.answer(id, Ok(answer.into())).is_err() {
                    return;
                }
            }
            AgentMessage::Response { outcome, .. } => match outcome {
                Ok(answer) => {
                    let _ = serde_json::from_value::<InitializeResponse>(answer.clone());
                    let _ = serde_json::from_value::<NewSessionResponse>(answer);
                }
                Err(error) => drop(agent_error_text(&error)),
            },
        }
    }
    let (rest, text) = recorder.finish();
    events.extend(rest);
    // Joined by line ends, at most one for each event.
    assert!(text.len() <= limits.turn_text_bytes + limits.turn_events);
    for event in &events {
        assert!(serde_json::to_string(event).is_ok());
    }
}
