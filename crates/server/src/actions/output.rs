//! Result objects of the actions: flat JSON, with secret values masked.

use indexmap::IndexMap;
use oubliette_protocol::{Error, JsonObject, Result, WorkspaceId};
use oubliette_store::{AuditRow, ListPage, ProjectRow, TokenRow, WorkspaceRow};
use serde::Serialize;
use serde_json::{Value, json};

use super::input::MASK;

/// A value as JSON.
pub(crate) fn to_json(value: impl Serialize) -> Result<Value> {
    serde_json::to_value(value).map_err(Error::internal)
}

/// An environment with every value masked.
pub(crate) fn mask_values(env: &IndexMap<String, String>) -> Value {
    env.keys()
        .map(|name| (name.clone(), Value::from(MASK)))
        .collect::<JsonObject>()
        .into()
}

/// A project as JSON.
pub(crate) fn project(row: &ProjectRow) -> Value {
    let mut object = json!({
        "project_id": row.project_id,
        "name": row.name,
        "description": row.description,
        "env": mask_values(&row.env),
        "sandbox": row.sandbox,
        "limits": row.limits,
        "default_workspace_id": row.default_workspace,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
    });
    if let Some(agent) = &row.agent {
        object["agent"] = json!(agent);
    }
    if let Some(scope) = row.api_key_scope {
        object["api_key"] = json!({ "scope": scope });
    }
    object
}

/// A workspace as JSON.
pub(crate) fn workspace(row: &WorkspaceRow, default: &WorkspaceId) -> Value {
    let mut object = json!({
        "workspace_id": row.workspace_id,
        "project_id": row.project_id,
        "name": row.name,
        "env": mask_values(&row.env),
        "default": row.workspace_id == *default,
        "created_at": row.created_at,
    });
    if let Some(source) = &row.source {
        object["source"] = source.clone();
    }
    object
}

/// A token's row as JSON; the token itself is not stored and not shown.
pub(crate) fn token(row: &TokenRow) -> Value {
    let mut object = json!({
        "token_id": row.token_id,
        "name": row.name,
        "scope": row.scope,
        "token": "oub_***",
        "created_at": row.created_at,
    });
    for (field, value) in [
        ("project_id", row.project_id.as_ref().map(|v| json!(v))),
        ("expires_at", row.expires_at.map(|v| json!(v))),
        ("revoked_at", row.revoked_at.map(|v| json!(v))),
        ("session_id", row.session_id.as_ref().map(|v| json!(v))),
    ] {
        if let Some(value) = value {
            object[field] = value;
        }
    }
    object
}

/// An audit entry as JSON.
pub(crate) fn audit(row: &AuditRow) -> Value {
    let entry = &row.entry;
    let mut object = json!({ "index": row.index, "ts": row.ts, "principal": entry.principal.as_str(), "action": entry.action, "outcome": entry.outcome });
    for (field, value) in [
        ("token_id", entry.principal.token_id().map(|v| json!(v))),
        ("session_id", entry.session_id.as_ref().map(|v| json!(v))),
        ("project_id", entry.project_id.as_ref().map(|v| json!(v))),
        ("target", entry.target.as_ref().map(|v| json!(v))),
        ("detail", entry.detail.clone()),
    ] {
        if let Some(value) = value {
            object[field] = value;
        }
    }
    object
}

/// A page of rows as `{<field>: [...], next_cursor?}`, each row turned into JSON by `to_json`.
pub(crate) fn list_page<T>(field: &str, page: &ListPage<T>, to_json: impl Fn(&T) -> Value) -> Value {
    list_items(
        field,
        page.items.iter().map(to_json).collect(),
        page.next_cursor.clone(),
    )
}

/// A page of JSON items as `{<field>: [...], next_cursor?}`.
pub(crate) fn list_items(field: &str, items: Vec<Value>, next_cursor: Option<String>) -> Value {
    let mut object = JsonObject::new();
    object.insert(field.into(), items.into());
    if let Some(cursor) = next_cursor {
        object.insert("next_cursor".into(), cursor.into());
    }
    object.into()
}

/// A definition with the values of its `env` and `headers` masked, at any depth. A value that only refers to the
/// server's environment (`${env:NAME}`) is no secret and stays readable.
pub(crate) fn mask_definition(mut definition: Value) -> Value {
    mask_in_place(&mut definition);
    definition
}

/// Fields whose values are secret.
const SECRET_MAPS: [&str; 2] = ["env", "headers"];

fn mask_in_place(value: &mut Value) {
    match value {
        Value::Object(object) => {
            for (key, inner) in object.iter_mut() {
                match inner {
                    Value::Object(map) if SECRET_MAPS.contains(&key.as_str()) => {
                        map.values_mut()
                            .filter(|v| !is_env_reference(v))
                            .for_each(|v| *v = MASK.into());
                    }
                    _ => mask_in_place(inner),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(mask_in_place),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn is_env_reference(value: &Value) -> bool {
    let text = value.as_str().unwrap_or_default();
    text.strip_prefix("${env:")
        .and_then(|t| t.strip_suffix('}'))
        .is_some_and(|name| !name.contains(['$', '}']))
}

/// Replaces the masked values of a definition by those of the definition before it.
pub(crate) fn restore_masked(given: &mut Value, before: &Value) {
    let (Value::Object(given), Value::Object(before)) = (given, before) else {
        return;
    };
    for (key, inner) in given.iter_mut() {
        let Some(old) = before.get(key) else { continue };
        match (inner, old) {
            (Value::Object(map), Value::Object(old)) if SECRET_MAPS.contains(&key.as_str()) => {
                for (name, value) in map.iter_mut().filter(|(_, v)| *v == MASK) {
                    if let Some(old) = old.get(name) {
                        *value = old.clone();
                    }
                }
            }
            (inner, old) => restore_masked(inner, old),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_masked_definition_can_be_restored() {
        let real = json!({"env":{"A":"secret","B":"${env:B}"},"runtime":{"kind":"acp","env":{"C":"c"}},"headers":{"X":"Bearer ${env:Y}"}});
        let shown = mask_definition(real.clone());
        assert!(!shown.to_string().contains("secret") && !shown.to_string().contains("Bearer"));
        assert_eq!(shown["env"]["B"], "${env:B}");
        let mut given = shown;
        restore_masked(&mut given, &real);
        assert_eq!(given, real);
    }
}
