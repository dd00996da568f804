//! A server's message, read only as far as tells what it is; and the result of a call.

use std::borrow::Cow;

use oubliette_protocol::tool::CallResult;
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

/// Notifications that say something to us or to the client.
pub(super) const READ: [&str; 4] = [
    "notifications/progress",
    "notifications/message",
    "notifications/cancelled",
    "notifications/subscriptions/acknowledged",
];

/// As much of a message as tells what it is.
#[derive(Deserialize)]
pub(super) struct Envelope<'a> {
    #[serde(borrow, default)]
    pub(super) id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) method: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    pub(super) result: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

impl Envelope<'_> {
    /// Which request of ours it answers, if any. Some servers answer a number with its text.
    pub(super) fn answers(&self) -> Option<i64> {
        match self.method {
            Some(_) => None,
            None => self.id?.get().trim_matches('"').parse().ok(),
        }
    }

    /// What its error says.
    pub(super) fn refusal(&self) -> String {
        #[derive(Deserialize)]
        struct Refusal {
            message: String,
        }
        let refusal = self
            .error
            .map(|error| serde_json::from_str::<Refusal>(error.get()));
        match refusal {
            Some(Ok(refusal)) => refusal.message,
            Some(Err(_)) => "it refused the call without saying why".into(),
            None => "it answered with neither a result nor an error".into(),
        }
    }
}

/// Reads a call's result, whatever its content blocks are.
pub(super) fn read_result(text: &[u8]) -> Result<CallResult, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Wire {
        #[serde(default)]
        result_type: Option<String>,
        #[serde(default)]
        content: Option<Vec<Value>>,
        #[serde(default)]
        structured_content: Option<Value>,
        #[serde(default)]
        is_error: Option<bool>,
    }
    // A list would be read as the fields in order.
    if !text.trim_ascii_start().starts_with(b"{") {
        return Err("it answered with no tool result: no object".into());
    }
    let wire: Wire =
        serde_json::from_slice(text).map_err(|error| format!("it answered with no tool result: {error}"))?;
    match wire.result_type.as_deref() {
        None | Some("complete") => Ok(CallResult {
            content: wire.content.unwrap_or_default(),
            structured_content: wire.structured_content,
            is_error: wire.is_error.unwrap_or_default(),
        }),
        Some("input_required") => Err("it asks for input, which nobody is there to give".into()),
        Some(other) => Err(format!(
            "it answered with a result of type {other:?}, which is not supported"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_result_is_said_to_be_none() {
        for text in [
            "[]",
            "1",
            r#"{"content":1}"#,
            r#"{"resultType":"input_required"}"#,
            r#"{"resultType":"x"}"#,
        ] {
            assert!(read_result(text.as_bytes()).is_err(), "{text}");
        }
        assert_eq!(read_result(b"{}").unwrap(), CallResult::default());
        let deep = format!(
            "{{\"structuredContent\":{}{}}}",
            "[".repeat(100_000),
            "]".repeat(100_000)
        );
        assert!(read_result(deep.as_bytes()).is_err());
    }
}
