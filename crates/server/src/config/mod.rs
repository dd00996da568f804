//! `oubliette.toml`: parsed strictly into [`raw`] structures, then resolved once into validated values.
//!
//! Sections with rules of their own are resolved in the file of their name. [`live_sections`]: which sections take effect
//! while the server runs.

pub(crate) mod clients;
mod cluster;
mod git;
mod kubernetes;
pub(crate) mod limits;
mod live_sections;
pub(crate) mod programs;
mod providers;
mod raw;
mod retention;
mod sandbox;
mod spending;
pub(crate) mod store;
mod upstreams;
mod webhooks;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use oubliette_egress::{ExternalService, ModelProvider};
use oubliette_home::HomeDir;
use oubliette_programs::InstallLimits;
use oubliette_protocol::{CatalogId, Error, Result, agent::check_env_name, duration::HumanDuration};
use oubliette_sandbox::ResourceLimits;
use oubliette_session::{PriceTable, RelayLimits, ServerBudget, SessionConfig};
use oubliette_store::{DatabaseUrl, StoreLocation};
use oubliette_tools::{TrustTable, TrustedResources};

use crate::webhooks::Webhook;
use clients::ClientSettings;
pub(crate) use cluster::ClusterConfig;
pub(crate) use git::{GitConfig, GitCredential};
pub(crate) use kubernetes::KubernetesConfig;
use limits::SessionShares;
pub(crate) use raw::RawConfig;
pub(crate) use retention::RetentionPeriods;
pub(crate) use sandbox::SandboxConfig;

/// The file written on the first run: every key, commented out, with its default and what it is for.
pub(crate) const TEMPLATE: &str = include_str!("template.toml");

/// The address the server listens on unless configured otherwise.
pub(crate) const DEFAULT_LISTEN: &str = "127.0.0.1:8080";

/// Looks up an environment variable; a function so that tests need not change the process's environment.
pub(crate) type EnvLookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The server's configuration, validated.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// `[server] listen`: the address the server listens on.
    pub listen: SocketAddr,
    /// The same as the file says it; `--listen` does not change it.
    pub(crate) configured_listen: SocketAddr,
    /// `[server] allowed_hosts`: host names, besides loopback, accepted in requests; lower case.
    pub allowed_hosts: Vec<String>,
    /// `[server] tls_cert` and `tls_key`; none: plain HTTP.
    pub tls: Option<TlsFiles>,
    /// `[server]`: limits of clients, and where they come from.
    pub(crate) clients: ClientSettings,
    /// `[store] url` or `OUBLIETTE_STORE_URL`: a PostgreSQL database; none: the file in the home.
    pub store_url: Option<DatabaseUrl>,
    /// `[cluster]`; none: this server uses its database alone.
    pub(crate) cluster: Option<ClusterConfig>,
    /// `[workspaces] dir`: the directory of projects; none: in the home.
    pub workspaces_dir: Option<PathBuf>,
    /// `[server] rate_limit`: how many requests a token may make.
    pub rate: RateLimit,
    /// `[server] mcp_session_idle`: an MCP session unused for this long is forgotten.
    pub mcp_session_idle: Duration,
    /// `[trust]`.
    pub trust: TrustConfig,
    /// `[relay]`.
    pub relay: RelayConfig,
    /// `[approval] timeout`: how long a call waits for a person to allow it.
    pub approval_timeout: Duration,
    /// `[switch] drain_timeout`: how long a running turn may take to end before a switch cancels it.
    pub drain_timeout: Duration,
    /// `[sandbox]`.
    pub sandbox: SandboxConfig,
    /// `[providers]`, with the keys read from the environment.
    pub providers: Vec<ModelProvider>,
    /// `[egress] allow`: private destinations that the proxy may reach.
    pub egress_allow: Vec<String>,
    /// `[upstreams]`, with the credentials read from the environment.
    pub upstreams: Vec<ExternalService>,
    /// `[git]`, with the passwords read from the environment.
    pub git: GitConfig,
    /// `[programs]`: the bounds of installations.
    pub programs: InstallLimits,
    /// `[session]`.
    pub session: SessionLimits,
    /// `[limits]`.
    pub limits: SessionShares,
    /// `[prices]`.
    pub(crate) prices: PriceTable,
    /// `[budget]`.
    pub(crate) budget: ServerBudget,
    /// `[[webhook]]`, with the secrets read from the environment.
    pub(crate) webhooks: Vec<Webhook>,
    /// `[retention]`.
    pub(crate) retention: RetentionPeriods,
    /// `[log]`.
    pub log: LogConfig,
    /// `[otlp] endpoint`: where traces are sent; none: nowhere.
    pub otlp: Option<String>,
    /// Whether to serve the tools of the MCP conformance suite. Set by `serve --test-fixtures`, not by the file.
    pub test_fixtures: bool,
}

/// The server's certificate and private key.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// PEM file with the certificate chain.
    pub cert: PathBuf,
    /// PEM file with the private key.
    pub key: PathBuf,
}

/// How many requests a token may make.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RateLimit {
    /// Sustained rate.
    pub per_second: u32,
    /// How many may come at once.
    pub burst: u32,
}

/// `[trust]`: what of the host sandboxes may reach.
#[derive(Debug, Clone, Default)]
pub struct TrustConfig {
    /// Host paths that may be mounted read-only.
    pub read_only: Vec<PathBuf>,
    /// Catalog entries that may run outside a sandbox.
    pub host_tools: Vec<CatalogId>,
    /// Variables of the server's environment that definitions may refer to.
    pub env: Vec<String>,
    /// Whether `network: "host"` is allowed.
    pub host_network: bool,
}

/// `[relay]`: timeouts of calls to callers' tools.
#[derive(Debug, Clone, Copy)]
pub struct RelayConfig {
    /// How long a caller may take to answer a tool call.
    pub caller_timeout: Duration,
    /// How long a disconnected caller may take to come back before its open calls fail.
    pub reconnect_grace: Duration,
}

/// `[session]`: timeouts and limits of sessions.
#[derive(Debug, Clone, Copy)]
pub struct SessionLimits {
    /// How long an idle session keeps its agent process.
    pub idle_sleep: Duration,
    /// How long an agent may take to start and answer `initialize`.
    pub start_timeout: Duration,
    /// How long one turn may take.
    pub turn_timeout: Duration,
    /// How many levels deep sessions may start further sessions.
    pub max_depth: u32,
    /// Maximum number of active sessions of a project.
    pub max_sessions: u32,
}

/// `[log]`: the server's own log.
#[derive(Debug, Clone)]
pub struct LogConfig {
    /// A `tracing` filter such as `info` or `oubliette=debug`.
    pub level: String,
    /// The format of log lines.
    pub format: LogFormat,
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object a line.
    Json,
}

impl ServerConfig {
    /// Reads a file; if it is missing, every key has its default.
    pub fn load(path: &Path, env: EnvLookup<'_>) -> Result<Self> {
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, &path.display().to_string(), env),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Self::parse("", "oubliette.toml", env),
            Err(e) => Err(Error::invalid(format!("{}: cannot be read: {e}", path.display()))),
        }
    }

    /// Parses a file's text; errors name `file`, the field and the reason.
    pub fn parse(text: &str, file: &str, env: EnvLookup<'_>) -> Result<Self> {
        let raw: RawConfig = toml::from_str(text).map_err(|e| syntax_error(text, file, &e))?;
        Self::resolve(raw, env).map_err(|e| Error::invalid(format!("{file}: {}", e.message)))
    }

    fn resolve(raw: RawConfig, env: EnvLookup<'_>) -> Result<Self> {
        let server = raw.server;
        let clients = ClientSettings::resolve(&server)?;
        let listen = parse_listen(server.listen.as_deref().unwrap_or(DEFAULT_LISTEN))
            .map_err(|e| field_error("server.listen", e.message))?;
        let tls = match (server.tls_cert, server.tls_key) {
            (Some(cert), Some(key)) => Some(TlsFiles { cert, key }),
            (None, None) => None,
            _ => {
                return Err(field_error(
                    "server.tls_cert",
                    "tls_cert and tls_key come together",
                ));
            }
        };
        let rate = match server.rate_limit {
            None => RateLimit {
                per_second: 10_000,
                burst: 20_000,
            },
            Some(r) if r.per_second == 0 || r.burst == Some(0) => {
                return Err(field_error(
                    "server.rate_limit",
                    "per_second and burst must be at least 1",
                ));
            }
            Some(r) => RateLimit {
                per_second: r.per_second,
                burst: r.burst.unwrap_or(r.per_second.saturating_mul(2)),
            },
        };
        for name in &raw.trust.env {
            check_env_name(name).map_err(|why| field_error("trust.env", format!("{name:?}: {why}")))?;
            if name == store::STORE_URL_VARIABLE {
                return Err(field_error(
                    "trust.env",
                    format!("{name} has the database's password and is never given to agents or tools"),
                ));
            }
        }
        let store_url = store::resolve(raw.store, env)?;
        let cluster = cluster::resolve(raw.cluster, store_url.as_ref(), env)?;
        if let Some(cluster) = &cluster
            && raw.trust.env.contains(&cluster.key_env)
        {
            return Err(field_error(
                "trust.env",
                format!(
                    "{} has the cluster key and is never given to agents or tools",
                    cluster.key_env
                ),
            ));
        }
        if let Some(dir) = raw.workspaces.dir.as_ref().filter(|dir| !dir.is_absolute()) {
            return Err(field_error(
                "workspaces.dir",
                format!("{} is not an absolute path", dir.display()),
            ));
        }
        for path in &raw.trust.read_only {
            if !path.is_absolute() {
                return Err(field_error(
                    "trust.read_only",
                    format!("{} is not an absolute path", path.display()),
                ));
            }
        }
        let sandbox = sandbox::resolve(raw.sandbox)?;
        let git = git::resolve(raw.git, env)?;
        let mut providers = Vec::new();
        for (name, raw) in raw.providers {
            providers.push(providers::resolve(&name, raw, env)?);
        }
        let mut upstreams = Vec::new();
        for (name, raw) in raw.upstreams {
            if providers.iter().any(|provider| provider.name == name) {
                return Err(field_error(
                    &format!("upstreams.{name}"),
                    format!(
                        "[providers.{name}] has the same name, and both are reached by it: choose another"
                    ),
                ));
            }
            upstreams.push(upstreams::resolve(&name, raw, env)?);
        }
        let format = match raw.log.format.as_deref() {
            None | Some("text") => LogFormat::Text,
            Some("json") => LogFormat::Json,
            Some(other) => {
                return Err(field_error(
                    "log.format",
                    format!("{other:?}: use \"text\" or \"json\""),
                ));
            }
        };
        Ok(Self {
            listen,
            configured_listen: listen,
            allowed_hosts: server
                .allowed_hosts
                .iter()
                .map(|h| h.to_ascii_lowercase())
                .collect(),
            tls,
            clients,
            store_url,
            cluster,
            workspaces_dir: raw.workspaces.dir,
            rate,
            mcp_session_idle: duration_or(server.mcp_session_idle, 3_600_000),
            trust: TrustConfig {
                read_only: raw.trust.read_only,
                host_tools: raw.trust.host_tools,
                env: raw.trust.env,
                host_network: raw.trust.host_network,
            },
            relay: RelayConfig {
                caller_timeout: duration_or(raw.relay.caller_timeout, 60_000),
                reconnect_grace: duration_or(raw.relay.reconnect_grace, 500),
            },
            approval_timeout: resolve_approval_timeout(raw.approval.timeout)?,
            drain_timeout: duration_or(raw.switch.drain_timeout, 5_000),
            sandbox,
            providers,
            egress_allow: raw.egress.allow,
            upstreams,
            git,
            programs: programs::resolve(raw.programs)?,
            session: SessionLimits {
                idle_sleep: duration_or(raw.session.idle_sleep, 600_000),
                start_timeout: duration_or(raw.session.start_timeout, 30_000),
                turn_timeout: duration_or(raw.session.turn_timeout, 3_600_000),
                max_depth: raw.session.max_depth.unwrap_or(3),
                max_sessions: raw.session.max_sessions.unwrap_or(50),
            },
            limits: SessionShares::resolve(&raw.limits)?,
            prices: spending::resolve_prices(raw.prices)?,
            budget: spending::resolve_budget(raw.budget)?,
            webhooks: webhooks::resolve(raw.webhook, env)?,
            retention: retention::resolve(raw.retention, raw.debugger.keep)?,
            log: LogConfig {
                level: raw.log.level.unwrap_or_else(|| "info".into()),
                format,
            },
            otlp: raw.otlp.endpoint,
            test_fixtures: false,
        })
    }

    /// Where the database of this home is.
    pub fn store_location(&self, home: &HomeDir) -> StoreLocation {
        match &self.store_url {
            Some(url) => StoreLocation::Postgres(url.clone()),
            None => StoreLocation::File(home.database_path()),
        }
    }

    /// The part of the configuration that the session manager takes.
    pub fn session_config(&self) -> SessionConfig {
        let rules = RelayLimits {
            call_timeout: self.relay.caller_timeout,
            reconnect_grace: self.relay.reconnect_grace,
            ..RelayLimits::default()
        };
        SessionConfig {
            relay: rules,
            approval_timeout: self.approval_timeout,
            drain_timeout: self.drain_timeout,
            turn_timeout: self.session.turn_timeout,
            idle_sleep: self.session.idle_sleep,
            initialize_timeout: self.session.start_timeout,
            // Opening a conversation is a part of the start; agents take longer for it than to answer at all.
            open_timeout: self
                .session
                .start_timeout
                .max(SessionConfig::default().open_timeout),
            max_depth: self.session.max_depth,
            max_sessions: self.session.max_sessions,
            session_buffer_bytes: self.limits.session_buffer_bytes,
            prices: self.prices.clone(),
            budget: self.budget,
            limits: ResourceLimits {
                memory_mb: Some(self.sandbox.memory_mb),
                cpus: Some(self.sandbox.cpus),
                pids: Some(self.sandbox.pids),
                workspace_mb: Some(self.sandbox.workspace_mb),
                ..ResourceLimits::default()
            },
            ..SessionConfig::default()
        }
    }
}

impl TrustConfig {
    /// The trust table that tools check against. It never reaches the home or the directory of its sockets.
    pub fn resolve(&self, home: &HomeDir) -> TrustedResources {
        let table = TrustTable {
            read_only: self.read_only.clone(),
            host_tools: self.host_tools.clone(),
            env: self.env.clone(),
            host_network: self.host_network,
        };
        table.resolve(&[home.root(), home.sockets_dir()])
    }
}

/// Parses `ADDR:PORT`; `:8080` and `localhost:8080` are 127.0.0.1.
pub(crate) fn parse_listen(text: &str) -> Result<SocketAddr> {
    let bad = || {
        Error::invalid(format!(
            "{text:?} is not an address to listen on: use one like \"127.0.0.1:8080\""
        ))
    };
    let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
    let port: u16 = port.parse().map_err(|_| bad())?;
    match host {
        "" | "localhost" => Ok(SocketAddr::from(([127, 0, 0, 1], port))),
        _ => text.parse().map_err(|_| bad()),
    }
}

/// The error of text that is not the file's format. It quotes the line, unless that may have a password in it.
fn syntax_error(text: &str, file: &str, error: &toml::de::Error) -> Error {
    let before = error
        .span()
        .map_or("", |span| text.get(..span.start).unwrap_or(""));
    let line = before.matches('\n').count();
    let quoted = error.to_string();
    let has_password = |line: &str| line.contains("://") && line.contains('@');
    match has_password(&quoted) || text.lines().nth(line).is_some_and(has_password) {
        true => Error::invalid(format!("{file}: line {}: {}", line + 1, error.message())),
        false => Error::invalid(format!("{file}: {}", quoted.trim_end())),
    }
}

/// The error of an invalid value of `field`.
fn field_error(field: &str, why: impl std::fmt::Display) -> Error {
    Error::invalid(format!("{field}: {why}"))
}

fn duration_or(given: Option<HumanDuration>, default_ms: u64) -> Duration {
    given.map_or(Duration::from_millis(default_ms), |s| s.0)
}

/// Resolves `[approval] timeout`: from a second to a month.
fn resolve_approval_timeout(given: Option<HumanDuration>) -> Result<Duration> {
    let timeout = duration_or(given, 10 * 60 * 1_000);
    match (Duration::from_secs(1)..=Duration::from_secs(30 * 24 * 3_600)).contains(&timeout) {
        true => Ok(timeout),
        false => Err(field_error(
            "approval.timeout",
            "must be 1s to 30d, such as \"10m\"",
        )),
    }
}

#[cfg(test)]
mod tests;
