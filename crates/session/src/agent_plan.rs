//! [`AgentPlan`]: everything needed to run an agent in a session, read and checked before anything is started.

use std::{collections::HashSet, sync::Arc};

use oubliette_egress::EgressList;
use oubliette_home::AgentEntry;
use oubliette_programs::ProgramLaunch;
use oubliette_protocol::{
    CatalogId, Error, ProjectId, Result, Slug, WorkspaceId,
    agent::{AgentDefinition, AgentRuntime, NetworkAccess},
    catalog::ToolDefinition,
};
use oubliette_sandbox::{BindMount, ResourceLimits};
use oubliette_store::{ProjectRow, SessionRow, WorkspaceRow};

use crate::ports::SessionDeps;

/// One agent in one session: its definition, tools, project and workspace, and what its sandbox may use.
#[derive(Clone)]
pub(crate) struct AgentPlan {
    /// The version of the library it was read from.
    pub(crate) library_version: u64,
    pub(crate) entry: Arc<AgentEntry>,
    /// The catalog entries the definition lists under `tools.use`, in that order.
    pub(crate) catalog: Vec<Arc<ToolDefinition>>,
    /// All ids of the catalog, whether this agent uses them or not.
    pub(crate) catalog_ids: Arc<HashSet<CatalogId>>,
    pub(crate) script: Option<String>,
    pub(crate) project: ProjectRow,
    pub(crate) workspace: WorkspaceRow,
    pub(crate) network: NetworkAccess,
    /// The hosts its sandbox may reach through the proxy: those in each of these lists, its own and its ancestors'.
    pub(crate) egress: Vec<EgressList>,
    /// The names of the services its sandbox may use.
    pub(crate) upstreams: Vec<String>,
    pub(crate) read_only: Vec<BindMount>,
    pub(crate) limits: ResourceLimits,
    /// The name of the image of its sandboxes, if the agent or the project names one.
    pub(crate) image: Option<String>,
}

impl AgentPlan {
    /// Reads and checks everything. An agent that cannot run is refused here, before anything has changed. Waits for
    /// nothing: what may take long, such as the installation of its program, is done when it is started.
    pub(crate) async fn resolve(deps: &SessionDeps, session: &SessionRow, agent: &Slug) -> Result<Self> {
        // Read first, so that an edit made during this function gives the library a later version.
        let version = deps.library.version();
        let project = deps.project(&session.project_id).await?;
        let workspace = workspace(deps, &session.project_id, &session.workspace_id).await?;
        let entry = deps.library.agent(agent)?;
        let definition = &entry.definition;
        deps.library.check_agent(definition)?;
        deps.trust.check_agent(definition)?;
        for name in &definition.sandbox.upstreams {
            if deps.services.service(name).is_none() {
                return Err(Error::invalid(format!(
                    "agent {agent}: sandbox.upstreams: oubliette.toml has no section [upstreams.{name}]"
                )));
            }
        }
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
        let ceiling = AncestorBounds::of_ancestors(deps, session).await?;
        let read_only = match &definition.runtime {
            AgentRuntime::Builtin {} => Vec::new(),
            AgentRuntime::Acp { read_only, .. } => {
                let within = read_only
                    .iter()
                    .filter(|path| ceiling.allows_path(path))
                    .collect::<Vec<_>>();
                let paths = deps.trust.check_read_only_all(&within)?;
                paths
                    .into_iter()
                    .map(|path| BindMount::read_only(path.host, path.inside))
                    .collect()
            }
        };
        let network = network(&project, definition).min(ceiling.network);
        deps.trust.check_network(network)?;
        let mut egress: Vec<EgressList> = egress_list(&entry.slug, definition).into_iter().collect();
        egress.extend(ceiling.egress.iter().cloned());
        let upstreams = definition.sandbox.upstreams.iter();
        let upstreams = upstreams
            .filter(|name| ceiling.allows_upstream(name))
            .cloned()
            .collect();
        let limits = ceiling.bound_limits(limits(deps, &project));
        let image = image(&project, definition);
        Ok(Self {
            library_version: version,
            entry,
            catalog,
            catalog_ids: Arc::new(known),
            script,
            project,
            workspace,
            network,
            egress,
            upstreams,
            read_only,
            limits,
            image,
        })
    }

    pub(crate) fn agent(&self) -> &Slug {
        &self.entry.slug
    }

    /// Makes the agent's program ready to run, if it has one: installs it if it is not, which may take minutes, and checks
    /// it.
    pub(crate) async fn prepare_program(&self, deps: &SessionDeps) -> Result<Option<ProgramLaunch>> {
        match self.entry.definition.runtime.program() {
            Some(program) => deps.program_store.launch(program).await.map(Some),
            None => Ok(None),
        }
    }
}

/// What the ancestors of a session may use: the sandbox of a child never gets more than its parent's.
struct AncestorBounds {
    network: NetworkAccess,
    /// The lists of hosts that ancestors have.
    egress: Vec<EgressList>,
    /// The services that all ancestors may use; `None` when there are no ancestors.
    upstreams: Option<Vec<String>>,
    /// The paths that all ancestors may read; `None` when there are no ancestors.
    read_only: Option<Vec<String>>,
    /// The limits of each ancestor's sandbox.
    limits: Vec<ResourceLimits>,
}

impl AncestorBounds {
    async fn of_ancestors(deps: &SessionDeps, session: &SessionRow) -> Result<Self> {
        let mut ceiling = Self {
            network: NetworkAccess::Host,
            egress: Vec::new(),
            upstreams: None,
            read_only: None,
            limits: Vec::new(),
        };
        let mut parent = session.parent_id.clone();
        while let Some(id) = parent {
            let Some(row) = deps.store.session_get(&id).await? else {
                break;
            };
            let project = deps.project(&row.project_id).await?;
            ceiling.limits.push(limits(deps, &project));
            // Of an agent that was deleted meanwhile nothing is known, so nothing is allowed.
            let definition = deps
                .library
                .agent(&row.agent)
                .ok()
                .map(|entry| entry.definition.clone());
            let network = definition
                .as_ref()
                .map_or(NetworkAccess::None, |above| network(&project, above));
            ceiling.network = ceiling.network.min(network);
            let above = definition.as_ref();
            let mut usable = above.map_or(Vec::new(), |above| above.sandbox.upstreams.clone());
            usable.retain(|name| ceiling.allows_upstream(name));
            ceiling.upstreams = Some(usable);
            ceiling
                .egress
                .extend(above.and_then(|above| egress_list(&row.agent, above)));
            let shown = match definition.as_ref().map(|above| &above.runtime) {
                Some(AgentRuntime::Acp { read_only, .. }) => read_only.clone(),
                Some(AgentRuntime::Builtin {}) | None => Vec::new(),
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

    /// Lowers limits to those of all ancestors: a child may be in another project than its parent.
    fn bound_limits(&self, own: ResourceLimits) -> ResourceLimits {
        self.limits.iter().fold(own, |held, above| ResourceLimits {
            memory_mb: lower_bound(held.memory_mb, above.memory_mb),
            cpus: lower_bound(held.cpus, above.cpus),
            pids: lower_bound(held.pids, above.pids),
            workspace_mb: lower_bound(held.workspace_mb, above.workspace_mb),
            open_files: lower_bound(held.open_files, above.open_files),
        })
    }

    fn allows_upstream(&self, name: &String) -> bool {
        self.upstreams.as_ref().is_none_or(|usable| usable.contains(name))
    }

    fn allows_path(&self, path: &String) -> bool {
        self.read_only.as_ref().is_none_or(|shown| shown.contains(path))
    }
}

/// The lower of two bounds, where `None` is no bound.
fn lower_bound<T: PartialOrd>(one: Option<T>, other: Option<T>) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if other < one { other } else { one }),
        (one, other) => one.or(other),
    }
}

async fn workspace(deps: &SessionDeps, project: &ProjectId, id: &WorkspaceId) -> Result<WorkspaceRow> {
    let row = deps.store.workspace_get(id).await?;
    let row = row.filter(|row| row.project_id == *project);
    row.ok_or_else(|| Error::not_found(format!("workspace {id} does not exist any more")))
}

/// The network set for the project's sandboxes, else the one the agent's definition asks for. An agent with a list of
/// hosts never has more than the proxy, since nothing else heeds the list.
fn network(project: &ProjectRow, definition: &AgentDefinition) -> NetworkAccess {
    let named = project.sandbox.get("network").cloned();
    let network = named
        .and_then(|value| serde_json::from_value(value).ok())
        .unwrap_or(definition.sandbox.network);
    match definition.sandbox.egress {
        Some(_) => network.min(NetworkAccess::Proxy),
        None => network,
    }
}

/// The image that the agent's definition names, else the project's.
fn image(project: &ProjectRow, definition: &AgentDefinition) -> Option<String> {
    let of_project = || project.sandbox.get("image")?.as_str().map(str::to_owned);
    definition.sandbox.image.clone().or_else(of_project)
}

/// The list of hosts of an agent's definition.
fn egress_list(agent: &Slug, definition: &AgentDefinition) -> Option<EgressList> {
    Some(EgressList {
        hosts: definition.sandbox.egress.clone()?,
        setting: format!("sandbox.egress in agents/{agent}/agent.json"),
    })
}

/// The project's limits, with the server's for those it does not set.
fn limits(deps: &SessionDeps, project: &ProjectRow) -> ResourceLimits {
    let config = deps.config.load();
    let ours = &config.limits;
    let number = |field: &str| project.sandbox.get(field).and_then(serde_json::Value::as_u64);
    ResourceLimits {
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
