//! `oubliette.toml`: read strictly, then resolved once into values that need no further checks.

pub mod raw;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use oubliette_egress::{AuthStyle, Provider};
use oubliette_home::Home;
use oubliette_protocol::{CatalogId, Error, Result, agent::env_name, duration::Span};
use oubliette_sandbox::{Level, Limits};
use oubliette_session::{Rules, SessionConfig};
use oubliette_tools::{Trust, TrustTable};
use secrecy::SecretString;

use raw::RawConfig;

/// The file a first run writes: every key with its default, and what it is for.
pub const TEMPLATE: &str = include_str!("template.toml");

/// Where the server listens when nothing says otherwise.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:8080";

/// The environment, behind a function so that tests need not touch the process's own.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The configuration, checked.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where the server listens.
    pub listen: SocketAddr,
    /// Host names besides loopback, lower case.
    pub allowed_hosts: Vec<String>,
    /// Certificate and key files.
    pub tls: Option<Tls>,
    /// Requests per token.
    pub rate: Rate,
    /// Idle time of an MCP session.
    pub mcp_session_idle: Duration,
    /// `[trust]`.
    pub trust: TrustConfig,
    /// `[relay]`.
    pub relay: RelayConfig,
    /// `[switch] drain_timeout`.
    pub drain_timeout: Duration,
    /// `[sandbox]`.
    pub sandbox: SandboxConfig,
    /// `[providers]`, keys read.
    pub providers: Vec<Provider>,
    /// `[egress] allow`.
    pub egress_allow: Vec<String>,
    /// `[session]`.
    pub session: SessionLimits,
    /// `[debugger] keep`: how long its events are kept; none: for ever.
    pub debugger_keep: Option<Duration>,
    /// `[log]`.
    pub log: LogConfig,
    /// `[otlp] endpoint`.
    pub otlp: Option<String>,
    /// Whether the conformance suite's tools are served. No file says so: see `doors::mcp::fixtures`.
    pub test_fixtures: bool,
}

/// Certificate and key files.
#[derive(Debug, Clone)]
pub struct Tls {
    /// PEM.
    pub cert: PathBuf,
    /// PEM.
    pub key: PathBuf,
}

/// Requests per token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Steady.
    pub per_second: u32,
    /// At once.
    pub burst: u32,
}

/// `[trust]`.
#[derive(Debug, Clone, Default)]
pub struct TrustConfig {
    /// Host paths.
    pub read_only: Vec<PathBuf>,
    /// Catalog entries.
    pub host_tools: Vec<CatalogId>,
    /// Variable names.
    pub env: Vec<String>,
    /// The host's network.
    pub host_network: bool,
}

/// `[relay]`.
#[derive(Debug, Clone, Copy)]
pub struct RelayConfig {
    /// How long a caller may take to answer.
    pub caller_timeout: Duration,
    /// How long it may take to come back.
    pub reconnect_grace: Duration,
}

/// `[sandbox]`.
#[derive(Debug, Clone)]
pub struct SandboxConfig {
    /// `local`.
    pub driver: String,
    /// The weakest isolation accepted.
    pub minimum: Level,
    /// MiB.
    pub memory_mb: u64,
    /// Processors.
    pub cpus: f64,
    /// Processes.
    pub pids: u64,
    /// MiB.
    pub workspace_mb: u64,
}

/// `[session]`.
#[derive(Debug, Clone, Copy)]
pub struct SessionLimits {
    /// How long an idle session keeps its agent.
    pub idle_sleep: Duration,
    /// How long an agent may take to start and answer.
    pub start_timeout: Duration,
    /// How long one turn may take.
    pub turn_timeout: Duration,
    /// How deep sessions may start sessions.
    pub max_depth: u32,
    /// Active sessions of a project.
    pub max_sessions: u32,
}

/// `[log]`.
#[derive(Debug, Clone)]
pub struct LogConfig {
    /// A `tracing` filter.
    pub level: String,
    /// How lines look.
    pub format: LogFormat,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

impl Config {
    /// Reads a file; a missing one is the defaults.
    pub fn load(path: &Path, env: Env<'_>) -> Result<Self> {
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, &path.display().to_string(), env),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Self::parse("", "oubliette.toml", env),
            Err(e) => Err(Error::invalid(format!("{}: cannot be read: {e}", path.display()))),
        }
    }

    /// Reads a text; errors name `file`, the field and the reason.
    pub fn parse(text: &str, file: &str, env: Env<'_>) -> Result<Self> {
        let raw: RawConfig = toml::from_str(text)
            .map_err(|e| Error::invalid(format!("{file}: {}", e.to_string().trim_end())))?;
        Self::resolve(raw, env).map_err(|e| Error::invalid(format!("{file}: {}", e.message)))
    }

    fn resolve(raw: RawConfig, env: Env<'_>) -> Result<Self> {
        let server = raw.server;
        let listen = parse_listen(server.listen.as_deref().unwrap_or(DEFAULT_LISTEN))
            .map_err(|e| at("server.listen", e.message))?;
        let tls = match (server.tls_cert, server.tls_key) {
            (Some(cert), Some(key)) => Some(Tls { cert, key }),
            (None, None) => None,
            _ => return Err(at("server.tls_cert", "tls_cert and tls_key come together")),
        };
        let rate = match server.rate_limit {
            None => Rate {
                per_second: 10_000,
                burst: 20_000,
            },
            Some(r) if r.per_second == 0 || r.burst == Some(0) => {
                return Err(at("server.rate_limit", "per_second and burst must be at least 1"));
            }
            Some(r) => Rate {
                per_second: r.per_second,
                burst: r.burst.unwrap_or(r.per_second.saturating_mul(2)),
            },
        };
        for name in &raw.trust.env {
            env_name(name).map_err(|why| at("trust.env", format!("{name:?}: {why}")))?;
        }
        for path in &raw.trust.read_only {
            if !path.is_absolute() {
                return Err(at(
                    "trust.read_only",
                    format!("{} is not an absolute path", path.display()),
                ));
            }
        }
        let sandbox = sandbox(raw.sandbox)?;
        let mut providers = Vec::new();
        for (name, raw) in raw.providers {
            providers.push(provider(&name, raw, env)?);
        }
        let format = match raw.log.format.as_deref() {
            None | Some("text") => LogFormat::Text,
            Some("json") => LogFormat::Json,
            Some(other) => return Err(at("log.format", format!("{other:?}: use \"text\" or \"json\""))),
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
            mcp_session_idle: span(server.mcp_session_idle, 3_600_000),
            trust: TrustConfig {
                read_only: raw.trust.read_only,
                host_tools: raw.trust.host_tools,
                env: raw.trust.env,
                host_network: raw.trust.host_network,
            },
            relay: RelayConfig {
                caller_timeout: span(raw.relay.caller_timeout, 60_000),
                reconnect_grace: span(raw.relay.reconnect_grace, 500),
            },
            drain_timeout: span(raw.switch.drain_timeout, 5_000),
            sandbox,
            providers,
            egress_allow: raw.egress.allow,
            session: SessionLimits {
                idle_sleep: span(raw.session.idle_sleep, 600_000),
                start_timeout: span(raw.session.start_timeout, 30_000),
                turn_timeout: span(raw.session.turn_timeout, 3_600_000),
                max_depth: raw.session.max_depth.unwrap_or(3),
                max_sessions: raw.session.max_sessions.unwrap_or(50),
            },
            debugger_keep: keep(raw.debugger.keep)?,
            log: LogConfig {
                level: raw.log.level.unwrap_or_else(|| "info".into()),
                format,
            },
            otlp: raw.otlp.endpoint,
            test_fixtures: false,
        })
    }
}

impl Config {
    /// What sessions need of it.
    pub fn sessions(&self) -> SessionConfig {
        let rules = Rules {
            timeout: self.relay.caller_timeout,
            grace: self.relay.reconnect_grace,
            ..Rules::default()
        };
        SessionConfig {
            relay: rules,
            drain_timeout: self.drain_timeout,
            turn_timeout: self.session.turn_timeout,
            idle_sleep: self.session.idle_sleep,
            initialize_timeout: self.session.start_timeout,
            max_depth: self.session.max_depth,
            max_sessions: self.session.max_sessions,
            limits: Limits {
                memory_mb: Some(self.sandbox.memory_mb),
                cpus: Some(self.sandbox.cpus),
                pids: Some(self.sandbox.pids),
                workspace_mb: Some(self.sandbox.workspace_mb),
                ..Limits::default()
            },
            ..SessionConfig::default()
        }
    }
}

impl TrustConfig {
    /// With the home it never reaches, nor its sockets where they lie elsewhere.
    pub fn resolve(&self, home: &Home) -> Trust {
        let table = TrustTable {
            read_only: self.read_only.clone(),
            host_tools: self.host_tools.clone(),
            env: self.env.clone(),
            host_network: self.host_network,
        };
        table.resolve(&[home.root(), home.sockets_dir()])
    }
}

/// `ADDR:PORT`, also `:8080` and `localhost:8080`.
pub fn parse_listen(text: &str) -> Result<SocketAddr> {
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

fn at(field: &str, why: impl std::fmt::Display) -> Error {
    Error::invalid(format!("{field}: {why}"))
}

fn span(given: Option<Span>, default_ms: u64) -> Duration {
    given.map_or(Duration::from_millis(default_ms), |s| s.0)
}

/// At least a minute: what runs now must be there to be looked at.
fn keep(given: Option<Span>) -> Result<Option<Duration>> {
    match given {
        Some(span) if span.0 < Duration::from_secs(60) => {
            Err(at("debugger.keep", "must be at least a minute, such as \"30d\""))
        }
        given => Ok(given.map(|span| span.0)),
    }
}

fn sandbox(raw: raw::RawSandbox) -> Result<SandboxConfig> {
    let driver = raw.driver.unwrap_or_else(|| "local".into());
    if driver != "local" {
        return Err(at(
            "sandbox.driver",
            format!("{driver:?} is not a driver here: use \"local\""),
        ));
    }
    let minimum = match raw.minimum.as_deref() {
        None | Some("namespaces") => Level::Namespaces,
        Some("landlock") => Level::Landlock,
        Some(other) => {
            return Err(at(
                "sandbox.minimum",
                format!("{other:?}: use \"namespaces\" or \"landlock\""),
            ));
        }
    };
    let cpus = raw.cpus.unwrap_or(2.0);
    if !(cpus.is_finite() && (0.01..=4096.0).contains(&cpus)) {
        return Err(at("sandbox.cpus", "must be between 0.01 and 4096"));
    }
    let positive = |field: &str, given: Option<u64>, default: u64| match given.unwrap_or(default) {
        0 => Err(at(field, "must be at least 1")),
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

fn provider(name: &str, raw: raw::RawProvider, env: Env<'_>) -> Result<Provider> {
    let mut provider = Provider::new(name, raw.base_url);
    provider.style = match raw.auth.as_deref() {
        None => provider.style,
        Some("anthropic") => AuthStyle::Anthropic,
        Some("gemini") => AuthStyle::Gemini,
        Some("bearer") => AuthStyle::Bearer,
        Some(other) => {
            return Err(at(
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

    fn parse(text: &str) -> Result<Config> {
        Config::parse(text, "oubliette.toml", &|name| {
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
    fn listen_addresses() {
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
