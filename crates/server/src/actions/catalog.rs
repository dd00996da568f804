//! The catalog: tool servers and built-ins under `tools/`.

use std::borrow::Cow;

use oubliette_home::ToolEntry;
use oubliette_protocol::{CatalogId, Error, Result, Scope};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Call, Effect, Reach, Tool, fields, shape};

/// `catalog_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CatalogList {
    /// At most so many (1 to 1000, default 100).
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the list before.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `catalog_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CatalogGet {
    /// Which.
    pub id: CatalogId,
}

/// `catalog_put`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CatalogPut {
    /// Which, new or not.
    pub id: CatalogId,
    /// The whole tool.json; its `id` may be left out.
    #[schemars(with = "serde_json::Map<String, Value>")]
    pub definition: Value,
}

/// `catalog_delete`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CatalogDelete {
    /// Which.
    pub id: CatalogId,
}

fn shaped(entry: &ToolEntry) -> Result<Value> {
    let definition = serde_json::to_value(&*entry.definition).map_err(Error::internal)?;
    let mut shape = json!({
        "id": entry.id,
        "transport": entry.definition.transport(),
        "definition": shape::masked_definition(definition),
    });
    if let Some(error) = &entry.error {
        shape["error"] = json!(error);
    }
    Ok(shape)
}

impl Tool for CatalogList {
    const NAME: &'static str = "catalog_list";
    const DESCRIPTION: &'static str = "List the catalog's tool servers and built-ins, by id.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const REACH: Reach = Reach::Server;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let catalog = call.app.library.catalog();
        let rows = catalog.iter().map(|(id, entry)| (id.as_str(), entry));
        let (rows, next) = fields::slice(rows, self.limit, self.cursor.as_deref())?;
        let items: Result<Vec<_>> = rows.into_iter().map(|entry| shaped(entry)).collect();
        Ok(shape::listed("entries", items?, next))
    }
}

impl Tool for CatalogGet {
    const NAME: &'static str = "catalog_get";
    const DESCRIPTION: &'static str = "Show one catalog entry.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const REACH: Reach = Reach::Server;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        shaped(&*call.app.library.tool(&self.id)?)
    }
}

impl Tool for CatalogPut {
    const NAME: &'static str = "catalog_put";
    const DESCRIPTION: &'static str =
        "Create or replace a catalog entry. Running sessions that use it take the new one over.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Set;
    const REACH: Reach = Reach::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.id.as_str().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let library = &call.app.library;
        let mut definition = self.definition;
        if let Value::Object(object) = &mut definition {
            object.entry("id").or_insert_with(|| json!(self.id));
        }
        if let Ok(before) = library.tool(&self.id)
            && let Ok(before) = serde_json::to_value(&*before.definition)
        {
            shape::unmasked_definition(&mut definition, &before);
        }
        let entry = library.tool_put(self.id, definition).await?;
        shaped(&entry)
    }
}

impl Tool for CatalogDelete {
    const NAME: &'static str = "catalog_delete";
    const DESCRIPTION: &'static str = "Delete a catalog entry. Refused while an agent uses it.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Delete;
    const REACH: Reach = Reach::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.id.as_str().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        call.app.library.tool_delete(self.id.clone()).await?;
        Ok(json!({ "id": self.id, "deleted": true }))
    }
}
