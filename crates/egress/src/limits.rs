//! Every bound of both ways out, with its default.

use std::time::Duration;

/// Bounds of the model gateway. Those on requests are a session's own.
#[derive(Debug, Clone)]
pub struct GatewayLimits {
    /// The largest request body.
    pub request_bytes: u64,
    /// The largest response body.
    pub response_bytes: u64,
    /// Time to connect to a provider.
    pub connect: Duration,
    /// Time without a byte from a provider.
    pub idle: Duration,
    /// Time for a whole request.
    pub total: Duration,
    /// Requests a session may have open at once.
    pub concurrent: usize,
    /// Requests a session may make in a minute; `None`: any number.
    pub per_minute: Option<u32>,
    /// Requests a session may make at all; `None`: any number.
    pub per_session: Option<u64>,
    /// Connections a session may hold open.
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

/// Bounds of the HTTP proxy. Those on connections are a session's own.
#[derive(Debug, Clone)]
pub struct ProxyLimits {
    /// The largest request head.
    pub head_bytes: usize,
    /// Time for a client to send its request head.
    pub head: Duration,
    /// Time to resolve a name.
    pub resolve: Duration,
    /// Time to connect, for each address.
    pub connect: Duration,
    /// Time without a byte either way.
    pub idle: Duration,
    /// Time for a whole connection.
    pub total: Duration,
    /// Connections a session may hold open.
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
