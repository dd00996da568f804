//! Network access of sandboxes, through the server: the model gateway and the HTTP proxy.
//!
//! A sandbox has no network and no key. Unix sockets mounted into it are served here: one for
//! requests to model providers ([`ModelGateway`]) and, if its agent has `network: "proxy"`, one that
//! is an HTTP proxy ([`EgressProxy`]). Each of the two is one object for the whole server, `serve`d
//! once a session on that session's own listener; an unused listener costs one idle task.
//!
//! This crate does not decide who gets a socket: the session that mounts it does. It writes no log
//! of requests itself ([`ModelSink`] receives them) and holds no key longer than a request needs it.
//!
//! In the order data flows:
//!
//! - [`provider`]: a configured model provider and how its key is sent.
//! - [`paths`]: which requests are model calls, and their URL at the provider.
//! - [`headers`]: which headers of a message are passed on.
//! - [`gateway`]: the model gateway; [`bodies`]: request and response bodies with size limits.
//! - [`address`]: which IP addresses a sandbox may not reach.
//! - [`allow_list`]: `[egress] allow`, the exceptions to that.
//! - [`proxy`]: the HTTP proxy; [`activity`]: closes idle connections.
//! - [`limits`]: every limit, with its default; [`connections`]: the accept loop of both;
//!   [`refusal`]: the error responses of both.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod activity;
mod address;
mod allow_list;
mod bodies;
mod connections;
mod gateway;
mod headers;
mod limits;
mod paths;
mod provider;
mod proxy;
mod refusal;

pub use gateway::{ModelGateway, ModelSink};
pub use limits::{GatewayLimits, ProxyLimits};
pub use provider::{AuthStyle, ModelProvider};
pub use proxy::EgressProxy;
