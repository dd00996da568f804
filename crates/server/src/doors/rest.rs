//! `/api`: every action in plain JSON, the OpenAPI document, login and logout.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

use axum::{
    Extension,
    body::Body,
    extract::{Path, State},
    response::Response,
};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use oubliette_protocol::{Error, JsonObject, ProjectId, Result};
use oubliette_store::{AuditEntry, AuditPrincipal};
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::Instrument as _;

use super::{
    DoorKind,
    access::{self, AcceptedCredentials},
    body::{self, BodyError},
    http::HttpDoors,
    openapi, reply,
};
use crate::{
    actions::{self, ActionOrigin, OutsideCall},
    auth::{LoginError, expose},
};

/// `POST /api/tools/{name}`: performs the action of that name with the body as its arguments.
pub(crate) async fn call_tool(
    State(doors): State<HttpDoors>,
    Extension(door): Extension<DoorKind>,
    Path(name): Path<String>,
    method: Method,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Response> {
    if method != Method::POST {
        return Err(reply::method_not_allowed("POST"));
    }
    let grant = access::authenticate(&doors.app, door, &headers, AcceptedCredentials::BearerOrCookie).await?;
    let answer = async {
        let definition =
            actions::find(&name).ok_or_else(|| RestError::from(actions::unknown_action(&name)))?;
        if definition.effect.changes() {
            access::require_csrf_header(&grant, &headers)?;
        }
        let arguments = read_object(&headers, body).await?;
        // When the client disconnects this future is dropped, and the guard cancels `gone`. The action itself runs in
        // a task of its own, so that an action once begun is finished.
        let gone = tokio_util::sync::CancellationToken::new();
        let _leaving = gone.clone().drop_guard();
        let origin = ActionOrigin::Outside(OutsideCall {
            cancellation: gone,
            ..OutsideCall::default()
        });
        let (app, grant, span) = (doors.app.clone(), grant.clone(), tracing::Span::current());
        let work = async move { actions::perform(&app, &grant, definition.name, arguments, &origin).await };
        let done = tokio::spawn(work.instrument(span)).await;
        Ok::<_, RestError>(done.map_err(Error::internal)??)
    };
    match answer.await {
        Ok(value) => Ok(reply::json(StatusCode::OK, &value)),
        Err(RestError::Error(error)) => Err(reply::error(&error)),
        Err(RestError::TooLarge) => Err(reply::body_too_large(body::MAX_BODY_BYTES)),
    }
}

/// Why a request failed.
enum RestError {
    Error(Error),
    TooLarge,
}

impl From<Error> for RestError {
    fn from(error: Error) -> Self {
        RestError::Error(error)
    }
}

/// Reads a body that is one JSON object; an empty body counts as an empty object.
async fn read_object(headers: &HeaderMap, body: Body) -> Result<JsonObject, RestError> {
    let bytes = match body::read(headers, body).await {
        Ok(bytes) => bytes,
        Err(BodyError::TooLarge) => return Err(RestError::TooLarge),
        Err(BodyError::Incomplete) => return Err(Error::invalid("the request body is incomplete").into()),
    };
    if bytes.is_empty() {
        return Ok(JsonObject::new());
    }
    match serde_json::from_slice::<Value>(&bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(Error::invalid("the body must be a JSON object: the tool's arguments").into()),
        Err(e) => Err(Error::invalid(format!("the body is not JSON: {e}")).into()),
    }
}

/// `GET /api/openapi.json`.
pub(crate) async fn openapi() -> Response {
    static DOCUMENT: std::sync::OnceLock<Arc<[u8]>> = std::sync::OnceLock::new();
    let document = DOCUMENT.get_or_init(|| openapi::document().to_string().into_bytes().into());
    let headers = [(header::CONTENT_TYPE, "application/json")];
    axum::response::IntoResponse::into_response((headers, document.to_vec()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoginRequest {
    token: String,
}

/// `POST /api/login {token}`: exchanges a token for a login cookie.
pub(crate) async fn login(
    State(doors): State<HttpDoors>,
    Extension(door): Extension<DoorKind>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let (from, tls) = match door {
        DoorKind::Network { peer: from, tls } => (from, tls),
        DoorKind::Control => (IpAddr::V4(Ipv4Addr::LOCALHOST), false),
    };
    let given = match read_object(&headers, body).await {
        Ok(given) => given,
        Err(RestError::TooLarge) => return reply::body_too_large(body::MAX_BODY_BYTES),
        Err(RestError::Error(error)) => return reply::error(&error),
    };
    let login: LoginRequest = match actions::definition::parse_arguments(given) {
        Ok(login) => login,
        Err(error) => return reply::error(&error),
    };
    match doors.app.auth.login(login.token.trim(), from).await {
        Ok((grant, cookie)) => {
            let principal = AuditPrincipal::of_grant(grant.token_id());
            audit_login(&doors, "login", principal, grant.project(), "ok").await;
            let secure = if tls { "; Secure" } else { "" };
            let cookie = format!(
                "{}={}; Path=/api; HttpOnly; SameSite=Strict{secure}",
                access::LOGIN_COOKIE,
                expose(&cookie)
            );
            let shape = json!({ "scope": grant.scope(), "project_id": grant.project(), "token_id": grant.token_id() });
            let mut response = reply::json(StatusCode::OK, &shape);
            if let Ok(mut value) = HeaderValue::from_str(&cookie) {
                value.set_sensitive(true);
                response.headers_mut().insert(header::SET_COOKIE, value);
            }
            response
        }
        // Not in the audit log: a client that retries without end must not fill it.
        Err(LoginError::TooManyFailures(wait)) => reply::too_many_requests("too many failed logins", wait),
        Err(LoginError::Refused(error)) => {
            audit_login(
                &doors,
                "login",
                AuditPrincipal::Anonymous,
                None,
                error.code.as_str(),
            )
            .await;
            reply::error(&error)
        }
    }
}

/// Writes a login or logout to the audit log; they are not actions, whose entries are written elsewhere.
async fn audit_login(
    doors: &HttpDoors,
    action: &str,
    principal: AuditPrincipal,
    project: Option<&ProjectId>,
    outcome: &str,
) {
    let entry = AuditEntry {
        principal,
        session_id: None,
        action: action.into(),
        target: None,
        outcome: outcome.into(),
        project_id: project.cloned(),
        detail: None,
    };
    doors.app.queue_audit(entry).await;
}

/// `POST /api/logout`: invalidates the login cookie and has the browser delete it.
pub(crate) async fn logout(State(doors): State<HttpDoors>, headers: HeaderMap) -> Response {
    if let Some(cookie) = access::login_cookie(&headers) {
        let whose = doors.app.auth.authenticate_cookie(cookie).await;
        if let Err(error) = doors.app.auth.logout(cookie).await {
            return reply::error(&error);
        }
        if let Ok(grant) = whose {
            let principal = AuditPrincipal::of_grant(grant.token_id());
            audit_login(&doors, "logout", principal, grant.project(), "ok").await;
        }
    }
    let mut response = reply::json(StatusCode::OK, &json!({ "logged_out": true }));
    let gone = format!(
        "{}=; Path=/api; HttpOnly; SameSite=Strict; Max-Age=0",
        access::LOGIN_COOKIE
    );
    if let Ok(value) = HeaderValue::from_str(&gone) {
        response.headers_mut().insert(header::SET_COOKIE, value);
    }
    response
}
