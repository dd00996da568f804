//! One running agent's tools: its servers, started side by side, and the registry made of what they offer.
//!
//! A context is built for one agent and never becomes another's: switching builds a new one and tears this
//! one down. `server` is one entry of `use`; `apply` takes an edit of the agent or of its catalog into the
//! running context; `sink` takes secrets out of what servers tell the debugger.

mod apply;
mod server;
mod sink;

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use arc_swap::ArcSwap;
use futures::future::join_all;
use indexmap::IndexMap;
use oubliette_protocol::{
    CatalogId, Error, Object, Result, SessionId, Slug,
    agent::AgentDefinition,
    catalog::ToolDefinition,
    debug::DebugBody,
    tool::{ServerRow, ToolRow},
};
use oubliette_sandbox::{Limits, Sandbox};
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

use crate::{
    CallContext, CallThread, DebugSink, Environment, Permit, Secrets, Trust,
    allow::Rules,
    call::Given,
    registry::{Entry, Offer, Registry},
    upstream::Hold,
};

use self::{server::Server, sink::MaskingSink};

/// What a context is built from.
#[derive(Clone)]
pub struct BuildSpec {
    /// The session it is for.
    pub session_id: SessionId,
    /// The agent.
    pub agent: Slug,
    /// Its definition.
    pub definition: Arc<AgentDefinition>,
    /// The entries of `use`, in that order.
    pub catalog: Vec<Arc<ToolDefinition>>,
    /// Every id of the catalog: a tool of one that is not in `use` is blocked, not unknown.
    pub known: Arc<HashSet<CatalogId>>,
    /// The session's workspace on the host.
    pub workspace: PathBuf,
    /// Where servers and commands run.
    pub sandbox: Arc<dyn Sandbox>,
    /// Where servers with `isolation: "host"` run.
    pub host: Arc<dyn Sandbox>,
    /// What of the host is open.
    pub trust: Arc<Trust>,
    /// How much of the machine one server may use.
    pub limits: Limits,
    /// The server's environment.
    pub env: Arc<dyn Environment>,
    /// The session's debugger.
    pub debug: Arc<dyn DebugSink>,
    /// The egress proxy's socket on the host, for servers with `network: "proxy"`.
    pub proxy_socket: Option<PathBuf>,
    /// Where its servers are listened to.
    pub thread: CallThread,
}

/// What the agent's definition and the catalog say of its tools.
struct Governed {
    definition: Arc<AgentDefinition>,
    rules: Arc<Rules>,
    /// The entries of `use`, in that order.
    used: Vec<Arc<ToolDefinition>>,
    known: Arc<HashSet<CatalogId>>,
}

/// One running agent's tools.
pub struct Context {
    me: Weak<Context>,
    spec: BuildSpec,
    /// What the agent may have now; `spec` says what it had when it was built.
    governed: ArcSwap<Governed>,
    secrets: Arc<Secrets>,
    servers: RwLock<IndexMap<CatalogId, Arc<Server>>>,
    registry: ArcSwap<Registry>,
    /// Held while the registry is made anew, so that an older view never replaces a newer one.
    rebuilding: Mutex<()>,
    /// Held while a server is replaced or all are stopped.
    changing: tokio::sync::Mutex<()>,
    closed: AtomicBool,
    changes: watch::Sender<u64>,
}

impl Context {
    /// Checks, starts and registers everything. A definition that asks for more of the host than it may
    /// have refuses the whole agent before anything is started; a server that does not start is red, its
    /// tools unavailable, and the rest go on.
    pub async fn build(spec: BuildSpec) -> Result<Arc<Self>> {
        let started = Instant::now();
        spec.trust.check_agent(&spec.definition)?;
        let governed = Governed::new(&spec, spec.definition.clone(), &spec.catalog, spec.known.clone())?;
        let used = governed.used.clone();
        let secrets = Arc::new(Secrets::new());
        let debug = Arc::new(MaskingSink::new(spec.debug.clone(), secrets.clone()));
        let context = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            governed: ArcSwap::from_pointee(governed),
            spec: BuildSpec { debug, ..spec },
            secrets,
            servers: RwLock::default(),
            registry: ArcSwap::default(),
            rebuilding: Mutex::new(()),
            changing: tokio::sync::Mutex::new(()),
            closed: AtomicBool::new(false),
            changes: watch::Sender::new(0),
        });
        context.record(DebugBody::BuildStarted {
            servers: used.iter().map(|tool| tool.id().to_string()).collect(),
        });
        let servers: Vec<Arc<Server>> = used.iter().map(|tool| context.start(tool, None).0).collect();
        *context.servers.write() = servers
            .iter()
            .map(|server| (server.id().clone(), server.clone()))
            .collect();
        join_all(servers.iter().map(|server| server.settled())).await;
        context.rebuild();
        let tools = context.registry().listed().count();
        let took_ms = millis(started);
        context.record(DebugBody::BuildFinished { tools, took_ms });
        Ok(context)
    }

    /// Starts one entry and follows its changes from the first one on.
    fn start(&self, tool: &Arc<ToolDefinition>, before: Option<&Server>) -> (Arc<Server>, Option<Hold>) {
        self.spec
            .trust
            .gather_secrets(tool, &*self.spec.env, &self.secrets);
        Server::start(tool, &self.spec, self.me.clone(), before)
    }

    /// The agent.
    pub fn agent(&self) -> &Slug {
        &self.spec.agent
    }

    /// Its definition, as it was last applied.
    pub fn definition(&self) -> Arc<AgentDefinition> {
        self.governed.load().definition.clone()
    }

    /// Its catalog tools as they are now.
    pub fn registry(&self) -> Arc<Registry> {
        self.registry.load_full()
    }

    /// What its servers read from the environment.
    pub fn secrets(&self) -> &Secrets {
        &self.secrets
    }

    /// Bumped whenever the agent's list changes.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Every catalog tool as `tool_list` shows it.
    pub fn rows(&self) -> Vec<ToolRow> {
        self.registry().entries().iter().map(Entry::row).collect()
    }

    /// Every server as `tool_list` shows it.
    pub fn servers(&self) -> Vec<ServerRow> {
        let servers = self.all();
        let rows = servers.iter().map(|server| server.row());
        rows.map(|row| ServerRow {
            error: row.error.map(|e| self.secrets.mask_text(&e)),
            ..row
        })
        .collect()
    }

    /// Calls a tool of one entry; the permit says that it may be.
    pub(crate) async fn dispatch(
        &self,
        permit: Permit,
        id: &CatalogId,
        tool: &str,
        arguments: &Object,
        ctx: &CallContext,
    ) -> Result<Given> {
        let server = self.servers.read().get(id.as_str()).cloned();
        match server {
            Some(server) => server.call(permit, tool, arguments, ctx).await,
            None => Err(Error::unavailable(format!("{id} has been stopped"))),
        }
    }

    /// Stops a server and starts it again; returns when it is ready, or with the reason why it is not. A
    /// teardown does not wait for it: stopping the server ends the wait.
    pub async fn restart_server(&self, id: &CatalogId) -> Result<()> {
        let server = self.servers.read().get(id.as_str()).cloned();
        let Some(server) = server else {
            let agent = self.agent();
            return Err(Error::not_found(format!("agent {agent} runs no server {id}")));
        };
        let restarted = server.restart().await;
        self.rebuild();
        restarted
    }

    /// Stops every server, whole process trees, and clears the registry. Nothing of this context can be
    /// called afterwards.
    pub async fn teardown(&self) {
        let _one_at_a_time = self.changing.lock().await;
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let started = Instant::now();
        self.record(DebugBody::TeardownStarted {});
        let servers: Vec<Arc<Server>> = self.servers.write().drain(..).map(|(_, server)| server).collect();
        join_all(
            servers
                .iter()
                .map(|server| server.stop("the agent's context was torn down")),
        )
        .await;
        let tools = {
            let _one_at_a_time = self.rebuilding.lock();
            self.registry.swap(Arc::default()).entries().len()
        };
        self.record(DebugBody::RegistryCleared { tools });
        self.record(DebugBody::TeardownFinished {
            took_ms: millis(started),
        });
        self.changes.send_modify(|version| *version += 1);
    }

    /// Makes the registry anew from what the servers offer now.
    pub(crate) fn rebuild(&self) {
        let (old, new) = {
            let _one_at_a_time = self.rebuilding.lock();
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            let governed = self.governed.load();
            let servers = self.servers.read();
            let offers: Vec<_> = governed
                .used
                .iter()
                .map(|tool| match servers.get(tool.id()) {
                    Some(server) => server.offer(&self.secrets),
                    None => Offer::starting(tool.id()),
                })
                .collect();
            let new = Arc::new(Registry::new(
                &governed.definition.tools,
                governed.rules.clone(),
                &offers,
                governed.known.clone(),
            ));
            (self.registry.swap(new.clone()), new)
        };
        let before: HashMap<&str, &Entry> = old
            .entries()
            .iter()
            .map(|entry| (&*entry.canonical, entry))
            .collect();
        for entry in new.entries() {
            let same =
                |old: &&Entry| old.name == entry.name && old.verdict.allows() == entry.verdict.allows();
            if before.get(&*entry.canonical).is_some_and(same) {
                continue;
            }
            self.record(DebugBody::ToolRegistered {
                tool: entry.name.clone(),
                canonical: entry.canonical.to_string(),
                server: entry.id.to_string(),
                allowed: entry.verdict.allows(),
                available: entry.unavailable().is_none(),
                reason: Some(entry.reason()),
            });
        }
        if !same_list(&old, &new) {
            self.changes.send_modify(|version| *version += 1);
        }
    }

    /// The servers that run, in `use` order.
    fn all(&self) -> Vec<Arc<Server>> {
        let servers = self.servers.read();
        let used = &self.governed.load().used;
        used.iter()
            .filter_map(|tool| servers.get(tool.id()).cloned())
            .collect()
    }

    fn record(&self, body: DebugBody) {
        self.spec.debug.record(Some(&self.spec.agent), body);
    }
}

impl Governed {
    /// Puts the catalog in the order `use` names it and refuses what asks for more of the host than it may
    /// have.
    fn new(
        spec: &BuildSpec,
        definition: Arc<AgentDefinition>,
        catalog: &[Arc<ToolDefinition>],
        known: Arc<HashSet<CatalogId>>,
    ) -> Result<Self> {
        let catalog: HashMap<&CatalogId, &Arc<ToolDefinition>> =
            catalog.iter().map(|tool| (tool.id(), tool)).collect();
        let mut used = Vec::with_capacity(definition.tools.uses.len());
        for id in &definition.tools.uses {
            let tool = catalog.get(id).ok_or_else(|| {
                let agent = &spec.agent;
                Error::invalid(format!("agent {agent} uses {id}, which is not in the catalog"))
            })?;
            spec.trust.check_tool(tool)?;
            used.push(Arc::clone(tool));
        }
        Ok(Self {
            rules: Arc::new(Rules::new(&definition.tools)),
            definition,
            used,
            known,
        })
    }
}

/// Whether the agent would see no difference.
fn same_list(a: &Registry, b: &Registry) -> bool {
    let same =
        |(a, b): (&Entry, &Entry)| a.name == b.name && (Arc::ptr_eq(&a.info, &b.info) || a.info == b.info);
    a.listed().count() == b.listed().count() && a.listed().zip(b.listed()).all(same)
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}
