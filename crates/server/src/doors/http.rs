//! The router, and the middleware every request passes.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Instant};

use axum::{
    Router,
    extract::{Request, State},
    middleware::{self, Next},
    response::Response,
    routing::{any, get, post},
};
use futures::FutureExt as _;
use http::{HeaderName, HeaderValue, Method, StatusCode, header};
use oubliette_protocol::Error;
use tokio::runtime::Handle;
use tracing::Instrument as _;

use super::{
    DoorKind,
    access::{self, AcceptedCredentials},
    allowed_hosts::AllowedHosts,
    console, files, mcp, reply, rest, sse,
};
use crate::{app::App, hop::door};

/// The HTTP doors of a server: the state shared by all request handlers.
#[derive(Clone)]
pub(crate) struct HttpDoors {
    /// The server.
    pub app: Arc<App>,
    /// The MCP endpoint.
    pub mcp: mcp::McpEndpoint,
    hosts: Arc<AllowedHosts>,
}

impl HttpDoors {
    /// The HTTP doors of a server that listens on `listen`.
    pub(crate) fn new(app: Arc<App>, listen: std::net::SocketAddr) -> Self {
        let hosts = Arc::new(AllowedHosts::new(&app.config.allowed_hosts, listen));
        app.live.set_hosts(hosts.clone());
        Self {
            mcp: mcp::McpEndpoint::new(app.clone()),
            app,
            hosts,
        }
    }

    /// The router of all paths. Requests must carry their [`DoorKind`] as an extension.
    pub(crate) fn router(&self) -> Router {
        Router::new()
            .route("/mcp", any(mcp::serve))
            .route("/api/tools/{name}", any(rest::call_tool))
            .route(
                "/api/openapi.json",
                get(rest::openapi).fallback(|| async { reply::method_not_allowed("GET") }),
            )
            .route(
                "/api/schemas/{file}",
                get(rest::file_schema).fallback(|| async { reply::method_not_allowed("GET") }),
            )
            .route(
                "/api/login",
                post(rest::login).fallback(|| async { reply::method_not_allowed("POST") }),
            )
            .route(
                "/api/logout",
                post(rest::logout).fallback(|| async { reply::method_not_allowed("POST") }),
            )
            .route(
                "/api/sessions/{id}/events",
                get(sse::session_events).fallback(|| async { reply::method_not_allowed("GET") }),
            )
            .route(
                "/api/debugger",
                get(sse::debugger_events).fallback(|| async { reply::method_not_allowed("GET") }),
            )
            .route("/api/workspaces/{id}/files", any(files::root))
            .route("/api/workspaces/{id}/files/", any(files::root))
            .route("/api/workspaces/{id}/files/{*path}", any(files::file))
            .route(
                "/api/workspaces/{id}/archive",
                get(files::archive)
                    .put(files::put_archive)
                    .fallback(|| async { reply::method_not_allowed("GET, PUT") }),
            )
            .route("/internal/{*path}", any(door::serve))
            .route("/health", get(health))
            .route("/ready", get(ready))
            .route("/metrics", get(metrics))
            .fallback(console::serve)
            .with_state(self.clone())
            .layer(middleware::from_fn_with_state(self.clone(), common_middleware))
    }
}

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Middleware of every request: request id, Host and Origin check, log, and a 500 response when a handler panics.
async fn common_middleware(State(doors): State<HttpDoors>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = request_id(&request);
    let door = request.extensions().get::<DoorKind>().copied();
    let path = request.uri().path().to_owned();
    let method = request.method().clone();
    let span = tracing::info_span!("request", id = %id.to_str().unwrap_or_default(), %method, path);
    let probe = matches!(path.as_str(), "/health" | "/ready");
    // Other servers address this one as `advertise` says, and prove by the cluster key that they are no web page.
    let from_peer = doors.app.hop.is_some() && door::is_internal(&path);
    let refused = match door {
        Some(DoorKind::Network { .. }) if !probe && !from_peer => {
            doors.hosts.check_request(request.uri(), request.headers()).err()
        }
        Some(_) => None,
        None => Some("the request came by no known door"),
    };
    let name = door_name(door, &path);
    let answer = async {
        match refused {
            Some(why) => reply::error(&Error::permission_denied(why)),
            None => AssertUnwindSafe(next.run(request))
                .catch_unwind()
                .await
                .unwrap_or_else(|panic| {
                    let text = panic.downcast_ref::<&str>().copied();
                    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
                    panic_response(text.unwrap_or("a handler panicked"))
                }),
        }
    };
    let mut response = answer.instrument(span.clone()).await;
    let status = response.status();
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, id);
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    doors.app.metrics.count_request(name, status.as_u16());
    let _inside = span.enter();
    let took_ms = started.elapsed().as_secs_f64() * 1000.0;
    match status.as_u16() {
        _ if probe => tracing::trace!(status = status.as_u16(), took_ms, "request answered"),
        500.. => tracing::warn!(status = status.as_u16(), took_ms, "request answered"),
        _ => tracing::debug!(status = status.as_u16(), took_ms, "request answered"),
    }
    response
}

/// The client's `X-Request-Id` if it has at most 64 letters, digits, `-`, `_` and `.`, else a new id.
fn request_id(request: &Request) -> HeaderValue {
    let plain = |v: &&HeaderValue| {
        let bytes = v.as_bytes();
        (1..=64).contains(&bytes.len())
            && bytes
                .iter()
                .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
    };
    match request.headers().get(REQUEST_ID).filter(plain) {
        Some(given) => given.clone(),
        None => {
            let made = uuid::Uuid::new_v4().simple().to_string();
            HeaderValue::from_str(&made).unwrap_or_else(|_| HeaderValue::from_static("-"))
        }
    }
}

fn panic_response(cause: &str) -> Response {
    let error = Error::internal(cause);
    tracing::error!(error = %error.for_log(), "request handler panicked");
    reply::error(&error)
}

fn door_name(door: Option<DoorKind>, path: &str) -> &'static str {
    match (door, path) {
        (Some(DoorKind::Control), _) => "control",
        (_, "/mcp") => "mcp",
        (_, "/health" | "/ready" | "/metrics") => "probe",
        (_, path) if path.starts_with("/api/") => "api",
        (_, path) if door::is_internal(path) => "internal",
        _ => "console",
    }
}

async fn health(State(doors): State<HttpDoors>) -> Response {
    reply::json(
        StatusCode::OK,
        &serde_json::json!({
            "status": "ok",
            "version": env!("CARGO_PKG_VERSION"),
            "uptime_s": doors.app.started.elapsed().as_secs(),
        }),
    )
}

async fn ready(State(doors): State<HttpDoors>) -> Response {
    let app = &doors.app;
    let store = app.store.healthy().await;
    let sandbox = app.sandbox.report().is_some_and(|r| r.ok);
    let stopping = app.stopping.is_cancelled();
    let word = |ok: bool| if ok { "ok" } else { "down" };
    let good = store.is_ok() && sandbox && !stopping;
    let (status, text) = match good {
        true => (StatusCode::OK, "ok"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
    };
    reply::json(
        status,
        &serde_json::json!({ "status": text, "store": word(store.is_ok()), "sandbox": word(sandbox), "stopping": stopping }),
    )
}

async fn metrics(State(doors): State<HttpDoors>, request: Request) -> Result<Response, Response> {
    let Some(door) = request.extensions().get::<DoorKind>().copied() else {
        return Err(reply::not_found("/metrics"));
    };
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return Err(reply::method_not_allowed("GET"));
    }
    access::authenticate(
        &doors.app,
        door,
        request.headers(),
        AcceptedCredentials::BearerOnly,
    )
    .await?;
    let gauges = doors.gauges().await;
    let body = doors.app.metrics.to_prometheus_text(&gauges);
    let headers = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    Ok(axum::response::IntoResponse::into_response((headers, body)))
}

impl HttpDoors {
    async fn gauges(&self) -> crate::metrics::MetricGauges {
        crate::metrics::MetricGauges {
            sessions: self.app.sessions.count_in_memory() as u64,
            mcp_sessions: self.app.mcp_sessions.len() as u64,
            streams: self.app.mcp_sessions.stream_count() as u64,
            callers: self.app.sessions.caller_load(),
            tasks: (Handle::current().metrics().num_alive_tasks() + self.app.call_threads.alive_tasks())
                as u64,
            providers: self.app.sessions.usage().by_provider(),
            uptime: self.app.started.elapsed().as_secs_f64(),
            database_bytes: match self.app.store.database_bytes().await {
                Some(bytes) => bytes,
                None => crate::metrics::database_bytes(&self.app.home.database_path()),
            },
            disk: crate::metrics::disk_space(self.app.home.root()),
            servers: match self.app.store.cluster() {
                Some(member) => member
                    .running_servers()
                    .await
                    .map_or(0, |servers| servers.len() as u64),
                None => 1,
            },
            server_address: self.app.store.cluster().map(|member| member.address().to_owned()),
        }
    }
}
