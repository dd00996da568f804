//! All that is needed to build an agent's context, read and checked before anything is touched.

use std::{collections::HashSet, sync::Arc};

use oubliette_home::AgentEntry;
use oubliette_protocol::{
    CatalogId, Error, ProjectId, Result, Slug, WorkspaceId,
    agent::{AgentDefinition, Network, Runtime},
    catalog::{ToolDefinition, Transport},
};
use oubliette_sandbox::{Limits, Mount};
use oubliette_store::{ProjectRow, SessionRow, WorkspaceRow};

use crate::ports::Deps;

/// A checked plan of one agent in one session.
#[derive(Clone)]
pub(crate) struct Blueprint {
    /// The library it was read from.
    pub(crate) version: u64,
    pub(crate) entry: Arc<AgentEntry>,
    /// What `use` names, in order.
    pub(crate) catalog: Vec<Arc<ToolDefinition>>,
    /// Every id of the catalog.
    pub(crate) known: Arc<HashSet<CatalogId>>,
    pub(crate) script: Option<String>,
    pub(crate) project: ProjectRow,
    pub(crate) workspace: WorkspaceRow,
    pub(crate) network: Network,
    pub(crate) read_only: Vec<Mount>,
    pub(crate) limits: Limits,
}

impl Blueprint {
    /// Reads and checks everything. An agent that cannot be built is refused here, with nothing changed.
    pub(crate) async fn draw(deps: &Deps, session: &SessionRow, agent: &Slug) -> Result<Self> {
        // Taken first: what changes from here on is noticed.
        let version = deps.library.version();
        let project = project(deps, &session.project_id).await?;
        let workspace = workspace(deps, &session.project_id, &session.workspace_id).await?;
        let entry = deps.library.agent(agent)?;
        let definition = &entry.definition;
        deps.library.check_agent(definition)?;
        deps.trust.check_agent(definition)?;
        let mut catalog = Vec::with_capacity(definition.tools.uses.len());
        for id in &definition.tools.uses {
            let tool = deps.library.tool(id)?;
            deps.trust.check_tool(&tool.definition)?;
            catalog.push(tool.definition.clone());
        }
        let known = deps.library.catalog().keys().cloned().collect();
        let script = definition
            .script()
            .map(|_| deps.library.script(&entry))
            .transpose()?;
        let ceiling = Ceiling::above(deps, session).await?;
        let read_only = match &definition.runtime {
            Runtime::Builtin {} => Vec::new(),
            Runtime::Acp { read_only, .. } => {
                let within = read_only
                    .iter()
                    .filter(|path| ceiling.shows(path))
                    .collect::<Vec<_>>();
                let paths = deps.trust.check_read_only_all(&within)?;
                paths
                    .into_iter()
                    .map(|path| Mount::read_only(path.host, path.inside))
                    .collect()
            }
        };
        let network = network(&project, definition).min(ceiling.network);
        deps.trust.check_network(network)?;
        let limits = ceiling.within(limits(deps, &project));
        Ok(Self {
            version,
            entry,
            catalog,
            known: Arc::new(known),
            script,
            project,
            workspace,
            network,
            read_only,
            limits,
        })
    }

    pub(crate) fn agent(&self) -> &Slug {
        &self.entry.slug
    }

    /// Whether anything in it goes out through the proxy.
    pub(crate) fn needs_proxy(&self) -> bool {
        let proxied = |tool: &Arc<ToolDefinition>| match &**tool {
            ToolDefinition::Mcp(server) => match &server.transport {
                Transport::Stdio(stdio) => stdio.network == Network::Proxy,
                Transport::Ws { .. } | Transport::Tcp { .. } | Transport::Http { .. } => false,
            },
            ToolDefinition::Builtin(_) => false,
        };
        self.network == Network::Proxy || self.catalog.iter().any(proxied)
    }
}

/// What the sessions above a session allow it: a child's sandbox never exceeds its parent's.
struct Ceiling {
    network: Network,
    /// `None`: no session above.
    read_only: Option<Vec<String>>,
    /// Of the sandboxes above, each.
    limits: Vec<Limits>,
}

impl Ceiling {
    async fn above(deps: &Deps, session: &SessionRow) -> Result<Self> {
        let mut ceiling = Self {
            network: Network::Host,
            read_only: None,
            limits: Vec::new(),
        };
        let mut parent = session.parent_id.clone();
        while let Some(id) = parent {
            let Some(row) = deps.store.session_get(&id).await? else {
                break;
            };
            let project = project(deps, &row.project_id).await?;
            ceiling.limits.push(limits(deps, &project));
            // An agent that was deleted meanwhile opens nothing.
            let definition = deps
                .library
                .agent(&row.agent)
                .ok()
                .map(|entry| entry.definition.clone());
            let network = definition
                .as_ref()
                .map_or(Network::None, |above| network(&project, above));
            ceiling.network = ceiling.network.min(network);
            let shown = match definition.as_ref().map(|above| &above.runtime) {
                Some(Runtime::Acp { read_only, .. }) => read_only.clone(),
                Some(Runtime::Builtin {}) | None => Vec::new(),
            };
            let kept = match ceiling.read_only.take() {
                None => shown,
                Some(before) => before.into_iter().filter(|path| shown.contains(path)).collect(),
            };
            ceiling.read_only = Some(kept);
            parent = row.parent_id;
        }
        Ok(ceiling)
    }

    /// A child in another project than its parent's is held to both.
    fn within(&self, own: Limits) -> Limits {
        self.limits.iter().fold(own, |held, above| Limits {
            memory_mb: least(held.memory_mb, above.memory_mb),
            cpus: least(held.cpus, above.cpus),
            pids: least(held.pids, above.pids),
            workspace_mb: least(held.workspace_mb, above.workspace_mb),
            open_files: least(held.open_files, above.open_files),
        })
    }

    fn shows(&self, path: &String) -> bool {
        self.read_only.as_ref().is_none_or(|shown| shown.contains(path))
    }
}

/// The lower of two bounds; none is no bound.
fn least<T: PartialOrd>(one: Option<T>, other: Option<T>) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if other < one { other } else { one }),
        (one, other) => one.or(other),
    }
}

async fn project(deps: &Deps, id: &ProjectId) -> Result<ProjectRow> {
    let row = deps.store.project_get(id).await?;
    row.ok_or_else(|| Error::not_found(format!("project {id} does not exist any more")))
}

async fn workspace(deps: &Deps, project: &ProjectId, id: &WorkspaceId) -> Result<WorkspaceRow> {
    let row = deps.store.workspace_get(id).await?;
    let row = row.filter(|row| row.project_id == *project);
    row.ok_or_else(|| Error::not_found(format!("workspace {id} does not exist any more")))
}

/// The network an admin gave the project's sandboxes, else the one the agent asks for.
fn network(project: &ProjectRow, definition: &AgentDefinition) -> Network {
    let named = project.sandbox.get("network").cloned();
    named
        .and_then(|value| serde_json::from_value(value).ok())
        .unwrap_or(definition.sandbox.network)
}

/// The server's limits, as the project changes them.
fn limits(deps: &Deps, project: &ProjectRow) -> Limits {
    let ours = &deps.config.limits;
    let number = |field: &str| project.sandbox.get(field).and_then(serde_json::Value::as_u64);
    Limits {
        memory_mb: number("memory_mb").or(ours.memory_mb),
        cpus: project
            .sandbox
            .get("cpus")
            .and_then(serde_json::Value::as_f64)
            .or(ours.cpus),
        pids: number("pids").or(ours.pids),
        workspace_mb: number("workspace_mb").or(ours.workspace_mb),
        open_files: ours.open_files,
    }
}
