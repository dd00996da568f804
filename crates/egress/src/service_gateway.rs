//! The service gateway: forwards a sandbox's requests to services of `[upstreams]`, with their credential.
//!
//! A request arrives on the socket of model requests as `/<service>/<path>`, without a credential. If the agent may use the
//! service and `allow` lets the request pass, it is sent on with the service's credential, and the answer is streamed back.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use arc_swap::ArcSwap;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::Body as _;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Incoming;
use oubliette_protocol::{Error, Result, debug::ServiceRequest};
use reqwest::Url;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use crate::{
    EgressSink, ExternalService, ServiceLimits,
    form_method::MethodFieldSearch,
    headers,
    http_clients::HttpClients,
    proxy_client::EgressReport,
    refusal::{EgressRefusal, ResponseBody, root_cause},
    secret_masker::SecretMasker,
    service_bodies::{ServiceReport, ServiceRequestBody, ServiceResponseBody},
    service_path::{ServicePath, check_query},
};

/// Whether some servers are told another method or path, or another credential, by this header than the request has.
fn is_overriding(name: &HeaderName) -> bool {
    let name = name.as_str();
    ["override", "original", "rewrite"]
        .iter()
        .any(|part| name.contains(part))
        || ["x-http-method", "private-token", "job-token", "deploy-token"].contains(&name)
}

/// Services that were checked.
#[derive(Debug)]
pub struct ServiceSet(Vec<Arc<ExternalService>>);

impl ServiceSet {
    /// Checks services: each by itself, and that no two have one name.
    pub fn check(services: Vec<ExternalService>) -> Result<Self> {
        for (i, service) in services.iter().enumerate() {
            service.check()?;
            if services[..i].iter().any(|before| before.name == service.name) {
                return Err(Error::invalid(format!(
                    "upstreams.{}: is configured twice",
                    service.name
                )));
            }
        }
        Ok(Self(services.into_iter().map(Arc::new).collect()))
    }
}

/// All configured services, shared by every session.
#[derive(Debug)]
pub struct ServiceGateway {
    services: ArcSwap<ServiceSet>,
    limits: ServiceLimits,
    clients: HttpClients,
}

impl ServiceGateway {
    /// Checks the services.
    pub fn new(services: Vec<ExternalService>, limits: ServiceLimits) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            services: ArcSwap::from_pointee(ServiceSet::check(services)?),
            clients: HttpClients::new(limits.connect, limits.idle),
            limits,
        }))
    }

    /// A service by its name.
    pub fn service(&self, name: &str) -> Option<Arc<ExternalService>> {
        let set = self.services.load();
        set.0.iter().find(|service| service.name == name).cloned()
    }

    /// Replaces the services. Requests that were sent on are not broken off.
    pub fn set_services(&self, services: ServiceSet) {
        self.services.store(Arc::new(services));
    }
}

/// The services as one agent may use them.
pub struct ServiceClient {
    gateway: Arc<ServiceGateway>,
    /// The names of the services it may use.
    names: ArcSwap<Vec<String>>,
    /// Where they are listed, for the answer to a refused request: `sandbox.upstreams in agents/x/agent.json`.
    setting: String,
    sink: Arc<dyn EgressSink>,
    open_requests: Arc<Semaphore>,
}

impl ServiceClient {
    /// A client that may use the services with these names.
    pub fn new(
        gateway: Arc<ServiceGateway>,
        names: Vec<String>,
        setting: String,
        sink: Arc<dyn EgressSink>,
    ) -> Arc<Self> {
        let most = gateway.limits.concurrent.clamp(1, Semaphore::MAX_PERMITS);
        Arc::new(Self {
            gateway,
            names: ArcSwap::from_pointee(names),
            setting,
            sink,
            open_requests: Arc::new(Semaphore::new(most)),
        })
    }

    /// Replaces the services it may use. Requests that were sent on are not broken off.
    pub fn set_names(&self, names: Vec<String>) {
        self.names.store(Arc::new(names));
    }

    /// The configured service that a request is for; none: it is for a model provider.
    pub(crate) fn service_of(&self, uri: &http::Uri) -> Option<Arc<ExternalService>> {
        self.gateway.service(ServicePath::service_name(uri))
    }

    /// Answers a request to this service.
    pub(crate) async fn handle_request(
        &self,
        service: &ExternalService,
        request: Request<Incoming>,
    ) -> Response<ResponseBody> {
        let url = &service.base_url;
        let (host, port) = (url.host_str().unwrap_or_default(), url.port_or_known_default());
        let mut report = ServiceReport {
            report: EgressReport::new(self.sink.clone(), host.to_owned(), port.unwrap_or(0)),
            sent: Arc::default(),
        };
        let path = request.uri().path().chars().filter(|c| !c.is_control());
        report.report.record.request = Some(ServiceRequest {
            upstream: service.name.clone(),
            method: request.method().as_str().chars().take(40).collect(),
            path: path.skip(service.name.len() + 1).take(200).collect(),
            status: 0,
        });
        match self.forward(service, request, &mut report).await {
            Ok((response, permit)) => self.answer(service, response, report, permit),
            Err(refusal) => {
                report.set_status(refusal.status);
                report.report.record.error = Some(refusal.message.clone());
                refusal.response()
            }
        }
    }

    async fn forward(
        &self,
        service: &ExternalService,
        request: Request<Incoming>,
        report: &mut ServiceReport,
    ) -> std::result::Result<(reqwest::Response, OwnedSemaphorePermit), EgressRefusal> {
        let limits = &self.gateway.limits;
        let rule = self.check(service, &request)?;
        report.report.allow(Some(rule));
        let permit = self.open_requests.clone().try_acquire_owned().map_err(|_| {
            let most = limits.concurrent;
            let message =
                format!("this session already has {most} requests to services open; wait for one to end");
            EgressRefusal::new(StatusCode::TOO_MANY_REQUESTS, "limit_exceeded", message)
        })?;
        if request.body().size_hint().lower() > limits.request_bytes {
            return Err(too_large(limits));
        }
        let url = service_url(service, &request)?;
        let mut passed = headers::to_provider(request.headers());
        let overriding: Vec<HeaderName> = passed
            .keys()
            .filter(|name| is_overriding(name))
            .cloned()
            .collect();
        for name in overriding {
            passed.remove(name);
        }
        // An answer that is compressed could not be searched for the credential.
        passed.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        service.authorise(&mut passed);
        let method = request.method().clone();
        let has_body = !request.body().is_end_stream();
        let search = self.method_field_search(service, &request);
        let has_method_field = Arc::new(AtomicBool::new(false));
        let mut body =
            ServiceRequestBody::new(request.into_body(), report.sent.clone(), limits.request_bytes);
        if let Some(search) = search {
            body = body.refuse_method_field(search, has_method_field.clone());
        }
        let mut outgoing = self
            .gateway
            .clients
            .get(&service.base_url)
            .map_err(|error| EgressRefusal::new(StatusCode::BAD_GATEWAY, "unavailable", error.message))?
            .request(method, url)
            .headers(passed);
        if has_body {
            outgoing = outgoing.body(reqwest::Body::wrap(body));
        }
        match tokio::time::timeout(limits.total, outgoing.send()).await {
            Ok(Ok(response)) => Ok((response, permit)),
            Ok(Err(_)) if has_method_field.load(Ordering::Acquire) => Err(method_in_form()),
            Ok(Err(_)) if report.sent.load(Ordering::Acquire) > limits.request_bytes => {
                Err(too_large(limits))
            }
            Ok(Err(error)) => Err(unreachable_service(&service.name, error)),
            Err(_) => Err(service_timeout(&service.name)),
        }
    }

    /// The search for a field that would change the request's method, unless `allow` lets each other method pass, too.
    fn method_field_search(
        &self,
        service: &ExternalService,
        request: &Request<Incoming>,
    ) -> Option<MethodFieldSearch> {
        let path = ServicePath::parse(request.uri()).ok()?;
        let is_allowed = |method: &Method| {
            let mut rules = service.allow.iter();
            rules.any(|rule| rule.allowing(method, &path.rest).is_some())
        };
        let all_are = [Method::PUT, Method::PATCH, Method::DELETE]
            .iter()
            .all(is_allowed);
        match all_are {
            true => None,
            false => MethodFieldSearch::of_request(request.method(), request.headers()),
        }
    }

    /// Checks that the agent may use the service, that the service has its credential, and that `allow` lets the request
    /// pass. Returns the entry that does.
    fn check(
        &self,
        service: &ExternalService,
        request: &Request<Incoming>,
    ) -> std::result::Result<String, EgressRefusal> {
        let name = &service.name;
        let forbidden = |message: String| EgressRefusal::new(StatusCode::FORBIDDEN, "not_allowed", message);
        if !self.names.load().contains(name) {
            return Err(forbidden(format!(
                "this agent may not use the service {name:?}: {} does not list it",
                self.setting
            )));
        }
        let path = ServicePath::parse(request.uri())?;
        check_query(request.uri().query().unwrap_or_default())?;
        let method = request.method();
        let mut rules = service.allow.iter();
        let Some(rule) = rules.find_map(|rule| rule.allowing(method, &path.rest)) else {
            let shown: String = path.rest.chars().take(200).collect();
            return Err(forbidden(format!(
                "{method} {shown} is not among what allow of [upstreams.{name}] in oubliette.toml lets pass"
            )));
        };
        if service.lacks_key() {
            let variable = service.api_key_env.as_deref().unwrap_or_default();
            return Err(EgressRefusal::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable",
                format!(
                    "the service {name:?} has no credential: set {variable} in the server's environment and start it again"
                ),
            ));
        }
        Ok(rule.as_str().to_owned())
    }

    /// The service's answer as the sandbox gets it.
    fn answer(
        &self,
        service: &ExternalService,
        mut response: reqwest::Response,
        mut report: ServiceReport,
        permit: OwnedSemaphorePermit,
    ) -> Response<ResponseBody> {
        let limits = &self.gateway.limits;
        report.set_status(response.status());
        let masker = SecretMasker::new(service.secret_forms());
        let mut answer = Response::new(());
        *answer.status_mut() = response.status();
        let location = redirect_target(service, &response);
        let given = std::mem::take(response.headers_mut());
        let mut passed = mask_headers(&masker, headers::from_provider(&given));
        if let Some(value) =
            location.and_then(|location| HeaderValue::from_bytes(&masked(&masker, location)).ok())
        {
            passed.insert(header::LOCATION, value);
        }
        *answer.headers_mut() = passed;
        let deadline = Instant::now() + limits.total;
        let body =
            ServiceResponseBody::new(response, masker, limits.response_bytes, deadline, report, permit);
        answer.map(|()| StreamBody::new(body).boxed_unsync())
    }
}

/// The URL of a request at the service.
fn service_url(
    service: &ExternalService,
    request: &Request<Incoming>,
) -> std::result::Result<Url, EgressRefusal> {
    let path = ServicePath::parse(request.uri())?.full_path(service.base_url.path());
    let mut url = service.base_url.clone();
    url.set_path(&path);
    url.set_query(request.uri().query().filter(|query| !query.is_empty()));
    // What was compared with `allow` is what is sent.
    match url.path() == path || path.is_empty() {
        true => Ok(url),
        false => Err(EgressRefusal::new(
            StatusCode::BAD_REQUEST,
            "invalid_argument",
            "the path has characters that must be escaped",
        )),
    }
}

/// Where a redirect leads, as the sandbox is told: a place at the service by its path here, so that the next request passes
/// this gateway too; another place as it stands, where the sandbox can go only by itself, without the credential.
fn redirect_target(service: &ExternalService, response: &reqwest::Response) -> Option<String> {
    let given = response.headers().get(header::LOCATION)?.to_str().ok()?;
    let target = response.url().join(given).ok()?;
    let base = &service.base_url;
    let beneath = target
        .path()
        .strip_prefix(base.path().trim_end_matches('/'))
        .filter(|rest| rest.is_empty() || rest.starts_with('/'));
    match beneath {
        Some(rest) if target.origin() == base.origin() => {
            let query = target
                .query()
                .map(|query| format!("?{query}"))
                .unwrap_or_default();
            Some(format!("/{}{rest}{query}", service.name))
        }
        _ => Some(target.into()),
    }
}

fn masked(masker: &SecretMasker, text: String) -> Vec<u8> {
    let mut bytes = text.into_bytes();
    masker.mask(&mut bytes);
    bytes
}

fn mask_headers(masker: &SecretMasker, headers: HeaderMap) -> HeaderMap {
    let mut passed = HeaderMap::with_capacity(headers.len());
    let mut last: Option<HeaderName> = None;
    for (name, value) in headers {
        // A further value of the same header comes without its name.
        last = name.or(last);
        let mut bytes = value.as_bytes().to_vec();
        masker.mask(&mut bytes);
        if let (Some(name), Ok(value)) = (&last, HeaderValue::from_bytes(&bytes)) {
            passed.append(name.clone(), value);
        }
    }
    passed
}

fn too_large(limits: &ServiceLimits) -> EgressRefusal {
    let most = limits.request_bytes >> 20;
    EgressRefusal::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        "limit_exceeded",
        format!("a request to a service may have {most} MiB"),
    )
}

fn method_in_form() -> EgressRefusal {
    EgressRefusal::new(
        StatusCode::BAD_REQUEST,
        "invalid_argument",
        "the form has a field by which some servers are told another method (_method): methods are not overridden; send \
         such a form uncompressed and without it",
    )
}

fn service_timeout(name: &str) -> EgressRefusal {
    EgressRefusal::new(
        StatusCode::GATEWAY_TIMEOUT,
        "timeout",
        format!("the service {name:?} did not answer in time"),
    )
}

/// The refusal for a request that could not be sent. It names the cause but not the service's address.
fn unreachable_service(name: &str, error: reqwest::Error) -> EgressRefusal {
    let error = error.without_url();
    if error.is_timeout() && !error.is_connect() {
        return service_timeout(name);
    }
    let cause = root_cause(&error);
    tracing::warn!(service = name, %error, cause = %cause, "request to a service failed");
    EgressRefusal::new(
        StatusCode::BAD_GATEWAY,
        "unavailable",
        format!("the service {name:?} cannot be reached: {cause}. Is base_url of [upstreams.{name}] right?"),
    )
}
