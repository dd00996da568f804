//! `catalog_*`: the catalog of tool servers and built-in tools, the files under `tools/` in the home.

use std::borrow::Cow;

use oubliette_home::ToolEntry;
use oubliette_protocol::{CatalogId, Error, Result, Scope};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{ActionCall, Effect, StateOwner, ActionHandler, input, output};

/// `catalog_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CatalogList {
    /// Maximum number of entries to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the previous answer, to read the entries after it. Absent: from the start.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `catalog_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CatalogGet {
    /// Id of the catalog entry, for example "files".
    pub id: CatalogId,
}

/// `catalog_put`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CatalogPut {
    /// Id of the entry to create or replace: 1 to 32 of a-z, 0-9 and -, not starting with -.
    pub id: CatalogId,
    /// The whole tool.json, at most 1 MiB; its `id` may be left out. Required: kind ("mcp" with transport, or
    /// "builtin" with builtinPolicy). The value `***` in env or headers keeps the stored value.
    #[schemars(with = "serde_json::Map<String, Value>")]
    pub definition: Value,
}

/// `catalog_delete`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CatalogDelete {
    /// Id of the catalog entry to delete.
    pub id: CatalogId,
}

fn entry_json(entry: &ToolEntry) -> Result<Value> {
    let definition = serde_json::to_value(&*entry.definition).map_err(Error::internal)?;
    let mut object = json!({
        "id": entry.id,
        "transport": entry.definition.transport(),
        "definition": output::mask_definition(definition),
    });
    if let Some(error) = &entry.error {
        object["error"] = json!(error);
    }
    Ok(object)
}

impl ActionHandler for CatalogList {
    const NAME: &'static str = "catalog_list";
    const DESCRIPTION: &'static str = "List the catalog's tool servers and built-ins, by id.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let catalog = call.app.library.catalog();
        let rows = catalog.iter().map(|(id, entry)| (id.as_str(), entry));
        let (rows, next) = input::page_of_sorted(rows, self.limit, self.cursor.as_deref())?;
        let items: Result<Vec<_>> = rows.into_iter().map(|entry| entry_json(entry)).collect();
        Ok(output::list_items("entries", items?, next))
    }
}

impl ActionHandler for CatalogGet {
    const NAME: &'static str = "catalog_get";
    const DESCRIPTION: &'static str = "Show one catalog entry.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        entry_json(&*call.app.library.tool(&self.id)?)
    }
}

impl ActionHandler for CatalogPut {
    const NAME: &'static str = "catalog_put";
    const DESCRIPTION: &'static str =
        "Create or replace a catalog entry. Running sessions that use it switch to the new definition.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Set;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let library = &call.app.library;
        let mut definition = self.definition;
        if let Value::Object(object) = &mut definition {
            object.entry("id").or_insert_with(|| json!(self.id));
        }
        if let Ok(before) = library.tool(&self.id)
            && let Ok(before) = serde_json::to_value(&*before.definition)
        {
            output::restore_masked(&mut definition, &before);
        }
        let entry = library.tool_put(self.id, definition).await?;
        entry_json(&entry)
    }
}

impl ActionHandler for CatalogDelete {
    const NAME: &'static str = "catalog_delete";
    const DESCRIPTION: &'static str = "Delete a catalog entry. Refused while an agent uses it.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Delete;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        call.app.library.tool_delete(self.id.clone()).await?;
        Ok(json!({ "id": self.id, "deleted": true }))
    }
}
