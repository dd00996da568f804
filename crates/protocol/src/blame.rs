//! Which field of a `tool.json` is at fault. serde reads a tagged document in two steps and forgets on the way
//! where it was; each field read on its own knows.

use indexmap::IndexMap;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{
    CatalogId,
    agent::Network,
    catalog::{BuiltinPolicy, HealthCheck, Isolation, Restart, Timeouts},
    strict::{self, Refusal},
};

/// The refusal with its field, when one can be named.
pub(crate) fn field(document: &Value, refusal: Refusal) -> Refusal {
    let (true, Some(object)) = (refusal.field.is_empty(), document.as_object()) else {
        return refusal;
    };
    let named = object.iter().find_map(|(key, value)| wrong(key, value));
    named.unwrap_or_else(|| match refusal.reason.starts_with("unknown variant") {
        // What is left to have variants is one of the tags.
        true if matches!(object.get("kind"), Some(kind) if *kind == "mcp") => {
            Refusal::at("transport", refusal.reason)
        }
        true => Refusal::at("kind", refusal.reason),
        false => refusal,
    })
}

fn wrong(key: &str, value: &Value) -> Option<Refusal> {
    let read = match key {
        "id" => tried::<CatalogId>(value),
        "description" | "command" | "endpoint" | "kind" | "transport" => tried::<String>(value),
        "args" | "read_only" => tried::<Vec<String>>(value),
        "env" | "headers" => tried::<IndexMap<String, String>>(value),
        "isolation" => tried::<Isolation>(value),
        "network" => tried::<Network>(value),
        "timeouts" => tried::<Timeouts>(value),
        "healthCheck" => tried::<Option<HealthCheck>>(value),
        "restart" => tried::<Restart>(value),
        "builtinPolicy" => tried::<BuiltinPolicy>(value),
        _ => Ok(()),
    };
    let inner = read.err()?;
    let field = match inner.field.as_str() {
        "" => key.to_owned(),
        place if place.starts_with('[') => format!("{key}{place}"),
        deeper => format!("{key}.{deeper}"),
    };
    Some(Refusal::at(field, inner.reason))
}

fn tried<T: DeserializeOwned>(value: &Value) -> Result<(), Refusal> {
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
            let refusal = ToolDefinition::from_value(document.clone()).unwrap_err();
            assert!(refusal.field.starts_with(named), "{document}: {refusal:?}");
            assert!(!refusal.reason.is_empty());
        }
        let missing = ToolDefinition::parse(r#"{"id":"a","kind":"mcp","transport":"stdio"}"#).unwrap_err();
        assert!(missing.to_string().contains("`command`"), "{missing}");
        let broken = ToolDefinition::parse(r#"{"id":"a","kind":"mcp","#).unwrap_err();
        assert!(!broken.to_string().contains('?'), "{broken}");
    }
}
