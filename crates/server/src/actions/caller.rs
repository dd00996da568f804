//! Callers' answers to their tools' calls.

use std::borrow::Cow;

use oubliette_protocol::{Result, Scope, SessionId};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Call, Effect, Tool};

/// `caller_tool_response`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CallerToolResponse {
    /// Whose agent asked.
    pub session_id: SessionId,
    /// `request_id` of the caller_tool_request event.
    pub request_id: String,
    /// What the tool gave: any JSON value, or MCP content.
    #[serde(default)]
    pub result: Option<Value>,
    /// Why it failed.
    #[serde(default)]
    pub error: Option<String>,
}

impl Tool for CallerToolResponse {
    const NAME: &'static str = "caller_tool_response";
    const DESCRIPTION: &'static str = "Answer a caller_tool_request event with the tool's result or its error. Only the token that lent the tool may.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Stream;

    fn target(&self) -> Option<Cow<'_, str>> {
        let request: String = self.request_id.chars().take(64).collect();
        Some(format!("{} {request}", self.session_id).into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
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
        Ok(json!({ "resolved": true }))
    }
}
