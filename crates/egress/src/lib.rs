//! The ways out of a sandbox through the server.
//!
//! A sandbox has no network and no key. What it has are Unix sockets, mounted into it, that end
//! here: one where model providers are asked ([`ModelGateway`]) and, if its agent may, one that is
//! an HTTP proxy ([`EgressProxy`]). Each is an object shared by the whole server and `serve`d once
//! a session, on that session's own listener; a listener nobody talks to costs one idle task.
//!
//! This crate is not a place for policy about who may have a socket: whoever mounts it decides. It
//! writes no log of its own and keeps no key longer than a request needs it.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod gateway;
pub mod limits;
pub mod provider;
pub mod proxy;

pub use gateway::{ModelGateway, ModelSink};
pub use limits::{GatewayLimits, ProxyLimits};
pub use provider::{AuthStyle, Provider};
pub use proxy::EgressProxy;
