//! The model gateway: forwards a sandbox's model calls to the configured providers.
//!
//! A request arrives on a session's own socket as `/<provider>/<path>`, without a key. If it is a
//! model call it is sent on with the provider's key, and the response is streamed back.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use arc_swap::ArcSwap;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::Body as _;
use http_body_util::{BodyExt, StreamBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use oubliette_os::UntrustedStream;
use oubliette_protocol::{Error, ErrorCode, Result};
use reqwest::Url;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    GatewayLimits, ModelProvider, SandboxListener, ServiceClient,
    bodies::{LimitedRequestBody, ProviderResponseBody},
    connections, headers,
    http_clients::HttpClients,
    paths::ModelRequestPath,
    refusal::{EgressRefusal, ResponseBody, RetryAdvice, root_cause},
    request_report::{ModelSink, RequestReport},
    usage::{ModelApi, RequestReader},
};

/// Model providers that were checked, in the order they were configured.
#[derive(Debug)]
pub struct ProviderSet(Vec<(Arc<ModelProvider>, Url)>);

impl ProviderSet {
    /// Checks providers: each by itself, and that no two have one name.
    pub fn check(providers: Vec<ModelProvider>) -> Result<Self> {
        let mut checked: Vec<(Arc<ModelProvider>, Url)> = Vec::with_capacity(providers.len());
        for provider in providers {
            let url = provider.check()?;
            if checked.iter().any(|(before, _)| before.name == provider.name) {
                return Err(Error::invalid(format!(
                    "the model provider {:?} is configured twice",
                    provider.name
                )));
            }
            checked.push((Arc::new(provider), url));
        }
        Ok(Self(checked))
    }
}

/// The gateway to all configured providers, shared by every session.
#[derive(Debug)]
pub struct ModelGateway {
    providers: ArcSwap<ProviderSet>,
    limits: GatewayLimits,
    clients: HttpClients,
}

/// The gateway as one session's socket serves it, with that session's counters.
struct SessionGateway {
    gateway: Arc<ModelGateway>,
    sink: Arc<dyn ModelSink>,
    services: Option<Arc<ServiceClient>>,
    open_requests: Arc<Semaphore>,
    counts: Mutex<RequestCounts>,
}

/// How many requests a session made, for its limits.
struct RequestCounts {
    total: u64,
    this_minute: u32,
    minute_start: Instant,
}

impl ModelGateway {
    /// Validates the providers.
    pub fn new(providers: Vec<ModelProvider>, limits: GatewayLimits) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            providers: ArcSwap::from_pointee(ProviderSet::check(providers)?),
            clients: HttpClients::new(limits.connect, limits.idle),
            limits,
        }))
    }

    /// The configured providers, in the order they were configured.
    pub fn providers(&self) -> Vec<Arc<ModelProvider>> {
        let set = self.providers.load();
        set.0.iter().map(|(provider, _)| provider.clone()).collect()
    }

    /// Replaces the providers. Requests that were sent on are not broken off.
    pub fn set_providers(&self, providers: ProviderSet) {
        self.providers.store(Arc::new(providers));
    }

    /// Serves one session's socket until `cancel`.
    pub async fn serve(
        self: Arc<Self>,
        listener: impl Into<SandboxListener>,
        sink: Arc<dyn ModelSink>,
        cancel: CancellationToken,
    ) {
        self.serve_with_services(listener, sink, None, cancel).await;
    }

    /// Like [`ModelGateway::serve`], and requests whose path begins with the name of a service are for that.
    pub async fn serve_with_services(
        self: Arc<Self>,
        listener: impl Into<SandboxListener>,
        sink: Arc<dyn ModelSink>,
        services: Option<Arc<ServiceClient>>,
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
            services,
        });
        connections::serve(listener.into(), connections, cancel, |stream| {
            session.clone().serve_connection(stream)
        })
        .await;
    }
}

impl SessionGateway {
    async fn serve_connection(self: Arc<Self>, stream: UntrustedStream) {
        let service = service_fn(move |request| {
            let session = self.clone();
            async move { Ok::<_, Infallible>(session.route_request(request).await) }
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

    /// Answers a request to a service or to a model provider.
    async fn route_request(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        if let Some(services) = &self.services
            && let Some(service) = services.service_of(request.uri())
        {
            return services.handle_request(&service, request).await;
        }
        self.handle_request(request).await
    }

    async fn handle_request(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        let mut report = RequestReport::begin(self.sink.clone(), truncate_untrusted(request.uri().path()));
        let path = ModelRequestPath::parse(request.uri()).ok();
        let api = path.and_then(|path| ModelApi::of_request(request.method(), &path));
        match self.forward(request, &mut report).await {
            Ok((mut response, permit)) => {
                let limits = &self.gateway.limits;
                report.answered(response.status(), response.headers());
                let mut answer = Response::new(());
                *answer.status_mut() = response.status();
                *answer.headers_mut() = headers::from_provider(&std::mem::take(response.headers_mut()));
                let deadline = report.since() + limits.total;
                let body =
                    ProviderResponseBody::new(response, limits.response_bytes, deadline, permit, report);
                answer.map(|()| StreamBody::new(body).boxed_unsync())
            }
            Err(refusal) => {
                let refusal = self.end_retries(refusal, api).await;
                report.refused(refusal.status);
                refusal.response()
            }
        }
    }

    /// A refusal as the client gets it: the second of a turn that says not to ask again leaves no doubt about it.
    async fn end_retries(&self, refusal: EgressRefusal, api: Option<ModelApi>) -> EgressRefusal {
        if refusal.retry_advice == RetryAdvice::None {
            return refusal;
        }
        let error = match refusal.status {
            StatusCode::TOO_MANY_REQUESTS => Error::limit_exceeded(refusal.message.clone()),
            _ => Error::unavailable(refusal.message.clone()),
        };
        match self.sink.count_refused(&error).await {
            0 | 1 => refusal,
            // A used up budget is 429 however often it is asked; the session ends the turn of an agent that goes on.
            _ if refusal.status == StatusCode::TOO_MANY_REQUESTS => refusal,
            _ => refusal.repeated(api),
        }
    }

    async fn forward(
        &self,
        request: Request<Incoming>,
        report: &mut RequestReport,
    ) -> std::result::Result<(reqwest::Response, OwnedSemaphorePermit), EgressRefusal> {
        let limits = &self.gateway.limits;
        let path = ModelRequestPath::parse(request.uri())?;
        report.set_target(
            truncate_untrusted(&path.provider),
            truncate_untrusted(&path.path()),
        );
        let providers = self.gateway.providers.load_full();
        let Some((provider, base)) = providers.0.iter().find(|(p, _)| p.name == path.provider) else {
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
        let reader = match ModelApi::of_request(&method, &path) {
            Some(api) => {
                report.admit().await.map_err(|error| not_admitted(api, error))?;
                // An answer that is compressed could not be read as it passes.
                passed.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
                let reader = Arc::new(RequestReader::new(ModelApi::model_in_path(&path)));
                report.passed_on(api, reader.clone());
                Some(reader)
            }
            None => None,
        };
        let (body, over) = LimitedRequestBody::new(request.into_body(), limits.request_bytes, reader);
        let mut outgoing = self
            .gateway
            .clients
            .get(base)
            .map_err(|error| EgressRefusal::new(StatusCode::BAD_GATEWAY, "unavailable", error.message))?
            .request(method.clone(), url)
            .headers(passed);
        if method != Method::GET && method != Method::HEAD {
            outgoing = outgoing.body(reqwest::Body::wrap(body));
        }
        let response = match tokio::time::timeout_at(report.since() + limits.total, outgoing.send()).await {
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
            )
            .without_retry());
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
            let used_up = refuse(format!("this session has used up its {most} model requests"));
            return Err(used_up.without_retry());
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
        let providers = self.gateway.providers();
        let mut known: Vec<&str> = providers.iter().map(|p| p.name.as_str()).collect();
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

/// The refusal of a request that the session's sink did not admit.
fn not_admitted(api: ModelApi, error: Error) -> EgressRefusal {
    match error.code {
        ErrorCode::LimitExceeded => EgressRefusal::quota(api, &error.message),
        _ => EgressRefusal::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", error.message),
    }
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
    let cause = root_cause(&error);
    tracing::warn!(provider, %error, cause = %cause, "request to a model provider failed");
    let refusal = EgressRefusal::new(
        StatusCode::BAD_GATEWAY,
        "unavailable",
        format!(
            "the provider {provider:?} cannot be reached: {cause}. Is base_url of [providers.{provider}] right?"
        ),
    );
    // Nobody listens there: some agents would ask for minutes before they say so.
    match cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind) {
        Some(std::io::ErrorKind::ConnectionRefused) => refusal.without_retry(),
        _ => refusal,
    }
}

/// The first 200 characters of text a client chose, without control characters, for logs and errors.
fn truncate_untrusted(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}
