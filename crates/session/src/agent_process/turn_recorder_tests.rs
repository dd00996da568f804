//! Tests of the turn recorder: ACP updates in, log events out.

use std::time::{Duration, Instant};

use agent_client_protocol::v1::schema::SessionUpdate;
use oubliette_protocol::{ByteBudget, event::EventBody};
use serde_json::{Value, json};

use super::turn_recorder::TurnRecorder;
use crate::config::AgentOutputLimits;

fn recorder_with(limits: AgentOutputLimits) -> TurnRecorder {
    TurnRecorder::new(limits, &ByteBudget::default())
}

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
    let mut recorder = recorder_with(AgentOutputLimits::default());
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
    let mut recorder = recorder_with(limits.clone());
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
    let mut recorder = recorder_with(AgentOutputLimits {
        turn_text_bytes: 100,
        ..AgentOutputLimits::default()
    });
    let now = Instant::now();
    assert!(recorder.record(chunk(&"x".repeat(100)), now).is_ok());
    assert!(recorder.record(chunk("x"), now).is_err());
    let mut recorder = recorder_with(AgentOutputLimits {
        turn_events: 3,
        ..AgentOutputLimits::default()
    });
    let call = |id: u32| {
        update(
            json!({"sessionUpdate":"tool_call","toolCallId":id.to_string(),"title":"t","status":"in_progress","rawInput":{"a":1}}),
        )
    };
    assert!((0..3).all(|id| recorder.record(call(id), now).is_ok()));
    assert!(recorder.record(call(3), now).is_err());
}

#[test]
fn text_of_a_turn_is_charged_until_the_turn_is_over() {
    let budget = ByteBudget::new("session_buffer_mb", 1_000_000);
    let mut recorder = TurnRecorder::new(AgentOutputLimits::default(), &budget);
    let now = Instant::now();
    assert!(recorder.record(chunk(&"x".repeat(500_000)), now).is_ok());
    assert_eq!(budget.used(), 500_000);
    let refused = recorder.record(chunk(&"x".repeat(600_000)), now).unwrap_err();
    assert!(refused.to_string().contains("session_buffer_mb"), "{refused}");
    recorder.finish();
    assert_eq!(budget.used(), 0);
}

#[test]
fn of_plans_and_usage_that_follow_closely_the_last_is_logged() {
    let limits = AgentOutputLimits::default();
    let mut recorder = recorder_with(limits.clone());
    let start = Instant::now();
    let plan = |n: u64| {
        let entry = json!({"content":n.to_string(),"priority":"high","status":"pending"});
        update(json!({"sessionUpdate":"plan","entries":[entry]}))
    };
    let usage = |n: u64| update(json!({"sessionUpdate":"usage_update","used":n,"size":1}));
    let shown = |events: &[EventBody]| -> Vec<String> {
        let text = |event: &EventBody| match event {
            EventBody::Plan { entries } => format!("plan {}", entries[0]["content"].as_str().unwrap()),
            EventBody::Usage { usage } => format!("usage {}", usage["used"]),
            other => panic!("{other:?}"),
        };
        events.iter().map(text).collect()
    };
    let mut events = Vec::new();
    for n in 0..10_000 {
        let now = start + Duration::from_nanos(n);
        events.extend(recorder.record(plan(n), now).unwrap());
        events.extend(recorder.record(usage(n), now).unwrap());
    }
    assert_eq!(shown(&events), ["plan 0", "usage 0"]);
    let due = recorder.flush_due().unwrap();
    assert_eq!(due, start + limits.update_interval);
    assert!(recorder.flush(start).is_empty());
    assert_eq!(
        shown(&recorder.flush(due + Duration::from_nanos(1))),
        ["plan 9999", "usage 9999"]
    );
    assert_eq!(recorder.flush_due(), None);
    recorder
        .record(plan(10_000), due + Duration::from_nanos(2))
        .unwrap();
    assert_eq!(shown(&recorder.finish().0), ["plan 10000"]);
}

#[test]
fn names_and_ids_of_tool_calls_are_bounded_and_few_arguments_are_kept() {
    let mut recorder = recorder_with(AgentOutputLimits::default());
    let (now, long) = (Instant::now(), "x".repeat(1_000_000));
    let mut events = Vec::new();
    for n in 0..40 {
        let id = format!("{n}{long}");
        let call = json!({"sessionUpdate":"tool_call","toolCallId":id,"title":long,"status":"in_progress"});
        events.extend(recorder.record(update(call), now).unwrap());
        let more = json!({"sessionUpdate":"tool_call_update","toolCallId":id,"rawInput":[long]});
        events.extend(recorder.record(update(more), now).unwrap());
    }
    assert!((20..=30).contains(&events.len()), "{}", events.len());
    events.extend(recorder.finish().0);
    assert_eq!(events.len(), 40);
    assert!(
        events
            .iter()
            .all(|event| oubliette_protocol::size::json_bytes(event) < 1_100_000)
    );
}

fn arguments_of(events: &[EventBody]) -> Vec<Value> {
    let arguments = |event: &EventBody| match event {
        EventBody::ToolCall { arguments, .. } => Some(arguments.clone()),
        _ => None,
    };
    events.iter().filter_map(arguments).collect()
}

#[test]
fn the_last_arguments_of_a_call_win_over_the_first() {
    let mut recorder = recorder_with(AgentOutputLimits::default());
    let now = Instant::now();
    let mut events = Vec::new();
    for step in [
        json!({"sessionUpdate":"tool_call","toolCallId":"c","title":"t","status":"pending","rawInput":{"path":"a"}}),
        json!({"sessionUpdate":"tool_call_update","toolCallId":"c","rawInput":{"path":"abc"}}),
        json!({"sessionUpdate":"tool_call_update","toolCallId":"c","status":"completed"}),
    ] {
        events.extend(recorder.record(update(step), now).unwrap());
    }
    assert_eq!(arguments_of(&events), [json!({"path":"abc"})]);
    // A call that runs is shown at once, and again when its arguments turn out to be others.
    let begin = json!({"sessionUpdate":"tool_call","toolCallId":"d","title":"t","status":"in_progress","rawInput":{"n":1}});
    assert_eq!(
        arguments_of(&recorder.record(update(begin), now).unwrap()),
        [json!({"n":1})]
    );
    let more = json!({"sessionUpdate":"tool_call_update","toolCallId":"d","rawInput":{"n":2}});
    assert!(recorder.record(update(more), now).unwrap().is_empty());
    let due = recorder.flush_due().unwrap();
    assert_eq!(arguments_of(&recorder.flush(due)), [json!({"n":2})]);
}

#[test]
fn terminal_output_is_the_result_and_no_text_has_escapes() {
    let mut recorder = recorder_with(AgentOutputLimits::default());
    let now = Instant::now();
    let mut events = Vec::new();
    for step in [
        json!({"sessionUpdate":"tool_call","toolCallId":"c","title":"ls","kind":"execute","status":"in_progress",
               "content":[{"type":"terminal","terminalId":"t"}]}),
        json!({"sessionUpdate":"tool_call_update","toolCallId":"c","_meta":{"terminal_output":{"terminal_id":"t","data":"\u{1b}[32mone"}}}),
        json!({"sessionUpdate":"tool_call_update","toolCallId":"c","_meta":{"terminal_output_delta":{"terminal_id":"t","data":" two\u{1b}[0m"}}}),
        json!({"sessionUpdate":"tool_call_update","toolCallId":"c","status":"completed"}),
        json!({"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"gr\u{1b}["}}),
        json!({"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"1meen"}}),
    ] {
        events.extend(recorder.record(update(step), now).unwrap());
    }
    let (rest, text) = recorder.finish();
    events.extend(rest);
    assert_eq!(text, "green");
    let result = events.iter().find_map(|event| match event {
        EventBody::ToolResult { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert_eq!(result, Some(json!("one two")));
}
