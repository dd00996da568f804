//! How an MCP server is started or connected to.

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    agent::{NetworkAccess, check_absolute_path, check_env},
    egress::{self, HostPattern},
    program::ProgramSpec,
    strict::FieldError,
};

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

    pub(super) fn check(&self) -> Result<(), FieldError> {
        match self {
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

/// How a stdio server is started.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StdioTransport {
    /// Program of the host to run. Either this or `program`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub command: String,
    /// Pinned package to install and run. Either this or `command`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<ProgramSpec>,
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
    /// With `network: "proxy"`, the only hosts it reaches: `host`, `*.domain`, each with an optional `:port`; at most 256.
    /// `[]`: none. Missing: every public host. It opens nothing that `[egress] allow` keeps closed.
    #[serde(
        default,
        deserialize_with = "egress::some_list",
        skip_serializing_if = "Option::is_none"
    )]
    pub egress: Option<Vec<HostPattern>>,
    /// Absolute host paths that are visible in its sandbox, read-only; only those that `[trust] read_only` covers.
    #[serde(default, alias = "readOnly")]
    pub read_only: Vec<String>,
    /// Maximum size of the server's cache at `/cache`, in MiB, 1 to 65536. Default: 512.
    #[serde(
        default = "default_cache_mb",
        alias = "cacheMb",
        skip_serializing_if = "is_default_cache_mb"
    )]
    #[schemars(range(min = 1, max = 65_536))]
    pub cache_mb: u64,
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

impl StdioTransport {
    pub(super) fn check(&self) -> Result<(), FieldError> {
        match &self.program {
            Some(_) if !self.command.is_empty() => {
                return Err(FieldError::at(
                    "command",
                    "a server has a command or a program; keep one of them",
                ));
            }
            Some(program) => {
                program.check("program")?;
                if self.isolation == ServerIsolation::Host {
                    return Err(FieldError::at("isolation", "a program runs only in a sandbox"));
                }
            }
            None if self.command.is_empty() || self.command.contains('\0') => {
                return Err(FieldError::at(
                    "command",
                    "must name a program: give a `command`, or a package as `program`",
                ));
            }
            None => {}
        }
        if !(1..=65_536).contains(&self.cache_mb) {
            return Err(FieldError::at("cache_mb", "must be 1 to 65536 MiB"));
        }
        if let Some(i) = self.args.iter().position(|a| a.contains('\0')) {
            return Err(FieldError::at(format!("args[{i}]"), "must hold no NUL"));
        }
        check_env("env", &self.env)?;
        egress::check_list("egress", self.egress.as_deref(), self.network)?;
        if self.egress.is_some() && self.isolation == ServerIsolation::Host {
            return Err(FieldError::at(
                "egress",
                "works only in a sandbox, not with \"isolation\": \"host\"",
            ));
        }
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

fn default_cache_mb() -> u64 {
    512
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_default_cache_mb(mb: &u64) -> bool {
    *mb == default_cache_mb()
}
