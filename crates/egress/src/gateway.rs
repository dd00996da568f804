//! The model gateway: forwards a sandbox's model calls to the configured providers.
//!
//! A request arrives on a session's own socket as `/<provider>/<path>`, without a key. If it is a
//! model call it is sent on with the provider's key, and the response is streamed back.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, OnceLock, PoisonError, atomic::Ordering},
    time::Duration,
};

use http::{Method, Request, Response, StatusCode};
use http_body::Body as _;
use http_body_util::{BodyExt, StreamBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use jiff::Timestamp;
use oubliette_protocol::{Error, Result};
use reqwest::{Client, Url, redirect};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    GatewayLimits, ModelProvider,
    bodies::{LimitedRequestBody, ProviderResponseBody},
    connections, headers,
    paths::ModelRequestPath,
    refusal::{EgressRefusal, ResponseBody},
};

/// Receives a record of each request, for the debugger. Never given a secret.
pub trait ModelSink: Send + Sync {
    /// One request is over. `path` is without provider and query; `status` is what the sandbox got.
    fn model_request(&self, provider: &str, path: &str, status: u16, started: Timestamp, duration: Duration);
}

/// The gateway to all configured providers, shared by every session.
#[derive(Debug)]
pub struct ModelGateway {
    /// In the order they were configured.
    providers: Vec<(ModelProvider, Url)>,
    limits: GatewayLimits,
    /// For remote providers: through the operator's proxy, if the environment names one.
    client: OnceLock<Client>,
    /// For providers on this host's loopback, without a proxy.
    loopback_client: OnceLock<Client>,
}

/// The gateway as one session's socket serves it, with that session's counters.
struct SessionGateway {
    gateway: Arc<ModelGateway>,
    sink: Arc<dyn ModelSink>,
    open_requests: Arc<Semaphore>,
    counts: Mutex<RequestCounts>,
}

/// How many requests a session made, for its limits.
struct RequestCounts {
    total: u64,
    this_minute: u32,
    minute_start: Instant,
}

/// Reports a request to the sink when dropped: after the last byte, or when either side broke off.
pub(crate) struct RequestReport {
    sink: Arc<dyn ModelSink>,
    provider: String,
    path: String,
    status: u16,
    started: Timestamp,
    since: Instant,
}

impl Drop for RequestReport {
    fn drop(&mut self) {
        let duration = self.since.elapsed();
        self.sink
            .model_request(&self.provider, &self.path, self.status, self.started, duration);
    }
}

impl ModelGateway {
    /// Validates the providers. HTTP clients are built with the first request: reading the root
    /// certificates takes time and memory that a server without model requests need not spend.
    pub fn new(providers: Vec<ModelProvider>, limits: GatewayLimits) -> Result<Arc<Self>> {
        // The process has one default crypto provider. If it is set already, it is this one too.
        let _already = rustls::crypto::ring::default_provider().install_default();
        let mut checked: Vec<(ModelProvider, Url)> = Vec::with_capacity(providers.len());
        for provider in providers {
            let url = provider.check()?;
            if checked.iter().any(|(before, _)| before.name == provider.name) {
                return Err(Error::invalid(format!(
                    "the model provider {:?} is configured twice",
                    provider.name
                )));
            }
            checked.push((provider, url));
        }
        Ok(Arc::new(Self {
            providers: checked,
            limits,
            client: OnceLock::new(),
            loopback_client: OnceLock::new(),
        }))
    }

    /// The configured providers, in the order they were configured.
    pub fn providers(&self) -> impl Iterator<Item = &ModelProvider> {
        self.providers.iter().map(|(provider, _)| provider)
    }

    /// Serves one session's socket until `cancel`.
    pub async fn serve(
        self: Arc<Self>,
        listener: UnixListener,
        sink: Arc<dyn ModelSink>,
        cancel: CancellationToken,
    ) {
        let connections = self.limits.connections;
        let session = Arc::new(SessionGateway {
            open_requests: Arc::new(Semaphore::new(
                self.limits.concurrent.clamp(1, Semaphore::MAX_PERMITS),
            )),
            counts: Mutex::new(RequestCounts {
                total: 0,
                this_minute: 0,
                minute_start: Instant::now(),
            }),
            gateway: self,
            sink,
        });
        connections::serve(listener, connections, cancel, |stream| {
            session.clone().serve_connection(stream)
        })
        .await;
    }

    fn client_for(&self, url: &Url) -> Result<&Client> {
        let is_loopback = match url.host() {
            Some(url::Host::Domain(name)) => name == "localhost",
            Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
            Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
            None => false,
        };
        let cell = if is_loopback {
            &self.loopback_client
        } else {
            &self.client
        };
        if let Some(client) = cell.get() {
            return Ok(client);
        }
        let prepared = || {
            let builder = Client::builder()
                .redirect(redirect::Policy::none())
                .referer(false)
                .connect_timeout(self.limits.connect)
                .read_timeout(self.limits.idle)
                .pool_idle_timeout(Duration::from_secs(30))
                .pool_max_idle_per_host(8);
            if is_loopback { builder.no_proxy() } else { builder }
        };
        let built = build_client(prepared)?;
        Ok(cell.get_or_init(|| built))
    }
}

impl SessionGateway {
    async fn serve_connection(self: Arc<Self>, stream: UnixStream) {
        let service = service_fn(move |request| {
            let session = self.clone();
            async move { Ok::<_, Infallible>(session.handle_request(request).await) }
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(Duration::from_secs(60))
            .max_buf_size(64 << 10)
            .serve_connection(TokioIo::new(stream), service)
            .await;
        if let Err(error) = served {
            tracing::debug!(%error, "a sandbox's connection to the model gateway broke off");
        }
    }

    async fn handle_request(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        let mut report = RequestReport {
            sink: self.sink.clone(),
            provider: String::new(),
            path: truncate_untrusted(request.uri().path()),
            status: 0,
            started: oubliette_protocol::now(),
            since: Instant::now(),
        };
        match self.forward(request, &mut report).await {
            Ok((mut response, permit)) => {
                let limits = &self.gateway.limits;
                report.status = response.status().as_u16();
                let mut answer = Response::new(());
                *answer.status_mut() = response.status();
                *answer.headers_mut() = headers::from_provider(&std::mem::take(response.headers_mut()));
                let deadline = report.since + limits.total;
                let body =
                    ProviderResponseBody::new(response, limits.response_bytes, deadline, permit, report);
                answer.map(|()| StreamBody::new(body).boxed_unsync())
            }
            Err(refusal) => {
                report.status = refusal.status.as_u16();
                refusal.response()
            }
        }
    }

    async fn forward(
        &self,
        request: Request<Incoming>,
        report: &mut RequestReport,
    ) -> std::result::Result<(reqwest::Response, OwnedSemaphorePermit), EgressRefusal> {
        let limits = &self.gateway.limits;
        let path = ModelRequestPath::parse(request.uri())?;
        report.provider = truncate_untrusted(&path.provider);
        report.path = truncate_untrusted(&path.path());
        let Some((provider, base)) = self
            .gateway
            .providers
            .iter()
            .find(|(p, _)| p.name == path.provider)
        else {
            return Err(self.unknown_provider(&path.provider));
        };
        path.check(request.method(), &provider.allow_paths)?;
        let permit = self.admit()?;
        if request.body().size_hint().lower() > limits.request_bytes {
            return Err(too_large(limits));
        }

        let url = provider_url(base, &path, request.uri().query());
        let mut passed = headers::to_provider(request.headers());
        provider.authorise(&mut passed);
        let method = request.method().clone();
        let (body, over) = LimitedRequestBody::new(request.into_body(), limits.request_bytes);
        let mut outgoing = self
            .gateway
            .client_for(base)
            .map_err(|error| EgressRefusal::new(StatusCode::BAD_GATEWAY, "unavailable", error.message))?
            .request(method.clone(), url)
            .headers(passed);
        if method != Method::GET && method != Method::HEAD {
            outgoing = outgoing.body(reqwest::Body::wrap(body));
        }
        let response = match tokio::time::timeout_at(report.since + limits.total, outgoing.send()).await {
            Ok(Ok(response)) => response,
            Ok(Err(_)) if over.load(Ordering::Acquire) => return Err(too_large(limits)),
            Ok(Err(error)) => return Err(provider_unreachable(&provider.name, error)),
            Err(_) => return Err(provider_timeout(&provider.name)),
        };
        if response.status().is_redirection() {
            return Err(EgressRefusal::new(
                StatusCode::BAD_GATEWAY,
                "unavailable",
                format!(
                    "the provider {:?} answered with a redirect, which is not followed: set base_url of [providers.{}] \
                     to where it leads",
                    provider.name, provider.name
                ),
            ));
        }
        Ok((response, permit))
    }

    /// Counts the request against the session's limits, or refuses it.
    fn admit(&self) -> std::result::Result<OwnedSemaphorePermit, EgressRefusal> {
        let limits = &self.gateway.limits;
        let refuse =
            |message: String| EgressRefusal::new(StatusCode::TOO_MANY_REQUESTS, "limit_exceeded", message);
        let permit = self.open_requests.clone().try_acquire_owned().map_err(|_| {
            refuse(format!(
                "this session already has {} model requests open; wait for one to end",
                limits.concurrent
            ))
        })?;
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.minute_start.elapsed() >= Duration::from_secs(60) {
            (counts.minute_start, counts.this_minute) = (Instant::now(), 0);
        }
        if let Some(most) = limits.per_session.filter(|most| counts.total >= *most) {
            return Err(refuse(format!(
                "this session has used up its {most} model requests"
            )));
        }
        if let Some(most) = limits.per_minute.filter(|most| counts.this_minute >= *most) {
            return Err(refuse(format!(
                "this session made {most} model requests in a minute; wait a little"
            )));
        }
        counts.total += 1;
        counts.this_minute += 1;
        Ok(permit)
    }

    fn unknown_provider(&self, name: &str) -> EgressRefusal {
        let mut known: Vec<&str> = self.gateway.providers().map(|p| p.name.as_str()).collect();
        known.sort_unstable();
        let known = if known.is_empty() {
            "none".to_owned()
        } else {
            known.join(", ")
        };
        let message = format!(
            "there is no model provider {:?}; configured: {known}. [providers.<name>] in oubliette.toml adds one",
            truncate_untrusted(name)
        );
        EgressRefusal::new(StatusCode::NOT_FOUND, "not_found", message)
    }
}

/// Builds an HTTP client. On a host without root certificates it trusts none, so that providers over plain HTTP
/// still work.
fn build_client(builder: impl Fn() -> reqwest::ClientBuilder) -> Result<Client> {
    let built = builder().build().or_else(|error| {
        tracing::warn!(%error, "root certificates could not be loaded; model providers over https cannot be reached");
        builder().tls_certs_only([]).build()
    });
    built.map_err(|e| Error::unavailable("connections to model providers cannot be prepared").with_cause(e))
}

fn provider_url(base: &Url, path: &ModelRequestPath, query: Option<&str>) -> Url {
    let mut url = base.clone();
    url.set_path(&path.provider_path(base.path()));
    // At some providers a key in the query takes precedence over the header, so it is dropped.
    let secret = |name: &str| matches!(name, "key" | "api_key" | "api-key" | "access_token");
    let kept: Vec<(String, String)> = url::form_urlencoded::parse(query.unwrap_or_default().as_bytes())
        .filter(|(name, _)| !secret(&name.to_ascii_lowercase()))
        .map(|(name, value)| (name.into_owned(), value.into_owned()))
        .collect();
    if !kept.is_empty() {
        url.query_pairs_mut().extend_pairs(kept);
    }
    url
}

fn too_large(limits: &GatewayLimits) -> EgressRefusal {
    let most = limits.request_bytes >> 20;
    EgressRefusal::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        "limit_exceeded",
        format!("a model request may have {most} MiB"),
    )
}

fn provider_timeout(provider: &str) -> EgressRefusal {
    EgressRefusal::new(
        StatusCode::GATEWAY_TIMEOUT,
        "timeout",
        format!("the provider {provider:?} did not answer in time"),
    )
}

/// The refusal for a request that could not be sent. It names the cause but not the provider's address, which
/// the sandbox need not know.
fn provider_unreachable(provider: &str, error: reqwest::Error) -> EgressRefusal {
    let error = error.without_url();
    if error.is_timeout() && !error.is_connect() {
        return provider_timeout(provider);
    }
    let mut cause: &dyn std::error::Error = &error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    tracing::warn!(provider, %error, cause = %cause, "request to a model provider failed");
    EgressRefusal::new(
        StatusCode::BAD_GATEWAY,
        "unavailable",
        format!(
            "the provider {provider:?} cannot be reached: {cause}. Is base_url of [providers.{provider}] right?"
        ),
    )
}

/// The first 200 characters of text a client chose, without control characters, for logs and errors.
fn truncate_untrusted(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}
