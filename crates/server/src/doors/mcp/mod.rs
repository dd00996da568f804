//! `/mcp`: MCP's streamable HTTP, four revisions on one endpoint.
//!
//! rmcp speaks the protocol. What it does not do is done here: who may ask, whose session a session id
//! is, malformed bodies, and events from the durable log.
//!
//! - [`listeners`]: stateful MCP sessions and what they hear.
//! - [`manager`]: rmcp's session manager with ours around it; [`push`]: the GET stream.
//! - [`handler`]: tools and levels; [`resources`]: sessions' logs.
//! - [`fixtures`]: what the conformance suite asks for, in servers under test only.

pub mod fixtures;
pub mod handler;
pub mod listeners;
pub mod manager;
pub mod push;
pub mod resources;

use std::sync::Arc;

use axum::{
    Extension,
    body::Body,
    extract::{Request, State},
    response::{IntoResponse as _, Response},
};
use http::{HeaderValue, Method, StatusCode, header};
use http_body_util::Full;
use rmcp::{
    model::ProtocolVersion,
    transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService},
};
use serde_json::json;

use super::{
    Door,
    access::{self, Takes},
    body::{self, BodyError},
    http::Doors,
    reply,
};
use crate::app::App;
use handler::Handler;
use manager::Manager;

/// The revisions spoken, oldest first.
pub const VERSIONS: &[ProtocolVersion] = &[
    ProtocolVersion::V_2025_03_26,
    ProtocolVersion::V_2025_06_18,
    ProtocolVersion::V_2025_11_25,
    ProtocolVersion::V_2026_07_28,
];

/// The header that names a stateful session.
pub const SESSION_ID: &str = "mcp-session-id";

/// How often a silent stream says that it is alive. With the socket's own time-out this bounds how long
/// a client that vanished is taken for present.
const KEEP_ALIVE: std::time::Duration = std::time::Duration::from_secs(10);

/// The endpoint.
#[derive(Clone)]
pub struct Endpoint {
    service: StreamableHttpService<Handler, Manager>,
    manager: Arc<Manager>,
}

impl Endpoint {
    /// Over a server.
    pub fn new(app: Arc<App>) -> Self {
        let manager = Arc::new(Manager::new(app.clone()));
        let config = StreamableHttpServerConfig::default()
            // Host and Origin are checked for every door in `http`.
            .disable_allowed_hosts()
            .disable_allowed_origins()
            .with_json_response(true)
            .with_sse_keep_alive(Some(KEEP_ALIVE))
            // Priming is the manager's: it knows who understands it.
            .with_sse_retry(None)
            .with_cancellation_token(app.stopped.child_token())
            .with_max_request_body_bytes(body::MOST);
        let service =
            StreamableHttpService::new(move || Ok(Handler::new(app.clone())), manager.clone(), config);
        Self { service, manager }
    }

    /// Ends idle sessions until the server stops.
    pub async fn reap(self) {
        self.manager.reap().await;
    }
}

/// Serves `/mcp`.
pub async fn serve(
    State(doors): State<Doors>,
    Extension(door): Extension<Door>,
    request: Request,
) -> Response {
    let app = &doors.app;
    let grant = match access::admit(app, door, request.headers(), Takes::Bearer).await {
        Ok(grant) => grant,
        Err(refused) => return refused,
    };
    let (mut parts, body) = request.into_parts();
    // A session id works for the token that opened the session and for no other.
    if let Some(id) = parts.headers.get(SESSION_ID) {
        let listener = id
            .to_str()
            .ok()
            .and_then(|id| app.listeners.get(id))
            .filter(|l| l.belongs_to(&grant));
        match listener {
            Some(listener) => listener.touch(),
            None => {
                return rpc_error(
                    StatusCode::NOT_FOUND,
                    -32001,
                    "there is no such MCP session; initialize a new one",
                );
            }
        }
    }
    let body = match parts.method {
        Method::POST => match body::read(&parts.headers, body).await {
            Ok(bytes) => bytes,
            Err(BodyError::TooLarge) => return reply::too_large(body::MOST),
            Err(BodyError::Broken) => {
                return rpc_error(StatusCode::BAD_REQUEST, -32700, "the body broke off");
            }
        },
        _ => bytes::Bytes::new(),
    };
    if parts.method == Method::POST
        && let Some((code, why)) = unreadable(&body)
    {
        return rpc_error(StatusCode::BAD_REQUEST, code, &why);
    }
    parts.extensions.insert(grant.clone());
    let method = parts.method.clone();
    let answer = doors
        .mcp
        .service
        .handle(http::Request::from_parts(parts, Full::new(body)))
        .await;
    if answer.status() == StatusCode::UNSUPPORTED_MEDIA_TYPE && !says_content_type(&answer) {
        return rpc_error(
            StatusCode::BAD_REQUEST,
            -32600,
            "this is not a JSON-RPC message of MCP",
        );
    }
    if let Some(id) = answer.headers().get(SESSION_ID).and_then(|v| v.to_str().ok()) {
        for idle in app.listeners.own(id, &grant) {
            doors.mcp.manager.end(&idle).await;
        }
    }
    let mut answer = answer.map(Body::new).into_response();
    if method == Method::DELETE && answer.status() == StatusCode::ACCEPTED {
        // Clients take 200 and 204 for done, and 202 for a failure.
        *answer.status_mut() = StatusCode::NO_CONTENT;
    }
    answer
}

/// What is wrong with a body that is not one JSON value, or is a batch.
fn unreadable(body: &[u8]) -> Option<(i64, String)> {
    if let Err(e) = serde_json::from_slice::<serde::de::IgnoredAny>(body) {
        return Some((-32700, format!("Parse error: {e}")));
    }
    let first = body.iter().find(|b| !b.is_ascii_whitespace());
    let batch = "batches are not supported: send one message a request";
    (first == Some(&b'[')).then(|| (-32600, batch.to_owned()))
}

/// rmcp answers 415 both to a wrong content type and to a body it cannot read; only the second is ours
/// to change, and it is the one that names no content type of its own.
fn says_content_type(answer: &http::Response<impl http_body::Body>) -> bool {
    http_body::Body::size_hint(answer.body()).exact() == Some(WRONG_CONTENT_TYPE.len() as u64)
}

const WRONG_CONTENT_TYPE: &str = "Unsupported Media Type: Content-Type must be application/json";

fn rpc_error(status: StatusCode, code: i64, message: &str) -> Response {
    let body = json!({ "jsonrpc": "2.0", "id": null, "error": { "code": code, "message": message } });
    let mut response = (status, body.to_string()).into_response();
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
