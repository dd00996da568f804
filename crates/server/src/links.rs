//! What sessions ask of the server: keys, workspaces, relay connections, Oubliette's own tools.

use std::sync::{Arc, Weak};

use async_trait::async_trait;
use indexmap::IndexMap;
use oubliette_protocol::{
    Error, Object, ProjectId, Result, Scope, SessionId, WorkspaceId, relay::method, tool::ToolSpec,
};
use oubliette_session::{KeyMinter, RelayDoor, WorkspaceMaker};
use oubliette_store::WorkspaceRow;
use oubliette_tools::{CallContext, Origin as ToolOrigin, OwnTools, Permit};
use serde_json::Value;
use tokio::net::UnixStream;

use crate::{
    actions::{self, Inside, Origin, Outside, call::Reason},
    app::App,
    auth::{Mint, expose},
    doors::{relay::Relay, stdio::Stdio},
    workspace,
};

/// The server, as sessions see it. It must not keep the server alive: the server holds the sessions.
pub struct Links {
    app: Weak<App>,
    relay: Relay,
    stdio: Stdio,
}

impl Links {
    /// To a server that is being made.
    pub fn new(app: Weak<App>) -> Arc<Self> {
        Arc::new(Self {
            relay: Relay::new(app.clone()),
            stdio: Stdio::new(app.clone()),
            app,
        })
    }

    fn app(&self) -> Result<Arc<App>> {
        self.app
            .upgrade()
            .ok_or_else(|| Error::unavailable("the server is stopping"))
    }
}

impl RelayDoor for Links {
    fn accept(&self, session: SessionId, stream: UnixStream) {
        self.relay.accept(session, stream);
    }

    fn borrow(&self, session: SessionId, stream: UnixStream) {
        self.stdio.borrow(session, stream);
    }

    fn close(&self, session: &SessionId) {
        self.stdio.close(session);
        self.relay.close(session);
    }
}

#[async_trait]
impl KeyMinter for Links {
    async fn mint(&self, session: &SessionId, project: &ProjectId, scope: Scope) -> Result<String> {
        let app = self.app()?;
        app.auth.revoke_of_session(session).await?;
        let mint = Mint {
            name: format!("key of {session}"),
            scope,
            project: Some(project.clone()),
            expires_at: None,
            session: Some(session.clone()),
        };
        let (_, token) = app.auth.mint(mint).await?;
        Ok(expose(&token).to_owned())
    }

    async fn revoke(&self, session: &SessionId) -> Result<()> {
        self.app()?.auth.revoke_of_session(session).await
    }
}

#[async_trait]
impl WorkspaceMaker for Links {
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
impl OwnTools for Links {
    async fn list(&self, _session: &SessionId, key: &str) -> Result<Vec<ToolSpec>> {
        let app = self.app()?;
        let grant = app.auth.token(key).await?;
        Ok(actions::specs(&grant))
    }

    async fn call(
        &self,
        _permit: Permit,
        session: &SessionId,
        origin: &ToolOrigin,
        tool: &str,
        arguments: Object,
        ctx: &CallContext,
    ) -> Result<Value> {
        let app = self.app()?;
        let gone = ctx.cancel.clone();
        let (grant, origin) = match origin {
            ToolOrigin::Inside { api_key } => {
                let key = api_key
                    .as_deref()
                    .ok_or_else(|| Error::unauthenticated("this call needs an API key"))?;
                let inside = Inside {
                    session: session.clone(),
                    reason: Reason::Key,
                    gone,
                };
                (app.auth.token(key).await?, Origin::Inside(inside))
            }
            ToolOrigin::Outside(principal) => (
                app.auth.again(principal).await?,
                Origin::Outside(Outside {
                    gone,
                    ..Outside::default()
                }),
            ),
        };
        Box::pin(actions::perform(&app, &grant, tool, arguments, &origin)).await
    }

    fn base_specs(&self) -> Vec<ToolSpec> {
        method::BASE
            .iter()
            .filter_map(|name| actions::find(name))
            .map(actions::spec)
            .collect()
    }

    async fn base(
        &self,
        _permit: Permit,
        session: &SessionId,
        tool: &str,
        arguments: Object,
        ctx: &CallContext,
    ) -> Result<Value> {
        if !method::BASE.contains(&tool) {
            return Err(actions::unknown(tool));
        }
        let app = self.app()?;
        let grant = app.auth.base(session).await?;
        let inside = Inside {
            session: session.clone(),
            reason: Reason::Base,
            gone: ctx.cancel.clone(),
        };
        Box::pin(actions::perform(
            &app,
            &grant,
            tool,
            arguments,
            &Origin::Inside(inside),
        ))
        .await
    }
}
