//! `caller_tool_response`: a caller's answer to a call of a tool it lent.

use std::borrow::Cow;

use oubliette_protocol::{Result, Scope, SessionId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ActionCall, ActionHandler, Effect};

/// `caller_tool_response`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CallerToolResponse {
    /// Id of the session whose agent called the tool (`gogol_…`): session_id of the caller_tool_request event.
    pub session_id: SessionId,
    /// request_id of the caller_tool_request event (a UUID).
    pub request_id: String,
    /// Result of the tool: any JSON value, or MCP content (`{"content": [...]}`). Absent, without error: null.
    #[serde(default)]
    pub result: Option<Value>,
    /// Why the tool failed, as text for the agent. Not together with result.
    #[serde(default)]
    pub error: Option<String>,
}

/// Result of `caller_tool_response`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct AnswerAccepted {
    /// True: the call is answered.
    resolved: bool,
}

impl ActionHandler for CallerToolResponse {
    type Output = AnswerAccepted;

    const NAME: &'static str = "caller_tool_response";
    const DESCRIPTION: &'static str = "Answer a caller_tool_request event with the tool's result or its error. Only the token that lent the tool may answer.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Stream;

    fn target(&self) -> Option<Cow<'_, str>> {
        let request: String = self.request_id.chars().take(64).collect();
        Some(format!("{} {request}", self.session_id).into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let sessions = &call.app.sessions;
        let principal = call.grant.principal();
        sessions
            .caller_tool_response(
                principal,
                &self.session_id,
                &self.request_id,
                self.result,
                self.error,
            )
            .await?;
        Ok(AnswerAccepted { resolved: true })
    }
}
