//! The server's entries. Each door turns a request into a [`Grant`](crate::auth::Grant) and an action, and the
//! action's outcome into a response of its own protocol; none makes policy decisions.
//!
//! - [`net`]: accepts connections (TCP, TLS, control socket) until the server stops.
//! - [`http`]: the router, and the middleware of every request: request id, Host and Origin check, log.
//! - [`access`]: authenticates a request (bearer token, cookie or control socket) and limits its rate.
//! - [`mcp`]: `/mcp`. [`rest`]: `/api`, described by [`openapi`]. [`sse`]: event streams. [`files`]: workspaces' files.
//! - `/internal`, for the other servers of a cluster, is in [`hop::door`](crate::hop::door).
//! - [`console`]: `/`. [`control`]: the socket of the command line. [`relay`]: the sockets in sandboxes. [`handoff`]: stdin
//!   and stdout handed off by agents' clients. [`connections`]: which connections of these two doors are open.
//! - [`connection_limit`]: counts connections. [`head_timeout`]: ends those that send too slowly. [`trusted_proxies`]: who a
//!   client is behind a reverse proxy.
//! - [`body`]: reads request bodies. [`lingering_close`]: closes connections whose body was refused. [`allowed_hosts`]: the
//!   Host and Origin check. [`reply`]: responses they share.

pub(crate) mod access;
pub(crate) mod allowed_hosts;
pub(crate) mod body;
pub(crate) mod connection_limit;
mod connections;
pub(crate) mod console;
pub(crate) mod control;
pub(crate) mod files;
pub(crate) mod handoff;
pub(crate) mod head_timeout;
pub(crate) mod http;
pub(crate) mod lingering_close;
pub(crate) mod mcp;
pub(crate) mod net;
pub(crate) mod openapi;
pub(crate) mod relay;
pub(crate) mod reply;
pub(crate) mod rest;
pub(crate) mod sse;
pub(crate) mod token_budget;
pub(crate) mod trusted_proxies;

use std::net::IpAddr;

/// The kind of door a connection came in by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DoorKind {
    /// The network.
    Network {
        /// The client's address.
        peer: IpAddr,
        /// Whether it is encrypted.
        tls: bool,
    },
    /// The control socket; the peer has proved to be the home's owner.
    Control,
}
