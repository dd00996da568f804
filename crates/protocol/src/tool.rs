//! A tool as it is listed, and what a call of it gives back.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{CatalogId, Object};

/// Where a tool comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// Lent by a caller.
    Caller,
    /// Oubliette's own, under an API key.
    Oubliette,
    /// An MCP server or built-in of the catalog.
    Catalog,
    /// What every agent has: `session_message`, `session_events`, `project_list`.
    Base,
}

/// A tool as a model is shown it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ToolSpec {
    /// The name it is called by.
    pub name: String,
    /// What it does.
    #[serde(default)]
    pub description: String,
    /// A JSON schema of type object.
    #[serde(default = "any_object")]
    pub input_schema: Value,
}

/// The schema of a tool that declared none.
pub fn any_object() -> Value {
    json!({ "type": "object" })
}

/// The result of a call in MCP's shape.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CallResult {
    /// MCP content blocks: text, images, resources.
    #[serde(default)]
    pub content: Vec<Value>,
    /// The result as data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub structured_content: Option<Value>,
    /// The tool ran and says it failed.
    #[serde(default)]
    pub is_error: bool,
}

impl CallResult {
    /// Plain text.
    pub fn text(text: impl Into<String>) -> Self {
        Self {
            content: vec![json!({ "type": "text", "text": text.into() })],
            ..Self::default()
        }
    }

    /// An error as a tool reports it.
    pub fn error(error: &crate::Error) -> Self {
        Self {
            structured_content: Some(error.body()),
            is_error: true,
            ..Self::text(&error.message)
        }
    }

    /// Data, with the same JSON as text.
    pub fn data(value: Value) -> Self {
        Self {
            structured_content: Some(value.clone()),
            ..Self::text(value.to_string())
        }
    }

    /// Any JSON value a caller answered with. A value that already is MCP content keeps its shape
    /// (text, images, structured); an object becomes structured content; anything else, text.
    pub fn from_value(value: Value) -> Self {
        if let Value::Object(object) = &value
            && object
                .get("content")
                .and_then(Value::as_array)
                .is_some_and(|blocks| {
                    blocks
                        .iter()
                        .all(|b| b.get("type").and_then(Value::as_str).is_some())
                })
            && object
                .keys()
                .all(|k| matches!(k.as_str(), "content" | "structuredContent" | "isError" | "_meta"))
            && let Ok(result) = serde_json::from_value::<CallResult>(value.clone())
        {
            return result;
        }
        match value {
            Value::String(text) => Self::text(text),
            Value::Object(_) => Self::data(value),
            other => Self::text(other.to_string()),
        }
    }

    /// All text blocks, joined by newlines.
    pub fn joined_text(&self) -> String {
        let texts = self
            .content
            .iter()
            .filter_map(|b| b.get("text").and_then(Value::as_str));
        texts.collect::<Vec<_>>().join("\n")
    }
}

/// How a tool server is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Light {
    /// The last check was good.
    Green,
    /// Starting, or a check was missed.
    Yellow,
    /// Down.
    Red,
}

/// One row of `tool_list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ToolRow {
    /// The name the agent sees.
    pub name: String,
    /// `@<id>/<tool>` for catalog tools; the name itself for the rest.
    pub canonical: String,
    /// Every other name it answers to.
    pub aliases: Vec<String>,
    /// Where it comes from.
    pub source: Source,
    /// The catalog entry or caller behind it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// Whether the agent may call it.
    pub allowed: bool,
    /// By which rule, and why it is not available when it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether a call can reach it now.
    pub available: bool,
    /// What it does.
    pub description: String,
    /// Its parameters.
    pub input_schema: Value,
}

/// One server of `tool_list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServerRow {
    /// Its catalog id.
    pub id: CatalogId,
    /// `stdio`, `ws`, `tcp`, `http` or `builtin`.
    pub transport: String,
    /// Its light.
    pub status: Light,
    /// Since when.
    pub since: jiff::Timestamp,
    /// When its last health check ended, or its last start that succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_check: Option<jiff::Timestamp>,
    /// Why it is not green, with the tail of its stderr.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// When the next start is tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_retry: Option<jiff::Timestamp>,
    /// How many tools it offers.
    pub tools: usize,
}

/// `tool_list`'s answer.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ToolList {
    /// Every tool, allowed or not, available or not.
    pub tools: Vec<ToolRow>,
    /// Every server.
    pub servers: Vec<ServerRow>,
}

/// Arguments of a call: always an object; absent and null mean empty.
pub fn arguments_object(value: Option<Value>) -> crate::Result<Object> {
    match value {
        None | Some(Value::Null) => Ok(Object::new()),
        Some(Value::Object(object)) => Ok(object),
        Some(other) => Err(crate::Error::invalid(format!(
            "arguments must be an object, not {}",
            kind_of(&other)
        ))),
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
