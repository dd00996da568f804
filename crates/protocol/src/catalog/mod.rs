//! `tool.json`: the definition of a catalog entry, which is an MCP server or a built-in tool with its policy.
//!
//! - [`transport`]: how an MCP server is started or connected to.
//! - [`builtin`]: built-in tools.

mod builtin;
mod transport;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::{
    builtin::{BuiltinDefinition, BuiltinPolicy},
    transport::{ServerIsolation, StdioTransport, Transport},
};
use crate::{CatalogId, error_field, strict::FieldError};

/// The content of a `tool.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "lowercase")]
#[allow(clippy::large_enum_variant, reason = "definitions are few and shared")]
pub enum ToolDefinition {
    /// An MCP server.
    Mcp(McpServerDefinition),
    /// A built-in file or shell tool.
    Builtin(BuiltinDefinition),
}

/// Definition of an MCP server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct McpServerDefinition {
    /// Address of this file's JSON Schema, for editors; not read.
    #[serde(rename = "$schema", default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<String>,
    /// Catalog id, the same as the name of its folder.
    pub id: CatalogId,
    /// What the entry is for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// How the server is started or connected to.
    #[serde(flatten)]
    pub transport: Transport,
    /// Timeouts of start and requests.
    #[serde(default)]
    pub timeouts: ServerTimeouts,
    /// Health checks; absent: only the end of its process or connection is noticed.
    #[serde(default, alias = "health_check", skip_serializing_if = "Option::is_none")]
    pub health_check: Option<HealthCheck>,
    /// How often it is restarted after it went down.
    #[serde(default)]
    pub restart: RestartPolicy,
}

/// Timeouts of an MCP server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ServerTimeouts {
    /// From start until its tools are listed, in ms, 1 to 3600000. Default: 10000, and 60000 for the first start of a
    /// version of a stdio server.
    #[serde(default, alias = "startup_ms", skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3_600_000))]
    pub startup_ms: Option<u64>,
    /// Of one request, in ms, 1 to 3600000. Default: 60000.
    #[serde(default = "default_request_ms", alias = "request_ms")]
    #[schemars(range(min = 1, max = 3_600_000))]
    pub request_ms: u64,
}

impl Default for ServerTimeouts {
    fn default() -> Self {
        Self {
            startup_ms: None,
            request_ms: default_request_ms(),
        }
    }
}

/// How often a server of this version was started before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerStart {
    /// Never: it may have to fill its caches.
    First,
    /// At least once.
    Later,
}

impl ServerTimeouts {
    /// The time from start until its tools are listed, in ms.
    pub fn startup_ms(&self, start: ServerStart) -> u64 {
        self.startup_ms.unwrap_or(match start {
            ServerStart::First => 60_000,
            ServerStart::Later => 10_000,
        })
    }
}

/// Health checks of an MCP server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HealthCheck {
    /// Time between checks, in ms, 1 to 3600000. Default: 5000.
    #[serde(default = "default_interval_ms", alias = "interval_ms")]
    #[schemars(range(min = 1, max = 3_600_000))]
    pub interval_ms: u64,
    /// Timeout of one check, in ms, 1 to 3600000. Default: 2000.
    #[serde(default = "default_check_timeout_ms", alias = "timeout_ms")]
    #[schemars(range(min = 1, max = 3_600_000))]
    pub timeout_ms: u64,
    /// Failed checks in a row after which the server counts as down, at least 1. Default: 3.
    #[serde(default = "default_failures")]
    #[schemars(range(min = 1))]
    pub failures: u32,
}

/// How often a server is restarted after it went down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RestartPolicy {
    /// Maximum number of restarts; 0: never. Default: 5.
    #[serde(default = "default_max_attempts", alias = "max_attempts")]
    pub max_attempts: u32,
}

impl Default for RestartPolicy {
    fn default() -> Self {
        Self {
            max_attempts: default_max_attempts(),
        }
    }
}
fn default_request_ms() -> u64 {
    60_000
}
fn default_interval_ms() -> u64 {
    5_000
}
fn default_check_timeout_ms() -> u64 {
    2_000
}
fn default_failures() -> u32 {
    3
}
fn default_max_attempts() -> u32 {
    5
}
/// The fields of each kind and transport.
const MCP_FIELDS: &[&str] = &[
    "$schema",
    "id",
    "kind",
    "description",
    "transport",
    "timeouts",
    "healthCheck",
    "restart",
];
const STDIO_FIELDS: &[&str] = &[
    "command",
    "program",
    "args",
    "env",
    "isolation",
    "network",
    "egress",
    "read_only",
    "cache_mb",
];
const BUILTIN_FIELDS: &[&str] = &["$schema", "id", "kind", "description", "builtinPolicy"];

/// A field of tool.json as it is shown. snake_case and camelCase are both read, whichever of the two is shown.
pub(crate) fn shown_spelling(field: &str) -> &str {
    match field {
        "health_check" => "healthCheck",
        "builtin_policy" => "builtinPolicy",
        "readOnly" => "read_only",
        "cacheMb" => "cache_mb",
        other => other,
    }
}

impl ToolDefinition {
    /// Parses and checks a `tool.json`.
    pub fn parse(text: &str) -> Result<Self, FieldError> {
        Self::from_value(crate::strict::from_str(text)?)
    }

    /// Parses and checks a definition that is already a JSON value.
    pub fn from_value(value: serde_json::Value) -> Result<Self, FieldError> {
        // serde cannot deny unknown fields through a flattened tag, so the fields are checked first.
        check_known_fields(&value)?;
        let read = crate::strict::from_value(value.clone());
        let definition: Self = read.map_err(|error| error_field::with_field(&value, error))?;
        definition.check()?;
        Ok(definition)
    }

    /// The catalog id.
    pub fn id(&self) -> &CatalogId {
        match self {
            ToolDefinition::Mcp(server) => &server.id,
            ToolDefinition::Builtin(builtin) => &builtin.id,
        }
    }

    /// Name of the transport: `stdio`, `ws`, `tcp`, `http` or `builtin`.
    pub fn transport(&self) -> &'static str {
        match self {
            ToolDefinition::Mcp(server) => server.transport.as_str(),
            ToolDefinition::Builtin(_) => "builtin",
        }
    }

    fn check(&self) -> Result<(), FieldError> {
        match self {
            ToolDefinition::Mcp(server) => server.check(),
            ToolDefinition::Builtin(builtin) => builtin.builtin_policy.check(),
        }
    }
}

/// Refuses fields that the kind and transport do not have.
fn check_known_fields(value: &serde_json::Value) -> Result<(), FieldError> {
    let Some(object) = value.as_object() else {
        return Err(FieldError::at("", "must be a JSON object"));
    };
    let own: &[&str] = match (
        object.get("kind").and_then(|k| k.as_str()),
        object.get("transport").and_then(|t| t.as_str()),
    ) {
        (Some("mcp"), Some("stdio")) => STDIO_FIELDS,
        (Some("mcp"), Some("ws" | "http")) => &["endpoint", "headers"],
        (Some("mcp"), Some("tcp")) => &["endpoint"],
        (Some("builtin"), _) => &[],
        // An unknown kind or transport is reported by serde.
        _ => return Ok(()),
    };
    let common = if object["kind"] == "builtin" {
        BUILTIN_FIELDS
    } else {
        MCP_FIELDS
    };
    match object
        .keys()
        .find(|k| !common.contains(&shown_spelling(k)) && !own.contains(&shown_spelling(k)))
    {
        Some(unknown) => {
            let expected = common.iter().chain(own).copied().collect::<Vec<_>>().join(", ");
            Err(FieldError::at(
                unknown,
                format!("unknown field, expected one of {expected}"),
            ))
        }
        None => Ok(()),
    }
}

impl McpServerDefinition {
    fn check(&self) -> Result<(), FieldError> {
        const HOUR: u64 = 3_600_000;
        let within = |field: &str, ms: u64| match (1..=HOUR).contains(&ms) {
            true => Ok(()),
            false => Err(FieldError::at(field, "must be 1 to 3600000 milliseconds")),
        };
        if let Some(ms) = self.timeouts.startup_ms {
            within("timeouts.startupMs", ms)?;
        }
        within("timeouts.requestMs", self.timeouts.request_ms)?;
        if let Some(check) = &self.health_check {
            within("healthCheck.intervalMs", check.interval_ms)?;
            within("healthCheck.timeoutMs", check.timeout_ms)?;
            if check.failures == 0 {
                return Err(FieldError::at("healthCheck.failures", "must be at least 1"));
            }
        }
        self.transport.check()
    }
}

#[cfg(test)]
mod tests;
