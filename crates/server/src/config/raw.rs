//! `oubliette.toml` as it is written. Unknown keys are refused; every section and nearly every key is optional.

use std::{collections::BTreeMap, path::PathBuf};

use oubliette_protocol::{CatalogId, duration::HumanDuration};
use serde::Deserialize;

/// The whole file.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawConfig {
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
pub(crate) struct RawServer {
    /// Address and port to listen on; default 127.0.0.1:8080.
    pub listen: Option<String>,
    /// Host names besides loopback that requests may be addressed to.
    pub allowed_hosts: Vec<String>,
    /// PEM file with the certificate chain; needs `tls_key`.
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the private key; needs `tls_cert`.
    pub tls_key: Option<PathBuf>,
    /// How many requests a token may make; default 10000 a second, 20000 at once.
    pub rate_limit: Option<RawRateLimit>,
    /// How long an MCP session may be without a request or a stream before it is forgotten; default 1h.
    pub mcp_session_idle: Option<HumanDuration>,
}

/// `[server] rate_limit`. Both values at least 1.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawRateLimit {
    /// Sustained rate.
    pub per_second: u32,
    /// How many may come at once; default twice the rate.
    pub burst: Option<u32>,
}

/// `[trust]`: the only section that gives sandboxes access to the host.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawTrust {
    /// Host paths that may be mounted into sandboxes, read-only; absolute.
    pub read_only: Vec<PathBuf>,
    /// Catalog entries that may run outside a sandbox.
    pub host_tools: Vec<CatalogId>,
    /// Variables of the server's environment that definitions may refer to.
    pub env: Vec<String>,
    /// Whether `network: "host"` is allowed.
    pub host_network: bool,
}

/// `[relay]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawRelay {
    /// How long a caller may take to answer a tool call; default 60s.
    pub caller_timeout: Option<HumanDuration>,
    /// How long a disconnected caller may take to come back before its open calls fail; default 500ms.
    pub reconnect_grace: Option<HumanDuration>,
}

/// `[switch]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawSwitch {
    /// How long a running turn may take to end before a switch of agents cancels it; default 5s.
    pub drain_timeout: Option<HumanDuration>,
}

/// `[sandbox]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawSandbox {
    /// The sandbox driver; `local`, the default, is the only one.
    pub driver: Option<String>,
    /// The weakest isolation sessions may start with: `namespaces` (default) or `landlock`.
    pub minimum: Option<String>,
    /// Memory of a sandbox, in MiB; default 2048.
    pub memory_mb: Option<u64>,
    /// Processors of a sandbox, 0.01 to 4096 cores; default 2.
    pub cpus: Option<f64>,
    /// Maximum number of processes in a sandbox; default 512.
    pub pids: Option<u64>,
    /// Maximum size of a workspace, in MiB; default 4096.
    pub workspace_mb: Option<u64>,
}

/// `[providers.<name>]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawProvider {
    /// The base URL of the provider's API.
    pub base_url: String,
    /// The variable of the server's environment that holds the API key.
    #[serde(default)]
    pub api_key_env: Option<String>,
    /// How the key is sent: `anthropic`, `gemini` or `bearer`; default by the provider's name and URL.
    #[serde(default)]
    pub auth: Option<String>,
    /// Paths that agents may request in addition to the built-in ones.
    #[serde(default)]
    pub allow_paths: Vec<String>,
}

/// `[egress]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawEgress {
    /// Private destinations that `network: "proxy"` may reach.
    pub allow: Vec<String>,
}

/// `[session]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawSession {
    /// How long an idle session keeps its agent process; default 10m.
    pub idle_sleep: Option<HumanDuration>,
    /// How long an agent may take to start and answer `initialize`; default 30s.
    pub start_timeout: Option<HumanDuration>,
    /// How long one turn may take; default 1h.
    pub turn_timeout: Option<HumanDuration>,
    /// How many levels deep sessions may start further sessions; default 3.
    pub max_depth: Option<u32>,
    /// Maximum number of active sessions of a project; default 50.
    pub max_sessions: Option<u32>,
}

/// `[debugger]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawDebugger {
    /// How long debugger events are kept, at least 1m; default for ever.
    pub keep: Option<HumanDuration>,
}

/// `[log]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawLog {
    /// A `tracing` filter; default `info`.
    pub level: Option<String>,
    /// `text` (default) or `json`.
    pub format: Option<String>,
}

/// `[otlp]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawOtlp {
    /// The URL of an OpenTelemetry collector (OTLP over HTTP); default none.
    pub endpoint: Option<String>,
}
