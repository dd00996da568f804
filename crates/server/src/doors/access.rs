//! Who asks.

use std::time::Instant;

use axum::response::Response;
use http::{HeaderMap, header};
use oubliette_protocol::{Error, Result};

use super::{Door, reply};
use crate::{
    app::App,
    auth::{Grant, Via},
};

/// The console's cookie.
pub const COOKIE: &str = "oubliette_session";
/// The header that a page of another origin cannot send unasked.
const CONFIRM: &str = "x-oubliette";

/// Which proofs a route takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    /// A bearer token alone.
    Bearer,
    /// Also the console's cookie.
    Cookie,
}

/// Makes a grant of what a request shows, or the answer that refuses it.
pub async fn admit(app: &App, door: Door, headers: &HeaderMap, takes: Takes) -> Result<Grant, Response> {
    let grant = grant(app, door, headers, takes).await.map_err(|e| {
        if e.log.is_some() {
            tracing::error!(error = %e.for_log(), "a token could not be checked");
        }
        reply::error(&e)
    })?;
    if let Some(token) = grant.token_id()
        && let Err(wait) = app.rate.take(token, Instant::now())
    {
        return Err(reply::slow_down("this token asks too often", wait));
    }
    Ok(grant)
}

async fn grant(app: &App, door: Door, headers: &HeaderMap, takes: Takes) -> Result<Grant> {
    if let Some(token) = bearer(headers)? {
        return app.auth.token(token).await;
    }
    if door == Door::Control {
        return Ok(app.auth.owner());
    }
    match cookie(headers).filter(|_| takes == Takes::Cookie) {
        Some(cookie) => app.auth.cookie(cookie).await,
        None => Err(Error::unauthenticated(
            "a token is needed: send it as `Authorization: Bearer oub_…`; `oubliette token create` makes one",
        )),
    }
}

/// The bearer token of a request.
fn bearer(headers: &HeaderMap) -> Result<Option<&str>> {
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

/// The console's cookie of a request.
pub fn cookie(headers: &HeaderMap) -> Option<&str> {
    let all = headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|v| v.to_str().ok());
    all.flat_map(|v| v.split(';'))
        .find_map(|pair| pair.trim().strip_prefix(COOKIE)?.strip_prefix('='))
}

/// Refuses a change asked for by cookie without the header that only our own page sends.
pub fn confirmed(grant: &Grant, headers: &HeaderMap) -> Result<()> {
    let sent = headers.get(CONFIRM).is_some_and(|v| v == "1");
    match grant.via() == Via::Cookie && !sent {
        true => Err(Error::permission_denied(
            "a change asked for by cookie needs the header `X-Oubliette: 1`",
        )),
        false => Ok(()),
    }
}
