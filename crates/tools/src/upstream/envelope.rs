//! Partial parsing of a server's messages: the JSON-RPC envelope, and the result of a call.

use std::borrow::Cow;

use oubliette_protocol::tool::CallResult;
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

/// Notifications that are deserialised; all others are counted and dropped by their method alone.
pub(super) const HANDLED_NOTIFICATIONS: [&str; 4] = [
    "notifications/progress",
    "notifications/message",
    "notifications/cancelled",
    "notifications/subscriptions/acknowledged",
];

/// The JSON-RPC fields of a server's message, with id, result and error left unparsed.
#[derive(Deserialize)]
pub(super) struct ServerEnvelope<'a> {
    #[serde(borrow, default)]
    pub(super) id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) method: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    pub(super) result: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

impl ServerEnvelope<'_> {
    /// The id of the request it responds to, if it is a response to one of ours. Some servers send a numeric id
    /// back as a string.
    pub(super) fn response_id(&self) -> Option<i64> {
        match self.method {
            Some(_) => None,
            None => self.id?.get().trim_matches('"').parse().ok(),
        }
    }

    /// The message of its error; a substitute if there is none.
    pub(super) fn error_message(&self) -> String {
        #[derive(Deserialize)]
        struct JsonRpcErrorText {
            message: String,
        }
        let refusal = self
            .error
            .map(|error| serde_json::from_str::<JsonRpcErrorText>(error.get()));
        match refusal {
            Some(Ok(refusal)) => refusal.message,
            Some(Err(_)) => "it refused the call without saying why".into(),
            None => "it answered with neither a result nor an error".into(),
        }
    }
}

/// Parses the result of a call. Content blocks of any type are kept as they are.
pub(super) fn read_result(text: &[u8]) -> Result<CallResult, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct UncheckedCallResult {
        #[serde(default)]
        result_type: Option<String>,
        #[serde(default)]
        content: Option<Vec<Value>>,
        #[serde(default)]
        structured_content: Option<Value>,
        #[serde(default)]
        is_error: Option<bool>,
    }
    // serde would accept an array as the fields in order.
    if !text.trim_ascii_start().starts_with(b"{") {
        return Err("it answered with no tool result: no object".into());
    }
    let wire: UncheckedCallResult =
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
    fn an_invalid_call_result_is_an_error() {
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
