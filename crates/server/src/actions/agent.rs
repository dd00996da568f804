//! Agents: the definitions under `agents/`.

use std::{borrow::Cow, collections::BTreeMap};

use oubliette_home::AgentEntry;
use oubliette_protocol::{Error, Result, Scope, Slug};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Call, Effect, Reach, Tool, fields, shape};

/// `agent_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentList {
    /// At most so many (1 to 1000, default 100).
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the list before.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `agent_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentGet {
    /// Which.
    pub slug: Slug,
}

/// `agent_put`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentPut {
    /// Which, new or not.
    pub slug: Slug,
    /// The whole agent.json.
    #[schemars(with = "serde_json::Map<String, Value>")]
    pub definition: Value,
    /// Files beside it, such as a script: name → text.
    #[serde(default)]
    pub files: Option<BTreeMap<String, String>>,
}

/// `agent_delete`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentDelete {
    /// Which.
    pub slug: Slug,
}

fn shaped(entry: &AgentEntry) -> Result<Value> {
    let definition = serde_json::to_value(&*entry.definition).map_err(Error::internal)?;
    let mut shape = json!({
        "slug": entry.slug,
        "name": entry.definition.name,
        "description": entry.definition.description,
        "definition": shape::masked_definition(definition),
    });
    if let Some(error) = &entry.error {
        shape["error"] = json!(error);
    }
    Ok(shape)
}

impl Tool for AgentList {
    const NAME: &'static str = "agent_list";
    const DESCRIPTION: &'static str = "List agents with their definitions, by slug.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const REACH: Reach = Reach::Server;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let agents = call.app.library.agents();
        let rows = agents.iter().map(|(slug, entry)| (slug.as_str(), entry));
        let (rows, next) = fields::slice(rows, self.limit, self.cursor.as_deref())?;
        let items: Result<Vec<_>> = rows.into_iter().map(|entry| shaped(entry)).collect();
        Ok(shape::listed("agents", items?, next))
    }
}

impl Tool for AgentGet {
    const NAME: &'static str = "agent_get";
    const DESCRIPTION: &'static str = "Show one agent's definition.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const REACH: Reach = Reach::Server;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let library = &call.app.library;
        let entry = library.agent(&self.slug)?;
        let mut shape = shaped(&entry)?;
        // What is edited has to be seen first.
        if let (Some(file), Ok(text)) = (entry.definition.script(), library.script(&entry)) {
            shape["files"] = json!({ file: text });
        }
        Ok(shape)
    }
}

impl Tool for AgentPut {
    const NAME: &'static str = "agent_put";
    const DESCRIPTION: &'static str = "Create or replace an agent. Running sessions keep the definition they were built with until they switch.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Set;
    const REACH: Reach = Reach::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.slug.as_str().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let library = &call.app.library;
        let mut definition = self.definition;
        if let Ok(before) = library.agent(&self.slug)
            && let Ok(before) = serde_json::to_value(&*before.definition)
        {
            shape::unmasked_definition(&mut definition, &before);
        }
        let entry = library
            .agent_put(self.slug, definition, self.files.unwrap_or_default())
            .await?;
        shaped(&entry)
    }
}

impl Tool for AgentDelete {
    const NAME: &'static str = "agent_delete";
    const DESCRIPTION: &'static str = "Delete an agent's definition. Running sessions keep theirs.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Delete;
    const REACH: Reach = Reach::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.slug.as_str().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        call.app.library.agent_delete(self.slug.clone()).await?;
        Ok(json!({ "slug": self.slug, "deleted": true }))
    }
}
