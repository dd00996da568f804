//! The ways in. Each turns what comes into a [`Grant`](crate::auth::Grant) and an action, and the answer
//! back into its own words; none decides anything.
//!
//! - [`net`]: connections: TCP, TLS and the control socket, until the server stops.
//! - [`http`]: the router, and what every request passes first: its id, Host and Origin, the log.
//! - [`access`]: who asks: bearer, cookie or the control socket, and how often.
//! - [`mcp`]: `/mcp`. [`rest`]: `/api`. [`sse`]: event streams. [`files`]: workspaces' files.
//! - [`console`]: `/`. [`control`]: the socket that commands use. [`relay`]: the sockets in sandboxes. [`stdio`]: streams
//!   lent from there.
//! - [`body`], [`host`], [`reply`]: the small parts they share.

pub mod access;
pub mod body;
pub mod console;
pub mod control;
pub mod files;
pub mod host;
pub mod http;
pub mod mcp;
pub mod net;
pub mod openapi;
pub mod relay;
pub mod reply;
pub mod rest;
pub mod sse;
pub mod stdio;

use std::net::IpAddr;

/// Where a connection came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// The network.
    Network {
        /// The other end.
        from: IpAddr,
        /// Whether it is encrypted.
        tls: bool,
    },
    /// The control socket; the kernel says that the other end is the home's owner.
    Control,
}
