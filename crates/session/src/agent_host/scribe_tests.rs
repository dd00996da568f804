//! Updates in, events out.

use std::time::{Duration, Instant};

use agent_client_protocol::v1::schema::SessionUpdate;
use oubliette_protocol::event::EventBody;
use serde_json::{Value, json};

use super::scribe::Scribe;
use crate::config::Voice;

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
fn a_turn_is_deltas_messages_and_calls_in_order() {
    let mut scribe = Scribe::new(Voice::default());
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
        events.extend(scribe.take(step, now).unwrap());
    }
    let (rest, text) = scribe.finish();
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
fn a_byte_at_a_time_is_gathered_and_none_is_lost() {
    let voice = Voice::default();
    let mut scribe = Scribe::new(voice.clone());
    let start = Instant::now();
    let mut events = Vec::new();
    for n in 0..20_000u64 {
        // A flood: twenty thousand pieces within one window.
        let now = start + Duration::from_nanos(n);
        events.extend(scribe.take(chunk("x"), now).unwrap());
    }
    assert!(events.len() <= 1 + 20_000 / voice.delta_bytes, "{}", events.len());
    assert!(
        scribe
            .due()
            .is_some_and(|due| due <= start + 2 * voice.delta_time)
    );
    events.extend(scribe.flush(start + voice.delta_time));
    let (rest, text) = scribe.finish();
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
fn a_turn_has_an_end_to_what_it_may_say() {
    let mut scribe = Scribe::new(Voice {
        turn_text: 100,
        ..Voice::default()
    });
    let now = Instant::now();
    assert!(scribe.take(chunk(&"x".repeat(100)), now).is_ok());
    assert!(scribe.take(chunk("x"), now).is_err());
    let mut scribe = Scribe::new(Voice {
        turn_events: 3,
        ..Voice::default()
    });
    let plan = || update(json!({"sessionUpdate":"plan","entries":[]}));
    assert!((0..3).all(|_| scribe.take(plan(), now).is_ok()));
    assert!(scribe.take(plan(), now).is_err());
}
