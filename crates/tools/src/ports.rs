//! The traits through which the tool plane reaches callers, Oubliette's own tools, the HTTP proxy and the debugger. The crates
//! `session` and `server` implement them.

use std::{path::PathBuf, sync::Arc};

use async_trait::async_trait;
use oubliette_protocol::{
    CallerId, CatalogId, JsonObject, Result, SessionId, Slug,
    approval::ApprovalSource,
    caller::{CallerDeclaration, LentTool},
    debug::DebugBody,
    egress::HostPattern,
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

    /// Whether a further call can be recorded. An error refuses it: no call is made that leaves no record.
    fn check_room(&self) -> Result<()> {
        Ok(())
    }
}

/// Drops every event: for what runs without a session to record them for.
#[derive(Debug, Clone, Copy)]
pub struct DiscardDebug;

impl DebugSink for DiscardDebug {
    fn record(&self, _agent: Option<&Slug>, _body: DebugBody) {}
}

/// The HTTP proxy of one session's tool servers with `network: "proxy"`.
pub trait ProxySockets: Send + Sync {
    /// The host path of a socket on which the proxy serves this server alone: the hosts in `egress`; none: every public
    /// host. Called before each start of the server; must not block.
    fn socket_for(&self, server: &CatalogId, egress: Option<&[HostPattern]>) -> Result<PathBuf>;
}

/// Counts the tool calls of one session.
pub trait CallMeter: Send + Sync {
    /// Takes a place for a call in the budget of its turn, once for each call and before a person is asked about it. An
    /// error refuses it. A call that is denied keeps its place, so that an agent cannot ask people without end.
    fn reserve_call(self: Arc<Self>, origin: &CallOrigin) -> Result<()>;

    /// Counts a call that is dispatched now.
    fn count_call(&self, origin: &CallOrigin);
}

/// Asks people whether calls of one session may be made.
#[async_trait]
pub trait Approver: Send + Sync {
    /// Returns when a person has allowed the call, or at once if that was decided for the whole session before. An error:
    /// it was denied, has expired or was cancelled. Reports progress meanwhile.
    async fn approve(&self, call: CallToApprove, ctx: &CallContext) -> Result<()>;
}

/// A call that waits for a person to allow it.
#[derive(Debug, Clone, PartialEq)]
pub struct CallToApprove {
    /// The agent whose rules ask.
    pub agent: Slug,
    /// The tool as it was called.
    pub tool: String,
    /// `@<id>/<tool>` for a catalog tool, else the tool's full name.
    pub canonical: String,
    /// Where the tool comes from.
    pub source: ApprovalSource,
    /// Its arguments, secrets masked and large ones cut.
    pub arguments: Value,
    /// The entries of `tools.ask` that hold for it, as they are written.
    pub rules: Vec<Value>,
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
