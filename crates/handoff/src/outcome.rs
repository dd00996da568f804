//! What a tool call came to, as an MCP result.

use oubliette_protocol::{
    Error, ErrorCode,
    relay::MAX_LINE_BYTES,
    size::json_bytes,
    tool::{CallResult, ToolSource},
};
use oubliette_relay::CallError;
use rmcp::model::{CallToolResult, ContentBlock, ProtocolVersion};
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

/// Maximum size of a result as JSON, in bytes. MCP clients silently drop a longer line, and the call would never
/// end.
const MAX_RESULT_BYTES: usize = MAX_LINE_BYTES - 64 * 1024;

/// What of [`MAX_RESULT_BYTES`] is left for `resultType` and the response around a result that is forwarded as text.
const RESPONSE_OVERHEAD: usize = 64;

/// How a tool call ended.
#[derive(Debug)]
pub enum CallAnswer {
    /// The answer of a source of tools, not parsed yet.
    Received(ToolSource, Box<RawValue>),
    /// No answer came: an error result that says why.
    Failed(CallResult),
}

impl CallAnswer {
    /// The length of the result as JSON, if it is one that was received.
    pub(crate) fn result_bytes(&self) -> usize {
        match self {
            Self::Received(_, raw) => raw.get().len(),
            Self::Failed(_) => 0,
        }
    }

    /// The answer, parsed.
    pub fn into_result(self) -> CallResult {
        match self {
            Self::Received(source, raw) => match serde_json::from_str(raw.get()) {
                Ok(value) => parse_answer(source, value),
                Err(why) => call_failed(CallError::BadAnswer(why.to_string())),
            },
            Self::Failed(result) => result,
        }
    }
}

/// A result whose content is text blocks only, with no field that needs conversion.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TextResult<'a> {
    #[serde(borrow, rename = "content")]
    _content: Vec<TextBlock<'a>>,
    #[serde(borrow, default, deserialize_with = "present")]
    structured_content: Option<&'a RawValue>,
    #[serde(rename = "isError")]
    _is_error: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TextBlock<'a> {
    #[serde(rename = "type")]
    _kind: TextType,
    #[serde(borrow, deserialize_with = "string")]
    #[serde(rename = "text")]
    _text: &'a RawValue,
}

#[derive(Deserialize)]
enum TextType {
    #[serde(rename = "text")]
    Text,
}

/// Reads a field that is there, also when it is `null`: a plain `Option` would take `null` for absent.
fn present<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(d).map(Some)
}

fn string<'de, D: serde::Deserializer<'de>>(d: D) -> Result<&'de RawValue, D::Error> {
    let raw = <&RawValue>::deserialize(d)?;
    match raw.get().starts_with('"') {
        true => Ok(raw),
        false => Err(serde::de::Error::custom("not a string")),
    }
}

/// Whether the text of an answer can be sent unchanged as the result to an agent of a revision before 2026-07-28.
pub(crate) fn is_forwardable(source: ToolSource, raw: &RawValue) -> bool {
    let has_mcp_shape = match source {
        ToolSource::Caller | ToolSource::Catalog => true,
        // These answer with data, which becomes structured content and text.
        ToolSource::Oubliette | ToolSource::Base => false,
    };
    // A reader that also ends lines at a carriage return would split the line in two.
    has_mcp_shape
        && raw.get().len() <= MAX_RESULT_BYTES - RESPONSE_OVERHEAD
        && memchr::memchr(b'\r', raw.get().as_bytes()).is_none()
        && serde_json::from_str::<TextResult<'_>>(raw.get()).is_ok_and(|result| {
            result
                .structured_content
                .is_none_or(|data| data.get().starts_with('{'))
        })
}

/// The result that a source's answer stands for. Callers answer with any value, the catalog with an MCP result,
/// Oubliette's own tools and the base tools with data.
fn parse_answer(source: ToolSource, value: Value) -> CallResult {
    match source {
        ToolSource::Caller => CallResult::from_value(value),
        ToolSource::Catalog => match CallResult::deserialize(&value) {
            Ok(result) => result,
            Err(_) => CallResult::from_value(value),
        },
        ToolSource::Oubliette | ToolSource::Base => match value {
            Value::Object(_) => CallResult::data(value),
            other => CallResult::from_value(other),
        },
    }
}

/// A call that failed, as a result the model can read.
pub fn call_failed(error: CallError) -> CallResult {
    let lost = matches!(error, CallError::Closed(_));
    let mut error = Error::from(error);
    if lost {
        error.message = "the connection to the Oubliette server ended before the answer came; \
                         the tool may or may not have run"
            .into();
    }
    CallResult::error(&error)
}

/// The result as a protocol revision wants it; without one, as the revisions before 2026-07-28 do.
pub fn to_mcp(result: CallResult, version: Option<&ProtocolVersion>) -> CallToolResult {
    let CallResult {
        content,
        structured_content,
        is_error,
    } = result;
    let mut blocks: Vec<_> = content.into_iter().map(content_block).collect();
    // Before 2026-07-28 structured content had to be an object; any other value goes as text.
    let any_shape = version.is_some_and(|v| v.as_str() >= ProtocolVersion::V_2026_07_28.as_str());
    let structured = structured_content.filter(|value| {
        let fits = any_shape || value.is_object();
        if !fits && blocks.is_empty() {
            blocks.push(ContentBlock::text(value.to_string()));
        }
        fits
    });
    let mut mcp = match is_error {
        true => CallToolResult::error(blocks),
        false => CallToolResult::success(blocks),
    };
    mcp.structured_content = structured;
    limit_size(mcp)
}

/// The result if it is small enough; else without its structured content; else an error that says why.
fn limit_size(mut result: CallToolResult) -> CallToolResult {
    let bytes = json_bytes(&result);
    if bytes <= MAX_RESULT_BYTES {
        return result;
    }
    // The text is the same data, and is what models are shown.
    let twice = !result.content.is_empty() && result.structured_content.take().is_some();
    if twice && json_bytes(&result) <= MAX_RESULT_BYTES {
        return result;
    }
    let message = format!(
        "the tool ran, but its result is too large to hand over: {bytes} bytes of JSON, at most {MAX_RESULT_BYTES} \
         can be; ask for less at once"
    );
    let error = Error::new(ErrorCode::LimitExceeded, message);
    let mut refused = CallToolResult::error(vec![ContentBlock::text(error.message.clone())]);
    refused.structured_content = Some(error.body());
    refused
}

/// A content block; one of a kind the MCP library does not know is shown as its JSON instead of being lost.
fn content_block(value: Value) -> ContentBlock {
    ContentBlock::deserialize(&value).unwrap_or_else(|_| ContentBlock::text(value.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn shown(source: ToolSource, value: Value, version: ProtocolVersion) -> Value {
        let mcp = to_mcp(parse_answer(source, value), Some(&version));
        let mut shown = serde_json::to_value(mcp).unwrap();
        shown.as_object_mut().unwrap().remove("resultType");
        shown
    }

    #[test]
    fn a_callers_answer_keeps_its_shape() {
        let old = ProtocolVersion::V_2025_06_18;
        let text = |t: &str| json!([{"type":"text","text":t}]);
        assert_eq!(
            shown(ToolSource::Caller, json!("hi"), old.clone()),
            json!({"content":text("hi"),"isError":false})
        );
        assert_eq!(
            shown(ToolSource::Caller, json!([1, 2]), old.clone()),
            json!({"content":text("[1,2]"),"isError":false})
        );
        assert_eq!(
            shown(ToolSource::Caller, Value::Null, old.clone()),
            json!({"content":text("null"),"isError":false})
        );
        let data = json!({"status":"sent"});
        let want = json!({"content":text(r#"{"status":"sent"}"#),"structuredContent":data,"isError":false});
        assert_eq!(shown(ToolSource::Caller, data, old.clone()), want);
        let image = json!({"content":[{"type":"image","data":"aGk=","mimeType":"image/png"},
            {"type":"text","text":"see"}],"isError":true});
        assert_eq!(shown(ToolSource::Caller, image.clone(), old), image);
    }

    #[test]
    fn a_forwardable_answer_equals_its_conversion() {
        for plain in [
            r#"{"content":[],"isError":false}"#,
            r#"{"content":[{"type":"text","text":"a\n\u00e9"}],"isError":true}"#,
            r#"{"isError":false,"structuredContent":{"a":[1]},"content":[{"text":"","type":"text"}]}"#,
        ] {
            let raw: &RawValue = serde_json::from_str(plain).unwrap();
            let value: Value = serde_json::from_str(plain).unwrap();
            for source in [ToolSource::Catalog, ToolSource::Caller] {
                assert!(is_forwardable(source, raw), "{plain}");
                let converted = shown(source, value.clone(), ProtocolVersion::V_2025_06_18);
                assert_eq!(converted, value, "{plain}");
            }
            assert!(!is_forwardable(ToolSource::Oubliette, raw));
        }
    }

    #[test]
    fn any_other_answer_is_converted() {
        for other in [
            "1",
            r#"{"content":[]}"#,
            r#"{"content":null,"isError":false}"#,
            r#"{"content":[],"isError":"no"}"#,
            r#"{"content":[],"isError":false,"_meta":{}}"#,
            r#"{"content":[],"isError":false,"structuredContent":null}"#,
            r#"{"content":[],"isError":false,"structuredContent":[1]}"#,
            r#"{"content":[{"type":"text","text":1}],"isError":false}"#,
            r#"{"content":[{"type":"text","text":"a","annotations":{}}],"isError":false}"#,
            r#"{"content":[{"type":"image","data":"aGk=","mimeType":"image/png"}],"isError":false}"#,
            "{\"content\":[],\r\"isError\":false}",
        ] {
            let raw: &RawValue = serde_json::from_str(other).unwrap();
            assert!(!is_forwardable(ToolSource::Catalog, raw), "{other}");
        }
        let long = format!(
            r#"{{"content":[{{"type":"text","text":"{}"}}],"isError":false}}"#,
            "a".repeat(MAX_RESULT_BYTES)
        );
        let raw: &RawValue = serde_json::from_str(&long).unwrap();
        assert!(!is_forwardable(ToolSource::Catalog, raw));
    }

    #[test]
    fn structured_content_that_is_no_object_needs_the_new_revision() {
        let value = json!({"content":[],"structuredContent":[1]});
        let new = shown(ToolSource::Catalog, value.clone(), ProtocolVersion::V_2026_07_28);
        assert_eq!(new["structuredContent"], json!([1]));
        let old = shown(ToolSource::Catalog, value, ProtocolVersion::V_2025_06_18);
        assert_eq!(
            old,
            json!({"content":[{"type":"text","text":"[1]"}],"isError":false})
        );
    }

    #[test]
    fn a_content_block_of_unknown_type_is_kept_as_text() {
        let value = json!({"content":[{"type":"hologram","beam":1}]});
        let shown = shown(ToolSource::Caller, value, ProtocolVersion::V_2025_06_18);
        assert_eq!(shown["content"][0]["text"], r#"{"type":"hologram","beam":1}"#);
    }

    #[test]
    fn own_results_are_data_even_when_they_look_like_content() {
        let value = json!({"content":[]});
        let shown = shown(
            ToolSource::Oubliette,
            value.clone(),
            ProtocolVersion::V_2025_06_18,
        );
        assert_eq!(shown["structuredContent"], value);
    }
}
