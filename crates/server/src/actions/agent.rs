//! `agent_*`: agent definitions, the files under `agents/` in the home.

use std::{borrow::Cow, collections::BTreeMap};

use oubliette_protocol::{Result, Scope, Slug};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{ActionCall, ActionHandler, Effect, StateOwner, library};

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
    /// permissions, children, env, sandbox, tools. The value `***` in an env keeps the stored value.
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

impl ActionHandler for AgentList {
    const NAME: &'static str = "agent_list";
    const DESCRIPTION: &'static str = "List agents with their definitions, by slug.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let agents = call.app.library.agents();
        library::list_entries("agents", &agents, self.limit, self.cursor.as_deref())
    }
}

impl ActionHandler for AgentGet {
    const NAME: &'static str = "agent_get";
    const DESCRIPTION: &'static str = "Show one agent's definition.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let agents = &call.app.library;
        let entry = agents.agent(&self.slug)?;
        let mut object = library::entry_json(&*entry)?;
        // With its script, so that a client can show it for editing.
        if let (Some(file), Ok(text)) = (entry.definition.script(), agents.script(&entry)) {
            object["files"] = json!({ file: text });
        }
        Ok(object)
    }
}

impl ActionHandler for AgentPut {
    const NAME: &'static str = "agent_put";
    const DESCRIPTION: &'static str = "Create or replace an agent. In running sessions its tools change at once; its prompt, model, runtime and environment change when its process is next started.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Set;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.slug.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let agents = &call.app.library;
        let mut definition = self.definition;
        library::restore_masked(&mut definition, agents.agent(&self.slug));
        let files = self.files.unwrap_or_default();
        library::entry_json(&*agents.agent_put(self.slug, definition, files).await?)
    }
}

impl ActionHandler for AgentDelete {
    const NAME: &'static str = "agent_delete";
    const DESCRIPTION: &'static str = "Delete an agent's definition. Running sessions keep it until their agent is next started.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Delete;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.slug.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        call.app.library.agent_delete(self.slug.clone()).await?;
        Ok(library::deleted("slug", self.slug.as_str()))
    }
}
