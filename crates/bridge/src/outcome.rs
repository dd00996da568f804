//! An answer of the relay as MCP sees it.

use oubliette_protocol::{Error, ErrorCode, relay::MAX_LINE, size::json_bytes, tool::CallResult};
use oubliette_relay::CallError;
use rmcp::model::{CallToolResult, ContentBlock, ProtocolVersion};
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

/// The most a result may take as JSON. Clients drop a longer line without a word, and the call would hang.
const MOST: usize = MAX_LINE - 64 * 1024;

/// What the frame around a result and `resultType` may take of [`MOST`].
const FRAME: usize = 64;

/// Where an answer comes from: what shape it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A caller, who answers with any value.
    Caller,
    /// The catalog, whose results are MCP's.
    Catalog,
    /// Oubliette's own tools and the base tools, which give data.
    Data,
}

/// A result of text alone, as MCP writes it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Plain<'a> {
    #[serde(borrow, rename = "content")]
    _content: Vec<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "present")]
    structured_content: Option<&'a RawValue>,
    #[serde(rename = "isError")]
    _is_error: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text<'a> {
    #[serde(rename = "type")]
    _kind: IsText,
    #[serde(borrow, deserialize_with = "string")]
    #[serde(rename = "text")]
    _text: &'a RawValue,
}

#[derive(Deserialize)]
enum IsText {
    #[serde(rename = "text")]
    Text,
}

/// `null` is present; a plain `Option` would make it absent.
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

/// Whether an answer from there is, as it stands, the result an agent of an older revision is shown.
pub(crate) fn as_it_stands(source: Source, raw: &RawValue) -> bool {
    let shown = match source {
        Source::Caller | Source::Catalog => true,
        // Shown as text as well.
        Source::Data => false,
    };
    // A reader that also ends lines at a carriage return would be lost.
    shown
        && raw.get().len() <= MOST - FRAME
        && memchr::memchr(b'\r', raw.get().as_bytes()).is_none()
        && serde_json::from_str::<Plain<'_>>(raw.get()).is_ok_and(|plain| {
            plain
                .structured_content
                .is_none_or(|data| data.get().starts_with('{'))
        })
}

/// What an answer from there means.
pub(crate) fn answered(source: Source, value: Value) -> CallResult {
    match source {
        Source::Caller => CallResult::from_value(value),
        Source::Catalog => match CallResult::deserialize(&value) {
            Ok(result) => result,
            Err(_) => CallResult::from_value(value),
        },
        Source::Data => match value {
            Value::Object(_) => CallResult::data(value),
            other => CallResult::from_value(other),
        },
    }
}

/// A call that failed, as a result the model can read.
pub(crate) fn failed(error: CallError) -> CallResult {
    let lost = matches!(error, CallError::Closed(_));
    let mut error = Error::from(error);
    if lost {
        error.message = "the connection to the Oubliette server ended before the answer came; \
                         the tool may or may not have run"
            .into();
    }
    CallResult::error(&error)
}

/// A call that could not be made.
pub(crate) fn away(socket: std::path::Display<'_>) -> CallResult {
    let text =
        format!("the Oubliette server is not reachable at {socket}; nothing was run. Try again later.");
    CallResult::error(&Error::unavailable(text))
}

/// The result on the wire of this revision.
pub(crate) fn to_mcp(result: CallResult, version: Option<&ProtocolVersion>) -> CallToolResult {
    let CallResult {
        content,
        structured_content,
        is_error,
    } = result;
    let mut blocks: Vec<_> = content.into_iter().map(block).collect();
    // Before 2026-07-28 structured content had to be an object; what is not goes as text.
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
    carried(mcp)
}

/// The result if it can be carried; else without what it says twice; else an error that says why.
fn carried(mut result: CallToolResult) -> CallToolResult {
    let bytes = json_bytes(&result);
    if bytes <= MOST {
        return result;
    }
    // The text is the same data, and what models are shown.
    let twice = !result.content.is_empty() && result.structured_content.take().is_some();
    if twice && json_bytes(&result) <= MOST {
        return result;
    }
    let message = format!(
        "the tool ran, but its result is too large to hand over: {bytes} bytes of JSON, at most {MOST} can be; \
         ask for less at once"
    );
    let error = Error::new(ErrorCode::LimitExceeded, message);
    let mut refused = CallToolResult::error(vec![ContentBlock::text(error.message.clone())]);
    refused.structured_content = Some(error.body());
    refused
}

/// A block of a kind this revision does not know is shown as its JSON rather than lost.
fn block(value: Value) -> ContentBlock {
    ContentBlock::deserialize(&value).unwrap_or_else(|_| ContentBlock::text(value.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn shown(source: Source, value: Value, version: ProtocolVersion) -> Value {
        let mcp = to_mcp(answered(source, value), Some(&version));
        let mut shown = serde_json::to_value(mcp).unwrap();
        shown.as_object_mut().unwrap().remove("resultType");
        shown
    }

    #[test]
    fn what_a_caller_sends_keeps_its_shape() {
        let old = ProtocolVersion::V_2025_06_18;
        let text = |t: &str| json!([{"type":"text","text":t}]);
        assert_eq!(
            shown(Source::Caller, json!("hi"), old.clone()),
            json!({"content":text("hi"),"isError":false})
        );
        assert_eq!(
            shown(Source::Caller, json!([1, 2]), old.clone()),
            json!({"content":text("[1,2]"),"isError":false})
        );
        assert_eq!(
            shown(Source::Caller, Value::Null, old.clone()),
            json!({"content":text("null"),"isError":false})
        );
        let data = json!({"status":"sent"});
        let want = json!({"content":text(r#"{"status":"sent"}"#),"structuredContent":data,"isError":false});
        assert_eq!(shown(Source::Caller, data, old.clone()), want);
        let image = json!({"content":[{"type":"image","data":"aGk=","mimeType":"image/png"},
            {"type":"text","text":"see"}],"isError":true});
        assert_eq!(shown(Source::Caller, image.clone(), old), image);
    }

    #[test]
    fn what_stands_as_it_is_means_the_same_when_converted() {
        for plain in [
            r#"{"content":[],"isError":false}"#,
            r#"{"content":[{"type":"text","text":"a\n\u00e9"}],"isError":true}"#,
            r#"{"isError":false,"structuredContent":{"a":[1]},"content":[{"text":"","type":"text"}]}"#,
        ] {
            let raw: &RawValue = serde_json::from_str(plain).unwrap();
            let value: Value = serde_json::from_str(plain).unwrap();
            for source in [Source::Catalog, Source::Caller] {
                assert!(as_it_stands(source, raw), "{plain}");
                let converted = shown(source, value.clone(), ProtocolVersion::V_2025_06_18);
                assert_eq!(converted, value, "{plain}");
            }
            assert!(!as_it_stands(Source::Data, raw));
        }
    }

    #[test]
    fn anything_else_is_converted() {
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
            assert!(!as_it_stands(Source::Catalog, raw), "{other}");
        }
        let long = format!(
            r#"{{"content":[{{"type":"text","text":"{}"}}],"isError":false}}"#,
            "a".repeat(MOST)
        );
        let raw: &RawValue = serde_json::from_str(&long).unwrap();
        assert!(!as_it_stands(Source::Catalog, raw));
    }

    #[test]
    fn structured_content_that_is_no_object_needs_the_new_revision() {
        let value = json!({"content":[],"structuredContent":[1]});
        let new = shown(Source::Catalog, value.clone(), ProtocolVersion::V_2026_07_28);
        assert_eq!(new["structuredContent"], json!([1]));
        let old = shown(Source::Catalog, value, ProtocolVersion::V_2025_06_18);
        assert_eq!(
            old,
            json!({"content":[{"type":"text","text":"[1]"}],"isError":false})
        );
    }

    #[test]
    fn an_unknown_kind_of_block_is_not_lost() {
        let value = json!({"content":[{"type":"hologram","beam":1}]});
        let shown = shown(Source::Caller, value, ProtocolVersion::V_2025_06_18);
        assert_eq!(shown["content"][0]["text"], r#"{"type":"hologram","beam":1}"#);
    }

    #[test]
    fn own_results_are_data_even_when_they_look_like_content() {
        let value = json!({"content":[]});
        let shown = shown(Source::Data, value.clone(), ProtocolVersion::V_2025_06_18);
        assert_eq!(shown["structuredContent"], value);
    }
}
