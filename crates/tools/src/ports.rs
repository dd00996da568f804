//! The traits through which the tool plane reaches callers, Oubliette's own tools and the debugger. The crates
//! `session` and `server` implement them.

use std::sync::Arc;

use async_trait::async_trait;
use oubliette_protocol::{
    CallerId, JsonObject, Result, SessionId, Slug,
    caller::{CallerDeclaration, LentTool},
    debug::DebugBody,
    tool::ToolSpec,
};
use serde_json::Value;

use crate::{CallContext, CallOrigin, Permit};

/// Receives the debugger events of one session. Recording keeps the order and does not block.
pub trait DebugSink: Send + Sync {
    /// Records an event.
    fn record(&self, agent: Option<&Slug>, body: DebugBody);

    /// Records an event of this kind that is a [`DebugBody`] in JSON text already.
    fn record_text(&self, agent: Option<&Slug>, kind: &'static str, text: String) {
        match serde_json::from_str(&text) {
            Ok(body) => self.record(agent, body),
            Err(error) => {
                tracing::error!(%error, kind, "encoded debugger event cannot be parsed; not recorded")
            }
        }
    }
}

/// The callers of one session and the tools they lend.
#[async_trait]
pub trait CallerTools: Send + Sync {
    /// The current declarations of all callers.
    fn declarations(&self) -> Vec<Arc<CallerDeclaration>>;

    /// Checks that `origin` may call this caller's tools: the session's agent, the declaring token or an admin
    /// may.
    fn may_call(&self, caller_id: &CallerId, origin: &CallOrigin) -> Result<()>;

    /// Calls a lent tool and waits for the caller's answer. The arguments have been checked against the tool's
    /// schema.
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
    /// The tools a key may call, their names without the `oubliette_` prefix.
    async fn list(&self, session: &SessionId, key: &str) -> Result<Vec<ToolSpec>>;

    /// Calls a tool by its name without prefix: under the agent's key for a call from inside, under the calling
    /// token for one from outside.
    async fn call(
        &self,
        permit: Permit,
        session: &SessionId,
        origin: &CallOrigin,
        tool: &str,
        arguments: JsonObject,
        ctx: &CallContext,
    ) -> Result<Value>;

    /// The specifications of the base tools.
    fn base_specs(&self) -> Vec<ToolSpec>;

    /// Calls a base tool, in the session's own project.
    async fn call_base(
        &self,
        permit: Permit,
        session: &SessionId,
        tool: &str,
        arguments: JsonObject,
        ctx: &CallContext,
    ) -> Result<Value>;
}
