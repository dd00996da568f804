//! One running agent's catalog tools: its servers, started concurrently, and the registry of what they offer.
//!
//! A context is built for one agent and never reused for another: switching builds a new one and tears this
//! one down. `running_entry` is one entry of `use`; `apply` applies an edit of the agent or of its catalog to
//! the running context; `masking_sink` masks secrets in what servers report to the debugger.

mod apply;
mod masking_sink;
mod running_entry;

use std::{
    collections::{HashMap, HashSet},
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
    CatalogId, Error, JsonObject, Result, SessionId, Slug,
    agent::AgentDefinition,
    catalog::ToolDefinition,
    debug::DebugBody,
    tool::{ListedServer, ListedTool},
};
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

use crate::{
    CallContext, Permit, Secrets,
    allow::ToolRules,
    call::ToolAnswer,
    registry::{OfferedTools, RegistryEntry, ToolRegistry},
    upstream::{ServerSetup, StartHold},
};

use self::{masking_sink::MaskingSink, running_entry::RunningEntry};

/// What an [`AgentContext`] is built from.
#[derive(Clone)]
pub struct ContextSpec {
    /// The session it is for.
    pub session_id: SessionId,
    /// The agent's definition.
    pub definition: Arc<AgentDefinition>,
    /// The entries of `use`, in that order.
    pub catalog: Vec<Arc<ToolDefinition>>,
    /// Every id of the catalog: a tool of an entry that is not in `use` is blocked, not unknown.
    pub catalog_ids: Arc<HashSet<CatalogId>>,
    /// What its servers are started with.
    pub setup: ServerSetup,
}

/// The agent's definition and catalog as last applied: what the context should run.
struct AppliedDefinition {
    definition: Arc<AgentDefinition>,
    rules: Arc<ToolRules>,
    /// The entries of `use`, in that order.
    used: Vec<Arc<ToolDefinition>>,
    catalog_ids: Arc<HashSet<CatalogId>>,
}

/// One running agent's catalog tools.
pub struct AgentContext {
    weak_self: Weak<AgentContext>,
    spec: ContextSpec,
    /// The definition in force now; `spec` has the one the context was built with.
    applied: ArcSwap<AppliedDefinition>,
    secrets: Arc<Secrets>,
    servers: RwLock<IndexMap<CatalogId, Arc<RunningEntry>>>,
    registry: ArcSwap<ToolRegistry>,
    /// Held while the registry is rebuilt, so that an older view never replaces a newer one.
    rebuild_lock: Mutex<()>,
    /// Held while servers are replaced or all are stopped.
    change_lock: tokio::sync::Mutex<()>,
    closed: AtomicBool,
    changes: watch::Sender<u64>,
}

impl AgentContext {
    /// Checks the definitions, starts the servers and registers their tools. A definition that asks for more of
    /// the host than `trust` allows fails the build before anything is started; a server that does not start is
    /// red, its tools are unavailable, and the others go on.
    pub async fn build(spec: ContextSpec) -> Result<Arc<Self>> {
        let started = Instant::now();
        spec.setup.trust.check_agent(&spec.definition)?;
        let applied = AppliedDefinition::new(
            &spec,
            spec.definition.clone(),
            &spec.catalog,
            spec.catalog_ids.clone(),
        )?;
        let used = applied.used.clone();
        let secrets = Arc::new(Secrets::new());
        let debug = Arc::new(MaskingSink::new(spec.setup.debug.clone(), secrets.clone()));
        let context = Arc::new_cyclic(|weak_self| Self {
            weak_self: weak_self.clone(),
            applied: ArcSwap::from_pointee(applied),
            spec: ContextSpec {
                setup: ServerSetup { debug, ..spec.setup },
                ..spec
            },
            secrets,
            servers: RwLock::default(),
            registry: ArcSwap::default(),
            rebuild_lock: Mutex::new(()),
            change_lock: tokio::sync::Mutex::new(()),
            closed: AtomicBool::new(false),
            changes: watch::Sender::new(0),
        });
        context.record(DebugBody::BuildStarted {
            servers: used.iter().map(|tool| tool.id().to_string()).collect(),
        });
        let servers: Vec<Arc<RunningEntry>> = used.iter().map(|tool| context.start(tool, None).0).collect();
        *context.servers.write() = servers
            .iter()
            .map(|server| (server.id().clone(), server.clone()))
            .collect();
        join_all(servers.iter().map(|server| server.wait_first_start())).await;
        context.rebuild_registry();
        let tools = context.registry().listed().count();
        let took_ms = millis(started);
        context.record(DebugBody::BuildFinished { tools, took_ms });
        Ok(context)
    }

    /// Starts one entry, and a task that rebuilds the registry at each of its changes.
    fn start(
        &self,
        tool: &Arc<ToolDefinition>,
        before: Option<&RunningEntry>,
    ) -> (Arc<RunningEntry>, Option<StartHold>) {
        self.spec
            .setup
            .trust
            .gather_secrets(tool, &*self.spec.setup.env, &self.secrets);
        RunningEntry::start(tool, &self.spec, self.weak_self.clone(), before)
    }

    /// The agent's name.
    pub fn agent(&self) -> &Slug {
        &self.spec.setup.agent
    }

    /// The agent's definition, as last applied.
    pub fn definition(&self) -> Arc<AgentDefinition> {
        self.applied.load().definition.clone()
    }

    /// The agent's catalog tools as they are now.
    pub fn registry(&self) -> Arc<ToolRegistry> {
        self.registry.load_full()
    }

    /// The values that its servers' definitions read from the environment.
    pub fn secrets(&self) -> &Secrets {
        &self.secrets
    }

    /// A version number that grows whenever the agent's tool list or rules change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Every catalog tool as `tool_list` shows it.
    pub fn rows(&self) -> Vec<ListedTool> {
        self.registry().entries().iter().map(RegistryEntry::row).collect()
    }

    /// Every server as `tool_list` shows it.
    pub fn servers(&self) -> Vec<ListedServer> {
        let servers = self.running_entries();
        let rows = servers.iter().map(|server| server.row());
        rows.map(|row| ListedServer {
            error: row.error.map(|e| self.secrets.mask_text(&e)),
            ..row
        })
        .collect()
    }

    /// Calls a tool of one entry, using up the permit.
    pub(crate) async fn dispatch(
        &self,
        permit: Permit,
        id: &CatalogId,
        tool: &str,
        arguments: &JsonObject,
        ctx: &CallContext,
    ) -> Result<ToolAnswer> {
        let server = self.servers.read().get(id.as_str()).cloned();
        match server {
            Some(server) => server.call(permit, tool, arguments, ctx).await,
            None => Err(Error::unavailable(format!("{id} has been stopped"))),
        }
    }

    /// Stops a server and starts it again; returns when it is ready, or the reason why it is not. A teardown
    /// need not wait for this: stopping the server ends the wait.
    pub async fn restart_server(&self, id: &CatalogId) -> Result<()> {
        let server = self.servers.read().get(id.as_str()).cloned();
        let Some(server) = server else {
            let agent = self.agent();
            return Err(Error::not_found(format!("agent {agent} runs no server {id}")));
        };
        let restarted = server.restart().await;
        self.rebuild_registry();
        restarted
    }

    /// Stops every server with its whole process tree and clears the registry. No tool of this context can be
    /// called afterwards.
    pub async fn teardown(&self) {
        let _one_at_a_time = self.change_lock.lock().await;
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let started = Instant::now();
        self.record(DebugBody::TeardownStarted {});
        let servers: Vec<Arc<RunningEntry>> =
            self.servers.write().drain(..).map(|(_, server)| server).collect();
        join_all(
            servers
                .iter()
                .map(|server| server.stop("the agent's context was torn down")),
        )
        .await;
        let tools = {
            let _one_at_a_time = self.rebuild_lock.lock();
            self.registry.swap(Arc::default()).entries().len()
        };
        self.record(DebugBody::RegistryCleared { tools });
        self.record(DebugBody::TeardownFinished {
            took_ms: millis(started),
        });
        self.changes.send_modify(|version| *version += 1);
    }

    /// Rebuilds the registry from what the servers offer now, and records and announces what changed.
    pub(crate) fn rebuild_registry(&self) {
        let (old, new) = {
            let _one_at_a_time = self.rebuild_lock.lock();
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            let applied = self.applied.load();
            let servers = self.servers.read();
            let offers: Vec<_> = applied
                .used
                .iter()
                .map(|tool| match servers.get(tool.id()) {
                    Some(server) => server.offer(&self.secrets),
                    None => OfferedTools::starting(tool.id()),
                })
                .collect();
            let new = Arc::new(ToolRegistry::new(
                &applied.definition.tools,
                applied.rules.clone(),
                &offers,
                applied.catalog_ids.clone(),
            ));
            (self.registry.swap(new.clone()), new)
        };
        let before: HashMap<&str, &RegistryEntry> = old
            .entries()
            .iter()
            .map(|entry| (&*entry.canonical, entry))
            .collect();
        for entry in new.entries() {
            let same = |old: &&RegistryEntry| {
                old.name == entry.name && old.rules.verdict.allows() == entry.rules.verdict.allows()
            };
            if before.get(&*entry.canonical).is_some_and(same) {
                continue;
            }
            self.record(DebugBody::ToolRegistered {
                tool: entry.name.clone(),
                canonical: entry.canonical.to_string(),
                server: entry.id.to_string(),
                allowed: entry.rules.verdict.allows(),
                available: entry.unavailable().is_none(),
                reason: Some(entry.reason().to_string()),
            });
        }
        if !same_list(&old, &new) {
            self.changes.send_modify(|version| *version += 1);
        }
    }

    /// The running entries, in `use` order.
    fn running_entries(&self) -> Vec<Arc<RunningEntry>> {
        let servers = self.servers.read();
        let used = &self.applied.load().used;
        used.iter()
            .filter_map(|tool| servers.get(tool.id()).cloned())
            .collect()
    }

    fn record(&self, body: DebugBody) {
        self.spec.setup.debug.record(Some(&self.spec.setup.agent), body);
    }
}

impl AppliedDefinition {
    /// Sorts the catalog entries by `use`. Fails when one is missing or asks for more of the host than `trust`
    /// allows.
    fn new(
        spec: &ContextSpec,
        definition: Arc<AgentDefinition>,
        catalog: &[Arc<ToolDefinition>],
        catalog_ids: Arc<HashSet<CatalogId>>,
    ) -> Result<Self> {
        let catalog: HashMap<&CatalogId, &Arc<ToolDefinition>> =
            catalog.iter().map(|tool| (tool.id(), tool)).collect();
        let mut used = Vec::with_capacity(definition.tools.uses.len());
        for id in &definition.tools.uses {
            let tool = catalog.get(id).ok_or_else(|| {
                let agent = &spec.setup.agent;
                Error::invalid(format!("agent {agent} uses {id}, which is not in the catalog"))
            })?;
            spec.setup.trust.check_tool(tool)?;
            used.push(Arc::clone(tool));
        }
        Ok(Self {
            rules: Arc::new(ToolRules::new(&definition.tools)),
            definition,
            used,
            catalog_ids,
        })
    }
}

/// Whether the agent's tool list is the same with both registries.
fn same_list(a: &ToolRegistry, b: &ToolRegistry) -> bool {
    let same = |(a, b): (&RegistryEntry, &RegistryEntry)| {
        a.name == b.name && (Arc::ptr_eq(&a.info, &b.info) || a.info == b.info)
    };
    a.listed().count() == b.listed().count() && a.listed().zip(b.listed()).all(same)
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}
