//! Checks of actions called from inside a sandbox. Whatever its key, an agent may not widen what its session, or
//! any session above it, may do.

use std::collections::HashSet;

use oubliette_protocol::{CatalogId, Error, Result, SessionId, Slug};
use serde_json::Value;

use super::{Action, project};
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
            check_own_project(app, session, change).await
        }
        Action::WorkspaceCreate(new) if new.source.is_some() => Err(denied(
            "source: cloning would give a sandbox the server's network",
        )),
        Action::AgentPut(put) => {
            check_definition(&put.definition)?;
            let used = UsedDefinitions::used_by(app, session).await?;
            used.check_agent(&put.slug)
        }
        Action::AgentDelete(delete) => UsedDefinitions::used_by(app, session)
            .await?
            .check_agent(&delete.slug),
        Action::CatalogPut(put) => {
            check_definition(&put.definition)?;
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
        Action::WorkspaceCreate(_)
        | Action::SessionMessage(_)
        | Action::SessionCancel(_)
        | Action::SessionEnd(_)
        | Action::SessionGet(_)
        | Action::SessionList(_)
        | Action::SessionEvents(_)
        | Action::CallerToolResponse(_)
        | Action::ToolListing(_)
        | Action::DebuggerEvents(_)
        | Action::ProjectList(_)
        | Action::ProjectGet(_)
        | Action::ProjectDelete(_)
        | Action::WorkspaceList(_)
        | Action::WorkspaceDelete(_)
        | Action::WorkspaceDiff(_)
        | Action::AgentList(_)
        | Action::AgentGet(_)
        | Action::CatalogList(_)
        | Action::CatalogGet(_)
        | Action::TokenCreate(_)
        | Action::TokenList(_)
        | Action::TokenRevoke(_)
        | Action::AuditList(_)
        | Action::ServerInfo(_)
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
fn check_sandbox(given: Option<&project::ProjectSandbox>) -> Result<()> {
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
    sandbox: Option<&project::ProjectSandbox>,
    limits: Option<&project::ProjectLimits>,
) -> Result<()> {
    let config = &app.config;
    let sandbox = sandbox.map(|given| given.numbers(config));
    let limits = limits.map(|given| given.numbers(config));
    let mut settings = sandbox.iter().flatten().chain(limits.iter().flatten());
    match settings.find(|setting| setting.is_above_default()) {
        Some(above) => Err(denied(&format!("{} is above the server's default", above.field))),
        None => Ok(()),
    }
}

/// Refuses changes to the calling session's own project that affect its sandbox, limits, key, environment or agent.
async fn check_own_project(app: &App, session: &SessionId, change: &project::ProjectUpdate) -> Result<()> {
    let Some(row) = app.store.session_get(session).await? else {
        return Ok(());
    };
    if row.project_id != change.project_id {
        return Ok(());
    }
    let own = |field: &str, set: bool| match set {
        true => Err(denied(&format!(
            "{field} of its own project bounds what a session may do"
        ))),
        false => Ok(()),
    };
    own("sandbox", change.sandbox.is_some())?;
    own("limits", change.limits.is_some())?;
    own("api_key", change.api_key.is_some())?;
    own("env", change.env.is_some())?;
    own("agent", change.agent.is_some())
}

/// Refuses a definition that leaves the sandbox, opens its network or shows host files, even for another agent.
fn check_definition(definition: &Value) -> Result<()> {
    if let Some(isolation) = definition.get("isolation")
        && isolation != "sandbox"
    {
        return Err(denied("isolation takes a tool server out of its sandbox"));
    }
    let network = [definition.get("network"), definition.pointer("/sandbox/network")];
    if network.into_iter().flatten().any(|n| n != "none") {
        return Err(denied("network opens a sandbox"));
    }
    let shown = [
        definition.get("read_only"),
        definition.pointer("/runtime/read_only"),
    ];
    if shown
        .into_iter()
        .flatten()
        .any(|paths| paths.as_array().is_none_or(|p| !p.is_empty()))
    {
        return Err(denied("read_only shows a sandbox the host's files"));
    }
    Ok(())
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
