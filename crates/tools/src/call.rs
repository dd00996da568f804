//! One tool call: the tool it names, who makes it, how it is cancelled, and what the tool answers.

use oubliette_protocol::{
    ByteCharge, Principal,
    relay::ProgressCallback,
    tool::{CallResult, ToolAddress},
};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

/// What accompanies a call besides its arguments: cancellation, progress, turn.
#[derive(Clone, Default)]
pub struct CallContext {
    /// Cancelled when the result is no longer wanted.
    pub cancel: CancellationToken,
    /// Receives progress, if the requester asked for it.
    pub progress: Option<ProgressCallback>,
    /// The session's turn the call belongs to.
    pub turn: Option<u64>,
}

impl CallContext {
    /// A copy with `cancel` in place of its cancellation token.
    #[must_use]
    pub(crate) fn with_cancel(&self, cancel: CancellationToken) -> Self {
        Self {
            cancel,
            progress: self.progress.clone(),
            turn: self.turn,
        }
    }
}

impl std::fmt::Debug for CallContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallContext")
            .field("turn", &self.turn)
            .finish_non_exhaustive()
    }
}

/// Who makes a call.
#[derive(Clone, PartialEq, Eq)]
pub enum CallOrigin {
    /// The session's own agent, over the relay socket.
    Inside {
        /// The API key sent with the call, if any.
        api_key: Option<String>,
    },
    /// A token, through one of the server's doors.
    Outside(Principal),
}

// The key must not reach a log by way of a derived Debug.
impl std::fmt::Debug for CallOrigin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CallOrigin::Inside { api_key } => f
                .debug_struct("Inside")
                .field("api_key", &api_key.as_ref().map(|_| "…"))
                .finish(),
            CallOrigin::Outside(principal) => f.debug_tuple("Outside").field(principal).finish(),
        }
    }
}

/// The tool a call is for, as it was requested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestedTool {
    /// By any name the agent could use; the gate finds out which source has it.
    ByName(String),
    /// By its address, which states the source.
    At(ToolAddress),
}

impl RequestedTool {
    /// The name in the request.
    pub fn name(&self) -> &str {
        match self {
            RequestedTool::ByName(name) => name,
            RequestedTool::At(address) => address.name(),
        }
    }
}

impl From<ToolAddress> for RequestedTool {
    fn from(address: ToolAddress) -> Self {
        RequestedTool::At(address)
    }
}

/// What a catalog tool answered: a parsed result, or validated JSON text.
#[derive(Debug)]
pub(crate) enum ToolAnswer {
    Result(CallResult),
    Text(RawCallResult),
}

impl ToolAnswer {
    /// The parsed result.
    pub(crate) fn into_result(self) -> CallResult {
        match self {
            ToolAnswer::Result(result) => result,
            ToolAnswer::Text(text) => text.parse(),
        }
    }
}

/// The JSON text of a [`CallResult`], validated and not parsed, so that it can be passed on unchanged.
#[derive(Debug)]
pub(crate) struct RawCallResult {
    raw: Box<RawValue>,
    is_error: bool,
    /// What the text is charged, until it has been passed on.
    _charge: Option<ByteCharge>,
}

impl RawCallResult {
    /// Accepts a text that is a result with its required fields, each of the right type, and no unknown ones.
    pub(crate) fn validate(text: &[u8]) -> Option<Self> {
        /// The fields of a result. serde also reads a struct from an array, hence the check for `{` below.
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase", deny_unknown_fields)]
        struct CallResultFields {
            #[serde(rename = "content")]
            _content: Vec<ValidJson>,
            #[serde(default, rename = "structuredContent")]
            _structured_content: ValidJsonObject,
            #[serde(default)]
            is_error: bool,
        }
        if !text.trim_ascii_start().starts_with(b"{") {
            return None;
        }
        let CallResultFields { is_error, .. } = serde_json::from_slice(text).ok()?;
        let raw = serde_json::from_slice(text).ok()?;
        Some(Self {
            raw,
            is_error,
            _charge: None,
        })
    }

    /// The same, with what its text is charged.
    #[must_use]
    pub(crate) fn with_charge(self, charge: Option<ByteCharge>) -> Self {
        Self {
            _charge: charge,
            ..self
        }
    }

    pub(crate) fn raw(&self) -> &RawValue {
        &self.raw
    }

    pub(crate) fn is_error(&self) -> bool {
        self.is_error
    }

    pub(crate) fn parse(&self) -> CallResult {
        serde_json::from_str(self.raw.get()).unwrap_or_default()
    }
}

/// Validates that the input is something a [`Value`](serde_json::Value) can hold, and discards it.
#[derive(Default)]
struct ValidJson;

/// Like [`ValidJson`], for a JSON object only.
#[derive(Default)]
struct ValidJsonObject;

impl<'de> Deserialize<'de> for ValidJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValidJsonVisitor)
    }
}

impl<'de> Deserialize<'de> for ValidJsonObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_map(ValidJsonVisitor)
            .map(|ValidJson| Self)
    }
}

/// Visits every nested value and keeps none.
struct ValidJsonVisitor;

impl<'de> Visitor<'de> for ValidJsonVisitor {
    type Value = ValidJson;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<ValidJson, E> {
        Ok(ValidJson)
    }

    fn visit_i64<E>(self, _: i64) -> Result<ValidJson, E> {
        Ok(ValidJson)
    }

    fn visit_u64<E>(self, _: u64) -> Result<ValidJson, E> {
        Ok(ValidJson)
    }

    fn visit_f64<E>(self, _: f64) -> Result<ValidJson, E> {
        Ok(ValidJson)
    }

    fn visit_str<E>(self, _: &str) -> Result<ValidJson, E> {
        Ok(ValidJson)
    }

    fn visit_unit<E>(self) -> Result<ValidJson, E> {
        Ok(ValidJson)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<ValidJson, A::Error> {
        while items.next_element::<ValidJson>()?.is_some() {}
        Ok(ValidJson)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<ValidJson, A::Error> {
        while entries.next_entry::<ValidJson, ValidJson>()?.is_some() {}
        Ok(ValidJson)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_never_printed() {
        let origin = CallOrigin::Inside {
            api_key: Some("oub_secret".into()),
        };
        assert!(!format!("{origin:?}").contains("oub_secret"));
    }

    #[test]
    fn only_a_valid_result_without_unknown_fields_is_passed_on_as_text() {
        for text in [
            r#"{"content":[]}"#,
            r#" {"content":[{"type":"text","text":"\u00fc \ud83d\ude00"}],"structuredContent":{"a":[1,2.5,null,true]},"isError":true}"#,
        ] {
            let result = RawCallResult::validate(text.as_bytes()).unwrap();
            assert_eq!(result.parse(), serde_json::from_str(text).unwrap());
            assert_eq!(result.is_error(), result.parse().is_error);
        }
        let deep = format!(
            r#"{{"content":[{}{}]}}"#,
            "[".repeat(100_000),
            "]".repeat(100_000)
        );
        for text in [
            &*deep,
            "[[],{},false]",
            "{}",
            r#"{"content":{}}"#,
            r#"{"content":[],"resultType":"complete"}"#,
            r#"{"content":[],"structuredContent":null}"#,
            r#"{"content":[],"structuredContent":[1]}"#,
            r#"{"content":[],"isError":null}"#,
            r#"{"content":[],"content":[]}"#,
            r#"{"content":["\ud800"]}"#,
            r#"{"content":[1e999]}"#,
        ] {
            assert!(
                RawCallResult::validate(text.as_bytes()).is_none(),
                "{}",
                &text[..40.min(text.len())]
            );
        }
        assert!(RawCallResult::validate(b"{\"content\":[\"\xff\"]}").is_none());
    }
}
