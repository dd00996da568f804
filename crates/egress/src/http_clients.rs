//! The HTTP clients with which the server asks model providers and services.

use std::{sync::OnceLock, time::Duration};

use oubliette_protocol::{Error, Result};
use reqwest::{Client, Url, redirect};

/// Clients that follow no redirect, since that could take a credential to another host. Each is built with its first
/// request: reading the root certificates takes time and memory that a server without such requests need not spend.
#[derive(Debug)]
pub(crate) struct HttpClients {
    /// Time to connect.
    connect: Duration,
    /// Time without a byte.
    idle: Duration,
    /// For remote hosts: through the operator's proxy, if the environment names one.
    remote: OnceLock<Client>,
    /// For this host's loopback, without a proxy.
    loopback: OnceLock<Client>,
}

impl HttpClients {
    pub(crate) fn new(connect: Duration, idle: Duration) -> Self {
        // The process has one default crypto provider. If it is set already, it is this one too.
        let _already = rustls::crypto::ring::default_provider().install_default();
        Self {
            connect,
            idle,
            remote: OnceLock::new(),
            loopback: OnceLock::new(),
        }
    }

    /// The client for a URL.
    pub(crate) fn get(&self, url: &Url) -> Result<&Client> {
        let is_loopback = match url.host() {
            Some(url::Host::Domain(name)) => name == "localhost",
            Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
            Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
            None => false,
        };
        let cell = if is_loopback { &self.loopback } else { &self.remote };
        if let Some(client) = cell.get() {
            return Ok(client);
        }
        let prepared = || {
            let builder = Client::builder()
                .redirect(redirect::Policy::none())
                .referer(false)
                .connect_timeout(self.connect)
                .read_timeout(self.idle)
                .pool_idle_timeout(Duration::from_secs(30))
                .pool_max_idle_per_host(8);
            if is_loopback { builder.no_proxy() } else { builder }
        };
        let built = build_client(prepared)?;
        Ok(cell.get_or_init(|| built))
    }
}

/// Builds an HTTP client. On a host without root certificates it trusts none, so that plain HTTP still works.
fn build_client(builder: impl Fn() -> reqwest::ClientBuilder) -> Result<Client> {
    let built = builder().build().or_else(|error| {
        tracing::warn!(%error, "root certificates could not be loaded; nothing can be reached over https");
        builder().tls_certs_only([]).build()
    });
    built.map_err(|e| Error::unavailable("outgoing HTTP connections cannot be prepared").with_cause(e))
}
