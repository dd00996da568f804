//! `tool.json`: the definition of a catalog entry, which is an MCP server or a built-in tool with its policy.

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    CatalogId,
    agent::{NetworkAccess, check_absolute_path, check_env},
    error_field,
    strict::FieldError,
};

/// The content of a `tool.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "lowercase")]
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health_check: Option<HealthCheck>,
    /// How often it is restarted after it went down.
    #[serde(default)]
    pub restart: RestartPolicy,
}

/// Transport of an MCP server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "transport", rename_all = "lowercase")]
pub enum Transport {
    /// A process that Oubliette starts, in a sandbox of its own by default.
    Stdio(StdioTransport),
    /// A WebSocket.
    Ws {
        /// `ws://…` or `wss://…`.
        endpoint: String,
        /// HTTP headers of the WebSocket handshake.
        #[serde(default)]
        headers: IndexMap<String, String>,
    },
    /// TCP with one JSON-RPC message a line.
    Tcp {
        /// `host:port`.
        endpoint: String,
    },
    /// Streamable HTTP.
    Http {
        /// `http://…` or `https://…`.
        endpoint: String,
        /// HTTP headers of every request.
        #[serde(default)]
        headers: IndexMap<String, String>,
    },
}

impl Transport {
    /// The transport's name in `tool.json`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Transport::Stdio(_) => "stdio",
            Transport::Ws { .. } => "ws",
            Transport::Tcp { .. } => "tcp",
            Transport::Http { .. } => "http",
        }
    }
}

/// How a stdio server is started.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StdioTransport {
    /// Program to run.
    pub command: String,
    /// Its arguments.
    #[serde(default)]
    pub args: Vec<String>,
    /// Its environment variables.
    #[serde(default)]
    pub env: IndexMap<String, String>,
    /// Whether it runs in a sandbox or on the host. Default: in a sandbox.
    #[serde(default)]
    pub isolation: ServerIsolation,
    /// Network access of its sandbox. Default: none.
    #[serde(default)]
    pub network: NetworkAccess,
    /// Absolute host paths that are visible in its sandbox, read-only; only those that `[trust] read_only` covers.
    #[serde(default)]
    pub read_only: Vec<String>,
}

/// Whether a stdio server runs in a sandbox or on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ServerIsolation {
    /// In a sandbox of its own.
    #[default]
    Sandbox,
    /// On the host; only if `[trust] host_tools` lists its id.
    Host,
}

/// Timeouts of an MCP server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ServerTimeouts {
    /// From start until its tools are listed, in ms, 1 to 3600000. Default: 10000.
    #[serde(default = "default_startup_ms")]
    pub startup_ms: u64,
    /// Of one request, in ms, 1 to 3600000. Default: 60000.
    #[serde(default = "default_request_ms")]
    pub request_ms: u64,
}

impl Default for ServerTimeouts {
    fn default() -> Self {
        Self {
            startup_ms: default_startup_ms(),
            request_ms: default_request_ms(),
        }
    }
}

/// Health checks of an MCP server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HealthCheck {
    /// Time between checks, in ms, 1 to 3600000. Default: 5000.
    #[serde(default = "default_interval_ms")]
    pub interval_ms: u64,
    /// Timeout of one check, in ms, 1 to 3600000. Default: 2000.
    #[serde(default = "default_check_timeout_ms")]
    pub timeout_ms: u64,
    /// Failed checks in a row after which the server counts as down, at least 1. Default: 3.
    #[serde(default = "default_failures")]
    pub failures: u32,
}

/// How often a server is restarted after it went down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RestartPolicy {
    /// Maximum number of restarts; 0: never. Default: 5.
    #[serde(default = "default_max_attempts")]
    pub max_attempts: u32,
}

impl Default for RestartPolicy {
    fn default() -> Self {
        Self {
            max_attempts: default_max_attempts(),
        }
    }
}

fn default_startup_ms() -> u64 {
    10_000
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
fn default_command_timeout_ms() -> u64 {
    10_000
}

/// Definition of a built-in tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuiltinDefinition {
    /// Catalog id, the same as the name of its folder.
    pub id: CatalogId,
    /// What the entry is for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Which built-in it is and what it may access.
    pub builtin_policy: BuiltinPolicy,
}

/// Which built-in tool it is, and what it may read, write or run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    tag = "name",
    rename_all = "snake_case",
    rename_all_fields = "camelCase",
    deny_unknown_fields
)]
pub enum BuiltinPolicy {
    /// Reads files.
    FsRead {
        /// Paths it may read beneath: relative to the workspace, or absolute as seen in the sandbox.
        allowed_paths: Vec<String>,
    },
    /// Writes files.
    FsWrite {
        /// Paths it may write beneath: relative to the workspace, or absolute as seen in the sandbox.
        allowed_paths: Vec<String>,
    },
    /// Runs commands in the sandbox.
    ShellExec {
        /// Commands it may run; each is matched word by word against the beginning of `argv`.
        allowed_commands: Vec<String>,
        /// Names of environment variables a call may set. Default: none.
        #[serde(default)]
        allowed_env: Vec<String>,
        /// Timeout of one command, in ms, 1 to 3600000. Default: 10000.
        #[serde(default = "default_command_timeout_ms")]
        timeout_ms: u64,
        /// Whether `argv` is one line that is run with `sh -c`. Default: false.
        #[serde(default)]
        shell: bool,
    },
}

impl BuiltinPolicy {
    /// The built-in's name, which is also its tool's name.
    pub fn tool(&self) -> &'static str {
        match self {
            BuiltinPolicy::FsRead { .. } => "fs_read",
            BuiltinPolicy::FsWrite { .. } => "fs_write",
            BuiltinPolicy::ShellExec { .. } => "shell_exec",
        }
    }
}

const MCP_FIELDS: &[&str] = &[
    "id",
    "kind",
    "description",
    "transport",
    "timeouts",
    "healthCheck",
    "restart",
];
const STDIO_FIELDS: &[&str] = &["command", "args", "env", "isolation", "network", "read_only"];
const BUILTIN_FIELDS: &[&str] = &["id", "kind", "description", "builtinPolicy"];

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
        .find(|k| !common.contains(&k.as_str()) && !own.contains(&k.as_str()))
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
        within("timeouts.startupMs", self.timeouts.startup_ms)?;
        within("timeouts.requestMs", self.timeouts.request_ms)?;
        if let Some(check) = &self.health_check {
            within("healthCheck.intervalMs", check.interval_ms)?;
            within("healthCheck.timeoutMs", check.timeout_ms)?;
            if check.failures == 0 {
                return Err(FieldError::at("healthCheck.failures", "must be at least 1"));
            }
        }
        match &self.transport {
            Transport::Stdio(stdio) => stdio.check(),
            Transport::Ws { endpoint, .. } => check_endpoint(endpoint, &["ws://", "wss://"]),
            Transport::Http { endpoint, .. } => check_endpoint(endpoint, &["http://", "https://"]),
            Transport::Tcp { endpoint } => match endpoint.rsplit_once(':') {
                Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(()),
                _ => Err(FieldError::at("endpoint", "must be host:port")),
            },
        }
    }
}

impl StdioTransport {
    fn check(&self) -> Result<(), FieldError> {
        if self.command.is_empty() || self.command.contains('\0') {
            return Err(FieldError::at("command", "must name a program"));
        }
        if let Some(i) = self.args.iter().position(|a| a.contains('\0')) {
            return Err(FieldError::at(format!("args[{i}]"), "must hold no NUL"));
        }
        check_env("env", &self.env)?;
        for (i, path) in self.read_only.iter().enumerate() {
            check_absolute_path(path).map_err(|why| FieldError::at(format!("read_only[{i}]"), why))?;
        }
        Ok(())
    }
}

fn check_endpoint(endpoint: &str, schemes: &[&str]) -> Result<(), FieldError> {
    let plain = endpoint.len() <= 2_000 && endpoint.bytes().all(|b| b.is_ascii_graphic());
    match plain
        && schemes
            .iter()
            .any(|s| endpoint.len() > s.len() && endpoint.starts_with(s))
    {
        true => Ok(()),
        false => Err(FieldError::at(
            "endpoint",
            format!("must start with {}", schemes.join(" or ")),
        )),
    }
}

impl BuiltinPolicy {
    fn check(&self) -> Result<(), FieldError> {
        match self {
            BuiltinPolicy::FsRead { allowed_paths } | BuiltinPolicy::FsWrite { allowed_paths } => {
                for (i, path) in allowed_paths.iter().enumerate() {
                    if path.is_empty() || path.contains('\0') || path.split('/').any(|part| part == "..") {
                        let field = format!("builtinPolicy.allowedPaths[{i}]");
                        return Err(FieldError::at(field, "must be a path without .."));
                    }
                }
                Ok(())
            }
            BuiltinPolicy::ShellExec {
                allowed_commands,
                allowed_env,
                timeout_ms,
                ..
            } => {
                if let Some(i) = allowed_commands
                    .iter()
                    .position(|c| c.split_whitespace().next().is_none())
                {
                    return Err(FieldError::at(
                        format!("builtinPolicy.allowedCommands[{i}]"),
                        "must name a command",
                    ));
                }
                for (i, name) in allowed_env.iter().enumerate() {
                    crate::agent::check_env_name(name)
                        .map_err(|why| FieldError::at(format!("builtinPolicy.allowedEnv[{i}]"), why))?;
                }
                match (1..=3_600_000).contains(timeout_ms) {
                    true => Ok(()),
                    false => Err(FieldError::at(
                        "builtinPolicy.timeoutMs",
                        "must be 1 to 3600000 milliseconds",
                    )),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_example_of_the_contract_parses_and_serializes_back() {
        for text in [
            r#"{"id":"files","kind":"mcp","transport":"stdio","command":"x","args":[],"env":{},"isolation":"sandbox","network":"none","read_only":[],"timeouts":{"startupMs":10000,"requestMs":60000},"healthCheck":{"intervalMs":5000,"timeoutMs":2000,"failures":3},"restart":{"maxAttempts":5}}"#,
            r#"{"id":"remote","kind":"mcp","transport":"ws","endpoint":"ws://h/x"}"#,
            r#"{"id":"raw","kind":"mcp","transport":"tcp","endpoint":"host:1"}"#,
            r#"{"id":"web","kind":"mcp","transport":"http","endpoint":"http://h/mcp","headers":{}}"#,
            r#"{"id":"reader","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":["notes/"]}}"#,
            r#"{"id":"writer","kind":"builtin","builtinPolicy":{"name":"fs_write","allowedPaths":["out/"]}}"#,
            r#"{"id":"shell","kind":"builtin","builtinPolicy":{"name":"shell_exec","allowedCommands":["git status","ls"],"allowedEnv":[],"timeoutMs":10000}}"#,
        ] {
            let definition = ToolDefinition::parse(text).unwrap();
            let again = serde_json::to_value(&definition).unwrap();
            assert_eq!(ToolDefinition::from_value(again).unwrap(), definition);
        }
    }

    #[test]
    fn errors_name_the_field() {
        for (text, field) in [
            (
                r#"{"id":"a","kind":"mcp","transport":"tcp","endpoint":"h:1","headers":{}}"#,
                "headers",
            ),
            (
                r#"{"id":"a","kind":"mcp","transport":"tcp","endpoint":"h"}"#,
                "endpoint",
            ),
            (
                r#"{"id":"a","kind":"mcp","transport":"http","endpoint":"ftp://h"}"#,
                "endpoint",
            ),
            (
                r#"{"id":"a","kind":"mcp","transport":"stdio","command":""}"#,
                "command",
            ),
            (
                r#"{"id":"a","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":["../x"]}}"#,
                "builtinPolicy.allowedPaths[0]",
            ),
            (
                r#"{"id":"a","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":[]},"x":1}"#,
                "x",
            ),
        ] {
            assert_eq!(ToolDefinition::parse(text).unwrap_err().field, field, "{text}");
        }
        assert!(ToolDefinition::parse("[]").is_err());
        assert!(ToolDefinition::parse(r#"{"id":"a","kind":"wasm"}"#).is_err());
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in "\\PC{0,200}") {
            let _ = ToolDefinition::parse(&text);
        }
    }
}
