//! Finds the field that a `tool.json` error is about. serde buffers an internally tagged enum before it reads its
//! fields, so its error has no path; parsing each field alone gives one.

use indexmap::IndexMap;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{
    CatalogId,
    agent::NetworkAccess,
    catalog::{BuiltinPolicy, HealthCheck, RestartPolicy, ServerIsolation, ServerTimeouts, shown_spelling},
    egress::HostPattern,
    program::ProgramSpec,
    strict::{self, FieldError},
};

/// Adds the field to an error that has none, if it can be found.
pub(crate) fn with_field(document: &Value, error: FieldError) -> FieldError {
    let (true, Some(object)) = (error.field.is_empty(), document.as_object()) else {
        return error;
    };
    let named = object.iter().find_map(|(key, value)| check_field(key, value));
    named.unwrap_or_else(|| match error.reason.starts_with("unknown variant") {
        // All other enum fields were parsed above, so it is one of the tags.
        true if matches!(object.get("kind"), Some(kind) if *kind == "mcp") => {
            FieldError::at("transport", error.reason)
        }
        true => FieldError::at("kind", error.reason),
        false => error,
    })
}

/// Parses one field as its type; returns the error with the field's path.
fn check_field(key: &str, value: &Value) -> Option<FieldError> {
    let read = match shown_spelling(key) {
        "id" => try_parse::<CatalogId>(value),
        "description" | "command" | "endpoint" | "kind" | "transport" => try_parse::<String>(value),
        "args" | "read_only" => try_parse::<Vec<String>>(value),
        "env" | "headers" => try_parse::<IndexMap<String, String>>(value),
        "program" => try_parse::<ProgramSpec>(value),
        "cache_mb" => try_parse::<u64>(value),
        "isolation" => try_parse::<ServerIsolation>(value),
        "network" => try_parse::<NetworkAccess>(value),
        "egress" => try_parse::<Vec<HostPattern>>(value),
        "timeouts" => try_parse::<ServerTimeouts>(value),
        "healthCheck" => try_parse::<Option<HealthCheck>>(value),
        "restart" => try_parse::<RestartPolicy>(value),
        "builtinPolicy" => try_parse::<BuiltinPolicy>(value),
        _ => Ok(()),
    };
    let inner = read.err()?;
    let field = match inner.field.as_str() {
        "" => key.to_owned(),
        place if place.starts_with('[') => format!("{key}{place}"),
        deeper => format!("{key}.{deeper}"),
    };
    Some(FieldError::at(field, inner.reason))
}

fn try_parse<T: DeserializeOwned>(value: &Value) -> Result<(), FieldError> {
    strict::from_value::<T>(value.clone()).map(drop)
}

#[cfg(test)]
mod tests {
    use crate::catalog::ToolDefinition;
    use serde_json::json;

    #[test]
    fn a_wrong_field_is_named() {
        for (document, named) in [
            (json!({"id":"a","kind":"mcp","transport":"pigeon"}), "transport"),
            (json!({"id":"a","kind":"magic"}), "kind"),
            (json!({"id":"a","kind":7}), "kind"),
            (
                json!({"id":"A!","kind":"mcp","transport":"tcp","endpoint":"h:1"}),
                "id",
            ),
            (
                json!({"id":"a","kind":"mcp","transport":"stdio","command":"x","restart":{"maxAttempts":-1}}),
                "restart.maxAttempts",
            ),
            (
                json!({"id":"a","kind":"mcp","transport":"stdio","command":"x","args":["a",5]}),
                "args[1]",
            ),
            (
                json!({"id":"a","kind":"mcp","transport":"stdio","command":"x","env":{"A":1}}),
                "env.A",
            ),
            (
                json!({"id":"a","kind":"mcp","transport":"stdio","command":"x","network":"moon"}),
                "network",
            ),
            (
                json!({"id":"a","kind":"mcp","transport":"stdio","command":"x","timeouts":{"startup":1}}),
                "timeouts.startup",
            ),
            (
                json!({"id":"a","kind":"mcp","transport":"ws","endpoint":5}),
                "endpoint",
            ),
            (
                json!({"id":"a","kind":"builtin","builtinPolicy":{"name":"fs_eat"}}),
                "builtinPolicy",
            ),
        ] {
            let error = ToolDefinition::from_value(document.clone()).unwrap_err();
            assert!(error.field.starts_with(named), "{document}: {error:?}");
            assert!(!error.reason.is_empty());
        }
        let missing = ToolDefinition::parse(r#"{"id":"a","kind":"mcp","transport":"stdio"}"#).unwrap_err();
        assert!(missing.to_string().contains("`command`"), "{missing}");
        let broken = ToolDefinition::parse(r#"{"id":"a","kind":"mcp","#).unwrap_err();
        assert!(!broken.to_string().contains('?'), "{broken}");
    }
}
