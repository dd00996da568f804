//! `/api`: any action by plain JSON, the OpenAPI page, login and logout.

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
use oubliette_protocol::{Error, Object, ProjectId, Result, TokenId};
use oubliette_store::AuditEntry;
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::Instrument as _;

use super::{
    Door,
    access::{self, Takes},
    body::{self, BodyError},
    http::Doors,
    openapi, reply,
};
use crate::{
    actions::{self, Origin, Outside},
    auth::{LoginError, expose},
};

/// `POST /api/tools/{name}`.
pub async fn tool(
    State(doors): State<Doors>,
    Extension(door): Extension<Door>,
    Path(name): Path<String>,
    method: Method,
    headers: HeaderMap,
    body: Body,
) -> Response {
    if method != Method::POST {
        return reply::no_such_method("POST");
    }
    let grant = match access::admit(&doors.app, door, &headers, Takes::Cookie).await {
        Ok(grant) => grant,
        Err(refused) => return refused,
    };
    let answer = async {
        let definition = actions::find(&name).ok_or_else(|| Refusal::from(actions::unknown(&name)))?;
        if definition.effect.changes() {
            access::confirmed(&grant, &headers)?;
        }
        let arguments = object(&headers, body).await?;
        // When the client goes away this future is dropped, and the guard says so. The action itself runs in a
        // task of its own: what was begun is finished.
        let gone = tokio_util::sync::CancellationToken::new();
        let _leaving = gone.clone().drop_guard();
        let origin = Origin::Outside(Outside {
            gone,
            ..Outside::default()
        });
        let (app, grant, span) = (doors.app.clone(), grant.clone(), tracing::Span::current());
        let work = async move { actions::perform(&app, &grant, definition.name, arguments, &origin).await };
        let done = tokio::spawn(work.instrument(span)).await;
        Ok::<_, Refusal>(done.map_err(Error::internal)??)
    };
    match answer.await {
        Ok(value) => reply::json(StatusCode::OK, &value),
        Err(Refusal::Error(error)) => reply::error(&error),
        Err(Refusal::TooLarge) => reply::too_large(body::MOST),
    }
}

/// Why a request was not served.
enum Refusal {
    Error(Error),
    TooLarge,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Refusal::Error(error)
    }
}

/// A body that is one JSON object; none at all is an empty one.
async fn object(headers: &HeaderMap, body: Body) -> Result<Object, Refusal> {
    let bytes = match body::read(headers, body).await {
        Ok(bytes) => bytes,
        Err(BodyError::TooLarge) => return Err(Refusal::TooLarge),
        Err(BodyError::Broken) => return Err(Error::invalid("the body broke off").into()),
    };
    if bytes.is_empty() {
        return Ok(Object::new());
    }
    match serde_json::from_slice::<Value>(&bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(Error::invalid("the body must be a JSON object: the tool's arguments").into()),
        Err(e) => Err(Error::invalid(format!("the body is not JSON: {e}")).into()),
    }
}

/// `GET /api/openapi.json`.
pub async fn openapi() -> Response {
    static DOCUMENT: std::sync::OnceLock<Arc<[u8]>> = std::sync::OnceLock::new();
    let document = DOCUMENT.get_or_init(|| openapi::document().to_string().into_bytes().into());
    let headers = [(header::CONTENT_TYPE, "application/json")];
    axum::response::IntoResponse::into_response((headers, document.to_vec()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Login {
    token: String,
}

/// `POST /api/login {token}`.
pub async fn login(
    State(doors): State<Doors>,
    Extension(door): Extension<Door>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let (from, tls) = match door {
        Door::Network { from, tls } => (from, tls),
        Door::Control => (IpAddr::V4(Ipv4Addr::LOCALHOST), false),
    };
    let given = match object(&headers, body).await {
        Ok(given) => given,
        Err(Refusal::TooLarge) => return reply::too_large(body::MOST),
        Err(Refusal::Error(error)) => return reply::error(&error),
    };
    let login: Login = match actions::definition::arguments(given) {
        Ok(login) => login,
        Err(error) => return reply::error(&error),
    };
    match doors.app.auth.login(login.token.trim(), from).await {
        Ok((grant, cookie)) => {
            note(&doors, "login", grant.token_id(), grant.project(), "ok").await;
            let secure = if tls { "; Secure" } else { "" };
            let cookie = format!(
                "{}={}; Path=/api; HttpOnly; SameSite=Strict{secure}",
                access::COOKIE,
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
        // Not written down: whoever tries without end must not fill the log.
        Err(LoginError::TooMany(wait)) => reply::slow_down("too many failed logins", wait),
        Err(LoginError::Refused(error)) => {
            note(&doors, "login", None, None, error.code.as_str()).await;
            reply::error(&error)
        }
    }
}

/// Logins and logouts are in the audit log too, though they are no actions.
async fn note(
    doors: &Doors,
    action: &str,
    token: Option<&TokenId>,
    project: Option<&ProjectId>,
    outcome: &str,
) {
    let entry = AuditEntry {
        token_id: token.cloned(),
        session_id: None,
        action: action.into(),
        target: None,
        outcome: outcome.into(),
        project_id: project.cloned(),
        detail: None,
    };
    doors.app.audit_soon(entry).await;
}

/// `POST /api/logout`.
pub async fn logout(State(doors): State<Doors>, headers: HeaderMap) -> Response {
    if let Some(cookie) = access::cookie(&headers) {
        let whose = doors.app.auth.cookie(cookie).await;
        if let Err(error) = doors.app.auth.logout(cookie).await {
            return reply::error(&error);
        }
        if let Ok(grant) = whose {
            note(&doors, "logout", grant.token_id(), grant.project(), "ok").await;
        }
    }
    let mut response = reply::json(StatusCode::OK, &json!({ "logged_out": true }));
    let gone = format!(
        "{}=; Path=/api; HttpOnly; SameSite=Strict; Max-Age=0",
        access::COOKIE
    );
    if let Ok(value) = HeaderValue::from_str(&gone) {
        response.headers_mut().insert(header::SET_COOKIE, value);
    }
    response
}
