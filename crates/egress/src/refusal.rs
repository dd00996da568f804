//! Error responses of gateway and proxy, in the JSON form of model APIs, which their clients display.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use serde_json::json;

/// An error that ends a body early.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The body of a response to the sandbox.
pub(crate) type ResponseBody = UnsyncBoxBody<Bytes, BoxError>;

/// Why a request was not passed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EgressRefusal {
    /// The HTTP status.
    pub status: StatusCode,
    /// Machine-readable error code.
    pub code: &'static str,
    /// What went wrong and what to do about it, for people.
    pub message: String,
}

impl EgressRefusal {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
        }
    }

    /// The refusal as an HTTP response.
    pub(crate) fn response(&self) -> Response<ResponseBody> {
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
