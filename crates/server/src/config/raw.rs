//! `oubliette.toml` as it is written. Unknown keys are refused; every section and nearly every key is optional.

use std::{collections::BTreeMap, path::PathBuf};

use oubliette_protocol::{CatalogId, duration::HumanDuration};
use schemars::JsonSchema;
use serde::Deserialize;

/// The whole file.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawConfig {
    /// Address of this file's JSON Schema, for editors; not read.
    #[serde(rename = "$schema")]
    #[allow(dead_code, reason = "accepted so that editors find the schema")]
    pub schema: Option<String>,
    /// `[server]`: where the server listens, and what clients may ask of it.
    pub server: RawServer,
    /// `[store]`: where the database is.
    pub store: RawStore,
    /// `[cluster]`: several servers on one PostgreSQL database. Without it one server uses a database at a time.
    pub cluster: Option<RawCluster>,
    /// `[workspaces]`: where the files of projects are.
    pub workspaces: RawWorkspaces,
    /// `[trust]`: the only section that gives sandboxes access to the host.
    pub trust: RawTrust,
    /// `[relay]`: timeouts of calls to tools that callers lend.
    pub relay: RawRelay,
    /// `[approval]`: calls that wait for a person.
    pub approval: RawApproval,
    /// `[switch]`: replacing the agent of a session.
    pub switch: RawSwitch,
    /// `[sandbox]`: how sessions are isolated, and what they may use.
    pub sandbox: RawSandbox,
    /// `[providers.<name>]`: model providers, asked by the server so that no key enters a sandbox.
    pub providers: BTreeMap<String, RawProvider>,
    /// `[egress]`: what sandboxes with a proxy may reach besides public hosts.
    pub egress: RawEgress,
    /// `[upstreams.<name>]`: services that agents use with a credential they never see.
    pub upstreams: BTreeMap<String, RawUpstream>,
    /// `[git]`: cloning and comparing workspaces.
    pub git: RawGit,
    /// `[programs]`: bounds of installing packages.
    pub programs: RawPrograms,
    /// `[session]`: how long sessions and turns last, and how many there may be.
    pub session: RawSession,
    /// `[limits]`: what the server keeps on behalf of sessions.
    pub limits: RawLimits,
    /// `[prices."provider/model-pattern"]`: what models cost, in US dollars for a million tokens; the most specific pattern counts.
    pub prices: BTreeMap<String, RawPrice>,
    /// `[budget]`: what the whole server may use; projects have limits of their own beside it.
    pub budget: RawBudget,
    /// `[[webhook]]`: session events sent to another program, signed.
    pub webhook: Vec<RawWebhook>,
    /// `[debugger]`: the older place of `[retention] debugger`.
    pub debugger: RawDebugger,
    /// `[retention]`: how long what is recorded is kept; looked through at start and every minute.
    pub retention: RawRetention,
    /// `[log]`: the server's own log.
    pub log: RawLog,
    /// `[otlp]`: traces for OpenTelemetry.
    pub otlp: RawOtlp,
}

/// `[server]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
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
    /// Maximum number of connections from the network, 16 to 1000000; default 1024. One address may have a quarter of them.
    #[schemars(range(min = 16, max = 1_000_000))]
    pub max_connections: Option<u32>,
    /// Maximum number of stateful MCP sessions, 16 to 1000000; default 4096. One token may have a quarter of them.
    #[schemars(range(min = 16, max = 1_000_000))]
    pub max_mcp_sessions: Option<u32>,
    /// Addresses and blocks of reverse proxies whose X-Forwarded-For and X-Forwarded-Proto are believed; default none.
    pub trusted_proxies: Vec<String>,
    /// Whether login cookies are always `Secure`; default only over TLS or if a trusted proxy says so.
    pub secure_cookies: bool,
    /// How many requests a token may make; default 10000 a second, 20000 at once.
    pub rate_limit: Option<RawRateLimit>,
    /// How long an MCP session may be without a request or a stream before it is forgotten; default 1h.
    pub mcp_session_idle: Option<HumanDuration>,
}

/// `[store]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawStore {
    /// A PostgreSQL database, `postgres://USER:PASSWORD@HOST:PORT/DATABASE`; default the file `oubliette.db` in the home.
    pub url: Option<RawUrl>,
}

/// `[cluster]`.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawCluster {
    /// The address at which the other servers reach this one, `https://HOST:PORT`; `http` on loopback only.
    pub advertise: String,
    /// The variable of the server's environment that holds the cluster key: the same on every server, at least 16 characters.
    pub key_env: String,
    /// PEM file with the certificates of authorities that signed those of the other servers, besides the ones the system trusts:
    /// for a private authority. Absolute.
    pub ca_file: Option<PathBuf>,
}

/// `[workspaces]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawWorkspaces {
    /// Directory of projects and their workspaces, absolute; default `projects` in the home. Several servers share one, at the same
    /// path or not.
    pub dir: Option<PathBuf>,
}

/// An address that may have a password in it, and is therefore never shown.
#[derive(Clone, Deserialize, JsonSchema)]
pub(crate) struct RawUrl(pub String);

impl std::fmt::Debug for RawUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RawUrl")
    }
}

/// `[server] rate_limit`. Both values at least 1.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawRateLimit {
    /// Sustained rate.
    #[schemars(range(min = 1))]
    pub per_second: u32,
    /// How many may come at once; default twice the rate.
    #[schemars(range(min = 1))]
    pub burst: Option<u32>,
}

/// `[trust]`: the only section that gives sandboxes access to the host.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawRelay {
    /// How long a caller may take to answer a tool call; default 60s.
    pub caller_timeout: Option<HumanDuration>,
    /// How long a disconnected caller may take to come back before its open calls fail; default 500ms.
    pub reconnect_grace: Option<HumanDuration>,
}

/// `[approval]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawApproval {
    /// How long a call waits for a person to allow it, 1s to 30d; default 10m.
    pub timeout: Option<HumanDuration>,
}

/// `[switch]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawSwitch {
    /// How long a running turn may take to end before a switch of agents cancels it; default 5s.
    pub drain_timeout: Option<HumanDuration>,
}

/// `[sandbox]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawSandbox {
    /// The sandbox driver: `local` (default; processes of this machine, no daemon), `docker` (containers) or `kubernetes` (pods).
    pub driver: Option<String>,
    /// With a driver of containers: how long a cut connection to a container may take to be made again, and how long
    /// containers outlive a killed server; 1s to 10m, default 30s.
    pub grace: Option<HumanDuration>,
    /// `[sandbox.docker]`.
    pub docker: RawDocker,
    /// `[sandbox.kubernetes]`.
    pub kubernetes: RawKubernetes,
    /// The weakest isolation sessions may start with: `namespaces` (default) or `landlock`.
    pub minimum: Option<String>,
    /// Memory of a session, in MiB; default 2048.
    #[schemars(range(min = 1))]
    pub memory_mb: Option<u64>,
    /// Processors of a session, 0.01 to 4096 cores; default 2.
    #[schemars(range(min = 0.01, max = 4096.0))]
    pub cpus: Option<f64>,
    /// Maximum number of processes of a session; default 512.
    #[schemars(range(min = 1))]
    pub pids: Option<u64>,
    /// What a session may have on disk, in MiB: its workspace, its agents' homes, temporary and open files; also what
    /// uploads may make of a workspace. Default 4096.
    #[schemars(range(min = 1))]
    pub workspace_mb: Option<u64>,
    /// Memory of all sessions together, in MiB, at least 64; default the machine's less an eighth.
    #[schemars(range(min = 64))]
    pub total_memory_mb: Option<u64>,
    /// Processes of all sessions together, at least 16; default three quarters of what the machine allows.
    #[schemars(range(min = 16))]
    pub total_pids: Option<u64>,
}

/// `[sandbox.docker]`: the container engine of the driver `docker`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawDocker {
    /// The engine's socket on this machine; default `unix:///var/run/docker.sock`.
    pub host: Option<String>,
    /// The engine's runtime, such as `runsc` (gVisor) or `kata`; default the engine's own.
    pub runtime: Option<String>,
    /// The engine's network for sandboxes with `"network": "host"`, which `[trust] host_network` allows; default `host`. All
    /// other sandboxes have none.
    pub network: Option<String>,
    /// The image of sessions whose agent and project name none; default none: such sessions are refused.
    pub image: Option<String>,
}

/// `[sandbox.kubernetes]`: the cluster of the driver `kubernetes`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawKubernetes {
    /// The namespace in which pods are made; it must exist. Needed.
    pub namespace: Option<String>,
    /// A kubeconfig file, absolute; default the account of the pod that this server runs in, else the file that `KUBECONFIG` names.
    pub kubeconfig: Option<PathBuf>,
    /// The image of sessions whose agent and project name none; default none: such sessions are refused.
    pub image: Option<String>,
    /// A PersistentVolumeClaim of that namespace, with the access mode ReadWriteMany, which this server has mounted too. Needed.
    pub volume_claim: Option<String>,
    /// Where this server has that volume mounted, absolute. The home and `[workspaces] dir` must be beneath it. Needed.
    pub volume_path: Option<PathBuf>,
    /// Address and port on which this server listens for pods, with TLS and a certificate of its own, such as `0.0.0.0:7443`. Needed.
    pub stage_listen: Option<String>,
    /// Host and port at which pods reach `stage_listen` of this very server, such as `10.0.0.5:7443`; a name is looked up by the
    /// server. Needed.
    pub stage_address: Option<String>,
    /// The RuntimeClass of pods, such as `gvisor` or `kata`; default the cluster's own.
    pub runtime_class: Option<String>,
    /// `required` (default): where the cluster does not keep network policies, which the first pod tries, sandboxes are refused;
    /// `unchecked`: they start, and may reach whatever pods of the cluster reach.
    pub network_policy: Option<String>,
    /// A SandboxWarmPool. It cannot be used yet, and `doctor` says why: leave it out.
    pub warm_pool: Option<String>,
    /// Processors that each pod is scheduled with, 0.001 to 4096 cores; default 0.1. What it may use is `cpus`.
    #[schemars(range(min = 0.001, max = 4096.0))]
    pub cpu_request: Option<f64>,
    /// Memory that each pod is scheduled with, in MiB, 1 to 1048576; default 128. What it may use is `memory_mb`.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub memory_request: Option<u64>,
}

/// `[providers.<name>]`.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
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

/// `[upstreams.<name>]`.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawUpstream {
    /// The base URL of the service.
    pub base_url: String,
    /// The variable of the server's environment that holds the credential; default: it needs none.
    #[serde(default)]
    pub api_key_env: Option<String>,
    /// How the credential is sent: `bearer` (default), `basic` or `header:NAME`.
    #[serde(default)]
    pub auth: Option<String>,
    /// What agents may ask of it, at most 256 entries; default: nothing.
    #[serde(default)]
    pub allow: Vec<RawUpstreamRule>,
    /// Whether git in sandboxes uses it for `https://` URLs of its host; default false.
    #[serde(default)]
    pub git: bool,
}

/// An entry of `[upstreams.<name>] allow`.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawUpstreamRule {
    /// HTTP methods, in capitals; `GET` includes `HEAD`.
    pub methods: Vec<String>,
    /// Paths relative to `base_url`; a `*` at the end of one stands for anything.
    pub paths: Vec<String>,
}

/// `[egress]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawEgress {
    /// Private destinations that `network: "proxy"` may reach.
    pub allow: Vec<String>,
}

/// `[git]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawGit {
    /// Private key for `ssh://` URLs, an absolute path; needs `known_hosts`. Default none: they are refused.
    pub ssh_key: Option<PathBuf>,
    /// Host keys that `ssh://` remotes must have, an absolute path; needs `ssh_key`.
    pub known_hosts: Option<PathBuf>,
    /// How long a clone may take, 1s to 1d; default 5m.
    pub clone_timeout: Option<HumanDuration>,
    /// How long a diff may take, 1s to 1d; default 1m.
    pub diff_timeout: Option<HumanDuration>,
    /// `[[git.credential]]`.
    pub credential: Vec<RawGitCredential>,
}

/// `[[git.credential]]`.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawGitCredential {
    /// Host, or `host:port`, of the `https://` URLs it is for.
    pub host: String,
    /// The user name.
    pub username: String,
    /// The variable of the server's environment that holds the password or token.
    pub password_env: String,
}

/// `[programs]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawPrograms {
    /// How long an installation may take, 1s to 1d; default 10m.
    pub install_timeout: Option<HumanDuration>,
    /// What an installation may have on disk, downloads included, in MiB, 1 to 1048576; default 4096.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub install_mb: Option<u64>,
}

/// `[session]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
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

/// `[limits]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawLimits {
    /// What the server keeps in memory on behalf of one session, in MiB, 64 to 1048576; default 64.
    #[schemars(range(min = 64, max = 1_048_576))]
    pub session_buffer_mb: Option<u64>,
    /// The same for all sessions together, in MiB, `session_buffer_mb` to 1048576; default 512.
    #[schemars(range(min = 64, max = 1_048_576))]
    pub server_buffer_mb: Option<u64>,
    /// The largest event log of one session, and the most it may have in the debugger, in MiB of JSON, 1 to 1048576; default 512.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub session_log_mb: Option<u64>,
}

/// `[prices."provider/model-pattern"]`, in US dollars for a million tokens, 0 to 1000000.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawPrice {
    /// Of input.
    #[schemars(range(min = 0.0, max = 1_000_000.0))]
    pub input: f64,
    /// Of output.
    #[schemars(range(min = 0.0, max = 1_000_000.0))]
    pub output: f64,
    /// Of input that was read from a cache; default that of input.
    #[serde(default)]
    #[schemars(range(min = 0.0, max = 1_000_000.0))]
    pub cached: Option<f64>,
}

/// `[budget]`.
#[derive(Debug, Clone, Copy, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawBudget {
    /// Input and output tokens of all sessions together in a day (UTC); default any number.
    pub tokens_per_day: Option<u64>,
    /// Cost of all sessions together in a day (UTC), in US dollars, at least 0; default any amount.
    #[schemars(range(min = 0.0))]
    pub cost_usd_per_day: Option<f64>,
    /// Tool calls that an agent may make in one turn; default any number.
    pub tool_calls_per_turn: Option<u64>,
}

/// `[[webhook]]`.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawWebhook {
    /// Where events are posted: http:// or https://.
    pub url: String,
    /// The types of events.
    pub events: Vec<String>,
    /// The variable of the server's environment that holds the secret events are signed with.
    pub secret_env: String,
}

/// `[debugger]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawDebugger {
    /// How long debugger events are kept, at least 1m; default for ever.
    pub keep: Option<HumanDuration>,
}

/// `[retention]`: durations of at least 1s, such as `"90d"`; default for ever.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawRetention {
    /// Of sessions that have ended or failed, with their logs and homes; their workspaces stay.
    pub sessions: Option<HumanDuration>,
    /// Of debugger events.
    pub debugger: Option<HumanDuration>,
    /// Of audit entries.
    pub audit: Option<HumanDuration>,
    /// Of usage records; those of the present day stay, because budgets count them.
    pub usage: Option<HumanDuration>,
}

/// `[log]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawLog {
    /// A `tracing` filter; default `info`.
    pub level: Option<String>,
    /// `text` (default) or `json`.
    pub format: Option<String>,
}

/// `[otlp]`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RawOtlp {
    /// The URL of an OpenTelemetry collector (OTLP over HTTP); default none.
    pub endpoint: Option<String>,
}
