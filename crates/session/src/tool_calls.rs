//! `tool_list`, `tool_call` and `tool_server_restart`: a session's tools as they are used from outside.

use oubliette_protocol::{
    CatalogId, Error, JsonObject, Principal, Result, SessionId, Slug,
    budget::{call_bytes, object_bytes},
    tool::{CallResult, ListedServer, ToolList},
};
use oubliette_tools::{CallContext, CallOrigin, RequestedTool, ToolCallError};

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    Sessions,
    live::{LiveSession, TaskCommand},
};

/// A tool server that runs in a session, or should.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct RunningToolServer {
    /// The session.
    pub session_id: SessionId,
    /// The slug of its agent.
    pub agent: Slug,
    /// The server.
    #[serde(flatten)]
    pub server: ListedServer,
}

impl Sessions {
    /// The tool servers of all sessions in memory that a principal may see, at most `max`. Starts nothing.
    pub fn running_servers(&self, principal: &Principal, max: usize) -> Vec<RunningToolServer> {
        let mut found = Vec::new();
        for live in self.all_in_memory() {
            let state = live.state.borrow().clone();
            if !state.status.is_active() || !principal.sees(&live.row.project_id) {
                continue;
            }
            let servers = live.plane.context().map(|context| context.servers());
            found.extend(
                servers
                    .unwrap_or_default()
                    .into_iter()
                    .map(|server| RunningToolServer {
                        session_id: live.row.session_id.clone(),
                        agent: state.agent.clone(),
                        server,
                    }),
            );
            if found.len() >= max {
                found.truncate(max);
                break;
            }
        }
        found
    }

    /// Lists the tools of a session, starting its tool servers if needed.
    pub async fn tool_list(&self, principal: &Principal, id: &SessionId) -> Result<ToolList> {
        let live = self.visible_session(principal, id).await?;
        self.ensure_tools(&live).await?;
        Ok(live.plane.list())
    }

    /// Calls a tool through the session's tool plane, as the principal, not as the agent.
    pub async fn tool_call(
        &self,
        principal: &Principal,
        id: &SessionId,
        tool: String,
        arguments: JsonObject,
        ctx: CallContext,
    ) -> Result<CallResult> {
        let live = self.visible_session(principal, id).await?;
        let bytes = call_bytes(object_bytes(&arguments));
        let _charge = live.plane.buffers().charge(bytes)?;
        let context = loop {
            self.ensure_tools(&live).await?;
            match live.plane.ready_context(&ctx.cancel).await {
                // The tools were stopped after they were found to be there: the call waits for the next agent.
                Err(ToolCallError::NotReady) => {}
                ready => break ready?,
            }
        };
        let tool = RequestedTool::ByName(tool);
        let origin = CallOrigin::Outside(principal.clone());
        let called = live.plane.call_in(&context, tool, arguments, origin, ctx).await;
        called.map_err(Error::from)
    }

    /// Restarts one tool server of a session.
    pub async fn tool_server_restart(
        &self,
        principal: &Principal,
        id: &SessionId,
        server: &CatalogId,
    ) -> Result<()> {
        let live = self.visible_session(principal, id).await?;
        self.ensure_tools(&live).await?;
        let context = live
            .plane
            .context()
            .ok_or_else(|| Error::unavailable("the session's tools are not ready"))?;
        context.restart_server(server).await
    }

    /// Waits for a running switch to end and makes sure that the agent's tools are installed.
    async fn ensure_tools(&self, live: &LiveSession) -> Result<()> {
        live.wait_for_switch().await;
        match live.plane.context() {
            Some(_) => Ok(()),
            None => live.send_command(TaskCommand::PrepareTools).await?,
        }
    }
}
