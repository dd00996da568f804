//! How large the events of a session's log may be. What is larger is cut, with a mark where something is missing.

use std::borrow::Cow;

use agent_client_protocol::v1::schema::PlanEntry;
use oubliette_os::fnv1a;
use oubliette_protocol::{JsonObject, event::EventBody, size::json_bytes};
use serde_json::{Value, json};

/// The largest tool arguments or result in an event, in bytes of JSON.
const MAX_VALUE_BYTES: usize = 1024 * 1024;
/// The longest reason, error message or tool name in an event, in bytes.
pub(crate) const MAX_TEXT_BYTES: usize = 8 * 1024;
/// The longest id of a tool call, in bytes.
const MAX_ID_BYTES: usize = 256;
/// The largest plan, in bytes of JSON, and the longest text of one of its entries, in bytes.
const MAX_PLAN_BYTES: usize = 64 * 1024;
const MAX_PLAN_TEXT_BYTES: usize = 2 * 1024;
/// The largest usage report, in bytes of JSON.
const MAX_USAGE_BYTES: usize = 4 * 1024;

/// Cuts what is too large in an event. Message text is not cut: a turn may have so much of it, and fails beyond that.
pub(crate) fn bound_event(event: &mut EventBody) {
    match event {
        EventBody::Status { reason, .. } => bound_option(reason),
        EventBody::Error { message, .. } => bound_text(message),
        EventBody::TurnCompleted { stop_reason, .. } => bound_text(stop_reason),
        EventBody::Plan { entries } => bound_value(entries, MAX_PLAN_BYTES * 2),
        EventBody::Usage { usage } => *usage = bounded_usage(std::mem::take(usage)),
        EventBody::ToolCall {
            tool_call_id,
            tool,
            arguments,
        } => {
            bound_id(tool_call_id);
            bound_text(tool);
            bound_value(arguments, MAX_VALUE_BYTES * 2);
        }
        EventBody::ToolResult {
            tool_call_id, result, ..
        } => {
            bound_id(tool_call_id);
            bound_value(result, MAX_VALUE_BYTES * 2);
        }
        // Of messages, and of calls that the tool plane has bounded.
        EventBody::Message { .. }
        | EventBody::Delta { .. }
        | EventBody::Thought { .. }
        | EventBody::CallerToolRequest { .. }
        | EventBody::CallerToolDone { .. }
        | EventBody::ApprovalRequested(_)
        | EventBody::ApprovalDecided(_) => {}
    }
}

/// A text, or its beginning and a mark.
pub(crate) fn truncate_text(text: String, most: usize) -> String {
    match text.len() > most {
        // A new text: one that is cut in place keeps its memory.
        true => format!("{}…", &text[..text.floor_char_boundary(most)]),
        false => text,
    }
}

/// A tool call's id; of one that is too long the beginning and a hash, so that different ids stay different.
pub(crate) fn bounded_id(id: &str) -> Cow<'_, str> {
    match id.len() > MAX_ID_BYTES {
        true => {
            let start = &id[..id.floor_char_boundary(MAX_ID_BYTES - 24)];
            Cow::Owned(format!("{start}…{:016x}", fnv1a(id.as_bytes())))
        }
        false => Cow::Borrowed(id),
    }
}

/// A value, or the beginning of its JSON text in an object that says so.
pub(crate) fn bounded_value(value: Value) -> Value {
    let mut value = value;
    bound_value(&mut value, MAX_VALUE_BYTES);
    value
}

/// The entries of a plan, as many as fit; a last one says how many are missing.
pub(crate) fn bounded_plan(entries: Vec<PlanEntry>) -> Value {
    let (mut kept, mut bytes) = (Vec::new(), 0);
    let mut left = entries.len();
    for mut entry in entries {
        entry.content = truncate_text(entry.content, MAX_PLAN_TEXT_BYTES);
        if json_bytes(&entry) > 2 * MAX_PLAN_TEXT_BYTES {
            entry.meta = None;
        }
        bytes += json_bytes(&entry);
        if bytes > MAX_PLAN_BYTES {
            let text = format!("… {left} more entries are left out");
            kept.push(json!({ "content": text, "priority": "low", "status": "pending" }));
            break;
        }
        kept.push(json!(entry));
        left -= 1;
    }
    Value::Array(kept)
}

/// A usage report; of one that is too large only the numbers.
pub(crate) fn bounded_usage(mut usage: JsonObject) -> JsonObject {
    if json_bytes(&usage) > MAX_USAGE_BYTES {
        usage.retain(|name, value| name.len() <= 64 && value.is_number());
        let keys: Vec<String> = usage.keys().skip(32).cloned().collect();
        for key in keys {
            usage.remove(&key);
        }
        usage.insert("truncated".into(), Value::Bool(true));
    }
    usage
}

fn bound_text(text: &mut String) {
    *text = truncate_text(std::mem::take(text), MAX_TEXT_BYTES);
}

fn bound_option(text: &mut Option<String>) {
    if let Some(text) = text {
        bound_text(text);
    }
}

fn bound_id(id: &mut String) {
    if let Cow::Owned(short) = bounded_id(id) {
        *id = short;
    }
}

fn bound_value(value: &mut Value, most: usize) {
    if json_bytes(value) > most {
        let text = value.to_string();
        let start = &text[..text.floor_char_boundary(most.min(MAX_VALUE_BYTES))];
        *value = json!({ "truncated": true, "bytes": text.len(), "start": start });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_an_event_holds_it_is_bounded() {
        let long = "\u{fc}".repeat(4 * MAX_VALUE_BYTES);
        let object =
            |value: &str| JsonObject::from_iter([("x".to_owned(), json!(value)), ("n".to_owned(), json!(1))]);
        let mut events = [
            EventBody::Status {
                status: oubliette_protocol::event::SessionStatus::Failed,
                reason: Some(long.clone()),
            },
            EventBody::error(oubliette_protocol::ErrorCode::Internal, long.as_str()),
            EventBody::TurnCompleted {
                turn: 1,
                stop_reason: long.clone(),
                text: String::new(),
                usage: None,
            },
            EventBody::Plan {
                entries: json!([long]),
            },
            EventBody::Usage { usage: object(&long) },
            EventBody::ToolCall {
                tool_call_id: long.clone(),
                tool: long.clone(),
                arguments: json!([long]),
            },
            EventBody::ToolResult {
                tool_call_id: long.clone(),
                ok: true,
                result: json!([long]),
            },
        ];
        for event in &mut events {
            bound_event(event);
            let bytes = json_bytes(event);
            assert!(bytes < MAX_VALUE_BYTES * 5 / 4, "{}: {bytes}", event.kind());
        }
        assert!(matches!(&events[4], EventBody::Usage { usage } if usage["n"] == 1 && usage.len() == 2));
    }

    #[test]
    fn small_events_stay_as_they_are() {
        let mut event = EventBody::ToolCall {
            tool_call_id: "c1".into(),
            tool: "read".into(),
            arguments: json!({ "path": "x" }),
        };
        let before = event.clone();
        bound_event(&mut event);
        assert_eq!(event, before);
    }

    #[test]
    fn long_ids_stay_different() {
        let (one, two) = ("x".repeat(10_000), format!("{}y", "x".repeat(9_999)));
        assert_ne!(bounded_id(&one), bounded_id(&two));
        assert!(bounded_id(&one).len() <= MAX_ID_BYTES);
        assert_eq!(bounded_id("short"), "short");
    }

    #[test]
    fn a_long_plan_says_what_is_missing() {
        let entry = |text: &str| -> PlanEntry {
            serde_json::from_value(json!({ "content": text, "priority": "high", "status": "pending" }))
                .unwrap()
        };
        let plan = bounded_plan(vec![entry("short")]);
        assert_eq!(plan, json!([entry("short")]));
        let plan = bounded_plan(vec![entry(&"x".repeat(MAX_VALUE_BYTES)); 1000]);
        assert!(json_bytes(&plan) < MAX_PLAN_BYTES + 4096);
        let last = plan.as_array().unwrap().last().unwrap();
        assert!(
            last["content"]
                .as_str()
                .unwrap()
                .contains("more entries are left out"),
            "{last}"
        );
    }
}
