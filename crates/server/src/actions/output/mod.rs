//! Results of the actions, with secret values masked. Each action's own type is beside it; [`rows`] are those that several
//! share, made of rows of the database.

mod rows;

use indexmap::IndexMap;
use oubliette_protocol::{Error, Result};
use serde::Serialize;
use serde_json::Value;

pub(crate) use rows::{
    ApprovalPage, ApprovalView, AuditPage, ProjectPage, ProjectView, TokenPage, WorkspacePage, WorkspaceView,
};

use super::input::MASK;

/// A value as JSON.
pub(crate) fn to_json(value: impl Serialize) -> Result<Value> {
    serde_json::to_value(value).map_err(Error::internal)
}

/// An environment with every value masked.
pub(crate) fn mask_values(env: &IndexMap<String, String>) -> IndexMap<String, String> {
    env.keys().map(|name| (name.clone(), MASK.to_owned())).collect()
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
    use serde_json::json;

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
