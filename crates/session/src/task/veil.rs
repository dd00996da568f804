//! What an agent reports may hold the key it was given. The log is read by people who were not given it.

use oubliette_protocol::event::{EventBody, Role};
use oubliette_tools::Plane;

/// Takes the session's keys out of an event. What a caller wrote or is asked stays as it is.
pub(super) fn veil(plane: &Plane, body: &mut EventBody) {
    match body {
        EventBody::ToolCall { arguments, .. } => plane.veil(arguments),
        EventBody::ToolResult { result, .. } => plane.veil(result),
        EventBody::Plan { entries } => plane.veil(entries),
        EventBody::Message {
            role: Role::Assistant,
            text,
        }
        | EventBody::Delta { text }
        | EventBody::Thought { text }
        | EventBody::TurnCompleted { text, .. }
        | EventBody::Error { message: text, .. }
        | EventBody::Status {
            reason: Some(text), ..
        } => plane.veil_text(text),
        EventBody::Message { role: Role::User, .. }
        | EventBody::Status { reason: None, .. }
        | EventBody::Usage { .. }
        | EventBody::CallerToolRequest { .. }
        | EventBody::CallerToolDone { .. } => {}
    }
}
