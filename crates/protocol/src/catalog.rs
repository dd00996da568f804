//! `tool.json`: an entry of the catalog, an MCP server or a built-in tool with its policy.

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    CatalogId,
    agent::{Network, absolute_path, check_env},
    blame,
    strict::Refusal,
};

/// A whole `tool.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum ToolDefinition {
    /// An MCP server.
    Mcp(McpServer),
    /// One of Oubliette's own file and shell tools.
    Builtin(Builtin),
}

/// An MCP server of the catalog.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct McpServer {
    /// Its catalog id, the same as its folder's name.
    pub id: CatalogId,
    /// What it is for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// How it is reached.
    #[serde(flatten)]
    pub transport: Transport,
    /// How long things may take.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// How its health is watched; absent: only by its process or connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health_check: Option<HealthCheck>,
    /// How it is brought back.
    #[serde(default)]
    pub restart: Restart,
}

/// How an MCP server is reached.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "transport", rename_all = "lowercase")]
pub enum Transport {
    /// A process of ours, in a sandbox of its own.
    Stdio(Stdio),
    /// A WebSocket.
    Ws {
        /// `ws://…` or `wss://…`.
        endpoint: String,
        /// Headers of the handshake.
        #[serde(default)]
        headers: IndexMap<String, String>,
    },
    /// One JSON-RPC message a line over TCP.
    Tcp {
        /// `host:port`.
        endpoint: String,
    },
    /// Streamable HTTP.
    Http {
        /// `http://…` or `https://…`.
        endpoint: String,
        /// Headers of every request.
        #[serde(default)]
        headers: IndexMap<String, String>,
    },
}

impl Transport {
    /// The word for it.
    pub fn as_str(&self) -> &'static str {
        match self {
            Transport::Stdio(_) => "stdio",
            Transport::Ws { .. } => "ws",
            Transport::Tcp { .. } => "tcp",
            Transport::Http { .. } => "http",
        }
    }
}

/// A server started by us.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Stdio {
    /// The program.
    pub command: String,
    /// Its arguments.
    #[serde(default)]
    pub args: Vec<String>,
    /// Its environment.
    #[serde(default)]
    pub env: IndexMap<String, String>,
    /// Where it runs.
    #[serde(default)]
    pub isolation: Isolation,
    /// What it can reach.
    #[serde(default)]
    pub network: Network,
    /// Host paths it needs to see, as far as `[trust] read_only` lists them.
    #[serde(default)]
    pub read_only: Vec<String>,
}

/// Where a tool server runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    /// In a sandbox of its own.
    #[default]
    Sandbox,
    /// On the host, as far as `[trust] host_tools` lists it.
    Host,
}

/// How long things may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Timeouts {
    /// From start to ready.
    #[serde(default = "ten_seconds")]
    pub startup_ms: u64,
    /// One request.
    #[serde(default = "a_minute")]
    pub request_ms: u64,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            startup_ms: ten_seconds(),
            request_ms: a_minute(),
        }
    }
}

/// How a server's health is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HealthCheck {
    /// Between checks.
    #[serde(default = "five_seconds")]
    pub interval_ms: u64,
    /// For one check.
    #[serde(default = "two_seconds")]
    pub timeout_ms: u64,
    /// Misses until it counts as down.
    #[serde(default = "three")]
    pub failures: u32,
}

/// How a server is brought back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Restart {
    /// How often; 0: never.
    #[serde(default = "five")]
    pub max_attempts: u32,
}

impl Default for Restart {
    fn default() -> Self {
        Self { max_attempts: five() }
    }
}

fn ten_seconds() -> u64 {
    10_000
}
fn a_minute() -> u64 {
    60_000
}
fn five_seconds() -> u64 {
    5_000
}
fn two_seconds() -> u64 {
    2_000
}
fn three() -> u32 {
    3
}
fn five() -> u32 {
    5
}

/// A built-in tool with its policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Builtin {
    /// Its catalog id, the same as its folder's name.
    pub id: CatalogId,
    /// What it is for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// What it may touch.
    pub builtin_policy: BuiltinPolicy,
}

/// What a built-in may touch.
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
        /// Beneath these, relative to the workspace or absolute as seen in the sandbox.
        allowed_paths: Vec<String>,
    },
    /// Writes files.
    FsWrite {
        /// Beneath these, likewise.
        allowed_paths: Vec<String>,
    },
    /// Runs commands in the sandbox.
    ShellExec {
        /// Whole-word prefixes of what may run.
        allowed_commands: Vec<String>,
        /// Environment names a call may set.
        #[serde(default)]
        allowed_env: Vec<String>,
        /// How long one command may take.
        #[serde(default = "ten_seconds")]
        timeout_ms: u64,
        /// Whether `argv` is one line for `sh -c`.
        #[serde(default)]
        shell: bool,
    },
}

impl BuiltinPolicy {
    /// The tool's own name.
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
    /// Reads and checks a `tool.json`.
    pub fn parse(text: &str) -> Result<Self, Refusal> {
        Self::from_value(crate::strict::from_str(text)?)
    }

    /// Reads and checks a definition that is JSON already.
    pub fn from_value(value: serde_json::Value) -> Result<Self, Refusal> {
        // serde cannot deny unknown fields through a flattened tag, so the fields are checked first.
        known_fields(&value)?;
        let read = crate::strict::from_value(value.clone());
        let definition: Self = read.map_err(|refusal| blame::field(&value, refusal))?;
        definition.check()?;
        Ok(definition)
    }

    /// Its catalog id.
    pub fn id(&self) -> &CatalogId {
        match self {
            ToolDefinition::Mcp(server) => &server.id,
            ToolDefinition::Builtin(builtin) => &builtin.id,
        }
    }

    /// `stdio`, `ws`, `tcp`, `http` or `builtin`.
    pub fn transport(&self) -> &'static str {
        match self {
            ToolDefinition::Mcp(server) => server.transport.as_str(),
            ToolDefinition::Builtin(_) => "builtin",
        }
    }

    fn check(&self) -> Result<(), Refusal> {
        match self {
            ToolDefinition::Mcp(server) => server.check(),
            ToolDefinition::Builtin(builtin) => builtin.builtin_policy.check(),
        }
    }
}

fn known_fields(value: &serde_json::Value) -> Result<(), Refusal> {
    let Some(object) = value.as_object() else {
        return Err(Refusal::at("", "must be a JSON object"));
    };
    let own: &[&str] = match (
        object.get("kind").and_then(|k| k.as_str()),
        object.get("transport").and_then(|t| t.as_str()),
    ) {
        (Some("mcp"), Some("stdio")) => STDIO_FIELDS,
        (Some("mcp"), Some("ws" | "http")) => &["endpoint", "headers"],
        (Some("mcp"), Some("tcp")) => &["endpoint"],
        (Some("builtin"), _) => &[],
        // serde says what is wrong with a kind or transport it does not know.
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
            Err(Refusal::at(
                unknown,
                format!("unknown field, expected one of {expected}"),
            ))
        }
        None => Ok(()),
    }
}

impl McpServer {
    fn check(&self) -> Result<(), Refusal> {
        const HOUR: u64 = 3_600_000;
        let within = |field: &str, ms: u64| match (1..=HOUR).contains(&ms) {
            true => Ok(()),
            false => Err(Refusal::at(field, "must be 1 to 3600000 milliseconds")),
        };
        within("timeouts.startupMs", self.timeouts.startup_ms)?;
        within("timeouts.requestMs", self.timeouts.request_ms)?;
        if let Some(check) = &self.health_check {
            within("healthCheck.intervalMs", check.interval_ms)?;
            within("healthCheck.timeoutMs", check.timeout_ms)?;
            if check.failures == 0 {
                return Err(Refusal::at("healthCheck.failures", "must be at least 1"));
            }
        }
        match &self.transport {
            Transport::Stdio(stdio) => stdio.check(),
            Transport::Ws { endpoint, .. } => endpoint_of(endpoint, &["ws://", "wss://"]),
            Transport::Http { endpoint, .. } => endpoint_of(endpoint, &["http://", "https://"]),
            Transport::Tcp { endpoint } => match endpoint.rsplit_once(':') {
                Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(()),
                _ => Err(Refusal::at("endpoint", "must be host:port")),
            },
        }
    }
}

impl Stdio {
    fn check(&self) -> Result<(), Refusal> {
        if self.command.is_empty() || self.command.contains('\0') {
            return Err(Refusal::at("command", "must name a program"));
        }
        if let Some(i) = self.args.iter().position(|a| a.contains('\0')) {
            return Err(Refusal::at(format!("args[{i}]"), "must hold no NUL"));
        }
        check_env("env", &self.env)?;
        for (i, path) in self.read_only.iter().enumerate() {
            absolute_path(path).map_err(|why| Refusal::at(format!("read_only[{i}]"), why))?;
        }
        Ok(())
    }
}

fn endpoint_of(endpoint: &str, schemes: &[&str]) -> Result<(), Refusal> {
    let plain = endpoint.len() <= 2_000 && endpoint.bytes().all(|b| b.is_ascii_graphic());
    match plain
        && schemes
            .iter()
            .any(|s| endpoint.len() > s.len() && endpoint.starts_with(s))
    {
        true => Ok(()),
        false => Err(Refusal::at(
            "endpoint",
            format!("must start with {}", schemes.join(" or ")),
        )),
    }
}

impl BuiltinPolicy {
    fn check(&self) -> Result<(), Refusal> {
        match self {
            BuiltinPolicy::FsRead { allowed_paths } | BuiltinPolicy::FsWrite { allowed_paths } => {
                for (i, path) in allowed_paths.iter().enumerate() {
                    if path.is_empty() || path.contains('\0') || path.split('/').any(|part| part == "..") {
                        let field = format!("builtinPolicy.allowedPaths[{i}]");
                        return Err(Refusal::at(field, "must be a path without .."));
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
                    return Err(Refusal::at(
                        format!("builtinPolicy.allowedCommands[{i}]"),
                        "must name a command",
                    ));
                }
                for (i, name) in allowed_env.iter().enumerate() {
                    crate::agent::env_name(name)
                        .map_err(|why| Refusal::at(format!("builtinPolicy.allowedEnv[{i}]"), why))?;
                }
                match (1..=3_600_000).contains(timeout_ms) {
                    true => Ok(()),
                    false => Err(Refusal::at(
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
    fn every_shape_of_the_contract_parses() {
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
    fn a_refusal_names_field_and_reason() {
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
        fn no_text_panics(text in "\\PC{0,200}") {
            let _ = ToolDefinition::parse(&text);
        }
    }
}
