//! What goes out: flat objects, environments masked.

use indexmap::IndexMap;
use oubliette_protocol::{Object, WorkspaceId};
use oubliette_store::{AuditRow, Paged, ProjectRow, TokenRow, WorkspaceRow};
use serde_json::{Value, json};

use super::fields::MASK;

/// An environment without its values.
pub fn masked(env: &IndexMap<String, String>) -> Value {
    env.keys()
        .map(|name| (name.clone(), Value::from(MASK)))
        .collect::<Object>()
        .into()
}

/// A project.
pub fn project(row: &ProjectRow) -> Value {
    let mut shape = json!({
        "project_id": row.project_id,
        "name": row.name,
        "description": row.description,
        "env": masked(&row.env),
        "sandbox": row.sandbox,
        "limits": row.limits,
        "default_workspace_id": row.default_workspace,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
    });
    if let Some(agent) = &row.agent {
        shape["agent"] = json!(agent);
    }
    if let Some(scope) = row.api_key_scope {
        shape["api_key"] = json!({ "scope": scope });
    }
    shape
}

/// A workspace.
pub fn workspace(row: &WorkspaceRow, default: &WorkspaceId) -> Value {
    let mut shape = json!({
        "workspace_id": row.workspace_id,
        "project_id": row.project_id,
        "name": row.name,
        "env": masked(&row.env),
        "default": row.workspace_id == *default,
        "created_at": row.created_at,
    });
    if let Some(source) = &row.source {
        shape["source"] = source.clone();
    }
    shape
}

/// A token; never the token itself.
pub fn token(row: &TokenRow) -> Value {
    let mut shape = json!({
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
            shape[field] = value;
        }
    }
    shape
}

/// An entry of the audit log.
pub fn audit(row: &AuditRow) -> Value {
    let entry = &row.entry;
    let mut shape =
        json!({ "index": row.index, "ts": row.ts, "action": entry.action, "outcome": entry.outcome });
    for (field, value) in [
        ("token_id", entry.token_id.as_ref().map(|v| json!(v))),
        ("session_id", entry.session_id.as_ref().map(|v| json!(v))),
        ("project_id", entry.project_id.as_ref().map(|v| json!(v))),
        ("target", entry.target.as_ref().map(|v| json!(v))),
        ("detail", entry.detail.clone()),
    ] {
        if let Some(value) = value {
            shape[field] = value;
        }
    }
    shape
}

/// `{<field>: [...], next_cursor?}`.
pub fn list<T>(field: &str, page: &Paged<T>, shape: impl Fn(&T) -> Value) -> Value {
    listed(
        field,
        page.items.iter().map(shape).collect(),
        page.next_cursor.clone(),
    )
}

/// The same, already shaped.
pub fn listed(field: &str, items: Vec<Value>, next_cursor: Option<String>) -> Value {
    let mut object = Object::new();
    object.insert(field.into(), items.into());
    if let Some(cursor) = next_cursor {
        object.insert("next_cursor".into(), cursor.into());
    }
    object.into()
}

/// A definition with the values of its environments and headers masked, at any depth. A value that
/// only refers to the server's environment is no secret and stays readable.
pub fn masked_definition(mut definition: Value) -> Value {
    mask(&mut definition);
    definition
}

const SECRET_MAPS: [&str; 2] = ["env", "headers"];

fn mask(value: &mut Value) {
    match value {
        Value::Object(object) => {
            for (key, inner) in object.iter_mut() {
                match inner {
                    Value::Object(map) if SECRET_MAPS.contains(&key.as_str()) => {
                        map.values_mut()
                            .filter(|v| !is_reference(v))
                            .for_each(|v| *v = MASK.into());
                    }
                    _ => mask(inner),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(mask),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn is_reference(value: &Value) -> bool {
    let text = value.as_str().unwrap_or_default();
    text.strip_prefix("${env:")
        .and_then(|t| t.strip_suffix('}'))
        .is_some_and(|name| !name.contains(['$', '}']))
}

/// Puts back what a masked definition hides, from the definition before it.
pub fn unmasked_definition(given: &mut Value, before: &Value) {
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
            (inner, old) => unmasked_definition(inner, old),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_is_masked_and_can_be_put_back() {
        let real = json!({"env":{"A":"secret","B":"${env:B}"},"runtime":{"kind":"acp","env":{"C":"c"}},"headers":{"X":"Bearer ${env:Y}"}});
        let shown = masked_definition(real.clone());
        assert!(!shown.to_string().contains("secret") && !shown.to_string().contains("Bearer"));
        assert_eq!(shown["env"]["B"], "${env:B}");
        let mut given = shown;
        unmasked_definition(&mut given, &real);
        assert_eq!(given, real);
    }
}
