//! Tests of the turn recorder: ACP updates in, log events out.

use std::time::{Duration, Instant};

use agent_client_protocol::v1::schema::SessionUpdate;
use oubliette_protocol::event::EventBody;
use serde_json::{Value, json};

use super::turn_recorder::TurnRecorder;
use crate::config::AgentOutputLimits;

fn update(value: Value) -> SessionUpdate {
    serde_json::from_value(value).unwrap()
}

fn chunk(text: &str) -> SessionUpdate {
    update(json!({"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":text}}))
}

fn kinds(events: &[EventBody]) -> Vec<&'static str> {
    events.iter().map(EventBody::kind).collect()
}

#[test]
fn deltas_messages_and_tool_calls_are_recorded_in_order() {
    let mut recorder = TurnRecorder::new(AgentOutputLimits::default());
    let now = Instant::now();
    let mut events = Vec::new();
    for step in [
        chunk("one "),
        chunk("two"),
        update(
            json!({"sessionUpdate":"tool_call","toolCallId":"c","title":"Reading","name":"read","status":"pending"}),
        ),
        update(
            json!({"sessionUpdate":"tool_call_update","toolCallId":"c","status":"in_progress","rawInput":{"path":"x"}}),
        ),
        update(
            json!({"sessionUpdate":"tool_call_update","toolCallId":"c","status":"completed","rawOutput":{"text":"y"}}),
        ),
        update(json!({"sessionUpdate":"tool_call_update","toolCallId":"c","status":"completed"})),
        chunk("three"),
    ] {
        events.extend(recorder.record(step, now).unwrap());
    }
    let (rest, text) = recorder.finish();
    events.extend(rest);
    assert_eq!(
        kinds(&events),
        [
            "delta",
            "delta",
            "message",
            "tool_call",
            "tool_result",
            "delta",
            "message"
        ]
    );
    assert_eq!(text, "one two\nthree");
    let EventBody::ToolCall { tool, arguments, .. } = &events[3] else {
        panic!("{events:?}")
    };
    assert_eq!((tool.as_str(), arguments), ("read", &json!({"path":"x"})));
    let EventBody::ToolResult { ok, result, .. } = &events[4] else {
        panic!("{events:?}")
    };
    assert_eq!((*ok, result), (true, &json!({"text":"y"})));
}

#[test]
fn single_byte_chunks_are_combined_and_none_is_lost() {
    let limits = AgentOutputLimits::default();
    let mut recorder = TurnRecorder::new(limits.clone());
    let start = Instant::now();
    let mut events = Vec::new();
    for n in 0..20_000u64 {
        // Twenty thousand chunks within one delta interval.
        let now = start + Duration::from_nanos(n);
        events.extend(recorder.record(chunk("x"), now).unwrap());
    }
    assert!(
        events.len() <= 1 + 20_000 / limits.delta_bytes,
        "{}",
        events.len()
    );
    assert!(
        recorder
            .flush_due()
            .is_some_and(|due| due <= start + 2 * limits.delta_interval)
    );
    events.extend(recorder.flush(start + limits.delta_interval));
    let (rest, text) = recorder.finish();
    events.extend(rest);
    let deltas: usize = events
        .iter()
        .map(|e| {
            if let EventBody::Delta { text } = e {
                text.len()
            } else {
                0
            }
        })
        .sum();
    assert_eq!((deltas, text.len()), (20_000, 20_000));
}

#[test]
fn text_and_events_of_a_turn_are_limited() {
    let mut recorder = TurnRecorder::new(AgentOutputLimits {
        turn_text_bytes: 100,
        ..AgentOutputLimits::default()
    });
    let now = Instant::now();
    assert!(recorder.record(chunk(&"x".repeat(100)), now).is_ok());
    assert!(recorder.record(chunk("x"), now).is_err());
    let mut recorder = TurnRecorder::new(AgentOutputLimits {
        turn_events: 3,
        ..AgentOutputLimits::default()
    });
    let plan = || update(json!({"sessionUpdate":"plan","entries":[]}));
    assert!((0..3).all(|_| recorder.record(plan(), now).is_ok()));
    assert!(recorder.record(plan(), now).is_err());
}
