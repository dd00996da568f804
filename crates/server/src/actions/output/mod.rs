//! Results of the actions, with secret values masked. Each action's own type is beside it; [`rows`] are those that several
//! share, made of rows of the database.

mod rows;

use indexmap::IndexMap;
use oubliette_protocol::{Error, Result, strict::FieldError};
use serde::Serialize;
use serde_json::Value;

pub(crate) use rows::{
    ApprovalPage, ApprovalView, AuditPage, ProjectPage, ProjectView, TokenPage, WorkspacePage, WorkspaceView,
};

use super::input::{MASK, NOTHING_MASKED};

/// A value as JSON.
pub(crate) fn to_json(value: impl Serialize) -> Result<Value> {
    serde_json::to_value(value).map_err(Error::internal)
}

/// An environment with every value masked.
pub(crate) fn mask_values(env: &IndexMap<String, String>) -> IndexMap<String, String> {
    env.keys().map(|name| (name.clone(), MASK.to_owned())).collect()
}

/// A definition with the values of its `env` and `headers` masked. A value that only refers to the server's environment
/// (`${env:NAME}`) is no secret and stays readable.
pub(crate) fn mask_definition(mut definition: Value) -> Value {
    for path in SECRET_MAPS {
        if let Some(Value::Object(map)) = definition.pointer_mut(path) {
            map.values_mut()
                .filter(|value| !is_env_reference(value))
                .for_each(|value| *value = MASK.into());
        }
    }
    definition
}

/// The maps of an agent's or a tool's definition whose values are secret, as JSON pointers. What is called the same elsewhere
/// is not: a rule's `when` may be about an argument `env`.
const SECRET_MAPS: [&str; 3] = ["/env", "/headers", "/runtime/env"];

fn is_env_reference(value: &Value) -> bool {
    let text = value.as_str().unwrap_or_default();
    text.strip_prefix("${env:")
        .and_then(|t| t.strip_suffix('}'))
        .is_some_and(|name| !name.contains(['$', '}']))
}

/// Replaces the masked values of a definition by those of the definition before it. One that nothing is stored for is an
/// error: the mask would become the value.
pub(crate) fn restore_masked(given: &mut Value, before: Option<&Value>) -> Result<(), FieldError> {
    for path in SECRET_MAPS {
        let old = before.and_then(|before| before.pointer(path));
        let Some(Value::Object(map)) = given.pointer_mut(path) else {
            continue;
        };
        for (name, value) in map.iter_mut().filter(|(_, value)| *value == MASK) {
            match old.and_then(|old| old.get(name)) {
                Some(old) => *value = old.clone(),
                None => {
                    let field = format!("{}.{name}", path[1..].replace('/', "."));
                    return Err(FieldError::at(field, NOTHING_MASKED));
                }
            }
        }
    }
    Ok(())
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
        restore_masked(&mut given, Some(&real)).unwrap();
        assert_eq!(given, real);
    }

    #[test]
    fn a_mask_that_nothing_is_stored_for_is_refused_by_its_field() {
        let stored = json!({"env": {"A": "secret"}, "runtime": {"kind": "acp", "env": {"C": "c"}}});
        for (given, before, field) in [
            (json!({"env": {"A": "***"}}), None, "env.A"),
            (json!({"env": {"A": "***", "B": "***"}}), Some(&stored), "env.B"),
            (json!({"headers": {"X": "***"}}), Some(&stored), "headers.X"),
            (
                json!({"runtime": {"env": {"D": "***"}}}),
                Some(&stored),
                "runtime.env.D",
            ),
        ] {
            let error = restore_masked(&mut given.clone(), before).unwrap_err();
            assert_eq!(error.field, field, "{given}");
            assert!(error.reason.contains("***"), "{}", error.reason);
        }
    }

    #[test]
    fn a_condition_about_an_argument_called_env_is_no_secret() {
        let rule = json!({"tool": "@shell/*", "when": {"properties": {
            "env": {"required": ["TOKEN"]}, "headers": {"minProperties": 1}}}});
        let real =
            json!({"env": {"A": "secret"}, "tools": {"ask": [rule], "aliases": {"env": "@shell/env"}}});
        let shown = mask_definition(real.clone());
        assert_eq!(shown["tools"], real["tools"]);
        assert_eq!(shown["env"]["A"], "***");
    }
}
