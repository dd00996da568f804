//! Masks the session's API keys in events. An agent's reports may contain the key it was given, and the log
//! is read by people who may not have that key.

use oubliette_protocol::event::{EventBody, MessageRole};
use oubliette_tools::ToolPlane;

/// Masks keys in an event in place. User messages and caller tool requests are left as they are;
/// approvals are masked when they are requested.
pub(super) fn mask_secrets(plane: &ToolPlane, body: &mut EventBody) {
    match body {
        EventBody::ToolCall { arguments, .. } => plane.mask(arguments),
        EventBody::ToolResult { result, .. } => plane.mask(result),
        EventBody::Plan { entries } => plane.mask(entries),
        EventBody::Message {
            role: MessageRole::Assistant,
            text,
        }
        | EventBody::Delta { text }
        | EventBody::Thought { text }
        | EventBody::TurnCompleted { text, .. }
        | EventBody::Error { message: text, .. }
        | EventBody::Status {
            reason: Some(text), ..
        } => plane.mask_text(text),
        EventBody::Message {
            role: MessageRole::User,
            ..
        }
        | EventBody::Status { reason: None, .. }
        | EventBody::Usage { .. }
        | EventBody::CallerToolRequest { .. }
        | EventBody::CallerToolDone { .. }
        | EventBody::ApprovalRequested(_)
        | EventBody::ApprovalDecided(_) => {}
    }
}
