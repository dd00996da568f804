//! Checks of actions called from inside a sandbox: by an agent, or with a token made for or from inside a session, at
//! whatever door. Whatever its key, an agent may not widen what its session, or any session above it, may do.

use std::{collections::HashSet, sync::Arc};

use oubliette_protocol::{
    CatalogId, Error, ProjectId, Result, SessionId, Slug,
    agent::{AgentDefinition, AgentRuntime, AgentSandboxSettings, NetworkAccess},
    catalog::{ServerIsolation, StdioTransport, ToolDefinition, Transport},
    program::ProgramSpec,
    strict,
};
use serde_json::Value;

use super::{
    Action,
    input::MASK,
    project::ProjectUpdate,
    project_settings::{ProjectLimits, ProjectSandbox},
};
use crate::app::App;

/// Refuses an action that would widen what the session, or anything it starts, may do.
pub(crate) async fn check(app: &App, session: &SessionId, action: &Action) -> Result<()> {
    match action {
        Action::ProjectCreate(new) => {
            check_sandbox(new.sandbox.as_ref())?;
            check_within_defaults(app, new.sandbox.as_ref(), new.limits.as_ref())
        }
        Action::ProjectUpdate(change) => {
            check_sandbox(change.sandbox.as_ref())?;
            check_within_defaults(app, change.sandbox.as_ref(), change.limits.as_ref())?;
            check_no_budget(change.limits.as_ref())?;
            check_own_project(app, session, change).await
        }
        Action::ProjectDelete(delete) => check_no_project_above(app, session, &delete.project_id).await,
        Action::WorkspaceCreate(new) if new.source.is_some() => Err(denied(
            "source: cloning would give a sandbox the server's network",
        )),
        Action::AgentPut(put) => {
            check_agent_definition(app, &put.definition)?;
            let used = UsedDefinitions::used_by(app, session).await?;
            used.check_agent(&put.slug)
        }
        Action::AgentDelete(delete) => UsedDefinitions::used_by(app, session)
            .await?
            .check_agent(&delete.slug),
        Action::CatalogPut(put) => {
            check_tool_definition(&put.id, &put.definition)?;
            let used = UsedDefinitions::used_by(app, session).await?;
            used.check_tool(&put.id)
        }
        Action::CatalogDelete(delete) => UsedDefinitions::used_by(app, session)
            .await?
            .check_tool(&delete.id),
        Action::SessionSwitchAgent(switch) => {
            let tree = SessionTree::of(app, session).await?;
            match tree.contains(app, &switch.session_id).await? {
                true => Err(denied(
                    "session_switch_agent of a session of its own tree changes what runs there",
                )),
                false => Ok(()),
            }
        }
        Action::ToolCall(call) => check_not_ancestor(app, session, &call.session_id, "tool_call").await,
        Action::ToolServerRestart(restart) => {
            check_not_ancestor(app, session, &restart.session_id, "tool_server_restart").await
        }
        Action::ProgramInstall(_) | Action::ProgramRemove(_) | Action::ToolAdd(_) => Err(denied(
            "programs are installed and removed from outside: the server's package registries are reached for it",
        )),
        Action::LibraryPush(_) => Err(denied(
            "library_push replaces agents and catalog entries with all their files",
        )),
        Action::LibraryList(_) | Action::LibraryRead(_) => Err(denied(
            "files of definitions may hold secrets, which agent_get and catalog_get do not show",
        )),
        Action::CatalogTest(_) => Err(denied("catalog_test starts a server outside of any session")),
        Action::SessionQueueRemove(_) => Err(denied(
            "session_queue_remove is for whoever sent the message, not for the agent that is to read it",
        )),
        Action::ApprovalDecide(_) => Err(denied(
            "approval_decide is for the person who is asked, not for the agent that waits",
        )),
        Action::SessionDelete(_) => Err(denied(
            "session_delete would remove the record of what an agent did",
        )),
        Action::WorkspaceCreate(_)
        | Action::ApprovalList(_)
        | Action::SessionMessage(_)
        | Action::SessionCancel(_)
        | Action::SessionEnd(_)
        | Action::SessionGet(_)
        | Action::SessionList(_)
        | Action::SessionEvents(_)
        | Action::CallerToolResponse(_)
        | Action::ToolListing(_)
        | Action::SessionQueueList(_)
        | Action::ToolExplain(_)
        | Action::CatalogStatus(_)
        | Action::FiguresReport(_)
        | Action::DebuggerEvents(_)
        | Action::ProjectList(_)
        | Action::ProjectGet(_)
        | Action::WorkspaceList(_)
        | Action::WorkspaceDelete(_)
        | Action::WorkspaceDiff(_)
        | Action::AgentList(_)
        | Action::PresetList(_)
        | Action::AgentGet(_)
        | Action::CatalogList(_)
        | Action::CatalogGet(_)
        | Action::ProgramList(_)
        | Action::TokenCreate(_)
        | Action::TokenList(_)
        | Action::TokenRevoke(_)
        | Action::AuditList(_)
        | Action::UsageReporting(_)
        | Action::ServerInfo(_)
        | Action::ServerList(_)
        | Action::Doctor(_) => Ok(()),
    }
}

/// The `permission_denied` error of every check here.
fn denied(what: &str) -> Error {
    Error::permission_denied(format!(
        "{what}; this is not possible from inside a sandbox, whatever the key"
    ))
}

/// Refuses the sandbox settings that only an admin outside may set.
fn check_sandbox(given: Option<&ProjectSandbox>) -> Result<()> {
    let Some(given) = given else { return Ok(()) };
    for (field, set) in [
        ("driver", given.driver.is_some()),
        ("image", given.image.is_some()),
        ("network", given.network.is_some()),
    ] {
        if set {
            return Err(denied(&format!("sandbox.{field} opens a sandbox")));
        }
    }
    Ok(())
}

/// Refuses limits above the server's defaults, which outside an admin token may set.
fn check_within_defaults(
    app: &App,
    sandbox: Option<&ProjectSandbox>,
    limits: Option<&ProjectLimits>,
) -> Result<()> {
    let config = app.live.config();
    let config = &*config;
    let sandbox = sandbox.map(|given| given.numbers(config));
    let limits = limits.map(|given| given.numbers(config));
    let mut settings = sandbox.iter().flatten().chain(limits.iter().flatten());
    match settings.find(|setting| setting.is_above_default()) {
        Some(above) => Err(denied(&format!("{} is above the server's default", above.field))),
        None => Ok(()),
    }
}

/// Refuses to change a budget, of whichever project.
fn check_no_budget(limits: Option<&ProjectLimits>) -> Result<()> {
    match limits.and_then(ProjectLimits::first_given_budget) {
        Some(budget) => Err(denied(&format!("limits.{budget} bounds what sessions may use"))),
        None => Ok(()),
    }
}

/// Refuses changes to the project of the calling session, or of one above it, that affect sandbox, limits, key, environment
/// or agent of its sessions: a session in another project is bound by what bounds the one that started it.
async fn check_own_project(app: &App, session: &SessionId, change: &ProjectUpdate) -> Result<()> {
    let ancestry = app.store.session_ancestry(session).await?;
    if ancestry.iter().all(|row| row.project_id != change.project_id) {
        return Ok(());
    }
    let own = |field: &str, set: bool| match set {
        true => Err(denied(&format!(
            "{field} of its own project, or of one above it, bounds what a session may do"
        ))),
        false => Ok(()),
    };
    own("sandbox", change.sandbox.is_some())?;
    own("limits", change.limits.is_some())?;
    own("api_key", change.api_key.is_some())?;
    own("env", change.env.is_some())?;
    own("agent", change.agent.is_some())
}

/// Refuses to delete another project of a session above the calling one: its budgets, which bind that session too, would go
/// with it. The calling session's own project is not deleted while it runs.
async fn check_no_project_above(app: &App, session: &SessionId, project: &ProjectId) -> Result<()> {
    let ancestry = app.store.session_ancestry(session).await?;
    let is_above = ancestry.iter().skip(1).any(|row| row.project_id == *project);
    let is_own = ancestry.first().is_some_and(|row| row.project_id == *project);
    match is_above && !is_own {
        true => Err(denied(
            "project_delete of a project above its own would remove budgets that bind a session",
        )),
        false => Ok(()),
    }
}

/// Refuses an agent that would have more than a sandbox without network: by itself, by a catalog entry it uses, or by an
/// agent it may start. It would not be this session's agent, but the key that put it may get it run.
fn check_agent_definition(app: &App, definition: &Value) -> Result<()> {
    check_texts(definition)?;
    let given: AgentDefinition = strict::from_value(definition.clone())
        .map_err(|error| Error::invalid(format!("definition: {error}")))?;
    let mut seen = HashSet::new();
    let mut unchecked = vec![Arc::new(given)];
    while let Some(agent) = unchecked.pop() {
        check_agent_opens_nothing(&agent)?;
        for id in &agent.tools.uses {
            if let Ok(entry) = app.library.tool(id) {
                check_tool_opens_nothing(&entry.definition)?;
            }
        }
        for child in &agent.children {
            if seen.insert(child.clone())
                && let Ok(entry) = app.library.agent(child)
            {
                unchecked.push(entry.definition.clone());
            }
        }
    }
    Ok(())
}

/// Refuses a catalog entry that would have more than a sandbox without network.
fn check_tool_definition(id: &CatalogId, definition: &Value) -> Result<()> {
    check_texts(definition)?;
    let mut definition = definition.clone();
    if let Value::Object(object) = &mut definition {
        object.entry("id").or_insert_with(|| Value::from(id.as_str()));
    }
    let given = ToolDefinition::from_value(definition)
        .map_err(|error| Error::invalid(format!("definition: {error}")))?;
    check_tool_opens_nothing(&given)
}

/// Without `..` in its patterns, so that whoever adds a field has to decide here whether it opens a sandbox.
fn check_agent_opens_nothing(agent: &AgentDefinition) -> Result<()> {
    let AgentDefinition {
        schema: _,
        name: _,
        description: _,
        prompt: _,
        model: _,
        runtime,
        permissions: _,
        children: _,
        env,
        sandbox:
            AgentSandboxSettings {
                network,
                // Narrows what the proxy reaches, and there is none.
                egress: _,
                upstreams,
                image,
            },
        tools: _,
    } = agent;
    check_no_network(*network)?;
    check_no_upstreams(upstreams)?;
    if image.is_some() {
        return Err(denied("sandbox.image has the container engine fetch an image"));
    }
    env.values().try_for_each(|text| check_text(text))?;
    match runtime {
        AgentRuntime::Builtin {} => Ok(()),
        AgentRuntime::Acp {
            command: _,
            program,
            args: _,
            env,
            read_only,
            // Its own tools, on the loopback of its own sandbox.
            mcp_transport: _,
        } => {
            check_no_program(program.as_ref())?;
            env.values().try_for_each(|text| check_text(text))?;
            check_no_host_paths(read_only)
        }
    }
}

/// Without `..` in its patterns, so that whoever adds a field has to decide here whether it opens a sandbox.
fn check_tool_opens_nothing(tool: &ToolDefinition) -> Result<()> {
    let server = match tool {
        // Works on the files and in the sandbox of the session that uses it.
        ToolDefinition::Builtin(_) => return Ok(()),
        ToolDefinition::Mcp(server) => server,
    };
    match &server.transport {
        Transport::Stdio(StdioTransport {
            command,
            program,
            args,
            env,
            isolation,
            network,
            // Narrows what the proxy reaches, and there is none.
            egress: _,
            read_only,
            cache_mb: _,
        }) => {
            check_no_program(program.as_ref())?;
            if *isolation != ServerIsolation::Sandbox {
                return Err(denied("isolation takes a tool server out of its sandbox"));
            }
            check_no_network(*network)?;
            check_no_host_paths(read_only)?;
            std::iter::once(command)
                .chain(args)
                .chain(env.values())
                .try_for_each(|text| check_text(text))
        }
        Transport::Ws { .. } | Transport::Tcp { .. } | Transport::Http { .. } => Err(denied(&format!(
            "transport {} is reached over the server's network",
            server.transport.as_str()
        ))),
    }
}

fn check_no_network(network: NetworkAccess) -> Result<()> {
    match network {
        NetworkAccess::None => Ok(()),
        NetworkAccess::Proxy | NetworkAccess::Host => Err(denied("network opens a sandbox")),
    }
}

fn check_no_program(program: Option<&ProgramSpec>) -> Result<()> {
    match program {
        None => Ok(()),
        Some(_) => Err(denied(
            "program has a package installed, for which the server's package registries are reached",
        )),
    }
}

fn check_no_upstreams(names: &[String]) -> Result<()> {
    match names.is_empty() {
        true => Ok(()),
        false => Err(denied(
            "sandbox.upstreams gives a sandbox a service with the server's credential",
        )),
    }
}

fn check_no_host_paths(read_only: &[String]) -> Result<()> {
    match read_only.is_empty() {
        true => Ok(()),
        false => Err(denied("read_only shows a sandbox the host's files")),
    }
}

/// Refuses texts, at any depth, that stand for values an agent may not read: variables of the server's environment, and
/// the mask by which a definition keeps its stored secrets (with another command, it could be made to show them).
fn check_texts(value: &Value) -> Result<()> {
    match value {
        Value::String(text) if text == MASK => Err(denied(
            "the mask *** would keep a secret and give it to another program",
        )),
        Value::String(text) => check_text(text),
        Value::Array(items) => items.iter().try_for_each(check_texts),
        Value::Object(object) => object.values().try_for_each(check_texts),
        Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
    }
}

fn check_text(text: &str) -> Result<()> {
    match text.contains("${env:") {
        true => Err(denied("${env:…} reads the server's environment")),
        false => Ok(()),
    }
}

/// The tree of sessions below one root session.
struct SessionTree {
    root: Option<SessionId>,
}

impl SessionTree {
    async fn of(app: &App, session: &SessionId) -> Result<Self> {
        Ok(Self {
            root: app.store.session_get(session).await?.map(|row| row.root_id),
        })
    }

    async fn contains(&self, app: &App, other: &SessionId) -> Result<bool> {
        let row = app.store.session_get(other).await?;
        Ok(row.is_some_and(|row| Some(row.root_id) == self.root))
    }
}

/// Refuses a target session that is an ancestor of the calling one, whose tools may be wider.
async fn check_not_ancestor(app: &App, session: &SessionId, target: &SessionId, what: &str) -> Result<()> {
    let ancestry = app.store.session_ancestry(session).await?;
    match ancestry.iter().skip(1).any(|row| row.session_id == *target) {
        true => Err(denied(&format!(
            "{what} in a session above its own would give it that session's tools"
        ))),
        false => Ok(()),
    }
}

/// The agents and catalog entries that a session and its ancestors use.
#[derive(Debug, Default)]
pub(crate) struct UsedDefinitions {
    agents: HashSet<Slug>,
    tools: HashSet<CatalogId>,
}

impl UsedDefinitions {
    /// Collects them from the session up to its root.
    pub(crate) async fn used_by(app: &App, session: &SessionId) -> Result<Self> {
        let mut used = Self::default();
        for row in app.store.session_ancestry(session).await? {
            used.add_agent(app, row.agent);
        }
        Ok(used)
    }

    /// Adds an agent, the agents it may start and the ones those may start, with their catalog entries.
    fn add_agent(&mut self, app: &App, agent: Slug) {
        let mut next = vec![agent];
        while let Some(agent) = next.pop() {
            if let Ok(entry) = app.library.agent(&agent)
                && !self.agents.contains(&agent)
            {
                self.tools.extend(entry.definition.tools.uses.iter().cloned());
                next.extend(entry.definition.children.iter().cloned());
            }
            self.agents.insert(agent);
        }
    }

    fn check_agent(&self, slug: &Slug) -> Result<()> {
        match self.agents.contains(slug) {
            true => Err(denied(&format!(
                "agent {slug} is what this session or one above it runs"
            ))),
            false => Ok(()),
        }
    }

    fn check_tool(&self, id: &CatalogId) -> Result<()> {
        match self.tools.contains(id) {
            true => Err(denied(&format!(
                "catalog entry {id} is what this session or one above it uses"
            ))),
            false => Ok(()),
        }
    }
}
