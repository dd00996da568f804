//! A tool call as the host is told of it: whole while it is of a sensible size, and its beginning when not.
//!
//! The host refuses lines past 16 MiB, and a result is in its report twice, as content and as raw output.
//! What is cut here the model has not lost: it is shown its own part of the result.

use std::borrow::Cow;

use oubliette_protocol::{Object, debug, size::json_bytes, tool::CallResult};
use serde_json::{Value, json};

/// The most that is told of one result or of one call's arguments, in bytes of JSON.
const MOST: usize = 512 * 1024;
/// With less room than this a block is not worth beginning.
const LEAST: usize = 256;

/// A result as it is told.
pub(crate) fn told(result: &CallResult) -> Cow<'_, CallResult> {
    if json_bytes(result) <= MOST {
        return Cow::Borrowed(result);
    }
    let mut room = MOST;
    let mut content = Vec::new();
    for (at, block) in result.content.iter().enumerate() {
        if room < LEAST {
            let rest = result.content.len() - at;
            content.push(note(format!("[… {rest} more blocks were dropped]")));
            break;
        }
        let bytes = json_bytes(block);
        let shown = match block["text"].as_str() {
            _ if bytes <= room => block.clone(),
            Some(text) if block["type"] == "text" => {
                let start = beginning(text, room);
                let rest = text.len() - start.len();
                note(format!("{start}\n[… {rest} more bytes were dropped]"))
            }
            _ => {
                let kind = block["type"].as_str().filter(|kind| kind.len() <= 32);
                let kind = kind.unwrap_or("unknown");
                note(format!("[{kind} content of {bytes} bytes was dropped]"))
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
        content.push(note(format!("[structured content of {bytes} bytes was dropped]")));
    }
    Cow::Owned(CallResult {
        content,
        structured_content: kept.map(|(data, _)| data.clone()),
        is_error: result.is_error,
    })
}

/// A call's arguments as they are told.
pub(crate) fn asked(arguments: &Object) -> Value {
    let value = Value::Object(arguments.clone());
    if json_bytes(&value) <= MOST {
        value
    } else {
        debug::kept(value)
    }
}

fn note(text: String) -> Value {
    json!({ "type": "text", "text": text })
}

/// As much of the text as takes `room` bytes as a JSON string.
fn beginning(text: &str, room: usize) -> &str {
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
    fn what_is_small_is_told_as_it_is() {
        let small = CallResult::text("x".repeat(MOST - 1000));
        assert!(matches!(told(&small), Cow::Borrowed(_)));
        let arguments = Object::from_iter([("a".to_owned(), json!(1))]);
        assert_eq!(asked(&arguments), json!({ "a": 1 }));
    }

    #[test]
    fn a_long_text_is_told_from_its_beginning_whatever_it_is_made_of() {
        for piece in ["x", "\n", "\u{1}", "\"", "é", "🦀"] {
            let whole = piece.repeat(10_000_000 / piece.len());
            let long = CallResult {
                is_error: true,
                ..CallResult::text(whole.as_str())
            };
            let told = told(&long);
            assert!(told.is_error);
            assert!(
                json_bytes(&*told) < MOST + 1000,
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
    fn what_is_no_text_is_named_when_it_is_dropped() {
        let data = json!({ "rows": "y".repeat(MOST) });
        let image = json!({ "type": "image", "mimeType": "image/png", "data": "A".repeat(MOST) });
        let mixed = CallResult {
            content: vec![image, json!({ "type": "text", "text": "a caption" })],
            structured_content: Some(data),
            is_error: false,
        };
        let told = told(&mixed);
        assert!(text(&told, 0).starts_with("[image content of 524"), "{told:?}");
        assert_eq!(text(&told, 1), "a caption");
        assert!(text(&told, 2).starts_with("[structured content of 524"));
        assert_eq!(told.structured_content, None);
    }

    #[test]
    fn many_blocks_are_counted() {
        let block = json!({ "type": "text", "text": "z".repeat(1000) });
        let many = CallResult {
            content: vec![block; 10_000],
            ..CallResult::default()
        };
        let told = told(&many);
        assert!(json_bytes(&*told) < MOST + 1000);
        assert!(text(&told, told.content.len() - 1).ends_with("more blocks were dropped]"));
    }

    #[test]
    fn large_arguments_are_told_from_their_beginning() {
        let large = Object::from_iter([("content".to_owned(), json!("x".repeat(MOST)))]);
        assert_eq!(asked(&large)["truncated"], true);
    }
}
