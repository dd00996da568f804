//! One entry of `use`, running: an MCP server or a built-in.

use std::sync::{Arc, Weak};

use oubliette_protocol::{
    CatalogId, Error, Object, Result,
    catalog::ToolDefinition,
    tool::{Light, ServerRow},
};
use parking_lot::Mutex;
use tokio::task::AbortHandle;

use crate::{
    CallContext, Permit, Secrets,
    builtin::{Builtin, Place},
    call::Given,
    registry::{Offer, ToolInfo},
    upstream::{Hold, Upstream, UpstreamSpec, UpstreamTool},
};

use super::{BuildSpec, Context};

/// One running entry. Its `call` takes a [`Permit`] and is the only way to what it holds.
pub(super) struct Server {
    definition: Arc<ToolDefinition>,
    body: Body,
}

enum Body {
    Builtin {
        builtin: Builtin,
        since: jiff::Timestamp,
    },
    Upstream {
        upstream: Arc<Upstream>,
        follower: AbortHandle,
        offered: Mutex<Offered>,
    },
}

/// The last list, in the registry's shape: most changes are of a light, and leave ten thousand tools alone.
#[derive(Default)]
struct Offered {
    raw: Option<Arc<[UpstreamTool]>>,
    tools: Arc<[Arc<ToolInfo>]>,
}

impl Server {
    /// Starts it; an MCP server is under way when this returns. One that takes the place of another server
    /// begins when the hold is dropped.
    pub(super) fn start(
        tool: &Arc<ToolDefinition>,
        spec: &BuildSpec,
        context: Weak<Context>,
        before: Option<&Server>,
    ) -> (Arc<Self>, Option<Hold>) {
        let mut hold = None;
        let body = match &**tool {
            ToolDefinition::Builtin(definition) => {
                let place = Place {
                    workspace: spec.workspace.clone(),
                    sandbox: spec.sandbox.clone(),
                    limits: spec.limits.clone(),
                    label: format!("{}-{}", spec.session_id, definition.id),
                };
                Body::Builtin {
                    builtin: Builtin::new(definition, place),
                    since: jiff::Timestamp::now(),
                }
            }
            ToolDefinition::Mcp(server) => {
                let spec = UpstreamSpec {
                    server: server.clone(),
                    agent: spec.agent.clone(),
                    workspace: spec.workspace.clone(),
                    sandbox: spec.sandbox.clone(),
                    host: spec.host.clone(),
                    trust: spec.trust.clone(),
                    limits: spec.limits.clone(),
                    env: spec.env.clone(),
                    debug: spec.debug.clone(),
                    proxy_socket: spec.proxy_socket.clone(),
                    thread: spec.thread.clone(),
                };
                let upstream = match before.map(|before| &before.body) {
                    Some(Body::Upstream { upstream: before, .. }) => {
                        let (upstream, place) = before.succeed(spec);
                        hold = Some(place);
                        upstream
                    }
                    Some(Body::Builtin { .. }) | None => Upstream::start(spec),
                };
                let follower = follow(&upstream, context);
                Body::Upstream {
                    upstream,
                    follower,
                    offered: Mutex::default(),
                }
            }
        };
        let server = Arc::new(Self {
            definition: tool.clone(),
            body,
        });
        (server, hold)
    }

    pub(super) fn id(&self) -> &CatalogId {
        self.definition.id()
    }

    /// What it was started from.
    pub(super) fn definition(&self) -> &Arc<ToolDefinition> {
        &self.definition
    }

    /// Returns when the first attempt to start it is over.
    pub(super) async fn settled(&self) {
        match &self.body {
            Body::Builtin { .. } => {}
            Body::Upstream { upstream, .. } => upstream.settled().await,
        }
    }

    /// What it offers now.
    pub(super) fn offer(&self, secrets: &Secrets) -> Offer {
        match &self.body {
            Body::Builtin { builtin, .. } => Offer {
                id: self.id().clone(),
                down: None,
                tools: [builtin.info()].into(),
            },
            Body::Upstream {
                upstream, offered, ..
            } => {
                let status = upstream.status();
                let down = (status.status == Light::Red
                    || (status.status == Light::Yellow && upstream.tools().is_empty()))
                .then(|| secrets.mask_text(&down(&status)));
                let tools = offered.lock().of(upstream.tools());
                Offer {
                    id: self.id().clone(),
                    down,
                    tools,
                }
            }
        }
    }

    /// How it is doing.
    pub(super) fn row(&self) -> ServerRow {
        match &self.body {
            Body::Upstream { upstream, .. } => upstream.status(),
            Body::Builtin { since, .. } => ServerRow {
                id: self.id().clone(),
                transport: "builtin".into(),
                status: Light::Green,
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
        arguments: &Object,
        ctx: &CallContext,
    ) -> Result<Given> {
        match &self.body {
            // Boxed: it is by far the largest, and every other call would hold its room too.
            Body::Builtin { builtin, .. } => {
                let calling = Box::pin(builtin.call(permit, arguments.clone(), ctx));
                calling.await.map(Given::Result)
            }
            Body::Upstream { upstream, .. } => {
                // The permit is spent here: behind this line there is only the one call it was made for.
                drop(permit);
                upstream.ask(tool, arguments, ctx).await
            }
        }
    }

    /// Stops it and starts it again.
    pub(super) async fn restart(&self) -> Result<()> {
        match &self.body {
            Body::Upstream { upstream, .. } => upstream.restart().await,
            Body::Builtin { .. } => Err(Error::invalid(format!(
                "{} is a built-in: it has no server to restart",
                self.id()
            ))),
        }
    }

    /// Stops it, with its whole process tree.
    pub(super) async fn stop(&self, reason: &str) {
        if let Body::Upstream {
            upstream, follower, ..
        } = &self.body
        {
            follower.abort();
            upstream.stop(reason).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Body::Upstream { follower, .. } = &self.body {
            follower.abort();
        }
    }
}

impl Offered {
    fn of(&mut self, raw: Arc<[UpstreamTool]>) -> Arc<[Arc<ToolInfo>]> {
        if !self.raw.as_ref().is_some_and(|last| Arc::ptr_eq(last, &raw)) {
            let info = |tool: &UpstreamTool| {
                Arc::new(ToolInfo {
                    name: tool.name.clone(),
                    description: tool.description.clone(),
                    input_schema: tool.input_schema.clone(),
                    note: tool.note.clone(),
                })
            };
            self.tools = raw.iter().map(info).collect();
            self.raw = Some(raw);
        }
        self.tools.clone()
    }
}

/// Has the registry made anew whenever the server's light or list changes.
fn follow(upstream: &Arc<Upstream>, context: Weak<Context>) -> AbortHandle {
    let mut changes = upstream.changes();
    let task = tokio::spawn(async move {
        while changes.changed().await.is_ok() {
            let Some(context) = context.upgrade() else { return };
            context.rebuild();
        }
    });
    task.abort_handle()
}

fn down(status: &ServerRow) -> String {
    let why = status.error.as_deref().unwrap_or("it is starting");
    format!("its server {} is down: {why}", status.id)
}
