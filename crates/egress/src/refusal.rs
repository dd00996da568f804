//! Error responses of gateway and proxy, in the JSON form of model APIs, which their clients display.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use serde_json::{Value, json};

use crate::usage::ModelApi;

/// With `false` it keeps the clients of several model APIs from asking again.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// An error that ends a body early.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The body of a response to the sandbox.
pub(crate) type ResponseBody = UnsyncBoxBody<Bytes, BoxError>;

/// The innermost cause of an error: it says what happened, the outer ones only that the request failed.
pub(crate) fn root_cause(error: &reqwest::Error) -> &(dyn std::error::Error + 'static) {
    let mut cause: &(dyn std::error::Error + 'static) = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause
}

/// Why a request was not passed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressRefusal {
    /// The HTTP status.
    pub status: StatusCode,
    /// Machine-readable error code.
    pub code: &'static str,
    /// What went wrong and what to do about it, for people.
    pub message: String,
    /// The body in the form of the provider's own API, instead of ours.
    pub(crate) provider_body: Option<Value>,
    /// What the client is told about asking again.
    pub(crate) retry_advice: RetryAdvice,
}

/// What a refusal says about asking again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RetryAdvice {
    /// Nothing: clients decide by the status.
    None,
    /// That the next answer would be the same.
    DoNotRetry,
}

impl EgressRefusal {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
            provider_body: None,
            retry_advice: RetryAdvice::None,
        }
    }

    /// The same refusal, which tells the client not to ask again.
    pub(crate) fn without_retry(self) -> Self {
        Self {
            retry_advice: RetryAdvice::DoNotRetry,
            ..self
        }
    }

    /// The refusal of a request for which a budget has nothing left, as a used up quota of the API it speaks.
    pub(crate) fn quota(api: ModelApi, message: &str) -> Self {
        Self {
            provider_body: Some(api.quota_error(message)),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "limit_exceeded", message).without_retry()
        }
    }

    /// The same refusal for a client that has asked again: with a status that no client takes for a passing trouble, in the
    /// form of the API it speaks. Some ask again after every 429 and 502, whatever else the answer says.
    pub(crate) fn repeated(self, api: Option<ModelApi>) -> Self {
        let provider_body = api.map(|api| api.request_error(&self.message));
        Self {
            status: StatusCode::BAD_REQUEST,
            provider_body,
            ..self
        }
    }

    /// The refusal as an HTTP response.
    pub(crate) fn response(&self) -> Response<ResponseBody> {
        let body = match &self.provider_body {
            Some(body) => body.clone(),
            None => json!({ "error": { "type": "oubliette", "code": self.code, "message": self.message } }),
        };
        let body = Full::new(Bytes::from(body.to_string()))
            .map_err(|never| match never {})
            .boxed_unsync();
        let mut response = Response::new(body);
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match (self.retry_advice, self.status) {
            // No `retry-after`: some clients would wait until a budget opens again, without saying so.
            (RetryAdvice::DoNotRetry, _) => {
                headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
            }
            (RetryAdvice::None, StatusCode::TOO_MANY_REQUESTS) => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
            }
            (RetryAdvice::None, _) => {}
        }
        response
    }
}
