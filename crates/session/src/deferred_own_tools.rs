//! Oubliette's own tools, set after the session manager is built: they are actions of the server, which
//! need the manager themselves.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use oubliette_protocol::{Error, JsonObject, Result, SessionId, tool::ToolSpec};
use oubliette_tools::{CallContext, CallOrigin, OwnTools, Permit};
use serde_json::Value;

/// Forwards to the own tools once they are set; `unavailable` before.
#[derive(Default)]
pub(crate) struct DeferredOwnTools {
    own_tools: OnceLock<Arc<dyn OwnTools>>,
}

impl DeferredOwnTools {
    pub(crate) fn set(&self, own: Arc<dyn OwnTools>) {
        // Called once, while the server is assembled.
        let _ = self.own_tools.set(own);
    }

    fn get(&self) -> Result<&Arc<dyn OwnTools>> {
        self.own_tools
            .get()
            .ok_or_else(|| Error::unavailable("the server is still starting"))
    }
}

#[async_trait]
impl OwnTools for DeferredOwnTools {
    async fn list(&self, session: &SessionId, key: &str) -> Result<Vec<ToolSpec>> {
        self.get()?.list(session, key).await
    }

    async fn call(
        &self,
        permit: Permit,
        session: &SessionId,
        origin: &CallOrigin,
        tool: &str,
        arguments: JsonObject,
        ctx: &CallContext,
    ) -> Result<Value> {
        self.get()?
            .call(permit, session, origin, tool, arguments, ctx)
            .await
    }

    fn base_specs(&self) -> Vec<ToolSpec> {
        self.get().map_or_else(|_| Vec::new(), |own| own.base_specs())
    }

    async fn call_base(
        &self,
        permit: Permit,
        session: &SessionId,
        tool: &str,
        arguments: JsonObject,
        ctx: &CallContext,
    ) -> Result<Value> {
        self.get()?.call_base(permit, session, tool, arguments, ctx).await
    }
}
