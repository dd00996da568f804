//! Authenticates HTTP requests and limits the rate of each token.

use std::time::Instant;

use axum::response::Response;
use http::{HeaderMap, header};
use oubliette_protocol::{Error, Result};

use super::{DoorKind, allowed_hosts::require_own_page, reply};
use crate::{
    app::App,
    auth::{CredentialKind, Grant},
};

/// The name of the console's login cookie.
pub(crate) const LOGIN_COOKIE: &str = "oubliette_session";
/// A header that a page of another origin cannot send without a CORS preflight, which this server never allows.
const CSRF_HEADER: &str = "x-oubliette";

/// Which credentials a route accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AcceptedCredentials {
    /// Only a bearer token.
    BearerOnly,
    /// A bearer token or the console's login cookie.
    BearerOrCookie,
}

/// Makes a grant of a request's credential; the error is the response to send.
pub(crate) async fn authenticate(
    app: &App,
    door: DoorKind,
    headers: &HeaderMap,
    accepted: AcceptedCredentials,
) -> Result<Grant, Response> {
    let grant = grant_from_headers(app, door, headers, accepted)
        .await
        .map_err(|e| {
            if e.has_cause() {
                tracing::error!(error = %e.for_log(), "checking a credential failed");
            }
            reply::error(&e)
        })?;
    if let Some(token) = grant.token_id()
        && let Err(wait) = app.rate_limit.take(token, Instant::now())
    {
        return Err(reply::too_many_requests("this token asks too often", wait));
    }
    Ok(grant)
}

async fn grant_from_headers(
    app: &App,
    door: DoorKind,
    headers: &HeaderMap,
    accepted: AcceptedCredentials,
) -> Result<Grant> {
    if let Some(token) = bearer_token(headers)? {
        return app.auth.authenticate_token(token).await;
    }
    if door == DoorKind::Control {
        return Ok(app.auth.owner_grant());
    }
    match login_cookie(headers).filter(|_| accepted == AcceptedCredentials::BearerOrCookie) {
        Some(cookie) => {
            require_own_page(headers)?;
            app.auth.authenticate_cookie(cookie).await
        }
        None => Err(Error::unauthenticated(
            "a token is needed: send it as `Authorization: Bearer oub_…`; `oubliette token create` makes one",
        )),
    }
}

/// The bearer token of a request.
fn bearer_token(headers: &HeaderMap) -> Result<Option<&str>> {
    let Some(value) = headers.get(header::AUTHORIZATION) else {
        return Ok(None);
    };
    let bad = || Error::unauthenticated("the Authorization header must be `Bearer oub_…`");
    let (scheme, token) = value
        .to_str()
        .ok()
        .and_then(|v| v.split_once(' '))
        .ok_or_else(bad)?;
    match scheme.eq_ignore_ascii_case("bearer") {
        true => Ok(Some(token.trim())),
        false => Err(bad()),
    }
}

/// The login cookie of a request.
pub(crate) fn login_cookie(headers: &HeaderMap) -> Option<&str> {
    let all = headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|v| v.to_str().ok());
    all.flat_map(|v| v.split(';'))
        .find_map(|pair| pair.trim().strip_prefix(LOGIN_COOKIE)?.strip_prefix('='))
}

/// Fails for a request authenticated by cookie without the header `X-Oubliette: 1`: protection against cross-site
/// request forgery, for requests that change something.
pub(crate) fn require_csrf_header(grant: &Grant, headers: &HeaderMap) -> Result<()> {
    let sent = headers.get(CSRF_HEADER).is_some_and(|v| v == "1");
    match grant.credential() == CredentialKind::Cookie && !sent {
        true => Err(Error::permission_denied(
            "a change asked for by cookie needs the header `X-Oubliette: 1`",
        )),
        false => Ok(()),
    }
}
