//! `oubliette.toml` as it is written: strict, every key optional.

use std::{collections::BTreeMap, path::PathBuf};

use oubliette_protocol::{CatalogId, duration::Span};
use serde::Deserialize;

/// The whole file.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawConfig {
    /// `[server]`.
    pub server: RawServer,
    /// `[trust]`.
    pub trust: RawTrust,
    /// `[relay]`.
    pub relay: RawRelay,
    /// `[switch]`.
    pub switch: RawSwitch,
    /// `[sandbox]`.
    pub sandbox: RawSandbox,
    /// `[providers.<name>]`.
    pub providers: BTreeMap<String, RawProvider>,
    /// `[egress]`.
    pub egress: RawEgress,
    /// `[session]`.
    pub session: RawSession,
    /// `[debugger]`.
    pub debugger: RawDebugger,
    /// `[log]`.
    pub log: RawLog,
    /// `[otlp]`.
    pub otlp: RawOtlp,
}

/// `[server]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawServer {
    /// Address and port.
    pub listen: Option<String>,
    /// Host names besides loopback that requests may be addressed to.
    pub allowed_hosts: Vec<String>,
    /// PEM file.
    pub tls_cert: Option<PathBuf>,
    /// PEM file.
    pub tls_key: Option<PathBuf>,
    /// Requests a token may make.
    pub rate_limit: Option<RawRateLimit>,
    /// How long an MCP session may sit without a stream or a request.
    pub mcp_session_idle: Option<Span>,
}

/// `rate_limit`.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawRateLimit {
    /// Steady rate.
    pub per_second: u32,
    /// How many may come at once; twice the rate when not given.
    pub burst: Option<u32>,
}

/// `[trust]`: the only thing that opens the host.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawTrust {
    /// Host paths sandboxes may be shown.
    pub read_only: Vec<PathBuf>,
    /// Catalog entries that may run outside a sandbox.
    pub host_tools: Vec<CatalogId>,
    /// Variables of the server's environment that definitions may refer to.
    pub env: Vec<String>,
    /// Whether `network: "host"` works.
    pub host_network: bool,
}

/// `[relay]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawRelay {
    /// How long a caller may take to answer.
    pub caller_timeout: Option<Span>,
    /// How long a caller that left may take to come back.
    pub reconnect_grace: Option<Span>,
}

/// `[switch]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawSwitch {
    /// How long a running turn may take to end.
    pub drain_timeout: Option<Span>,
}

/// `[sandbox]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawSandbox {
    /// `local`.
    pub driver: Option<String>,
    /// The weakest isolation accepted.
    pub minimum: Option<String>,
    /// Memory of a sandbox, in MiB.
    pub memory_mb: Option<u64>,
    /// Processors.
    pub cpus: Option<f64>,
    /// Processes.
    pub pids: Option<u64>,
    /// Largest workspace, in MiB.
    pub workspace_mb: Option<u64>,
}

/// `[providers.<name>]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawProvider {
    /// Where it is.
    pub base_url: String,
    /// The variable that holds the key.
    #[serde(default)]
    pub api_key_env: Option<String>,
    /// How the key is shown: `anthropic`, `gemini` or `bearer`; guessed when not given.
    #[serde(default)]
    pub auth: Option<String>,
    /// More paths that agents may ask for.
    #[serde(default)]
    pub allow_paths: Vec<String>,
}

/// `[egress]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawEgress {
    /// Private destinations that `network: "proxy"` may reach.
    pub allow: Vec<String>,
}

/// `[session]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawSession {
    /// How long an idle session keeps its agent process.
    pub idle_sleep: Option<Span>,
    /// How long an agent may take to start and answer.
    pub start_timeout: Option<Span>,
    /// How long one turn may take.
    pub turn_timeout: Option<Span>,
    /// How deep sessions may start sessions.
    pub max_depth: Option<u32>,
    /// Active sessions of a project.
    pub max_sessions: Option<u32>,
}

/// `[debugger]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawDebugger {
    /// How long its events are kept.
    pub keep: Option<Span>,
}

/// `[log]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawLog {
    /// A `tracing` filter.
    pub level: Option<String>,
    /// `text` or `json`.
    pub format: Option<String>,
}

/// `[otlp]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawOtlp {
    /// Where traces go.
    pub endpoint: Option<String>,
}
