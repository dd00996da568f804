//! Answers in the shapes every door shares.

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header};
use oubliette_protocol::{Error, ErrorCode, id::quoted};
use serde::Serialize;

/// A JSON body.
pub fn json(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => {
            // Answers may hold what is shown once.
            let headers = [
                (header::CONTENT_TYPE, "application/json"),
                (header::CACHE_CONTROL, "no-store"),
            ];
            (status, headers, bytes).into_response()
        }
        Err(e) => {
            tracing::error!(error = %e, "an answer could not be written as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// An error with the status of its code.
pub fn error(error: &Error) -> Response {
    let status = StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    with_status(status, error)
}

/// An error with a status of its own.
pub fn with_status(status: StatusCode, error: &Error) -> Response {
    let mut response = json(status, &error.body());
    if error.code == ErrorCode::Unauthenticated {
        response
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// Too fast; try again after this long.
pub fn slow_down(what: &str, wait: std::time::Duration) -> Response {
    let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
    let mut response = error(&Error::limit_exceeded(format!(
        "{what}; try again in {seconds} s"
    )));
    response
        .headers_mut()
        .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    response
}

/// A body that is too large.
pub fn too_large(most: usize) -> Response {
    let error = Error::limit_exceeded(format!("the body is larger than {} MiB", most / 1024 / 1024));
    with_status(StatusCode::PAYLOAD_TOO_LARGE, &error)
}

/// No such path.
pub fn no_such_path(path: &str) -> Response {
    error(&Error::not_found(format!("there is nothing at {}", quoted(path))))
}

/// A method a path does not have.
pub fn no_such_method(allowed: &'static str) -> Response {
    let error = Error::invalid(format!("this path takes {allowed}"));
    let mut response = with_status(StatusCode::METHOD_NOT_ALLOWED, &error);
    response
        .headers_mut()
        .insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

/// A body of bytes that no browser interprets: what agents write is not ours.
pub fn foreign(content_type: &'static str, body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, "sandbox; default-src 'none'"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, body).into_response()
}
