//! Why a request to a model failed, and whether to retry it.

use std::time::Duration;

use serde_json::Value;

use super::context;

/// Why one attempt failed.
pub(crate) struct ModelFailure {
    /// The cause, for the user.
    pub(crate) message: String,
    /// The provider's HTTP status, if it answered.
    pub(crate) status: Option<u16>,
    /// Whether a retry may succeed.
    pub(crate) retryable: bool,
    /// The wait the provider asked for (`retry-after`).
    pub(crate) retry_after: Option<Duration>,
    /// Part of the answer was already sent to the host, so a retry would repeat it.
    pub(crate) output_shown: bool,
}

impl ModelFailure {
    /// Classifies an error of the `genai` library.
    pub(crate) fn new(error: &genai::Error, shown: bool) -> Self {
        // An HTTP error of a streaming request comes wrapped in a stream error.
        let inner = match error {
            genai::Error::WebStream { error: cause, .. } => {
                cause.downcast_ref::<genai::Error>().unwrap_or(error)
            }
            other => other,
        };
        if let genai::Error::HttpError {
            status,
            body,
            headers,
            ..
        } = inner
        {
            let wait = headers
                .get("retry-after")
                .and_then(|v| v.to_str().ok())
                .and_then(|v| v.parse().ok());
            // Said when a budget is used up, which waiting does not change.
            let forbidden = headers.get("x-should-retry").is_some_and(|v| v == "false");
            let again = !forbidden && matches!(status.as_u16(), 408 | 425 | 429 | 500..);
            let message = format!("{}: {}", status.as_u16(), error_text(body));
            let wait = wait.map(Duration::from_secs);
            return Self {
                message,
                status: Some(status.as_u16()),
                retryable: again,
                retry_after: wait,
                output_shown: shown,
            };
        }
        let (message, again) = match inner {
            genai::Error::ChatResponse { body, .. } => (error_text(&body.to_string()), true),
            genai::Error::WebStream { cause, .. } => (format!("the connection broke: {cause}"), true),
            genai::Error::WebModelCall { webc_error, .. } => {
                (format!("the connection failed: {webc_error}"), true)
            }
            genai::Error::StreamParse { serde_error, .. } => {
                (format!("its answer is not valid JSON: {serde_error}"), false)
            }
            other => (context::truncate_text(other.to_string(), 500), false),
        };
        Self {
            message,
            status: inner.status().map(|s| s.as_u16()),
            retryable: again,
            retry_after: None,
            output_shown: shown,
        }
    }

    /// The stream closed before the answer was complete.
    pub(crate) fn stream_ended_early(shown: bool) -> Self {
        Self {
            message: "its answer ended early".to_owned(),
            status: None,
            retryable: true,
            retry_after: None,
            output_shown: shown,
        }
    }

    /// Whether the provider found the conversation too long. Providers have no common code for it, so the
    /// message is searched.
    pub(crate) fn is_context_too_long(&self) -> bool {
        let text = self.message.to_lowercase();
        self.status == Some(413)
            || (self.status == Some(400)
                && [
                    "context length",
                    "context window",
                    "context_length",
                    "too long",
                    "too many tokens",
                    "maximum context",
                ]
                .iter()
                .any(|sign| text.contains(sign)))
    }
}

/// The message in an error body, or the beginning of the body if it has none.
fn error_text(body: &str) -> String {
    let parsed: Option<Value> = serde_json::from_str(body).ok();
    let message = parsed.as_ref().and_then(|value| {
        let value = value.get(0).unwrap_or(value);
        let error = value.get("error").unwrap_or(value);
        error.get("message").or(Some(error)).and_then(Value::as_str)
    });
    context::truncate_text(message.unwrap_or(body).trim().to_owned(), 500)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_providers_message_is_found_in_the_body() {
        assert_eq!(
            error_text(r#"{"error":{"message":"no credit","type":"x"}}"#),
            "no credit"
        );
        assert_eq!(
            error_text(r#"[{"error":{"message":"gemini says"}}]"#),
            "gemini says"
        );
        assert_eq!(error_text(r#"{"message":"plain"}"#), "plain");
        assert_eq!(error_text(r#"{"error":"text"}"#), "text");
        assert_eq!(error_text("<html>"), "<html>");
        assert!(error_text(&"x".repeat(10_000)).len() < 700);
    }
}
