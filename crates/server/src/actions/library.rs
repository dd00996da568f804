//! What the actions on agents (`agent_*`) and on catalog entries (`catalog_*`) have in common: both are definitions
//! of the library, shown with secrets masked and written back without losing them.

use std::{collections::BTreeMap, sync::Arc};

use oubliette_home::{AgentEntry, ToolEntry};
use oubliette_protocol::{JsonObject, Result};
use serde_json::{Value, json};

use super::{input, output};

/// A definition of the library, as the actions show it.
pub(super) trait LibraryEntry {
    /// The fields that identify and summarise it, in the order they are shown.
    fn summary(&self) -> Value;
    /// The last valid definition.
    fn definition(&self) -> Result<Value>;
    /// What is wrong with a later edit.
    fn error(&self) -> Option<&str>;
}

impl LibraryEntry for AgentEntry {
    fn summary(&self) -> Value {
        json!({
            "slug": self.slug,
            "name": self.definition.name,
            "description": self.definition.description,
        })
    }

    fn definition(&self) -> Result<Value> {
        output::to_json(&*self.definition)
    }

    fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }
}

impl LibraryEntry for ToolEntry {
    fn summary(&self) -> Value {
        json!({ "id": self.id, "transport": self.definition.transport() })
    }

    fn definition(&self) -> Result<Value> {
        output::to_json(&*self.definition)
    }

    fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }
}

/// An entry as JSON, with the secrets of its definition masked.
pub(super) fn entry_json(entry: &impl LibraryEntry) -> Result<Value> {
    let mut object = entry.summary();
    object["definition"] = output::mask_definition(entry.definition()?);
    if let Some(error) = entry.error() {
        object["error"] = json!(error);
    }
    Ok(object)
}

/// A page of entries as `{<field>: [...], next_cursor?}`.
pub(super) fn list_entries<Id: AsRef<str>, E: LibraryEntry>(
    field: &str,
    entries: &BTreeMap<Id, Arc<E>>,
    limit: Option<u32>,
    cursor: Option<&str>,
) -> Result<Value> {
    let rows = entries.iter().map(|(id, entry)| (id.as_ref(), entry));
    let (rows, next) = input::page_of_sorted(rows, limit, cursor)?;
    let items: Result<Vec<_>> = rows.into_iter().map(|entry| entry_json(&**entry)).collect();
    Ok(output::list_items(field, items?, next))
}

/// Puts the stored values back where a new definition has the mask; `before` is the entry it replaces, if any.
pub(super) fn restore_masked<E: LibraryEntry>(definition: &mut Value, before: Result<Arc<E>>) {
    if let Ok(before) = before.and_then(|entry| entry.definition()) {
        output::restore_masked(definition, &before);
    }
}

/// The answer of a deletion: the id under its name, and `deleted`.
pub(super) fn deleted(id_field: &str, id: &str) -> Value {
    let mut object = JsonObject::new();
    object.insert(id_field.into(), id.into());
    object.insert("deleted".into(), true.into());
    object.into()
}
