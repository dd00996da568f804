//! What the plane needs from its surroundings, as traits: `session` and `server` implement them.

use std::sync::Arc;

use async_trait::async_trait;
use oubliette_protocol::{
    CallerId, Object, Result, SessionId, Slug,
    caller::{Declaration, LentTool},
    debug::DebugBody,
    tool::ToolSpec,
};
use serde_json::Value;

use crate::{CallContext, Origin, Permit};

/// Where debugger events of one session go. Recording is ordered and does not wait.
pub trait DebugSink: Send + Sync {
    /// Records what happened.
    fn record(&self, agent: Option<&Slug>, body: DebugBody);

    /// The same of a [`DebugBody`] of this kind that is JSON already.
    fn record_text(&self, agent: Option<&Slug>, kind: &'static str, text: String) {
        match serde_json::from_str(&text) {
            Ok(body) => self.record(agent, body),
            Err(error) => tracing::error!(%error, kind, "a debugger event that is none"),
        }
    }
}

/// The callers of one session and the tools they lend.
#[async_trait]
pub trait Callers: Send + Sync {
    /// Every live declaration.
    fn declarations(&self) -> Vec<Arc<Declaration>>;

    /// Whether whoever asks may call this caller's tools: the session's agent, the declaring token or an
    /// admin.
    fn may_call(&self, caller_id: &CallerId, origin: &Origin) -> Result<()>;

    /// Calls a lent tool and waits for the caller's answer. The arguments fit the tool's schema.
    async fn call(
        &self,
        permit: Permit,
        caller_id: &CallerId,
        tool: &LentTool,
        arguments: Value,
        ctx: &CallContext,
    ) -> Result<Value>;
}

/// Oubliette's own tools, as the server executes them.
#[async_trait]
pub trait OwnTools: Send + Sync {
    /// What a key may call, unprefixed.
    async fn list(&self, session: &SessionId, key: &str) -> Result<Vec<ToolSpec>>;

    /// Calls one, under the agent's key or the calling token, never the other.
    async fn call(
        &self,
        permit: Permit,
        session: &SessionId,
        origin: &Origin,
        tool: &str,
        arguments: Object,
        ctx: &CallContext,
    ) -> Result<Value>;

    /// The base tools.
    fn base_specs(&self) -> Vec<ToolSpec>;

    /// Calls a base tool, in the session's own project.
    async fn base(
        &self,
        permit: Permit,
        session: &SessionId,
        tool: &str,
        arguments: Object,
        ctx: &CallContext,
    ) -> Result<Value>;
}
