//! `oubliette.toml`: parsed strictly into [`raw`] structures, then resolved once into validated values.

pub(crate) mod raw;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use oubliette_egress::{AuthStyle, ModelProvider};
use oubliette_home::HomeDir;
use oubliette_protocol::{CatalogId, Error, Result, agent::check_env_name, duration::HumanDuration};
use oubliette_sandbox::{IsolationLevel, ResourceLimits};
use oubliette_session::{RelayLimits, SessionConfig};
use oubliette_tools::{Trust, TrustTable};
use secrecy::SecretString;

use raw::RawConfig;

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
    /// `[server] allowed_hosts`: host names, besides loopback, accepted in requests; lower case.
    pub allowed_hosts: Vec<String>,
    /// `[server] tls_cert` and `tls_key`; none: plain HTTP.
    pub tls: Option<TlsFiles>,
    /// `[server] rate_limit`: how many requests a token may make.
    pub rate: RateLimit,
    /// `[server] mcp_session_idle`: an MCP session unused for this long is forgotten.
    pub mcp_session_idle: Duration,
    /// `[trust]`.
    pub trust: TrustConfig,
    /// `[relay]`.
    pub relay: RelayConfig,
    /// `[switch] drain_timeout`: how long a running turn may take to end before a switch cancels it.
    pub drain_timeout: Duration,
    /// `[sandbox]`.
    pub sandbox: SandboxConfig,
    /// `[providers]`, with the keys read from the environment.
    pub providers: Vec<ModelProvider>,
    /// `[egress] allow`: private destinations that the proxy may reach.
    pub egress_allow: Vec<String>,
    /// `[session]`.
    pub session: SessionLimits,
    /// `[debugger] keep`: how long debugger events are kept; none: for ever.
    pub debugger_keep: Option<Duration>,
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

/// `[sandbox]`: the driver, and the default limits of a sandbox.
#[derive(Debug, Clone)]
pub struct SandboxConfig {
    /// The sandbox driver; always `local`.
    pub driver: String,
    /// The weakest isolation that sessions may start with.
    pub minimum: IsolationLevel,
    /// Memory of a sandbox, in MiB.
    pub memory_mb: u64,
    /// Processors of a sandbox, in cores.
    pub cpus: f64,
    /// Maximum number of processes in a sandbox.
    pub pids: u64,
    /// Maximum size of a workspace, in MiB.
    pub workspace_mb: u64,
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
        let raw: RawConfig = toml::from_str(text)
            .map_err(|e| Error::invalid(format!("{file}: {}", e.to_string().trim_end())))?;
        Self::resolve(raw, env).map_err(|e| Error::invalid(format!("{file}: {}", e.message)))
    }

    fn resolve(raw: RawConfig, env: EnvLookup<'_>) -> Result<Self> {
        let server = raw.server;
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
        }
        for path in &raw.trust.read_only {
            if !path.is_absolute() {
                return Err(field_error(
                    "trust.read_only",
                    format!("{} is not an absolute path", path.display()),
                ));
            }
        }
        let sandbox = resolve_sandbox(raw.sandbox)?;
        let mut providers = Vec::new();
        for (name, raw) in raw.providers {
            providers.push(resolve_provider(&name, raw, env)?);
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
            allowed_hosts: server
                .allowed_hosts
                .iter()
                .map(|h| h.to_ascii_lowercase())
                .collect(),
            tls,
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
            drain_timeout: duration_or(raw.switch.drain_timeout, 5_000),
            sandbox,
            providers,
            egress_allow: raw.egress.allow,
            session: SessionLimits {
                idle_sleep: duration_or(raw.session.idle_sleep, 600_000),
                start_timeout: duration_or(raw.session.start_timeout, 30_000),
                turn_timeout: duration_or(raw.session.turn_timeout, 3_600_000),
                max_depth: raw.session.max_depth.unwrap_or(3),
                max_sessions: raw.session.max_sessions.unwrap_or(50),
            },
            debugger_keep: resolve_debugger_keep(raw.debugger.keep)?,
            log: LogConfig {
                level: raw.log.level.unwrap_or_else(|| "info".into()),
                format,
            },
            otlp: raw.otlp.endpoint,
            test_fixtures: false,
        })
    }
}

impl ServerConfig {
    /// The part of the configuration that the session manager takes.
    pub fn session_config(&self) -> SessionConfig {
        let rules = RelayLimits {
            call_timeout: self.relay.caller_timeout,
            reconnect_grace: self.relay.reconnect_grace,
            ..RelayLimits::default()
        };
        SessionConfig {
            relay: rules,
            drain_timeout: self.drain_timeout,
            turn_timeout: self.session.turn_timeout,
            idle_sleep: self.session.idle_sleep,
            initialize_timeout: self.session.start_timeout,
            max_depth: self.session.max_depth,
            max_sessions: self.session.max_sessions,
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
    pub fn resolve(&self, home: &HomeDir) -> Trust {
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

/// The error of an invalid value of `field`.
fn field_error(field: &str, why: impl std::fmt::Display) -> Error {
    Error::invalid(format!("{field}: {why}"))
}

fn duration_or(given: Option<HumanDuration>, default_ms: u64) -> Duration {
    given.map_or(Duration::from_millis(default_ms), |s| s.0)
}

/// Resolves `[debugger] keep`: at least a minute, so that events of running sessions can still be read.
fn resolve_debugger_keep(given: Option<HumanDuration>) -> Result<Option<Duration>> {
    match given {
        Some(span) if span.0 < Duration::from_secs(60) => Err(field_error(
            "debugger.keep",
            "must be at least a minute, such as \"30d\"",
        )),
        given => Ok(given.map(|span| span.0)),
    }
}

fn resolve_sandbox(raw: raw::RawSandbox) -> Result<SandboxConfig> {
    let driver = raw.driver.unwrap_or_else(|| "local".into());
    if driver != "local" {
        return Err(field_error(
            "sandbox.driver",
            format!("{driver:?} is not a driver here: use \"local\""),
        ));
    }
    let minimum = match raw.minimum.as_deref() {
        None | Some("namespaces") => IsolationLevel::Namespaces,
        Some("landlock") => IsolationLevel::Landlock,
        Some(other) => {
            return Err(field_error(
                "sandbox.minimum",
                format!("{other:?}: use \"namespaces\" or \"landlock\""),
            ));
        }
    };
    let cpus = raw.cpus.unwrap_or(2.0);
    if !(cpus.is_finite() && (0.01..=4096.0).contains(&cpus)) {
        return Err(field_error("sandbox.cpus", "must be between 0.01 and 4096"));
    }
    let positive = |field: &str, given: Option<u64>, default: u64| match given.unwrap_or(default) {
        0 => Err(field_error(field, "must be at least 1")),
        n => Ok(n),
    };
    Ok(SandboxConfig {
        driver,
        minimum,
        memory_mb: positive("sandbox.memory_mb", raw.memory_mb, 2048)?,
        cpus,
        pids: positive("sandbox.pids", raw.pids, 512)?,
        workspace_mb: positive("sandbox.workspace_mb", raw.workspace_mb, 4096)?,
    })
}

fn resolve_provider(name: &str, raw: raw::RawProvider, env: EnvLookup<'_>) -> Result<ModelProvider> {
    let mut provider = ModelProvider::new(name, raw.base_url);
    provider.style = match raw.auth.as_deref() {
        None => provider.style,
        Some("anthropic") => AuthStyle::Anthropic,
        Some("gemini") => AuthStyle::Gemini,
        Some("bearer") => AuthStyle::Bearer,
        Some(other) => {
            return Err(field_error(
                &format!("providers.{name}.auth"),
                format!("{other:?}: use \"anthropic\", \"gemini\" or \"bearer\""),
            ));
        }
    };
    provider.api_key = raw
        .api_key_env
        .as_deref()
        .and_then(env)
        .filter(|k| !k.is_empty())
        .map(SecretString::from);
    provider.api_key_env = raw.api_key_env;
    provider.allow_paths = raw.allow_paths;
    Ok(provider)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<ServerConfig> {
        ServerConfig::parse(text, "oubliette.toml", &|name| {
            (name == "KEY").then(|| "secret".into())
        })
    }

    #[test]
    fn the_first_run_file_is_the_defaults() {
        let (template, empty) = (parse(TEMPLATE).unwrap(), parse("").unwrap());
        assert_eq!(format!("{template:?}"), format!("{empty:?}"));
        assert_eq!(empty.listen.to_string(), DEFAULT_LISTEN);
        assert_eq!(empty.relay.reconnect_grace, Duration::from_millis(500));
    }

    #[test]
    fn every_commented_key_of_the_first_run_file_is_a_real_one() {
        let text: String = TEMPLATE
            .lines()
            .map(|line| match line.strip_prefix("# ") {
                Some(rest) if rest.contains(" = ") && !rest.ends_with('.') || rest.starts_with('[') => rest,
                _ => line,
            })
            .map(|line| format!("{line}\n"))
            .collect();
        let config = parse(&text).unwrap();
        assert_eq!(config.providers.len(), 3);
        assert!(config.tls.is_some());
    }

    #[test]
    fn a_refusal_names_file_field_and_reason() {
        for (text, field) in [
            ("[server]\nlisen = \"x\"", "lisen"),
            ("[server]\nlisten = \"x\"", "server.listen"),
            ("[server]\ntls_cert = \"/a\"", "tls_key"),
            ("[server]\nrate_limit = { per_second = 0 }", "rate_limit"),
            ("[trust]\nread_only = [\"a\"]", "trust.read_only"),
            ("[trust]\nenv = [\"A B\"]", "trust.env"),
            ("[trust]\nhost_tools = [\"A\"]", "host_tools"),
            ("[relay]\ncaller_timeout = \"1 year\"", "caller_timeout"),
            ("[sandbox]\nminimum = \"some\"", "sandbox.minimum"),
            ("[sandbox]\ncpus = 0", "sandbox.cpus"),
            ("[providers.a]\n", "base_url"),
            ("[debugger]\nkeep = \"5s\"", "debugger.keep"),
            ("[log]\nformat = \"xml\"", "log.format"),
            ("x", "oubliette.toml"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.message.contains("oubliette.toml"), "{text}: {error}");
            assert!(error.message.contains(field), "{text}: {error}");
        }
    }

    #[test]
    fn a_providers_key_comes_from_the_environment_and_is_not_printed() {
        let config = parse("[providers.x]\nbase_url = \"http://h\"\napi_key_env = \"KEY\"").unwrap();
        assert!(config.providers[0].api_key.is_some());
        assert!(!format!("{config:?}").contains("secret"));
    }

    #[test]
    fn listen_addresses_are_parsed_or_refused() {
        assert_eq!(parse_listen("localhost:1").unwrap().to_string(), "127.0.0.1:1");
        assert_eq!(parse_listen(":1").unwrap().to_string(), "127.0.0.1:1");
        assert_eq!(parse_listen("[::1]:1").unwrap().to_string(), "[::1]:1");
        for bad in ["", "8080", "example.com:80", "127.0.0.1:99999"] {
            assert!(parse_listen(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,200}") {
            let _ = parse(&text);
            let _ = parse_listen(&text);
        }
    }
}
