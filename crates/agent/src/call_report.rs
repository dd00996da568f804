//! Size limits for the tool calls and results reported to the host: a larger one is truncated.
//!
//! The host refuses lines longer than 16 MiB, and a report contains a result twice, as content and as raw
//! output. The model is not affected: it gets the result separately, with a limit of its own.

use std::borrow::Cow;

use oubliette_protocol::{JsonObject, debug, size::json_bytes, tool::CallResult};
use serde_json::{Value, json};

/// The maximum size of a reported result or of a call's reported arguments, in bytes of JSON.
const MAX_REPORT_BYTES: usize = 512 * 1024;
/// When fewer bytes than this are left, the remaining blocks are dropped instead of truncated.
const MIN_BLOCK_BYTES: usize = 256;

/// The result as it is reported: unchanged if small enough, else truncated with a note of what was dropped.
pub(crate) fn bounded_result(result: &CallResult) -> Cow<'_, CallResult> {
    if json_bytes(result) <= MAX_REPORT_BYTES {
        return Cow::Borrowed(result);
    }
    let mut room = MAX_REPORT_BYTES;
    let mut content = Vec::new();
    for (at, block) in result.content.iter().enumerate() {
        if room < MIN_BLOCK_BYTES {
            let rest = result.content.len() - at;
            content.push(text_block(format!("[… {rest} more blocks were dropped]")));
            break;
        }
        let bytes = json_bytes(block);
        let shown = match block["text"].as_str() {
            _ if bytes <= room => block.clone(),
            Some(text) if block["type"] == "text" => {
                let start = prefix_within(text, room);
                let rest = text.len() - start.len();
                text_block(format!("{start}\n[… {rest} more bytes were dropped]"))
            }
            _ => {
                let kind = block["type"].as_str().filter(|kind| kind.len() <= 32);
                let kind = kind.unwrap_or("unknown");
                text_block(format!("[{kind} content of {bytes} bytes was dropped]"))
            }
        };
        room = room.saturating_sub(json_bytes(&shown));
        content.push(shown);
    }
    let structured = result
        .structured_content
        .as_ref()
        .map(|data| (data, json_bytes(data)));
    let kept = structured.filter(|(_, bytes)| *bytes <= room);
    if let (Some((_, bytes)), None) = (structured, kept) {
        content.push(text_block(format!(
            "[structured content of {bytes} bytes was dropped]"
        )));
    }
    Cow::Owned(CallResult {
        content,
        structured_content: kept.map(|(data, _)| data.clone()),
        is_error: result.is_error,
    })
}

/// The arguments as they are reported: unchanged if small enough, else truncated.
pub(crate) fn bounded_arguments(arguments: &JsonObject) -> Value {
    let value = Value::Object(arguments.clone());
    if json_bytes(&value) <= MAX_REPORT_BYTES {
        value
    } else {
        debug::truncate_recorded(value)
    }
}

fn text_block(text: String) -> Value {
    json!({ "type": "text", "text": text })
}

/// The longest prefix of the text that takes at most `room` bytes as a JSON string.
fn prefix_within(text: &str, room: usize) -> &str {
    let mut taken = 0;
    let end = text.char_indices().find_map(|(at, c)| {
        taken += match c {
            '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
            c if c < ' ' => 6,
            c => c.len_utf8(),
        };
        (taken > room).then_some(at)
    });
    &text[..end.unwrap_or(text.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(result: &CallResult, at: usize) -> &str {
        result.content[at]["text"].as_str().unwrap()
    }

    #[test]
    fn small_results_are_reported_unchanged() {
        let small = CallResult::text("x".repeat(MAX_REPORT_BYTES - 1000));
        assert!(matches!(bounded_result(&small), Cow::Borrowed(_)));
        let arguments = JsonObject::from_iter([("a".to_owned(), json!(1))]);
        assert_eq!(bounded_arguments(&arguments), json!({ "a": 1 }));
    }

    #[test]
    fn long_text_is_truncated_to_the_limit_whatever_its_characters() {
        for piece in ["x", "\n", "\u{1}", "\"", "é", "🦀"] {
            let whole = piece.repeat(10_000_000 / piece.len());
            let long = CallResult {
                is_error: true,
                ..CallResult::text(whole.as_str())
            };
            let told = bounded_result(&long);
            assert!(told.is_error);
            assert!(
                json_bytes(&*told) < MAX_REPORT_BYTES + 1000,
                "{piece:?}: {}",
                json_bytes(&*told)
            );
            let (start, mark) = text(&told, 0).rsplit_once("\n[… ").unwrap();
            assert!(whole.starts_with(start) && start.len() > 10_000);
            assert_eq!(
                mark,
                format!("{} more bytes were dropped]", whole.len() - start.len())
            );
        }
    }

    #[test]
    fn dropped_content_that_is_not_text_is_named() {
        let data = json!({ "rows": "y".repeat(MAX_REPORT_BYTES) });
        let image = json!({ "type": "image", "mimeType": "image/png", "data": "A".repeat(MAX_REPORT_BYTES) });
        let mixed = CallResult {
            content: vec![image, json!({ "type": "text", "text": "a caption" })],
            structured_content: Some(data),
            is_error: false,
        };
        let told = bounded_result(&mixed);
        assert!(text(&told, 0).starts_with("[image content of 524"), "{told:?}");
        assert_eq!(text(&told, 1), "a caption");
        assert!(text(&told, 2).starts_with("[structured content of 524"));
        assert_eq!(told.structured_content, None);
    }

    #[test]
    fn dropped_blocks_are_counted() {
        let block = json!({ "type": "text", "text": "z".repeat(1000) });
        let many = CallResult {
            content: vec![block; 10_000],
            ..CallResult::default()
        };
        let told = bounded_result(&many);
        assert!(json_bytes(&*told) < MAX_REPORT_BYTES + 1000);
        assert!(text(&told, told.content.len() - 1).ends_with("more blocks were dropped]"));
    }

    #[test]
    fn large_arguments_are_truncated() {
        let large = JsonObject::from_iter([("content".to_owned(), json!("x".repeat(MAX_REPORT_BYTES)))]);
        assert_eq!(bounded_arguments(&large)["truncated"], true);
    }
}
