//! One running entry of `use`: an MCP server or a built-in.

use std::sync::{Arc, Weak};

use oubliette_protocol::{
    CatalogId, Error, JsonObject, Result,
    catalog::ToolDefinition,
    tool::{HealthStatus, ListedServer},
};
use tokio::task::AbortHandle;

use crate::{
    CallContext, Permit, Secrets,
    builtin::{BuiltinSetup, BuiltinTool},
    call::ToolAnswer,
    registry::OfferedTools,
    upstream::{StartHold, Upstream, UpstreamSpec},
};

use super::{AgentContext, ContextSpec};

/// One running entry. Its tools are reached only through `call`, which takes a [`Permit`].
pub(super) struct RunningEntry {
    definition: Arc<ToolDefinition>,
    backend: EntryBackend,
}

enum EntryBackend {
    Builtin {
        builtin: Box<BuiltinTool>,
        since: jiff::Timestamp,
    },
    Upstream {
        upstream: Arc<Upstream>,
        follower: AbortHandle,
    },
}

impl RunningEntry {
    /// Starts an entry; an MCP server is still starting when this returns. One that replaces another server
    /// starts when the returned hold is dropped.
    pub(super) fn start(
        tool: &Arc<ToolDefinition>,
        spec: &ContextSpec,
        context: Weak<AgentContext>,
        before: Option<&RunningEntry>,
    ) -> (Arc<Self>, Option<StartHold>) {
        let mut hold = None;
        let backend = match &**tool {
            ToolDefinition::Builtin(definition) => {
                let setup = BuiltinSetup {
                    workspace: spec.setup.workspace.clone(),
                    sandbox: spec.setup.sandbox.clone(),
                    limits: spec.setup.limits.clone(),
                    group: spec.setup.group.clone(),
                    label: format!("{}-{}", spec.session_id, definition.id),
                };
                EntryBackend::Builtin {
                    builtin: Box::new(BuiltinTool::new(definition, setup)),
                    since: jiff::Timestamp::now(),
                }
            }
            ToolDefinition::Mcp(server) => {
                let spec = UpstreamSpec {
                    server: server.clone(),
                    setup: spec.setup.clone(),
                };
                let upstream = match before.map(|before| &before.backend) {
                    Some(EntryBackend::Upstream { upstream: before, .. }) => {
                        let (upstream, start_hold) = before.start_successor(spec);
                        hold = Some(start_hold);
                        upstream
                    }
                    Some(EntryBackend::Builtin { .. }) | None => Upstream::start(spec),
                };
                let follower = follow_changes(&upstream, context);
                EntryBackend::Upstream { upstream, follower }
            }
        };
        let server = Arc::new(Self {
            definition: tool.clone(),
            backend,
        });
        (server, hold)
    }

    pub(super) fn id(&self) -> &CatalogId {
        self.definition.id()
    }

    /// The definition it was started from.
    pub(super) fn definition(&self) -> &Arc<ToolDefinition> {
        &self.definition
    }

    /// Waits until the first attempt to start it has succeeded or failed.
    pub(super) async fn wait_first_start(&self) {
        match &self.backend {
            EntryBackend::Builtin { .. } => {}
            EntryBackend::Upstream { upstream, .. } => upstream.wait_first_start().await,
        }
    }

    /// The tools it offers now, and why it is down if it is.
    pub(super) fn offer(&self, secrets: &Secrets) -> OfferedTools {
        match &self.backend {
            EntryBackend::Builtin { builtin, .. } => OfferedTools {
                id: self.id().clone(),
                down_reason: None,
                tools: [builtin.info()].into(),
            },
            EntryBackend::Upstream { upstream, .. } => {
                let (status, tools) = (upstream.status(), upstream.tools());
                let down = (status.status == HealthStatus::Red
                    || (status.status == HealthStatus::Yellow && tools.is_empty()))
                .then(|| secrets.mask_text(&down_text(&status)));
                OfferedTools {
                    id: self.id().clone(),
                    down_reason: down,
                    tools,
                }
            }
        }
    }

    /// Its status, as `tool_list` shows it.
    pub(super) fn row(&self) -> ListedServer {
        match &self.backend {
            EntryBackend::Upstream { upstream, .. } => upstream.status(),
            EntryBackend::Builtin { since, .. } => ListedServer {
                id: self.id().clone(),
                transport: "builtin".into(),
                status: HealthStatus::Green,
                since: *since,
                last_check: None,
                error: None,
                next_retry: None,
                tools: 1,
            },
        }
    }

    /// Calls one of its tools.
    pub(super) async fn call(
        &self,
        permit: Permit,
        tool: &str,
        arguments: &JsonObject,
        ctx: &CallContext,
    ) -> Result<ToolAnswer> {
        match &self.backend {
            // Boxed: it is by far the largest future, and every other call would take as much memory.
            EntryBackend::Builtin { builtin, .. } => {
                let calling = Box::pin(builtin.call(permit, arguments.clone(), ctx));
                calling.await.map(ToolAnswer::Result)
            }
            EntryBackend::Upstream { upstream, .. } => {
                // The permit is used up here: what follows is the one call it was made for.
                drop(permit);
                upstream.call_unparsed(tool, arguments, ctx).await
            }
        }
    }

    /// Restarts its server; an error for a built-in, which has none.
    pub(super) async fn restart(&self) -> Result<()> {
        match &self.backend {
            EntryBackend::Upstream { upstream, .. } => upstream.restart().await,
            EntryBackend::Builtin { .. } => Err(Error::invalid(format!(
                "{} is a built-in: it has no server to restart",
                self.id()
            ))),
        }
    }

    /// Stops it, with its whole process tree.
    pub(super) async fn stop(&self, reason: &str) {
        if let EntryBackend::Upstream {
            upstream, follower, ..
        } = &self.backend
        {
            follower.abort();
            upstream.stop(reason).await;
        }
    }
}

impl Drop for RunningEntry {
    fn drop(&mut self) {
        if let EntryBackend::Upstream { follower, .. } = &self.backend {
            follower.abort();
        }
    }
}

/// Spawns a task that rebuilds the registry whenever the server's status or tool list changes.
fn follow_changes(upstream: &Arc<Upstream>, context: Weak<AgentContext>) -> AbortHandle {
    let mut changes = upstream.changes();
    let task = tokio::spawn(async move {
        while changes.changed().await.is_ok() {
            let Some(context) = context.upgrade() else { return };
            context.rebuild_registry();
        }
    });
    task.abort_handle()
}

fn down_text(status: &ListedServer) -> String {
    let why = status.error.as_deref().unwrap_or("it is starting");
    format!("its server {} is down: {why}", status.id)
}
