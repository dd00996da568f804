//! `/mcp`: MCP's streamable HTTP, four revisions on one endpoint.
//!
//! rmcp implements the protocol. What it does not do is done here: authentication, the check that a session id belongs
//! to the token that uses it, responses to malformed bodies, and events from the durable log.
//!
//! - [`mcp_sessions`]: stateful MCP sessions, their owners and the logs they subscribe to.
//! - [`session_manager`]: wraps rmcp's session manager. [`event_stream`]: the events of a GET stream.
//! - [`handler`]: the MCP methods. [`approval_prompts`]: asks a client's user about calls that wait for approval;
//!   [`approval_question`]: how one is asked about. [`resources`]: sessions' logs as resources.
//! - [`fixtures`]: tools of the MCP conformance suite, in servers under test only.

pub(crate) mod approval_prompts;
mod approval_question;
pub(crate) mod event_stream;
pub(crate) mod fixtures;
pub(crate) mod handler;
pub(crate) mod mcp_sessions;
pub(crate) mod resources;
pub(crate) mod session_manager;

use std::sync::Arc;

use axum::{
    Extension,
    body::Body,
    extract::{Request, State},
    response::{IntoResponse as _, Response},
};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use http_body_util::Full;
use oubliette_handoff::progress::Heartbeat;
use oubliette_protocol::{OverBudget, ServerId};
use rmcp::{
    model::ProtocolVersion,
    transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService},
};
use serde_json::json;

use super::{
    DoorKind,
    access::{self, AcceptedCredentials},
    body::{self, BodyError, RequestBody},
    http::HttpDoors,
    reply,
};
use crate::{app::App, auth::Grant, hop::proxy::ProxiedMcp};
use handler::McpHandler;
use session_manager::McpSessionManager;

/// The supported revisions of MCP, oldest first.
pub(crate) const PROTOCOL_VERSIONS: &[ProtocolVersion] = &[
    ProtocolVersion::V_2025_03_26,
    ProtocolVersion::V_2025_06_18,
    ProtocolVersion::V_2025_11_25,
    ProtocolVersion::V_2026_07_28,
];

/// The header that carries a stateful MCP session's id.
pub(crate) const SESSION_ID_HEADER: &str = "mcp-session-id";

/// The media type of JSON.
const JSON: &str = "application/json";

/// How often a stream without messages sends a comment. With the socket's own timeout this bounds how long a client
/// that vanished counts as present.
const KEEP_ALIVE: std::time::Duration = std::time::Duration::from_secs(10);

/// The `/mcp` endpoint: rmcp's HTTP service with our session manager.
#[derive(Clone)]
pub(crate) struct McpEndpoint {
    service: StreamableHttpService<McpHandler, McpSessionManager>,
    manager: Arc<McpSessionManager>,
}

impl McpEndpoint {
    /// The endpoint of a server.
    pub(crate) fn new(app: Arc<App>) -> Self {
        let manager = Arc::new(McpSessionManager::new(app.clone()));
        let config = StreamableHttpServerConfig::default()
            // Host and Origin are checked for all doors in `http`.
            .disable_allowed_hosts()
            .disable_allowed_origins()
            .with_json_response(true)
            .with_sse_keep_alive(Some(KEEP_ALIVE))
            // The session manager sends priming events itself: it knows which clients understand them.
            .with_sse_retry(None)
            .with_cancellation_token(app.stopped.child_token())
            .with_max_request_body_bytes(body::MAX_BODY_BYTES);
        let heartbeat = Heartbeat::default();
        let new_handler = move || Ok(McpHandler::new(app.clone(), heartbeat.clone()));
        let service = StreamableHttpService::new(new_handler, manager.clone(), config);
        Self { service, manager }
    }

    /// Closes idle MCP sessions until the server stops.
    pub(crate) async fn close_idle_sessions(self) {
        self.manager.close_idle_sessions().await;
    }
}

/// Serves `/mcp`.
pub(crate) async fn serve(
    State(doors): State<HttpDoors>,
    Extension(door): Extension<DoorKind>,
    request: Request,
) -> Response {
    let app = &doors.app;
    let grant =
        match access::authenticate(app, door, request.headers(), AcceptedCredentials::BearerOnly).await {
            Ok(grant) => grant,
            Err(refused) => return refused,
        };
    match Box::pin(pass_on(&doors, &grant, request)).await {
        Ok(request) => serve_here(&doors, grant, request).await,
        Err(response) => response,
    }
}

/// Passes a request on if its MCP session is at another server of the cluster; the error is the response. Else returns the
/// request.
async fn pass_on(doors: &HttpDoors, grant: &Grant, request: Request) -> Result<Request, Response> {
    let app = &doors.app;
    let Some((hop, server)) = app.hop.as_ref().zip(mcp_session_server(request.headers())) else {
        return Ok(request);
    };
    if server == *hop.server_id() {
        return Ok(request);
    }
    let peer = hop
        .running_peer(&server)
        .await
        .map_err(|error| reply::error(&error))?;
    let Some(peer) = peer else {
        return Err(no_mcp_session());
    };
    let (parts, body) = request.into_parts();
    let RequestBody {
        bytes,
        charge: _charge,
    } = read_body(app, grant, &parts, body).await?;
    let proxied = hop
        .proxy_mcp(app, &peer, grant, parts.method, &parts.headers, bytes)
        .await;
    Err(match proxied {
        ProxiedMcp::Response(response) => response,
        ProxiedMcp::Ended => no_mcp_session(),
        ProxiedMcp::Unavailable(error) => {
            tracing::warn!(error = %error.for_log(), "a request for an MCP session at another server failed");
            rpc_error(StatusCode::SERVICE_UNAVAILABLE, -32000, &error.message)
        }
    })
}

/// The server that has the MCP session a request names. In a cluster clients see `<server id>.<id>`.
fn mcp_session_server(headers: &HeaderMap) -> Option<ServerId> {
    let id = headers.get(SESSION_ID_HEADER)?.to_str().ok()?;
    id.split_once('.')?.0.parse().ok()
}

/// Takes this server's id away from the id of an MCP session that a client named.
fn remove_server_id(app: &App, headers: &mut HeaderMap) {
    let inner = app.hop.as_ref().and_then(|hop| {
        let id = headers.get(SESSION_ID_HEADER)?.to_str().ok()?;
        let inner = id.strip_prefix(hop.server_id().as_str())?.strip_prefix('.')?;
        HeaderValue::from_str(inner).ok()
    });
    if let Some(inner) = inner {
        headers.insert(SESSION_ID_HEADER, inner);
    }
}

/// Adds it to the id that a response names.
fn add_server_id(app: &App, headers: &mut HeaderMap) {
    let shown = app.hop.as_ref().and_then(|hop| {
        let id = headers.get(SESSION_ID_HEADER)?.to_str().ok()?;
        HeaderValue::from_str(&format!("{}.{id}", hop.server_id())).ok()
    });
    if let Some(shown) = shown {
        headers.insert(SESSION_ID_HEADER, shown);
    }
}

fn no_mcp_session() -> Response {
    rpc_error(
        StatusCode::NOT_FOUND,
        -32001,
        "there is no such MCP session; initialize a new one",
    )
}

/// Reads the body of a message, charged to its token as what it takes once it is parsed; other requests have none.
async fn read_body(
    app: &App,
    grant: &Grant,
    parts: &http::request::Parts,
    body: Body,
) -> Result<RequestBody, Response> {
    let charge = app.token_budgets.request_of(Some(grant));
    if parts.method != Method::POST {
        let bytes = bytes::Bytes::new();
        return Ok(RequestBody { bytes, charge });
    }
    let over_budget =
        |over: OverBudget| rpc_error(StatusCode::SERVICE_UNAVAILABLE, -32000, &over.to_string());
    let read = body::read(&parts.headers, body, charge).await;
    let mut body = read.map_err(|error| match error {
        BodyError::TooLarge => reply::body_too_large(body::MAX_BODY_BYTES),
        BodyError::Incomplete => rpc_error(StatusCode::BAD_REQUEST, -32700, "the request body is incomplete"),
        BodyError::OverBudget(over) => over_budget(over),
    })?;
    body.charge.parse(&body.bytes).map_err(over_budget)?;
    Ok(body)
}

/// Serves a request whose MCP session, if it has one, is at this server.
pub(crate) async fn serve_here(doors: &HttpDoors, grant: Grant, request: Request) -> Response {
    let app = &doors.app;
    let (mut parts, body) = request.into_parts();
    remove_server_id(app, &mut parts.headers);
    // An MCP session id works only for the token that opened the session.
    if let Some(id) = parts.headers.get(SESSION_ID_HEADER) {
        let mcp_session = id
            .to_str()
            .ok()
            .and_then(|id| app.mcp_sessions.get(id))
            .filter(|l| l.belongs_to(&grant));
        match mcp_session {
            Some(mcp_session) => mcp_session.touch(),
            None => return no_mcp_session(),
        }
    }
    if parts.method == Method::POST {
        if !has_json_content_type(&parts.headers) {
            return rpc_error(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                -32600,
                "the Content-Type of a message must be application/json",
            );
        }
        // In rmcp's own spelling: what rmcp refuses with 415 from here on is the body.
        parts
            .headers
            .insert(header::CONTENT_TYPE, HeaderValue::from_static(JSON));
    }
    let (body, _charge) = match read_body(app, &grant, &parts, body).await {
        Ok(RequestBody { bytes, charge }) => (bytes, charge),
        Err(refused) => return refused,
    };
    if parts.method == Method::POST
        && let Some((code, why)) = check_body(&body)
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
    if answer.status() == StatusCode::UNSUPPORTED_MEDIA_TYPE {
        return rpc_error(
            StatusCode::BAD_REQUEST,
            -32600,
            "this is not a JSON-RPC message of MCP",
        );
    }
    if let Some(id) = answer
        .headers()
        .get(SESSION_ID_HEADER)
        .and_then(|v| v.to_str().ok())
    {
        for idle in app.mcp_sessions.set_owner(id, &grant) {
            doors.mcp.manager.end_session(&idle).await;
        }
    }
    let mut answer = answer.map(Body::new).into_response();
    // The events of a GET stream are charged as they are sent.
    if method == Method::POST {
        answer = match app.token_budgets.charge_answer(&grant, answer) {
            Ok(answer) => answer,
            Err(over) => return rpc_error(StatusCode::SERVICE_UNAVAILABLE, -32000, &over.to_string()),
        };
    }
    add_server_id(app, answer.headers_mut());
    if method == Method::DELETE && answer.status() == StatusCode::ACCEPTED {
        // Clients treat 200 and 204 as success, but 202 as a failure.
        *answer.status_mut() = StatusCode::NO_CONTENT;
    }
    answer
}

/// The JSON-RPC error for a body that is not one JSON value or is a batch; `None` for other bodies.
fn check_body(body: &[u8]) -> Option<(i64, String)> {
    if let Err(e) = serde_json::from_slice::<serde::de::IgnoredAny>(body) {
        return Some((-32700, format!("Parse error: {e}")));
    }
    let first = body.iter().find(|b| !b.is_ascii_whitespace());
    let batch = "batches are not supported: send one message a request";
    (first == Some(&b'[')).then(|| (-32600, batch.to_owned()))
}

/// Whether the body is declared as JSON, with or without parameters such as a charset.
fn has_json_content_type(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
    let media_type = content_type.and_then(|v| v.split(';').next());
    media_type.is_some_and(|m| m.trim().eq_ignore_ascii_case(JSON))
}

fn rpc_error(status: StatusCode, code: i64, message: &str) -> Response {
    let body = json!({ "jsonrpc": "2.0", "id": null, "error": { "code": code, "message": message } });
    let mut response = (status, body.to_string()).into_response();
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(JSON));
    response
}
