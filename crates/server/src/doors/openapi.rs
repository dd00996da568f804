//! The OpenAPI document, made from the same action definitions as the MCP tools.

use oubliette_protocol::ErrorCode;
use serde_json::{Value, json};

use crate::actions::{self, ActionDefinition};

/// The OpenAPI document of `/api`.
pub(crate) fn document() -> Value {
    let mut paths = serde_json::Map::new();
    for definition in actions::all() {
        paths.insert(
            format!("/api/tools/{}", definition.name),
            json!({ "post": tool_operation(definition) }),
        );
    }
    for (path, value) in other_paths() {
        paths.insert(path.into(), value);
    }
    let codes: Vec<_> = ErrorCode::ALL.iter().map(|c| c.as_str()).collect();
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
            "schemas": {
                "Error": {
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
                },
            },
        },
    })
}

fn tool_operation(definition: &ActionDefinition) -> Value {
    json!({
        "operationId": definition.name,
        "summary": definition.description,
        "description": format!("Scope: {}.", definition.scope),
        "tags": [definition.name.split('_').next().unwrap_or_default()],
        "security": [{ "bearer": [] }, { "cookie": [] }],
        "requestBody": { "content": { "application/json": { "schema": (definition.schema)() } } },
        "responses": responses("The result.", "application/json"),
    })
}

fn responses(what: &str, content: &str) -> Value {
    let error = json!({ "description": "Refused.", "content": { "application/json": {
        "schema": { "$ref": "#/components/schemas/Error" } } } });
    json!({
        "200": { "description": what, "content": { content: { "schema": { "type": if content == "application/json" { "object" } else { "string" } } } } },
        "default": error,
    })
}

fn other_paths() -> Vec<(&'static str, Value)> {
    let parameter = |name: &str, place: &str, kind: &str| json!({ "name": name, "in": place, "required": place == "path", "schema": { "type": kind } });
    let events = |summary: &str, parameters: Vec<Value>| json!({ "get": { "summary": summary, "parameters": parameters, "responses": responses("The events.", "text/event-stream") } });
    let file = |summary: &str, what: &str, content: &str| {
        json!({ "summary": summary, "responses": responses(what, content),
            "parameters": [parameter("id", "path", "string"), parameter("path", "path", "string")] })
    };
    let mut put = file("Write a file whole.", "Written.", "application/json");
    put["requestBody"] = json!({ "content": { "application/octet-stream": {} } });
    vec![
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
                "delete": file("Delete a file or an empty folder.", "Deleted.", "application/json"),
            }),
        ),
        (
            "/api/workspaces/{id}/archive",
            json!({ "get": { "summary": "The whole workspace as a tar.gz.",
                "parameters": [parameter("id", "path", "string")],
                "responses": responses("The archive.", "application/gzip") } }),
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
}
