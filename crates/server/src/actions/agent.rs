//! `agent_*`: agent definitions, the files under `agents/` in the home or the database.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use oubliette_protocol::{Error, Result, Scope, Slug, agent::AgentDefinition, library::DefinitionKey};
use oubliette_store::{PageRequest, ProjectFilter, SessionFilter};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    ActionCall, ActionHandler, Effect, StateOwner,
    library::{self, AgentView, LibraryEntry as _},
};
use crate::app::App;

/// `agent_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AgentList {
    /// Maximum number of entries to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the previous answer, to read the entries after it. Absent: from the start.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `agent_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AgentGet {
    /// Slug of the agent, for example "assistant".
    pub slug: Slug,
}

/// `agent_put`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AgentPut {
    /// Slug of the agent to create or replace: 1 to 32 of a-z, 0-9 and -, not starting with -.
    pub slug: Slug,
    /// The whole agent.json, at most 1 MiB. Required: name, prompt. Optional: description, model, runtime,
    /// permissions, children, env, sandbox, tools. The value `***` in an env keeps the stored value, and is
    /// refused where none is stored.
    #[schemars(with = "serde_json::Map<String, Value>")]
    pub definition: Value,
    /// Files to write beside agent.json, such as the script of a `script:` model: file name to text. At most 64, each
    /// of at most 1 MiB. Files not named here stay. Default: none.
    #[serde(default)]
    pub files: Option<BTreeMap<String, String>>,
}

/// `agent_delete`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AgentDelete {
    /// Slug of the agent to delete, with all its files.
    pub slug: Slug,
}

/// Result of `agent_list`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct AgentPage {
    /// The agents, by slug.
    agents: Vec<AgentView>,
    /// The cursor of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

/// Result of `agent_delete`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct AgentDeleted {
    /// The agent.
    slug: Slug,
    /// True.
    deleted: bool,
}

impl ActionHandler for AgentList {
    type Output = AgentPage;

    const NAME: &'static str = "agent_list";
    const DESCRIPTION: &'static str = "List agents with their definitions, by slug. One whose file is broken has usable false and its error.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let (agents, broken) = (call.app.library.agents(), call.app.library.broken_agents());
        let cursor = self.cursor.as_deref();
        let (agents, next_cursor) = library::list_entries(&agents, &broken, self.limit, cursor)?;
        Ok(AgentPage { agents, next_cursor })
    }
}

impl ActionHandler for AgentGet {
    type Output = AgentView;

    const NAME: &'static str = "agent_get";
    const DESCRIPTION: &'static str = "Show one agent's definition.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let agents = &call.app.library;
        let entry = agents.agent(&self.slug)?;
        let mut shown = entry.view()?;
        // With its script, so that a client can show it for editing.
        if let (Some(file), Ok(text)) = (entry.definition.script(), agents.script(&entry)) {
            shown.files = Some(BTreeMap::from([(file.to_owned(), text)]));
        }
        Ok(shown)
    }
}

impl ActionHandler for AgentPut {
    type Output = AgentView;

    const NAME: &'static str = "agent_put";
    const DESCRIPTION: &'static str = "Create or replace an agent. In running sessions its tools change at once; its prompt, model, runtime and environment change when its process is next started.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Set;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.slug.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let agents = &call.app.library;
        let mut definition = self.definition;
        let key = DefinitionKey::agent(&self.slug);
        library::restore_masked(&key, &mut definition, agents.agent(&self.slug))?;
        let files = self.files.unwrap_or_default();
        call.app
            .definitions
            .agent_put(self.slug, definition, files)
            .await?
            .view()
    }
}

impl ActionHandler for AgentDelete {
    type Output = AgentDeleted;

    const NAME: &'static str = "agent_delete";
    const DESCRIPTION: &'static str = "Delete an agent's definition. Refused while an active session runs it, a project has it as its agent, or another agent names it under children.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Delete;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.slug.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let agents = call.app.library.agents();
        let agents = agents
            .iter()
            .map(|(slug, entry)| (slug.clone(), entry.definition.clone()));
        check_unused(call.app, &self.slug, &agents.collect()).await?;
        call.app.definitions.agent_delete(self.slug.clone()).await?;
        Ok(AgentDeleted {
            slug: self.slug,
            deleted: true,
        })
    }
}

/// `conflict` if an agent of these, a project or an active session uses this one.
pub(super) async fn check_unused(
    app: &App,
    slug: &Slug,
    agents: &BTreeMap<Slug, Arc<AgentDefinition>>,
) -> Result<()> {
    match find_user(app, slug, agents).await? {
        Some(user) => Err(Error::conflict(format!("agent {slug} is in use: {user}"))),
        None => Ok(()),
    }
}

/// Something that uses an agent, and what to do about it; none if nothing does.
async fn find_user(
    app: &App,
    slug: &Slug,
    agents: &BTreeMap<Slug, Arc<AgentDefinition>>,
) -> Result<Option<String>> {
    let parent = agents
        .iter()
        .find(|(other, agent)| *other != slug && agent.children.contains(slug));
    if let Some((other, _)) = parent {
        return Ok(Some(format!(
            "agent {other} names it under children; take it out there first"
        )));
    }
    let mut page = PageRequest {
        limit: Some(1000),
        cursor: None,
    };
    loop {
        let found = app.store.project_list(ProjectFilter::default(), page).await?;
        if let Some(project) = found
            .items
            .iter()
            .find(|project| project.agent.as_ref() == Some(slug))
        {
            let id = &project.project_id;
            return Ok(Some(format!(
                "project {id} has it as its agent; give it another with project_update first"
            )));
        }
        match found.next_cursor {
            None => break,
            cursor => {
                page = PageRequest {
                    limit: Some(1000),
                    cursor,
                }
            }
        }
    }
    let mut cursor = None;
    loop {
        let filter = SessionFilter {
            active_only: true,
            ..SessionFilter::default()
        };
        let limit = Some(1000);
        let found = app
            .store
            .session_list(filter, PageRequest { limit, cursor })
            .await?;
        if let Some(session) = found.items.iter().find(|session| session.agent == *slug) {
            let id = &session.session_id;
            return Ok(Some(format!(
                "session {id} runs it; end it with session_end first"
            )));
        }
        cursor = found.next_cursor;
        if cursor.is_none() {
            return Ok(None);
        }
    }
}
