//! The ways out of a sandbox through the server.
//!
//! A sandbox has no network and no key. What it has are Unix sockets, mounted into it, that end
//! here: one where model providers are asked ([`ModelGateway`]) and, if its agent may, one that is
//! an HTTP proxy ([`EgressProxy`]). Each is an object shared by the whole server and `serve`d once
//! a session, on that session's own listener; a listener nobody talks to costs one idle task.
//!
//! This crate is not a place for policy about who may have a socket: whoever mounts it decides. It
//! writes no log of its own and keeps no key longer than a request needs it.
//!
//! In the order data flows:
//!
//! - [`provider`]: a configured model provider, how its key is shown to it.
//! - [`paths`]: which requests are model calls, and where they go.
//! - [`headers`]: what of a request's headers may pass.
//! - [`gateway`]: the model gateway.
//! - [`address`]: which addresses are nobody's business from inside a sandbox.
//! - [`allow`]: `[egress] allow`, the exceptions.
//! - [`proxy`]: the HTTP proxy; [`tunnel`]: a connection out that notices when it is idle.
//! - [`limits`]: every bound, with its default; [`answer`]: the errors both give.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod address;
pub mod allow;
pub mod answer;
mod connections;
pub mod gateway;
mod headers;
pub mod limits;
pub mod paths;
pub mod provider;
pub mod proxy;
mod tunnel;
mod upstream;

pub use gateway::{ModelGateway, ModelSink};
pub use limits::{GatewayLimits, ProxyLimits};
pub use provider::{AuthStyle, Provider};
pub use proxy::EgressProxy;
