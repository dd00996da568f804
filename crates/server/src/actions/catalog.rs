//! `catalog_*`: the catalog of tool servers and built-in tools, the files under `tools/` in the home.

use std::borrow::Cow;

use oubliette_protocol::{CatalogId, Result, Scope};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{ActionCall, ActionHandler, Effect, StateOwner, library};

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

impl ActionHandler for CatalogList {
    const NAME: &'static str = "catalog_list";
    const DESCRIPTION: &'static str = "List the catalog's tool servers and built-ins, by id.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let catalog = call.app.library.catalog();
        library::list_entries("entries", &catalog, self.limit, self.cursor.as_deref())
    }
}

impl ActionHandler for CatalogGet {
    const NAME: &'static str = "catalog_get";
    const DESCRIPTION: &'static str = "Show one catalog entry.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        library::entry_json(&*call.app.library.tool(&self.id)?)
    }
}

impl ActionHandler for CatalogPut {
    const NAME: &'static str = "catalog_put";
    const DESCRIPTION: &'static str =
        "Create or replace a catalog entry. Running sessions that use it start its server anew with the new definition.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Set;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let catalog = &call.app.library;
        let mut definition = self.definition;
        if let Value::Object(object) = &mut definition {
            object.entry("id").or_insert_with(|| json!(self.id));
        }
        library::restore_masked(&mut definition, catalog.tool(&self.id));
        library::entry_json(&*catalog.tool_put(self.id, definition).await?)
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
        Ok(library::deleted("id", self.id.as_str()))
    }
}
