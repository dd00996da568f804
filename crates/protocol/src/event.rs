//! Events of a session's log.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    CallerId, Error, ErrorCode, RequestId, SessionId,
    approval::{ApprovalDecision, ApprovalRequest},
    usage::{BudgetName, UsageTotals},
};

/// `logger` of the MCP notifications that carry session events.
pub const EVENT_LOGGER: &str = "oubliette.session";

/// The types of session events, for whoever selects some of them.
pub const EVENT_TYPES: [&str; 14] = [
    "status",
    "message",
    "delta",
    "thought",
    "plan",
    "usage",
    "tool_call",
    "tool_result",
    "caller_tool_request",
    "caller_tool_done",
    "turn_completed",
    "error",
    "approval_requested",
    "approval_decided",
];

/// One event of a session's log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SessionEvent {
    /// Position in the session's log, from 0 without gaps.
    pub index: i64,
    /// When it was written (RFC 3339).
    #[schemars(with = "String")]
    pub ts: jiff::Timestamp,
    /// The session.
    pub session_id: SessionId,
    /// The event's type and fields.
    #[serde(flatten)]
    pub body: EventBody,
}

/// Type and fields of a session event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EventBody {
    /// The session's state changed.
    Status {
        /// The new status.
        status: SessionStatus,
        /// Why it changed, if there is something to say.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A complete message of the user or the agent.
    Message {
        /// Who wrote it.
        role: MessageRole,
        /// Its text.
        text: String,
    },
    /// A piece of the agent's message text, while it is being written.
    Delta {
        /// The piece.
        text: String,
    },
    /// A piece of the agent's reasoning text.
    Thought {
        /// The piece.
        text: String,
    },
    /// The agent's plan, as it reports it.
    Plan {
        /// ACP plan entries.
        entries: Value,
    },
    /// Token usage, as the agent reports it.
    Usage {
        /// The fields of the report.
        #[serde(flatten)]
        usage: crate::JsonObject,
    },
    /// The agent reports that it calls a tool. The debugger has the calls that reached the tool plane.
    ToolCall {
        /// The agent's id for the call.
        tool_call_id: String,
        /// The tool's name or title, as the agent reports it.
        tool: String,
        /// Its arguments.
        arguments: Value,
    },
    /// The agent reports that a tool call ended.
    ToolResult {
        /// The agent's id for the call.
        tool_call_id: String,
        /// Whether the call succeeded.
        ok: bool,
        /// Its result.
        #[serde(default, skip_serializing_if = "Value::is_null")]
        result: Value,
    },
    /// The agent called a tool that a caller lent; the caller runs it and answers with `caller_tool_response`.
    CallerToolRequest {
        /// Id of the request, which the answer names.
        request_id: RequestId,
        /// The caller that lent the tool.
        caller_id: CallerId,
        /// Name of the tool, without the caller id.
        tool: String,
        /// Its arguments, already validated against the declared schema.
        arguments: Value,
    },
    /// A caller tool request ended.
    CallerToolDone {
        /// Id of the request.
        request_id: RequestId,
        /// How it ended.
        outcome: CallerToolOutcome,
    },
    /// A call waits for a person to allow it.
    ApprovalRequested(ApprovalRequest),
    /// An approval was decided, or ended undecided.
    ApprovalDecided(ApprovalDecision),
    /// The agent finished a turn.
    TurnCompleted {
        /// Number of the turn, from 1.
        turn: u64,
        /// Why it stopped, as the agent reports it (`end_turn`, `cancelled`, …).
        stop_reason: String,
        /// All of the turn's message text.
        text: String,
        /// What its model requests used. Absent in events of older versions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        usage: Option<UsageTotals>,
    },
    /// Something failed.
    Error {
        /// Error code, for programs.
        code: ErrorCode,
        /// Text for people.
        message: String,
        /// The turn that was not begun because of it; its message is not run. Absent for any other error.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        skipped_turn: Option<u64>,
        /// The budget that is used up, by the name of its setting. Absent for any other error.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        budget: Option<BudgetName>,
    },
}

impl EventBody {
    /// The event of an error that concerns no skipped turn and no budget.
    pub fn error(code: ErrorCode, message: impl Into<String>) -> Self {
        EventBody::Error {
            code,
            message: message.into(),
            skipped_turn: None,
            budget: None,
        }
    }

    /// The event of a turn that is not begun.
    pub fn turn_skipped(turn: u64, why: &Error) -> Self {
        EventBody::Error {
            code: why.code,
            message: format!("turn {turn} was not begun: {}", why.message),
            skipped_turn: Some(turn),
            budget: None,
        }
    }

    /// The event's `type` on the wire.
    pub fn kind(&self) -> &'static str {
        match self {
            EventBody::Status { .. } => "status",
            EventBody::Message { .. } => "message",
            EventBody::Delta { .. } => "delta",
            EventBody::Thought { .. } => "thought",
            EventBody::Plan { .. } => "plan",
            EventBody::Usage { .. } => "usage",
            EventBody::ToolCall { .. } => "tool_call",
            EventBody::ToolResult { .. } => "tool_result",
            EventBody::CallerToolRequest { .. } => "caller_tool_request",
            EventBody::CallerToolDone { .. } => "caller_tool_done",
            EventBody::ApprovalRequested(_) => "approval_requested",
            EventBody::ApprovalDecided(_) => "approval_decided",
            EventBody::TurnCompleted { .. } => "turn_completed",
            EventBody::Error { .. } => "error",
        }
    }

    /// Whether MCP clients get the event as a notification: all but the frequent, partial ones.
    pub fn is_pushed(&self) -> bool {
        !matches!(
            self,
            EventBody::Delta { .. }
                | EventBody::Thought { .. }
                | EventBody::Plan { .. }
                | EventBody::Usage { .. }
        )
    }
}

/// Status of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum SessionStatus {
    /// Sandbox and agent are being started.
    Starting,
    /// A turn is running.
    Running,
    /// Waiting for a message.
    Idle,
    /// One agent is being replaced by another.
    Switching,
    /// Ended on request; final.
    Ended,
    /// Stopped by an error; the next message starts it again if that is possible.
    Failed,
}

impl SessionStatus {
    /// Whether the session counts as active: any status but `ended` and `failed`.
    pub fn is_active(self) -> bool {
        !matches!(self, SessionStatus::Ended | SessionStatus::Failed)
    }

    /// The status' name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            SessionStatus::Starting => "starting",
            SessionStatus::Running => "running",
            SessionStatus::Idle => "idle",
            SessionStatus::Switching => "switching",
            SessionStatus::Ended => "ended",
            SessionStatus::Failed => "failed",
        }
    }
}

impl std::fmt::Display for SessionStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for SessionStatus {
    type Err = crate::Error;

    fn from_str(text: &str) -> crate::Result<Self> {
        use SessionStatus::{Ended, Failed, Idle, Running, Starting, Switching};
        [Starting, Running, Idle, Switching, Ended, Failed]
            .into_iter()
            .find(|s| s.as_str() == text)
            .ok_or_else(|| crate::Error::invalid(format!("{} is not a status", crate::id::quoted(text))))
    }
}

/// Who wrote a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MessageRole {
    /// The caller, or the session that started this one.
    User,
    /// The agent.
    Assistant,
}

/// How a caller tool request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CallerToolOutcome {
    /// The caller answered with a result.
    Answered,
    /// The caller answered with an error.
    Error,
    /// The caller did not answer within the timeout.
    Timeout,
    /// The caller disconnected.
    Disconnected,
    /// The call, the turn or the session was cancelled.
    Cancelled,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_serializes_flat_with_its_type() {
        let event = SessionEvent {
            index: 3,
            ts: jiff::Timestamp::UNIX_EPOCH,
            session_id: SessionId::generate(),
            body: EventBody::Status {
                status: SessionStatus::Idle,
                reason: None,
            },
        };
        let json = serde_json::to_value(&event).unwrap();
        assert_eq!(json["type"], "status");
        assert_eq!(json["status"], "idle");
        assert_eq!(json["index"], 3);
        assert_eq!(serde_json::from_value::<SessionEvent>(json).unwrap(), event);
    }
}
