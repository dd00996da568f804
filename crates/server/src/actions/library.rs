//! What the actions on agents (`agent_*`) and on catalog entries (`catalog_*`) have in common: both are definitions
//! of the library, shown with secrets masked and written back without losing them.

use std::{collections::BTreeMap, sync::Arc};

use oubliette_home::{AgentEntry, ToolEntry};
use oubliette_protocol::{Result, agent::AgentDefinition, catalog::ToolDefinition, library::DefinitionKey};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use super::{input, output};

/// A definition of the library, as the actions show it.
pub(super) trait LibraryEntry {
    /// What clients see of it.
    type View;

    /// The last valid definition.
    fn definition(&self) -> Result<Value>;
    /// The entry as clients see it, with the secrets of its definition masked.
    fn view(&self) -> Result<Self::View>;
    /// An entry whose file was never valid.
    fn broken(id: &str, error: &str) -> Self::View;
}

/// An agent.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Agent")]
pub(crate) struct AgentView {
    /// Its slug.
    slug: String,
    /// Its display name; the slug if its file is broken.
    name: String,
    /// What it is for; absent if its file is broken.
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    /// Whether it has a valid definition.
    usable: bool,
    /// Its agent.json, values of `env` shown as `***`; of a broken one only `name`.
    #[schemars(with = "ShownDefinition<AgentDefinition>")]
    definition: Value,
    /// What is wrong with its file; absent if nothing is. An agent with an error may be usable: by its last valid definition.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// The script it follows, by file name; only from `agent_get`, and only if its model is a script.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) files: Option<BTreeMap<String, String>>,
}

/// A catalog entry.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "CatalogEntry")]
pub(crate) struct CatalogEntryView {
    /// Its id.
    id: String,
    /// Its id again, if its file is broken; else absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// `stdio`, `ws`, `tcp`, `http` or `builtin`; absent if its file is broken.
    #[serde(skip_serializing_if = "Option::is_none")]
    transport: Option<&'static str>,
    /// Whether it has a valid definition.
    usable: bool,
    /// Its tool.json, values of `env` and `headers` shown as `***`; of a broken one only `name`.
    #[schemars(with = "ShownDefinition<ToolDefinition>")]
    definition: Value,
    /// What is wrong with its file; absent if nothing is. An entry with an error may be usable: by its last valid definition.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// The schema of a definition with masked values, or of what stands for a broken one.
#[derive(JsonSchema)]
#[serde(untagged)]
#[schemars(inline)]
#[allow(
    dead_code,
    reason = "only its schema is used: a masked definition is a JSON value"
)]
enum ShownDefinition<T> {
    Whole(T),
    /// Of a broken file.
    Broken {
        /// The slug or id.
        name: String,
    },
}

impl LibraryEntry for AgentEntry {
    type View = AgentView;

    fn definition(&self) -> Result<Value> {
        output::to_json(&*self.definition)
    }

    fn view(&self) -> Result<AgentView> {
        Ok(AgentView {
            slug: self.slug.to_string(),
            name: self.definition.name.clone(),
            description: Some(self.definition.description.clone()),
            usable: true,
            definition: output::mask_definition(self.definition()?),
            error: self.error.clone(),
            files: None,
        })
    }

    fn broken(id: &str, error: &str) -> AgentView {
        AgentView {
            slug: id.to_owned(),
            name: id.to_owned(),
            description: None,
            usable: false,
            definition: json!({ "name": id }),
            error: Some(error.to_owned()),
            files: None,
        }
    }
}

impl LibraryEntry for ToolEntry {
    type View = CatalogEntryView;

    fn definition(&self) -> Result<Value> {
        output::to_json(&*self.definition)
    }

    fn view(&self) -> Result<CatalogEntryView> {
        Ok(CatalogEntryView {
            id: self.id.to_string(),
            name: None,
            transport: Some(self.definition.transport()),
            usable: true,
            definition: output::mask_definition(self.definition()?),
            error: self.error.clone(),
        })
    }

    fn broken(id: &str, error: &str) -> CatalogEntryView {
        CatalogEntryView {
            id: id.to_owned(),
            name: Some(id.to_owned()),
            transport: None,
            usable: false,
            definition: json!({ "name": id }),
            error: Some(error.to_owned()),
        }
    }
}

/// A page of entries, and the cursor of the next. Those whose file was never valid are among them, with their error and
/// without a definition.
pub(super) fn list_entries<Id: AsRef<str> + Ord, E: LibraryEntry>(
    entries: &BTreeMap<Id, Arc<E>>,
    broken: &BTreeMap<Id, String>,
    limit: Option<u32>,
    cursor: Option<&str>,
) -> Result<(Vec<E::View>, Option<String>)> {
    let mut rows: BTreeMap<&str, Result<&E, &str>> = broken
        .iter()
        .map(|(id, error)| (id.as_ref(), Err(error.as_str())))
        .collect();
    rows.extend(entries.iter().map(|(id, entry)| (id.as_ref(), Ok(&**entry))));
    let rows = rows.iter().map(|(id, row)| (*id, (*id, *row)));
    let (rows, next) = input::page_of_sorted(rows, limit, cursor)?;
    let view = |(id, row): (&str, Result<&E, &str>)| match row {
        Ok(entry) => entry.view(),
        Err(error) => Ok(E::broken(id, error)),
    };
    let views: Result<Vec<_>> = rows.into_iter().map(view).collect();
    Ok((views?, next))
}

/// Puts the stored values back where a new definition has the mask; `before` is the entry it replaces, if any. A mask that
/// nothing is stored for is refused with file and field.
pub(super) fn restore_masked<E: LibraryEntry>(
    key: &DefinitionKey,
    definition: &mut Value,
    before: Result<Arc<E>>,
) -> Result<()> {
    let before = before.and_then(|entry| entry.definition()).ok();
    let file = format!("{key}/{}", key.kind.main_file());
    output::restore_masked(definition, before.as_ref()).map_err(|refusal| refusal.in_file(&file))
}
