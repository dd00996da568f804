//! Limits of gateways and proxy, with their defaults.

use std::time::Duration;

/// Limits of the model gateway. Those on requests and connections apply to each session.
#[derive(Debug, Clone)]
pub struct GatewayLimits {
    /// The largest request body, in bytes. Default: 32 MiB.
    pub request_bytes: u64,
    /// The largest response body, in bytes. Default: 256 MiB.
    pub response_bytes: u64,
    /// Time to connect to a provider. Default: 10 s.
    pub connect: Duration,
    /// Time without a byte from a provider. Default: 300 s.
    pub idle: Duration,
    /// Time for a whole request. Default: 1 h.
    pub total: Duration,
    /// Requests a session may have open at once. Default: 16.
    pub concurrent: usize,
    /// Requests a session may make in a minute; `None`: any number. Default: 600.
    pub per_minute: Option<u32>,
    /// Requests a session may make in all; `None`, the default: any number.
    pub per_session: Option<u64>,
    /// Connections a session may hold open. Default: 64.
    pub connections: usize,
}

impl Default for GatewayLimits {
    fn default() -> Self {
        Self {
            request_bytes: 32 << 20,
            response_bytes: 256 << 20,
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(300),
            total: Duration::from_secs(3600),
            concurrent: 16,
            per_minute: Some(600),
            per_session: None,
            connections: 64,
        }
    }
}

/// Limits of requests to services. The number of requests applies to each session.
#[derive(Debug, Clone)]
pub struct ServiceLimits {
    /// The largest request body, in bytes: a push of a git repository is one. Default: 1 GiB.
    pub request_bytes: u64,
    /// The largest response body, in bytes: a clone of a git repository is one. Default: 4 GiB.
    pub response_bytes: u64,
    /// Time to connect to a service. Default: 10 s.
    pub connect: Duration,
    /// Time without a byte from a service. Default: 300 s.
    pub idle: Duration,
    /// Time until a service answers, and time for its answer. Default: 1 h.
    pub total: Duration,
    /// Requests a session may have open at once. Default: 16.
    pub concurrent: usize,
}

impl Default for ServiceLimits {
    fn default() -> Self {
        Self {
            request_bytes: 1 << 30,
            response_bytes: 4 << 30,
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(300),
            total: Duration::from_secs(3600),
            concurrent: 16,
        }
    }
}

/// Limits of the HTTP proxy. The number of connections applies to each session.
#[derive(Debug, Clone)]
pub struct ProxyLimits {
    /// The largest request head, in bytes; at least 8 KiB is used. Default: 64 KiB.
    pub head_bytes: usize,
    /// Time for a client to send its request head. Default: 30 s.
    pub head: Duration,
    /// Time to resolve a name. Default: 10 s.
    pub resolve: Duration,
    /// Time to connect, for each address. Default: 10 s.
    pub connect: Duration,
    /// Time without a byte in either direction. Default: 300 s.
    pub idle: Duration,
    /// Time for a whole connection. Default: 1 h.
    pub total: Duration,
    /// Connections a session may hold open. Default: 128.
    pub connections: usize,
}

impl Default for ProxyLimits {
    fn default() -> Self {
        Self {
            head_bytes: 64 << 10,
            head: Duration::from_secs(30),
            resolve: Duration::from_secs(10),
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(300),
            total: Duration::from_secs(3600),
            connections: 128,
        }
    }
}
