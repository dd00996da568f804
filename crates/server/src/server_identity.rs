//! What distinguishes this server from others: its id, since when it serves, and where.

use std::{net::SocketAddr, sync::OnceLock};

use jiff::Timestamp;
use oubliette_protocol::ServerId;

/// This server, as it tells others about itself.
#[derive(Debug)]
pub(crate) struct AdvertisedServer {
    /// New at every start.
    pub(crate) server_id: ServerId,
    /// When the server started.
    pub(crate) since: Timestamp,
    /// The base URL; empty until it listens, and for ever in a command that works without a server.
    address: OnceLock<String>,
}

impl AdvertisedServer {
    /// The identity of a server that starts now.
    pub(crate) fn generate() -> Self {
        Self {
            server_id: ServerId::generate(),
            since: Timestamp::now(),
            address: OnceLock::new(),
        }
    }

    /// Sets the base URL, when the server listens. Only the first one counts.
    pub(crate) fn set_address(&self, url: String) {
        let _ = self.address.set(url);
    }

    /// The base URL; absent as long as it does not listen.
    pub(crate) fn address(&self) -> Option<&str> {
        self.address.get().map(String::as_str)
    }
}

/// The base URL of a listening address, for clients on the same machine.
pub(crate) fn local_url(address: SocketAddr, has_tls: bool) -> String {
    let scheme = if has_tls { "https" } else { "http" };
    let host = match address.ip() {
        ip if ip.is_unspecified() => "localhost".to_owned(),
        ip if ip.is_ipv6() => format!("[{ip}]"),
        ip => ip.to_string(),
    };
    format!("{scheme}://{host}:{}", address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listening_address_becomes_a_url() {
        for (address, has_tls, url) in [
            ("127.0.0.1:8080", false, "http://127.0.0.1:8080"),
            ("0.0.0.0:443", true, "https://localhost:443"),
            ("[::1]:8080", false, "http://[::1]:8080"),
            ("[::]:8080", false, "http://localhost:8080"),
        ] {
            assert_eq!(local_url(address.parse().unwrap(), has_tls), url);
        }
    }
}
