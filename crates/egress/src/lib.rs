//! Network access of sandboxes, through the server: model providers, services with a credential, and the HTTP proxy.
//!
//! A sandbox has no network and no key. Unix sockets mounted into it are served here: one for
//! requests to model providers ([`ModelGateway`]) and services ([`ServiceGateway`]) and, if its agent has `network: "proxy"`, one that
//! is an HTTP proxy ([`EgressProxy`]). Each of the two is one object for the whole server, `serve`d
//! once a session on that session's own listener; an unused listener costs one idle task.
//!
//! This crate does not decide who gets a socket: the session that mounts it does. It writes no log
//! of requests itself ([`ModelSink`] and [`EgressSink`] receive them) and holds no key longer than a request needs it.
//!
//! In the order data flows:
//!
//! - [`provider`]: a configured model provider and how its key is sent.
//! - [`paths`]: which requests are model calls, and their URL at the provider.
//! - [`headers`]: which headers of a message are passed on.
//! - [`gateway`]: the model gateway; [`bodies`]: request and response bodies with size limits;
//!   [`request_report`]: the record of each request; [`usage`]: what answers say they used.
//! - [`service`]: a configured service and how its credential is sent; [`service_path`]: which requests to it pass.
//! - [`service_gateway`]: forwards those; [`service_bodies`]: their bodies; [`form_method`]: finds a method in the body of a
//!   form; [`secret_masker`]: hides the credential in
//!   answers. [`http_clients`]: the HTTP clients of both gateways.
//! - [`address`]: which IP addresses a sandbox may not reach.
//! - [`allow_list`]: `[egress] allow`, the exceptions to that.
//! - [`proxy_client`]: whose connections a socket of the proxy carries, and where these may go.
//! - [`proxy`]: the HTTP proxy; [`activity`]: counts bytes and closes idle connections.
//! - [`limits`]: every limit, with its default; [`connections`]: the accept loop of both;
//!   [`refusal`]: the error responses of both. [`fuzzing`]: the fuzz target of requests.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod activity;
mod address;
mod allow_list;
mod bodies;
mod connections;
mod form_method;
mod fuzzing;
mod gateway;
mod headers;
mod http_clients;
mod limits;
mod paths;
mod provider;
mod proxy;
mod proxy_client;
mod refusal;
mod request_report;
mod secret_masker;
mod service;
mod service_bodies;
mod service_gateway;
mod service_path;
mod usage;

pub use allow_list::EgressAllowList;
pub use connections::SandboxListener;
#[doc(hidden)]
pub use fuzzing::fuzz_request;
pub use gateway::{ModelGateway, ProviderSet};
pub use limits::{GatewayLimits, ProxyLimits, ServiceLimits};
pub use provider::{AuthStyle, ModelProvider};
pub use proxy::{EgressProxy, OnRefusal};
pub use proxy_client::{EgressList, EgressRecord, EgressSink, ProxyClient};
pub use refusal::EgressRefusal;
pub use request_report::{ModelRequest, ModelSink};
pub use service::{ExternalService, ServiceAuth, ServiceRule};
pub use service_gateway::{ServiceClient, ServiceGateway, ServiceSet};
pub use usage::ModelApi;
