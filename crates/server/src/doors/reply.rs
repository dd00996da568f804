//! Responses that several doors send.

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header};
use oubliette_protocol::{Error, ErrorCode, id::quoted};
use serde::Serialize;

/// A response with a JSON body.
pub(crate) fn json(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => {
            // Not cached: a response may hold a secret that is shown once.
            let headers = [
                (header::CONTENT_TYPE, "application/json"),
                (header::CACHE_CONTROL, "no-store"),
            ];
            (status, headers, bytes).into_response()
        }
        Err(e) => {
            tracing::error!(error = %e, "serializing a response as JSON failed");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// An error, with the HTTP status of its code.
pub(crate) fn error(error: &Error) -> Response {
    let status = StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    error_with_status(status, error)
}

/// An error, with another HTTP status than its code's.
pub(crate) fn error_with_status(status: StatusCode, error: &Error) -> Response {
    let mut response = json(status, &error.body());
    if error.code == ErrorCode::Unauthenticated {
        response
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// 429: the client may try again after `wait`.
pub(crate) fn too_many_requests(what: &str, wait: std::time::Duration) -> Response {
    let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
    let mut response = error(&Error::limit_exceeded(format!(
        "{what}; try again in {seconds} s"
    )));
    response
        .headers_mut()
        .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    response
}

/// 413: the body is larger than `most` bytes. The connection ends with it: what is left of the body would be taken for the
/// next request.
pub(crate) fn body_too_large(most: usize) -> Response {
    let error = Error::limit_exceeded(match most / 1024 {
        kib @ ..1024 => format!("the body is larger than {kib} KiB"),
        kib => format!("the body is larger than {} MiB", kib / 1024),
    });
    let mut response = error_with_status(StatusCode::PAYLOAD_TOO_LARGE, &error);
    response
        .headers_mut()
        .insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// 404: no such path.
pub(crate) fn not_found(path: &str) -> Response {
    error(&Error::not_found(format!("there is nothing at {}", quoted(path))))
}

/// 405: the path does not have the request's method.
pub(crate) fn method_not_allowed(allowed: &'static str) -> Response {
    let error = Error::invalid(format!("this path takes {allowed}"));
    let mut response = error_with_status(StatusCode::METHOD_NOT_ALLOWED, &error);
    response
        .headers_mut()
        .insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

/// A body written by agents or users, with headers that keep a browser from running it as a page of this server.
pub(crate) fn untrusted_bytes(content_type: &'static str, body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, "sandbox; default-src 'none'"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, body).into_response()
}
