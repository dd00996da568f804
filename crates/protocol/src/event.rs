//! What a session says: the events of its log.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{CallerId, ErrorCode, RequestId, SessionId};

/// The logger name events are pushed under to MCP clients.
pub const LOGGER: &str = "oubliette.session";

/// One entry of a session's log. `index` starts at 0 and has no holes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Its place in the session's log.
    pub index: i64,
    /// When it was written.
    pub ts: jiff::Timestamp,
    /// Whose log.
    pub session_id: SessionId,
    /// What happened.
    #[serde(flatten)]
    pub body: EventBody,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EventBody {
    /// The session's state changed.
    Status {
        /// To this.
        status: Status,
        /// Because of this.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A whole message.
    Message {
        /// Whose.
        role: Role,
        /// Its text.
        text: String,
    },
    /// A piece of the agent's text, as it comes.
    Delta {
        /// The piece.
        text: String,
    },
    /// A piece of the agent's thinking.
    Thought {
        /// The piece.
        text: String,
    },
    /// The agent's plan, as it reports it.
    Plan {
        /// ACP plan entries.
        entries: Value,
    },
    /// Tokens used, as the agent reports them.
    Usage {
        /// The report.
        #[serde(flatten)]
        usage: crate::Object,
    },
    /// The agent says it calls a tool.
    ToolCall {
        /// The agent's id for the call.
        tool_call_id: String,
        /// The tool's name or title as the agent gives it.
        tool: String,
        /// Its arguments.
        arguments: Value,
    },
    /// The agent says a call ended.
    ToolResult {
        /// The agent's id for the call.
        tool_call_id: String,
        /// Whether it went well.
        ok: bool,
        /// What came back.
        #[serde(default, skip_serializing_if = "Value::is_null")]
        result: Value,
    },
    /// The agent called a tool of the caller; the caller should run it and answer.
    CallerToolRequest {
        /// Names the request in the answer.
        request_id: RequestId,
        /// Whose tool.
        caller_id: CallerId,
        /// The tool, unprefixed.
        tool: String,
        /// Its arguments, valid by the declared schema.
        arguments: Value,
    },
    /// A caller tool request is over.
    CallerToolDone {
        /// Which.
        request_id: RequestId,
        /// How.
        outcome: Outcome,
    },
    /// The agent finished a turn.
    TurnCompleted {
        /// Which, from 1.
        turn: u64,
        /// Why it stopped, in the agent's words (`end_turn`, `cancelled`, …).
        stop_reason: String,
        /// All of the turn's message text.
        text: String,
    },
    /// Something failed.
    Error {
        /// For programs.
        code: ErrorCode,
        /// For people.
        message: String,
    },
}

impl EventBody {
    /// The `type` on the wire.
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
            EventBody::TurnCompleted { .. } => "turn_completed",
            EventBody::Error { .. } => "error",
        }
    }

    /// Whether MCP callers are sent it as a notification: all but the fine-grained ones.
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

/// A session's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum Status {
    /// Sandbox and agent are being made ready.
    Starting,
    /// A turn is under way.
    Running,
    /// Waiting for a message.
    Idle,
    /// One agent is being replaced by another.
    Switching,
    /// Over, as asked.
    Ended,
    /// Over, or unusable until the next message, because of a fault.
    Failed,
}

impl Status {
    /// Active in any status but `ended` and `failed`.
    pub fn is_active(self) -> bool {
        !matches!(self, Status::Ended | Status::Failed)
    }

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Starting => "starting",
            Status::Running => "running",
            Status::Idle => "idle",
            Status::Switching => "switching",
            Status::Ended => "ended",
            Status::Failed => "failed",
        }
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Status {
    type Err = crate::Error;

    fn from_str(text: &str) -> crate::Result<Self> {
        use Status::{Ended, Failed, Idle, Running, Starting, Switching};
        [Starting, Running, Idle, Switching, Ended, Failed]
            .into_iter()
            .find(|s| s.as_str() == text)
            .ok_or_else(|| crate::Error::invalid(format!("{} is not a status", crate::id::quoted(text))))
    }
}

/// Whose message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The caller's.
    User,
    /// The agent's.
    Assistant,
}

/// How a caller tool request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// With a result.
    Answered,
    /// With the caller's error.
    Error,
    /// Unanswered in time.
    Timeout,
    /// The caller left.
    Disconnected,
    /// The agent, the turn or the session was cancelled.
    Cancelled,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_flat_and_names_its_type() {
        let event = Event {
            index: 3,
            ts: jiff::Timestamp::UNIX_EPOCH,
            session_id: SessionId::generate(),
            body: EventBody::Status {
                status: Status::Idle,
                reason: None,
            },
        };
        let json = serde_json::to_value(&event).unwrap();
        assert_eq!(json["type"], "status");
        assert_eq!(json["status"], "idle");
        assert_eq!(json["index"], 3);
        assert_eq!(serde_json::from_value::<Event>(json).unwrap(), event);
    }
}
