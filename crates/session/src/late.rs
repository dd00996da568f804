//! Oubliette's own tools, which the server supplies after sessions exist.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use oubliette_protocol::{Error, Object, Result, SessionId, tool::ToolSpec};
use oubliette_tools::{CallContext, Origin, OwnTools, Permit};
use serde_json::Value;

/// Hands on to what was set.
#[derive(Default)]
pub(crate) struct LateOwnTools {
    own: OnceLock<Arc<dyn OwnTools>>,
}

impl LateOwnTools {
    pub(crate) fn set(&self, own: Arc<dyn OwnTools>) {
        // Set once, when the server is put together.
        let _ = self.own.set(own);
    }

    fn get(&self) -> Result<&Arc<dyn OwnTools>> {
        self.own
            .get()
            .ok_or_else(|| Error::unavailable("the server is still starting"))
    }
}

#[async_trait]
impl OwnTools for LateOwnTools {
    async fn list(&self, session: &SessionId, key: &str) -> Result<Vec<ToolSpec>> {
        self.get()?.list(session, key).await
    }

    async fn call(
        &self,
        permit: Permit,
        session: &SessionId,
        origin: &Origin,
        tool: &str,
        arguments: Object,
        ctx: &CallContext,
    ) -> Result<Value> {
        self.get()?
            .call(permit, session, origin, tool, arguments, ctx)
            .await
    }

    fn base_specs(&self) -> Vec<ToolSpec> {
        self.get().map_or_else(|_| Vec::new(), |own| own.base_specs())
    }

    async fn base(
        &self,
        permit: Permit,
        session: &SessionId,
        tool: &str,
        arguments: Object,
        ctx: &CallContext,
    ) -> Result<Value> {
        self.get()?.base(permit, session, tool, arguments, ctx).await
    }
}
