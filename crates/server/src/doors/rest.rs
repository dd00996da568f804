//! `/api`: every action in plain JSON, the OpenAPI document, the schemas of files, login and logout.

use std::sync::Arc;

use axum::{
    Extension,
    body::Body,
    extract::{Path, State},
    response::Response,
};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use oubliette_protocol::{Error, JsonObject, Result};
use oubliette_store::{AuditEntry, AuditPrincipal};
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::Instrument as _;

use super::{
    DoorKind,
    access::{self, AcceptedCredentials},
    allowed_hosts::require_own_page,
    body::{self, BodyError, RequestBody},
    connection_limit::client_key,
    http::HttpDoors,
    openapi, reply,
    token_budget::RequestCharge,
};
use crate::{
    actions::{self, ClientContext},
    auth::{Grant, LoginError, expose},
    schemas::file_schemas,
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
        // More than the usual only from those who may perform the action.
        let most = match actions::check_grant(&grant, definition) {
            Ok(()) => definition.max_body_bytes,
            Err(_) => body::MAX_BODY_BYTES,
        };
        let (arguments, charge) = read_object(&doors, &grant, &headers, body, most).await?;
        // When the client disconnects this future is dropped, and the guard cancels `gone`. The action itself runs in
        // a task of its own, so that an action once begun is finished.
        let gone = tokio_util::sync::CancellationToken::new();
        let _leaving = gone.clone().drop_guard();
        let client = ClientContext::cancelled_by(gone);
        let (app, grant, span) = (doors.app.clone(), grant.clone(), tracing::Span::current());
        let work = async move {
            let _charge = charge;
            actions::perform(&app, &grant, definition.name, arguments, &client).await
        };
        let done = tokio::spawn(work.instrument(span)).await;
        Ok::<_, RestError>(done.map_err(Error::internal)??)
    };
    match answer.await {
        Ok(value) => {
            let answer = reply::json(StatusCode::OK, &value);
            let charged = doors.app.token_budgets.charge_answer(&grant, answer);
            charged.map_err(|over| reply::error(&over.into()))
        }
        Err(RestError::Error(error)) => Err(reply::error(&error)),
        Err(RestError::TooLarge(most)) => Err(reply::body_too_large(most)),
    }
}

/// Why a request failed.
enum RestError {
    Error(Error),
    /// The body has more bytes than this.
    TooLarge(usize),
}

impl From<Error> for RestError {
    fn from(error: Error) -> Self {
        RestError::Error(error)
    }
}

/// Reads a body that is one JSON object; an empty body counts as an empty object. Returns also what it is charged while it
/// is kept.
async fn read_object(
    doors: &HttpDoors,
    grant: &Grant,
    headers: &HeaderMap,
    body: Body,
    most: usize,
) -> Result<(JsonObject, RequestCharge), RestError> {
    let charge = doors.app.token_budgets.request_of(Some(grant));
    let read = body::read_up_to(headers, body, most, charge).await;
    let RequestBody { bytes, mut charge } = whole_body(read, most)?;
    charge.parse(&bytes).map_err(Error::from)?;
    Ok((parse_object(&bytes)?, charge))
}

fn whole_body<T>(read: Result<T, BodyError>, most: usize) -> Result<T, RestError> {
    read.map_err(|error| match error {
        BodyError::TooLarge => RestError::TooLarge(most),
        BodyError::Incomplete => Error::invalid("the request body is incomplete").into(),
        BodyError::OverBudget(over) => Error::from(over).into(),
    })
}

fn parse_object(bytes: &[u8]) -> Result<JsonObject, RestError> {
    if bytes.is_empty() {
        return Ok(JsonObject::new());
    }
    match serde_json::from_slice::<Value>(bytes) {
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

/// `GET /api/schemas/{file}`: the JSON Schema of a file that people write. Without a token, because editors have none.
pub(crate) async fn file_schema(Path(file): Path<String>) -> Response {
    match file_schemas().iter().find(|schema| schema.file == file) {
        Some(schema) => {
            let headers = [(header::CONTENT_TYPE, "application/schema+json")];
            axum::response::IntoResponse::into_response((headers, schema.text.as_str()))
        }
        None => reply::error(&Error::not_found(
            "there is no such schema: there are agent.json, tool.json and config.json",
        )),
    }
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
    if let Err(error) = require_own_page(&headers) {
        return reply::error(&error);
    }
    let clients = &doors.app.config.clients;
    let client = clients.trusted_proxies.client_origin(door, &headers);
    let read = whole_body(
        body::read_anonymous(&headers, body).await,
        body::MAX_ANONYMOUS_BODY_BYTES,
    );
    let given = match read.and_then(|bytes| parse_object(&bytes)) {
        Ok(given) => given,
        Err(RestError::TooLarge(most)) => return reply::body_too_large(most),
        Err(RestError::Error(error)) => return reply::error(&error),
    };
    let login: LoginRequest = match actions::definition::parse_arguments(given) {
        Ok(login) => login,
        Err(error) => return reply::error(&error),
    };
    match doors
        .app
        .auth
        .login(login.token.trim(), client_key(client.address))
        .await
    {
        Ok((grant, cookie)) => {
            audit_login(&doors, "login", Some(&grant), "ok").await;
            let secure = client.encrypted || clients.secure_cookies;
            let cookie = cookie_header(expose(&cookie), secure);
            let shape = json!({ "scope": grant.scope(), "project_id": grant.project(), "token_id": grant.token_id() });
            let mut response = reply::json(StatusCode::OK, &shape);
            response.headers_mut().extend(cookie);
            response
        }
        // Not in the audit log: a client that retries without end must not fill it.
        Err(LoginError::TooManyFailures(wait)) => reply::too_many_requests("too many failed logins", wait),
        Err(LoginError::Refused(error)) => {
            audit_login(&doors, "login", None, error.code.as_str()).await;
            reply::error(&error)
        }
    }
}

/// Writes a login or logout to the audit log; they are not actions, whose entries are written elsewhere.
async fn audit_login(doors: &HttpDoors, action: &str, grant: Option<&Grant>, outcome: &str) {
    let principal = grant.map_or(AuditPrincipal::Anonymous, |grant| {
        AuditPrincipal::of_grant(grant.token_id())
    });
    let entry = AuditEntry {
        principal,
        session_id: grant.and_then(Grant::inside).cloned(),
        action: action.into(),
        target: None,
        outcome: outcome.into(),
        project_id: grant.and_then(Grant::project).cloned(),
        detail: None,
    };
    if let Err(error) = doors.app.store.audit_append_soon(entry).await {
        tracing::error!(action, error = %error.for_log(), "appending an audit entry failed");
    }
}

/// `POST /api/logout`: invalidates the login cookie and has the browser delete it.
pub(crate) async fn logout(
    State(doors): State<HttpDoors>,
    Extension(door): Extension<DoorKind>,
    headers: HeaderMap,
) -> Response {
    if let Err(error) = require_own_page(&headers) {
        return reply::error(&error);
    }
    if let Some(cookie) = access::login_cookie(&headers) {
        let whose = doors.app.auth.authenticate_cookie(cookie).await;
        if let Err(error) = doors.app.auth.logout(cookie).await {
            return reply::error(&error);
        }
        if let Ok(grant) = whose {
            audit_login(&doors, "logout", Some(&grant), "ok").await;
        }
    }
    let mut response = reply::json(StatusCode::OK, &json!({ "logged_out": true }));
    let clients = &doors.app.config.clients;
    let secure = clients.trusted_proxies.client_origin(door, &headers).encrypted || clients.secure_cookies;
    response
        .headers_mut()
        .extend(cookie_header("; Max-Age=0", secure));
    response
}

/// The header that sets the login cookie to a value, with attributes that may follow it.
fn cookie_header(value: &str, secure: bool) -> Option<(header::HeaderName, HeaderValue)> {
    let secure = if secure { "; Secure" } else { "" };
    let cookie = format!(
        "{}={value}; Path=/api; HttpOnly; SameSite=Strict{secure}",
        access::LOGIN_COOKIE
    );
    let mut value = HeaderValue::from_str(&cookie).ok()?;
    value.set_sensitive(true);
    Some((header::SET_COOKIE, value))
}
