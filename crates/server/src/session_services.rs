//! What sessions need from the server, behind the traits the session and tools crates declare: agents' keys,
//! workspaces, relay connections, Oubliette's own tools.

use std::sync::{Arc, Weak};

use async_trait::async_trait;
use indexmap::IndexMap;
use oubliette_os::UntrustedSocket;
use oubliette_protocol::{
    ByteBudget, Error, JsonObject, ProjectId, Result, Scope, SessionId, WorkspaceId, relay::method,
    tool::ToolSpec,
};
use oubliette_session::{KeyMinter, RelayDoor, WorkspaceMaker};
use oubliette_store::WorkspaceRow;
use oubliette_tools::{CallContext, CallOrigin as ToolOrigin, OwnTools, Permit};
use serde_json::Value;

use crate::{
    actions::{self, ClientContext},
    app::App,
    auth::{TokenSpec, expose},
    doors::{handoff::HandoffConnections, relay::RelayConnections},
    workspace,
};

/// Implements those traits for the server. It holds the server weakly, because the server owns the sessions and
/// the sessions own this.
pub(crate) struct SessionServices {
    app: Weak<App>,
    relay: RelayConnections,
    handoff: HandoffConnections,
}

impl SessionServices {
    /// For a server that is still being constructed.
    pub(crate) fn new(app: Weak<App>) -> Arc<Self> {
        Arc::new(Self {
            relay: RelayConnections::new(app.clone()),
            handoff: HandoffConnections::new(app.clone()),
            app,
        })
    }

    fn app(&self) -> Result<Arc<App>> {
        self.app
            .upgrade()
            .ok_or_else(|| Error::unavailable("the server is stopping"))
    }
}

impl RelayDoor for SessionServices {
    fn accept(&self, session: SessionId, socket: UntrustedSocket, buffers: ByteBudget) {
        self.relay.accept(session, socket, buffers);
    }

    fn accept_handoff(&self, session: SessionId, socket: UntrustedSocket) {
        self.handoff.accept(session, socket);
    }

    fn disconnect(&self, session: &SessionId) {
        self.handoff.close(session);
        self.relay.close(session);
    }
}

#[async_trait]
impl KeyMinter for SessionServices {
    async fn mint(&self, session: &SessionId, project: &ProjectId, scope: Scope) -> Result<String> {
        let app = self.app()?;
        app.auth.revoke_session_keys(session).await?;
        let spec = TokenSpec {
            name: format!("key of {session}"),
            scope,
            project: Some(project.clone()),
            expires_at: None,
            session: Some(session.clone()),
        };
        let (_, token) = app.auth.mint(spec).await?;
        Ok(expose(&token).to_owned())
    }

    async fn revoke(&self, session: &SessionId) -> Result<()> {
        self.app()?.auth.revoke_session_keys(session).await
    }
}

#[async_trait]
impl WorkspaceMaker for SessionServices {
    async fn create(&self, project: &ProjectId) -> Result<WorkspaceId> {
        let app = self.app()?;
        let row = WorkspaceRow {
            workspace_id: WorkspaceId::generate(),
            project_id: project.clone(),
            name: "session".into(),
            env: IndexMap::new(),
            source: None,
            created_at: oubliette_store::now(),
        };
        workspace::create(&app, project, &row.workspace_id, None).await?;
        let id = row.workspace_id.clone();
        if let Err(error) = app.store.workspace_insert(row).await {
            workspace::remove(&app, project, &id).await;
            return Err(error);
        }
        Ok(id)
    }
}

#[async_trait]
impl OwnTools for SessionServices {
    async fn list(&self, session: &SessionId, key: &str) -> Result<Vec<ToolSpec>> {
        let app = self.app()?;
        let grant = app.auth.authenticate_inside(key, session).await?;
        Ok(actions::tool_specs(&grant))
    }

    async fn call(
        &self,
        _permit: Permit,
        session: &SessionId,
        origin: &ToolOrigin,
        tool: &str,
        arguments: JsonObject,
        ctx: &CallContext,
    ) -> Result<Value> {
        let app = self.app()?;
        let grant = match origin {
            ToolOrigin::Inside { api_key } => {
                let key = api_key
                    .as_deref()
                    .ok_or_else(|| Error::unauthenticated("this call needs an API key"))?;
                app.auth.authenticate_inside(key, session).await?
            }
            ToolOrigin::Outside(principal) => app.auth.reauthenticate(principal).await?,
        };
        let client = ClientContext::cancelled_by(ctx.cancel.clone());
        Box::pin(actions::perform(&app, &grant, tool, arguments, &client)).await
    }

    fn base_specs(&self) -> Vec<ToolSpec> {
        method::BASE_TOOLS
            .iter()
            .filter_map(|name| actions::find(name))
            .map(actions::tool_spec)
            .collect()
    }

    async fn call_base(
        &self,
        _permit: Permit,
        session: &SessionId,
        tool: &str,
        arguments: JsonObject,
        ctx: &CallContext,
    ) -> Result<Value> {
        if !method::BASE_TOOLS.contains(&tool) {
            return Err(actions::unknown_action(tool));
        }
        let app = self.app()?;
        let grant = app.auth.base_tools_grant(session).await?;
        let client = ClientContext::cancelled_by(ctx.cancel.clone());
        Box::pin(actions::perform(&app, &grant, tool, arguments, &client)).await
    }
}
