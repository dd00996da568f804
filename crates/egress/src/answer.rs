//! The errors both ways out answer with, in the shape model clients know how to show.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use serde_json::json;

/// Whatever broke a body off.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// A response's body.
pub(crate) type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Why a request was not passed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The HTTP status.
    pub status: StatusCode,
    /// What went wrong, as a program reads it.
    pub code: &'static str,
    /// What went wrong and what to do, as a person reads it.
    pub message: String,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
        }
    }

    /// The refusal as a response.
    pub(crate) fn response(&self) -> Response<Body> {
        let body = json!({ "error": { "type": "oubliette", "code": self.code, "message": self.message } });
        let body = Full::new(Bytes::from(body.to_string()))
            .map_err(|never| match never {})
            .boxed_unsync();
        let mut response = Response::new(body);
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
        }
        response
    }
}
