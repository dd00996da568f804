//! Why a request to a model failed, and whether asking again may help.

use std::time::Duration;

use serde_json::Value;

use super::context;

/// Why an attempt failed.
pub(crate) struct Failure {
    /// What it says.
    pub(crate) message: String,
    /// The provider's HTTP status.
    pub(crate) status: Option<u16>,
    /// Whether asking again may help.
    pub(crate) again: bool,
    /// How long the provider wants to be left alone.
    pub(crate) wait: Option<Duration>,
    /// Something had been shown already: asking again would show it twice.
    pub(crate) shown: bool,
}

impl Failure {
    /// Reads genai's error.
    pub(crate) fn new(error: &genai::Error, shown: bool) -> Self {
        // A refused stream comes wrapped.
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
            let again = matches!(status.as_u16(), 408 | 425 | 429 | 500..);
            let message = format!("{}: {}", status.as_u16(), told(body));
            let wait = wait.map(Duration::from_secs);
            return Self {
                message,
                status: Some(status.as_u16()),
                again,
                wait,
                shown,
            };
        }
        let (message, again) = match inner {
            genai::Error::ChatResponse { body, .. } => (told(&body.to_string()), true),
            genai::Error::WebStream { cause, .. } => (format!("the connection broke: {cause}"), true),
            genai::Error::WebModelCall { webc_error, .. } => {
                (format!("the connection failed: {webc_error}"), true)
            }
            genai::Error::StreamParse { serde_error, .. } => {
                (format!("it answered rubbish: {serde_error}"), false)
            }
            other => (context::cut(other.to_string(), 500), false),
        };
        Self {
            message,
            status: inner.status().map(|s| s.as_u16()),
            again,
            wait: None,
            shown,
        }
    }

    /// A stream that ended before its end.
    pub(crate) fn broken_off(shown: bool) -> Self {
        Self {
            message: "its answer broke off".to_owned(),
            status: None,
            again: true,
            wait: None,
            shown,
        }
    }

    /// Whether the provider found the conversation too long. There is no common code for it.
    pub(crate) fn says_too_long(&self) -> bool {
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

/// What an error's body says: its message if it has one, else its beginning.
fn told(body: &str) -> String {
    let parsed: Option<Value> = serde_json::from_str(body).ok();
    let message = parsed.as_ref().and_then(|value| {
        let value = value.get(0).unwrap_or(value);
        let error = value.get("error").unwrap_or(value);
        error.get("message").or(Some(error)).and_then(Value::as_str)
    });
    context::cut(message.unwrap_or(body).trim().to_owned(), 500)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_provider_says_is_found() {
        assert_eq!(
            told(r#"{"error":{"message":"no credit","type":"x"}}"#),
            "no credit"
        );
        assert_eq!(told(r#"[{"error":{"message":"gemini says"}}]"#), "gemini says");
        assert_eq!(told(r#"{"message":"plain"}"#), "plain");
        assert_eq!(told(r#"{"error":"text"}"#), "text");
        assert_eq!(told("<html>"), "<html>");
        assert!(told(&"x".repeat(10_000)).len() < 700);
    }
}
