//! The JSON Schemas of the files that people write: agent.json, tool.json and oubliette.toml. Made from the types that read
//! these files, so that an editor accepts and explains what the server does.

use std::sync::OnceLock;

use oubliette_protocol::{agent::AgentDefinition, catalog::ToolDefinition};
use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::{Value, json};

use crate::config::RawConfig;

/// Where the meaning of a JSON Schema is said.
const DIALECT: &str = "https://json-schema.org/draft/2020-12/schema";

/// A schema, as it is served at `/api/schemas/` and written into `docs/src/schemas/`.
pub(crate) struct FileSchema {
    /// Its file name.
    pub(crate) file: &'static str,
    /// What it describes.
    pub(crate) of: &'static str,
    /// The schema, indented, with a newline at its end.
    pub(crate) text: String,
}

/// The schemas of the three files.
pub(crate) fn file_schemas() -> &'static [FileSchema; 3] {
    static SCHEMAS: OnceLock<[FileSchema; 3]> = OnceLock::new();
    SCHEMAS.get_or_init(|| {
        [
            file_schema("agent.json", "agent.json", read_schema::<AgentDefinition>()),
            file_schema("tool.json", "tool.json", closed(read_schema::<ToolDefinition>())),
            file_schema("config.json", "oubliette.toml", read_schema::<RawConfig>()),
        ]
    })
}

/// The JSON Schema of what is read as a type: fields with a default are optional. With everything inline.
pub(crate) fn read_schema<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().for_deserialize().with(|settings| {
        settings.inline_subschemas = true;
        settings.meta_schema = None;
    });
    settings.into_generator().into_root_schema_for::<T>().to_value()
}

fn file_schema(file: &'static str, of: &'static str, mut schema: Value) -> FileSchema {
    schema["$schema"] = json!(DIALECT);
    schema["title"] = json!(of);
    FileSchema {
        file,
        of,
        text: format!("{schema:#}\n"),
    }
}

/// Closes the variants of a schema to further fields. What reads tool.json refuses them by hand, because serde cannot with
/// the fields of a transport among those of the server.
fn closed(mut schema: Value) -> Value {
    let variants = schema["oneOf"].as_array_mut().into_iter().flatten();
    for variant in variants {
        variant["unevaluatedProperties"] = json!(false);
    }
    schema
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a schema accepts a document.
    fn accepts(file: &str, document: &Value) -> bool {
        let schema = file_schemas().iter().find(|schema| schema.file == file).unwrap();
        let schema: Value = serde_json::from_str(&schema.text).unwrap();
        jsonschema::draft202012::is_valid(&schema, document)
    }

    #[test]
    fn the_schemas_accept_and_refuse_what_the_server_does() {
        let whole =
            json!({ "$schema": "http://127.0.0.1:8080/api/schemas/agent.json", "name": "A", "prompt": "P" });
        let with = |field: &str, value: Value| {
            let mut document = whole.clone();
            document[field] = value;
            document
        };
        for document in [
            whole.clone(),
            with(
                "runtime",
                json!({ "kind": "acp", "command": ["opencode", "acp"], "read_only": ["/opt"] }),
            ),
            with(
                "tools",
                json!({ "use": ["a"], "ask": [{ "tool": "x", "when": true }] }),
            ),
            with("nme", json!("x")),
            with("runtime", json!({ "kind": "builtin", "command": ["x"] })),
            with("sandbox", json!({ "network": "some" })),
            with("name", json!("")),
            json!({ "name": "A" }),
        ] {
            let parsed = AgentDefinition::parse(&document.to_string());
            assert_eq!(accepts("agent.json", &document), parsed.is_ok(), "{document}");
        }
        let stdio = json!({ "$schema": "x", "id": "a", "kind": "mcp", "transport": "stdio", "command": "x" });
        let with = |field: &str, value: Value| {
            let mut document = stdio.clone();
            document[field] = value;
            document
        };
        for document in [
            stdio.clone(),
            with("timeouts", json!({ "startupMs": 5 })),
            with("timeouts", json!({ "startupMs": 0 })),
            with("healthCheck", json!({ "failures": 0 })),
            with("cache_mb", json!(70_000)),
            with("endpoint", json!("http://h")),
            with("kind", json!("builtin")),
            json!({ "id": "a", "kind": "mcp", "transport": "ws", "endpoint": "ws://h", "headers": {} }),
            json!({ "id": "a", "kind": "builtin", "builtinPolicy": { "name": "fs_read", "allowedPaths": ["x"] } }),
            json!({ "id": "a", "kind": "builtin", "builtinPolicy": { "name": "fs_read", "allowedEnv": ["x"] } }),
        ] {
            let parsed = ToolDefinition::from_value(document.clone());
            assert_eq!(
                accepts("tool.json", &document),
                parsed.is_ok(),
                "{document} {parsed:?}"
            );
        }
        assert!(accepts(
            "config.json",
            &json!({ "server": { "listen": "127.0.0.1:1" } })
        ));
        assert!(!accepts(
            "config.json",
            &json!({ "server": { "lisen": "127.0.0.1:1" } })
        ));
        assert!(!accepts("config.json", &json!({ "sandbox": { "cpus": 0 } })));
        assert!(!accepts(
            "config.json",
            &json!({ "relay": { "caller_timeout": "1 year" } })
        ));
    }

    #[test]
    fn the_file_that_the_first_run_writes_fits_its_schema() {
        let config: toml::Value = toml::from_str(crate::config::TEMPLATE).unwrap();
        assert!(accepts("config.json", &serde_json::to_value(config).unwrap()));
    }

    #[test]
    fn the_file_that_the_first_run_writes_names_every_setting() {
        let schemas = file_schemas();
        let schema = schemas
            .iter()
            .find(|schema| schema.file == "config.json")
            .unwrap();
        let schema: Value = serde_json::from_str(&schema.text).unwrap();
        for (section, described) in schema["properties"].as_object().unwrap() {
            // An editor's note, and the older place of a setting.
            if section == "$schema" || section == "debugger" {
                continue;
            }
            assert!(
                crate::config::TEMPLATE.contains(&format!("[{section}")),
                "[{section}]"
            );
            for field in described["properties"].as_object().into_iter().flatten() {
                let named = [format!("{} =", field.0), format!("[{section}.{}]", field.0)];
                let is_there = named.iter().any(|name| crate::config::TEMPLATE.contains(name));
                assert!(is_there, "[{section}] {}", field.0);
            }
        }
    }
}
