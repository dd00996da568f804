//! The OpenAPI document, made from the same action definitions as the MCP tools.

use oubliette_protocol::ErrorCode;
use schemars::{Schema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Value, json};

use crate::{
    actions::{self, ActionDefinition},
    schemas::file_schemas,
};

/// The OpenAPI document of `/api`.
pub(crate) fn document() -> Value {
    let mut paths = serde_json::Map::new();
    let mut results = result_schemas();
    for definition in actions::all() {
        let result = (definition.result_schema)(&mut results);
        paths.insert(
            format!("/api/tools/{}", definition.name),
            json!({ "post": tool_operation(definition, &result) }),
        );
    }
    let mut schemas = results.take_definitions(true);
    for (path, value) in other_paths() {
        paths.insert(path.into(), value);
    }
    schemas.insert("Error".into(), error_schema());
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Oubliette",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Coding agents in sandboxes behind one tool gate. Every tool of the MCP endpoint by plain JSON.",
        },
        "security": [{ "bearer": [] }],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": { "type": "http", "scheme": "bearer" },
                "cookie": { "type": "apiKey", "in": "cookie", "name": super::access::LOGIN_COOKIE },
            },
            "schemas": schemas,
        },
    })
}

/// The generator of the types of results, which are under `components`, each once.
fn result_schemas() -> SchemaGenerator {
    let settings = SchemaSettings::draft2020_12().for_serialize().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    settings.into_generator()
}

fn error_schema() -> Value {
    let codes: Vec<_> = ErrorCode::ALL.iter().map(|c| c.as_str()).collect();
    json!({
        "type": "object",
        "required": ["error"],
        "properties": { "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {
                "code": { "type": "string", "enum": codes },
                "message": { "type": "string" },
            },
        } },
    })
}

fn tool_operation(definition: &ActionDefinition, result: &Schema) -> Value {
    let mut responses = responses("The result.", "application/json");
    responses["200"]["content"]["application/json"]["schema"] = result.as_value().clone();
    json!({
        "operationId": definition.name,
        "summary": definition.description,
        "description": format!("Scope: {}.", definition.scope),
        "tags": [definition.name.split('_').next().unwrap_or_default()],
        "security": [{ "bearer": [] }, { "cookie": [] }],
        "requestBody": { "content": { "application/json": { "schema": (definition.schema)() } } },
        "responses": responses,
    })
}

fn responses(what: &str, content: &str) -> Value {
    let error = json!({ "description": "Refused.", "content": { "application/json": {
        "schema": { "$ref": "#/components/schemas/Error" } } } });
    json!({
        "200": { "description": what, "content": { content: { "schema": { "type": if content.ends_with("json") { "object" } else { "string" } } } } },
        "default": error,
    })
}

/// Says which fields the JSON result of an operation has, all of them always.
fn set_result(operation: &mut Value, fields: Value) {
    let names: Vec<&String> = fields
        .as_object()
        .into_iter()
        .flat_map(|fields| fields.keys())
        .collect();
    let schema = json!({ "type": "object", "required": names, "properties": fields });
    operation["responses"]["200"]["content"]["application/json"]["schema"] = schema;
}

fn other_paths() -> Vec<(&'static str, Value)> {
    let parameter = |name: &str, place: &str, kind: &str| json!({ "name": name, "in": place, "required": place == "path", "schema": { "type": kind } });
    let events = |summary: &str, parameters: Vec<Value>| json!({ "get": { "summary": summary, "parameters": parameters, "responses": responses("The events.", "text/event-stream") } });
    let file = |summary: &str, what: &str, content: &str| {
        json!({ "summary": summary, "responses": responses(what, content),
            "parameters": [parameter("id", "path", "string"), parameter("path", "path", "string")] })
    };
    let (text, count) = (
        json!({ "type": "string" }),
        json!({ "type": "integer", "minimum": 0 }),
    );
    let mut put = file("Write a file whole.", "Written.", "application/json");
    put["requestBody"] = json!({ "content": { "application/octet-stream": {} } });
    set_result(&mut put, json!({ "path": text, "size": count }));
    let mut delete = file(
        "Delete a file or an empty folder.",
        "Deleted.",
        "application/json",
    );
    set_result(&mut delete, json!({ "path": text, "deleted": { "const": true } }));
    let mut put_archive = json!({
        "summary": "Put the files of a tar.gz (GNU format) into the workspace; others stay. At most what the workspace may hold.",
        "parameters": [parameter("id", "path", "string")],
        "requestBody": { "required": true, "content": { "application/gzip": {} } },
        "responses": responses("How many files and bytes it holds.", "application/json"),
    });
    set_result(
        &mut put_archive,
        json!({ "workspace_id": text, "files": count, "bytes": count }),
    );
    let files: Vec<&str> = file_schemas().iter().map(|schema| schema.file).collect();
    let described: Vec<&str> = file_schemas().iter().map(|schema| schema.of).collect();
    vec![
        (
            "/api/schemas/{file}",
            json!({ "get": { "summary": format!("The JSON Schema of {}.", described.join(", ")),
                "security": [],
                "parameters": [{ "name": "file", "in": "path", "required": true, "schema": { "enum": files } }],
                "responses": responses("The schema.", "application/schema+json") } }),
        ),
        (
            "/api/sessions/{id}/events",
            events(
                "A session's events: replayed from the log, then live.",
                vec![
                    parameter("id", "path", "string"),
                    parameter("since_index", "query", "integer"),
                    parameter("caller_id", "query", "string"),
                ],
            ),
        ),
        (
            "/api/debugger",
            events(
                "Debugger events: replayed, then live.",
                vec![
                    parameter("session_id", "query", "string"),
                    parameter("since_index", "query", "integer"),
                ],
            ),
        ),
        (
            "/api/workspaces/{id}/files/{path}",
            json!({
                "get": file("Read a file, or list a folder.", "The file, or a folder's entries.", "application/octet-stream"),
                "put": put,
                "delete": delete,
            }),
        ),
        (
            "/api/workspaces/{id}/archive",
            json!({ "get": { "summary": "The whole workspace as a tar.gz.",
                "parameters": [parameter("id", "path", "string")],
                "responses": responses("The archive.", "application/gzip") },
              "put": put_archive }),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_action_is_in_the_document() {
        let document = document();
        for definition in actions::all() {
            let path = format!("/api/tools/{}", definition.name);
            let schema =
                &document["paths"][&path]["post"]["requestBody"]["content"]["application/json"]["schema"];
            assert_eq!(schema["type"], "object", "{path}");
            assert_eq!(schema["additionalProperties"], false, "{path}");
        }
    }

    #[test]
    fn every_result_has_a_type_and_every_reference_leads_to_one() {
        let document = document();
        for definition in actions::all() {
            let path = format!("/api/tools/{}", definition.name);
            let schema = &document["paths"][&path]["post"]["responses"]["200"]["content"]["application/json"]
                ["schema"];
            let reference = schema["$ref"]
                .as_str()
                .unwrap_or_else(|| panic!("{path}: {schema}"));
            let found = document.pointer(reference.trim_start_matches('#')).unwrap();
            assert_eq!(found["type"], "object", "{path}: {found}");
            assert!(found["description"].is_string(), "{path}: {found}");
        }
        let text = document.to_string();
        for reference in text.split("\"$ref\":\"#").skip(1) {
            let pointer = reference.split('"').next().unwrap();
            assert!(document.pointer(pointer).is_some(), "{pointer}");
        }
    }
}
