//! Model providers, asked on a sandbox's behalf.
//!
//! A request arrives on a session's own socket as `/<provider>/<path>`, without a key. It leaves
//! with the key, if it is a model call; the answer streams back as it comes.

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
use oubliette_protocol::{Error, Result};
use reqwest::{Client, Url, redirect};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    GatewayLimits, Provider,
    answer::{Body, Refusal},
    connections, headers,
    paths::Wanted,
    upstream::{Outgoing, Returning},
};

/// Who hears of each request: the debugger. Never given a secret.
pub trait ModelSink: Send + Sync {
    /// One request is over. `path` has no provider and no query; `status` is what the sandbox got.
    fn model_request(&self, provider: &str, path: &str, status: u16, duration: Duration);
}

/// All configured providers, shared by every session.
#[derive(Debug)]
pub struct ModelGateway {
    /// In the order they were configured.
    providers: Vec<(Provider, Url)>,
    limits: GatewayLimits,
    /// For providers elsewhere: through the operator's own proxy, if the environment names one.
    client: OnceLock<Client>,
    /// For providers on this machine.
    direct: OnceLock<Client>,
}

/// One session's share of the gateway.
struct Door {
    gateway: Arc<ModelGateway>,
    sink: Arc<dyn ModelSink>,
    open: Arc<Semaphore>,
    made: Mutex<Made>,
}

/// How many requests a session made.
struct Made {
    in_all: u64,
    this_minute: u32,
    minute: Instant,
}

/// Tells the sink when it is dropped: after the last byte, or when either side broke off.
pub(crate) struct Report {
    sink: Arc<dyn ModelSink>,
    provider: String,
    path: String,
    status: u16,
    since: Instant,
}

impl Drop for Report {
    fn drop(&mut self) {
        self.sink
            .model_request(&self.provider, &self.path, self.status, self.since.elapsed());
    }
}

impl ModelGateway {
    /// Checks the providers. Connections to them are prepared with the first request: reading the root
    /// certificates takes time and memory that a server without model requests need not spend.
    pub fn new(providers: Vec<Provider>, limits: GatewayLimits) -> Result<Arc<Self>> {
        // The process has one crypto provider; whoever was first has set the same one.
        let _already = rustls::crypto::ring::default_provider().install_default();
        let mut checked: Vec<(Provider, Url)> = Vec::with_capacity(providers.len());
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
            direct: OnceLock::new(),
        }))
    }

    /// The configured providers, in the order they were configured.
    pub fn providers(&self) -> impl Iterator<Item = &Provider> {
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
        let door = Arc::new(Door {
            open: Arc::new(Semaphore::new(
                self.limits.concurrent.clamp(1, Semaphore::MAX_PERMITS),
            )),
            made: Mutex::new(Made {
                in_all: 0,
                this_minute: 0,
                minute: Instant::now(),
            }),
            gateway: self,
            sink,
        });
        connections::serve(listener, connections, cancel, |stream| {
            door.clone().connection(stream)
        })
        .await;
    }

    fn client_for(&self, url: &Url) -> Result<&Client> {
        let here = match url.host() {
            Some(url::Host::Domain(name)) => name == "localhost",
            Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
            Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
            None => false,
        };
        let place = if here { &self.direct } else { &self.client };
        if let Some(client) = place.get() {
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
            if here { builder.no_proxy() } else { builder }
        };
        let made = client(prepared)?;
        Ok(place.get_or_init(|| made))
    }
}

impl Door {
    async fn connection(self: Arc<Self>, stream: UnixStream) {
        let service = service_fn(move |request| {
            let door = self.clone();
            async move { Ok::<_, Infallible>(door.answer(request).await) }
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

    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let mut report = Report {
            sink: self.sink.clone(),
            provider: String::new(),
            path: short(request.uri().path()),
            status: 0,
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
                let body = Returning::new(response, limits.response_bytes, deadline, permit, report);
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
        report: &mut Report,
    ) -> std::result::Result<(reqwest::Response, OwnedSemaphorePermit), Refusal> {
        let limits = &self.gateway.limits;
        let wanted = Wanted::parse(request.uri())?;
        report.provider = short(&wanted.provider);
        report.path = short(&wanted.path());
        let Some((provider, base)) = self
            .gateway
            .providers
            .iter()
            .find(|(p, _)| p.name == wanted.provider)
        else {
            return Err(self.unknown(&wanted.provider));
        };
        wanted.check(request.method(), &provider.allow_paths)?;
        let permit = self.admit()?;
        if request.body().size_hint().lower() > limits.request_bytes {
            return Err(too_large(limits));
        }

        let url = upstream_url(base, &wanted, request.uri().query());
        let mut passed = headers::to_provider(request.headers());
        provider.authorise(&mut passed);
        let method = request.method().clone();
        let (body, over) = Outgoing::new(request.into_body(), limits.request_bytes);
        let mut outgoing = self
            .gateway
            .client_for(base)
            .map_err(|error| Refusal::new(StatusCode::BAD_GATEWAY, "unavailable", error.message))?
            .request(method.clone(), url)
            .headers(passed);
        if method != Method::GET && method != Method::HEAD {
            outgoing = outgoing.body(reqwest::Body::wrap(body));
        }
        let response = match tokio::time::timeout_at(report.since + limits.total, outgoing.send()).await {
            Ok(Ok(response)) => response,
            Ok(Err(_)) if over.load(Ordering::Acquire) => return Err(too_large(limits)),
            Ok(Err(error)) => return Err(unreachable(&provider.name, error)),
            Err(_) => return Err(slow(&provider.name)),
        };
        if response.status().is_redirection() {
            return Err(Refusal::new(
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

    /// Counts the request against the session's limits.
    fn admit(&self) -> std::result::Result<OwnedSemaphorePermit, Refusal> {
        let limits = &self.gateway.limits;
        let refuse = |message: String| Refusal::new(StatusCode::TOO_MANY_REQUESTS, "limit_exceeded", message);
        let permit = self.open.clone().try_acquire_owned().map_err(|_| {
            refuse(format!(
                "this session already has {} model requests open; wait for one to end",
                limits.concurrent
            ))
        })?;
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.minute.elapsed() >= Duration::from_secs(60) {
            (made.minute, made.this_minute) = (Instant::now(), 0);
        }
        if let Some(most) = limits.per_session.filter(|most| made.in_all >= *most) {
            return Err(refuse(format!(
                "this session has used up its {most} model requests"
            )));
        }
        if let Some(most) = limits.per_minute.filter(|most| made.this_minute >= *most) {
            return Err(refuse(format!(
                "this session made {most} model requests in a minute; wait a little"
            )));
        }
        made.in_all += 1;
        made.this_minute += 1;
        Ok(permit)
    }

    fn unknown(&self, name: &str) -> Refusal {
        let mut known: Vec<&str> = self.gateway.providers().map(|p| p.name.as_str()).collect();
        known.sort_unstable();
        let known = if known.is_empty() {
            "none".to_owned()
        } else {
            known.join(", ")
        };
        let message = format!(
            "there is no model provider {:?}; configured: {known}. [providers.<name>] in oubliette.toml adds one",
            short(name)
        );
        Refusal::new(StatusCode::NOT_FOUND, "not_found", message)
    }
}

/// A host without root certificates can still serve providers over plain HTTP.
fn client(builder: impl Fn() -> reqwest::ClientBuilder) -> Result<Client> {
    let built = builder().build().or_else(|error| {
        tracing::warn!(%error, "no root certificates: model providers over https cannot be reached");
        builder().tls_certs_only([]).build()
    });
    built.map_err(|e| Error::unavailable("connections to model providers cannot be prepared").with_log(e))
}

fn upstream_url(base: &Url, wanted: &Wanted, query: Option<&str>) -> Url {
    let mut url = base.clone();
    url.set_path(&wanted.upstream_path(base.path()));
    // A key in the query would beat the header at some providers.
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

fn too_large(limits: &GatewayLimits) -> Refusal {
    let most = limits.request_bytes >> 20;
    Refusal::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        "limit_exceeded",
        format!("a model request may have {most} MiB"),
    )
}

fn slow(provider: &str) -> Refusal {
    Refusal::new(
        StatusCode::GATEWAY_TIMEOUT,
        "timeout",
        format!("the provider {provider:?} did not answer in time"),
    )
}

/// Says what failed, never where exactly: the address may be the operator's business.
fn unreachable(provider: &str, error: reqwest::Error) -> Refusal {
    let error = error.without_url();
    if error.is_timeout() && !error.is_connect() {
        return slow(provider);
    }
    let mut cause: &dyn std::error::Error = &error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    tracing::warn!(provider, %error, cause = %cause, "a model provider could not be asked");
    Refusal::new(
        StatusCode::BAD_GATEWAY,
        "unavailable",
        format!(
            "the provider {provider:?} cannot be reached: {cause}. Is base_url of [providers.{provider}] right?"
        ),
    )
}

/// The beginning of something a client chose, for logs and errors.
fn short(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}
