//! The router, and what every request passes first.

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
    Door,
    access::{self, Takes},
    console, files,
    host::Hosts,
    mcp, reply, rest, sse,
};
use crate::app::App;

/// What the doors share.
#[derive(Clone)]
pub struct Doors {
    /// The server.
    pub app: Arc<App>,
    /// The MCP endpoint.
    pub mcp: mcp::Endpoint,
    hosts: Arc<Hosts>,
}

impl Doors {
    /// Opens every door of a server that listens there.
    pub fn new(app: Arc<App>, listen: std::net::SocketAddr) -> Self {
        let hosts = Arc::new(Hosts::new(&app.config.allowed_hosts, listen));
        Self {
            mcp: mcp::Endpoint::new(app.clone()),
            app,
            hosts,
        }
    }

    /// The router. Requests must carry their [`Door`] as an extension.
    pub fn router(&self) -> Router {
        Router::new()
            .route("/mcp", any(mcp::serve))
            .route("/api/tools/{name}", any(rest::tool))
            .route(
                "/api/openapi.json",
                get(rest::openapi).fallback(|| async { reply::no_such_method("GET") }),
            )
            .route(
                "/api/login",
                post(rest::login).fallback(|| async { reply::no_such_method("POST") }),
            )
            .route(
                "/api/logout",
                post(rest::logout).fallback(|| async { reply::no_such_method("POST") }),
            )
            .route(
                "/api/sessions/{id}/events",
                get(sse::session).fallback(|| async { reply::no_such_method("GET") }),
            )
            .route(
                "/api/debugger",
                get(sse::debugger).fallback(|| async { reply::no_such_method("GET") }),
            )
            .route("/api/workspaces/{id}/files", any(files::root))
            .route("/api/workspaces/{id}/files/", any(files::root))
            .route("/api/workspaces/{id}/files/{*path}", any(files::file))
            .route(
                "/api/workspaces/{id}/archive",
                get(files::archive).fallback(|| async { reply::no_such_method("GET") }),
            )
            .route("/health", get(health))
            .route("/ready", get(ready))
            .route("/metrics", get(metrics))
            .fallback(console::serve)
            .with_state(self.clone())
            .layer(middleware::from_fn_with_state(self.clone(), front))
    }
}

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What every request passes: an id, the Host and Origin check, the log, the last resort for a panic.
async fn front(State(doors): State<Doors>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = request_id(&request);
    let door = request.extensions().get::<Door>().copied();
    let path = request.uri().path().to_owned();
    let method = request.method().clone();
    let span = tracing::info_span!("request", id = %id.to_str().unwrap_or_default(), %method, path);
    let probe = matches!(path.as_str(), "/health" | "/ready");
    let refused = match door {
        Some(Door::Network { .. }) if !probe => doors.hosts.accepts(request.uri(), request.headers()).err(),
        Some(_) => None,
        None => Some("the connection is of no known kind"),
    };
    let name = door_name(door, &path);
    request.extensions_mut().insert(RequestId(id.clone()));
    let answer = async {
        match refused {
            Some(why) => reply::error(&Error::permission_denied(why)),
            None => AssertUnwindSafe(next.run(request))
                .catch_unwind()
                .await
                .unwrap_or_else(|panic| {
                    let said = panic.downcast_ref::<&str>().copied();
                    let said = said.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
                    reply_to_internal(said.unwrap_or("a handler panicked"))
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
    doors.app.metrics.request(name, status.as_u16());
    let _inside = span.enter();
    let took_ms = started.elapsed().as_secs_f64() * 1000.0;
    match status.as_u16() {
        _ if probe => tracing::trace!(status = status.as_u16(), took_ms, "answered"),
        500.. => tracing::warn!(status = status.as_u16(), took_ms, "answered"),
        _ => tracing::debug!(status = status.as_u16(), took_ms, "answered"),
    }
    response
}

/// A request's id, for whoever logs about it.
#[derive(Debug, Clone)]
pub struct RequestId(pub HeaderValue);

/// The id a client gave, if it is a plain one, else a new one.
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

fn reply_to_internal(cause: &str) -> Response {
    let error = Error::internal(cause);
    tracing::error!(error = %error.for_log(), "panic");
    reply::error(&error)
}

fn door_name(door: Option<Door>, path: &str) -> &'static str {
    match (door, path) {
        (Some(Door::Control), _) => "control",
        (_, "/mcp") => "mcp",
        (_, "/health" | "/ready" | "/metrics") => "probe",
        (_, path) if path.starts_with("/api/") => "api",
        _ => "console",
    }
}

async fn health(State(doors): State<Doors>) -> Response {
    reply::json(
        StatusCode::OK,
        &serde_json::json!({
            "status": "ok",
            "version": env!("CARGO_PKG_VERSION"),
            "uptime_s": doors.app.started.elapsed().as_secs(),
        }),
    )
}

async fn ready(State(doors): State<Doors>) -> Response {
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

async fn metrics(State(doors): State<Doors>, request: Request) -> Response {
    let Some(door) = request.extensions().get::<Door>().copied() else {
        return reply::no_such_path("/metrics");
    };
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return reply::no_such_method("GET");
    }
    if let Err(refused) = access::admit(&doors.app, door, request.headers(), Takes::Bearer).await {
        return refused;
    }
    let gauges = doors.gauges().await;
    let body = doors.app.metrics.text(&gauges);
    let headers = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    axum::response::IntoResponse::into_response((headers, body))
}

impl Doors {
    async fn gauges(&self) -> crate::metrics::Gauges {
        crate::metrics::Gauges {
            sessions: self.app.sessions.count_in_memory() as u64,
            mcp_sessions: self.app.listeners.len() as u64,
            streams: self.app.listeners.streams() as u64,
            callers: self.app.sessions.caller_load(),
            tasks: (Handle::current().metrics().num_alive_tasks() + self.app.threads.tasks()) as u64,
            uptime: self.app.started.elapsed().as_secs_f64(),
        }
    }
}
