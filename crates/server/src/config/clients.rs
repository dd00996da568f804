//! The part of `[server]` that bounds clients: their connections, and which proxies may state a client's address.

use oubliette_protocol::Result;

use super::{field_error, raw::RawServer};
use crate::doors::trusted_proxies::TrustedProxies;

/// Limits of clients, and where they come from.
#[derive(Debug, Clone)]
pub(crate) struct ClientSettings {
    /// `[server] max_connections`: how many connections from the network there may be; one address has a quarter.
    pub max_connections: u32,
    /// `[server] max_mcp_sessions`: how many stateful MCP sessions there may be; one token has a quarter.
    pub max_mcp_sessions: u32,
    /// `[server] trusted_proxies`: reverse proxies whose statement of a client's address is used.
    pub trusted_proxies: TrustedProxies,
    /// `[server] secure_cookies`: whether login cookies are always `Secure`.
    pub secure_cookies: bool,
}

impl ClientSettings {
    pub(super) fn resolve(server: &RawServer) -> Result<Self> {
        let max_connections = bounded("server.max_connections", server.max_connections.unwrap_or(1024))?;
        let max_mcp_sessions = bounded("server.max_mcp_sessions", server.max_mcp_sessions.unwrap_or(4096))?;
        let trusted_proxies = TrustedProxies::parse(&server.trusted_proxies).map_err(|text| {
            field_error(
                "server.trusted_proxies",
                format!("{text:?} is not an address or a block: use \"127.0.0.1\" or \"10.0.0.0/8\""),
            )
        })?;
        Ok(Self {
            max_connections,
            max_mcp_sessions,
            trusted_proxies,
            secure_cookies: server.secure_cookies,
        })
    }
}

fn bounded(field: &str, value: u32) -> Result<u32> {
    match value {
        16..=1_000_000 => Ok(value),
        _ => Err(field_error(field, "must be between 16 and 1000000")),
    }
}

#[cfg(test)]
mod tests {
    use crate::config::ServerConfig;

    #[test]
    fn a_refusal_names_the_field() {
        for (text, field) in [
            ("max_connections = 15", "server.max_connections"),
            ("max_connections = 1000001", "server.max_connections"),
            ("max_mcp_sessions = 15", "server.max_mcp_sessions"),
            ("trusted_proxies = [\"proxy\"]", "server.trusted_proxies"),
            ("secure_cookies = \"yes\"", "secure_cookies"),
        ] {
            let text = format!("[server]\n{text}");
            let error = ServerConfig::parse(&text, "oubliette.toml", &|_| None).unwrap_err();
            assert!(error.message.contains(field), "{text}: {error}");
        }
    }
}
