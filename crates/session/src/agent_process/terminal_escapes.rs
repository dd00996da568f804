//! Removes terminal escape sequences (colours, cursor movements, titles) from what an agent reports: events are shown in
//! browsers and written to other people's terminals.

use std::borrow::Cow;

use oubliette_protocol::event::EventBody;
use serde_json::Value;

/// The characters with which a sequence begins: ESC, and the control characters that stand for ESC and a letter.
const INTRODUCERS: [char; 7] = [
    '\u{1b}', '\u{90}', '\u{98}', '\u{9b}', '\u{9d}', '\u{9e}', '\u{9f}',
];

/// The longest sequence that is recognised, in bytes; of a longer one only its first character is removed.
const MAX_SEQUENCE_BYTES: usize = 4 * 1024;

/// What begins at an escape character.
enum EscapeSequence {
    /// A sequence of this many bytes.
    Complete(usize),
    /// The text ends within the sequence.
    Unfinished,
}

/// Removes escape sequences from a whole text. One that the text's end cuts off is removed too.
pub(crate) fn strip_escapes(text: &str) -> Cow<'_, str> {
    match is_plain(text) {
        true => Cow::Borrowed(text),
        false => Cow::Owned(split_stripped(text).0),
    }
}

/// Removes escape sequences from every string of a value.
pub(crate) fn strip_escapes_in(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Cow::Owned(stripped) = strip_escapes(text) {
                *text = stripped;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(strip_escapes_in),
        Value::Object(fields) => {
            if !fields.keys().all(|name| is_plain(name)) {
                let stripped = std::mem::take(fields).into_iter();
                *fields = stripped
                    .map(|(name, value)| (strip_escapes(&name).into_owned(), value))
                    .collect();
            }
            fields.values_mut().for_each(strip_escapes_in);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Removes escape sequences from the texts of an event that are an agent's own, as far as they are not stripped where they
/// arrive: those of the turn's messages and tool calls are.
pub(crate) fn strip_event(event: &mut EventBody) {
    match event {
        EventBody::Status {
            reason: Some(text), ..
        }
        | EventBody::Error { message: text, .. }
        | EventBody::TurnCompleted {
            stop_reason: text, ..
        }
        | EventBody::ToolCall {
            tool_call_id: text, ..
        }
        | EventBody::ToolResult {
            tool_call_id: text, ..
        } => {
            if let Cow::Owned(stripped) = strip_escapes(text) {
                *text = stripped;
            }
        }
        EventBody::Plan { entries } => strip_escapes_in(entries),
        EventBody::Usage { usage } => usage.values_mut().for_each(strip_escapes_in),
        EventBody::Status { reason: None, .. }
        | EventBody::Message { .. }
        | EventBody::Delta { .. }
        | EventBody::Thought { .. }
        | EventBody::CallerToolRequest { .. }
        | EventBody::CallerToolDone { .. }
        | EventBody::ApprovalRequested(_)
        | EventBody::ApprovalDecided(_) => {}
    }
}

/// Removes escape sequences from a text that arrives in pieces, also those that begin in one piece and end in another.
#[derive(Debug, Default)]
pub(crate) struct EscapeFilter {
    /// The beginning of a sequence, whose end has not arrived.
    unfinished: String,
}

impl EscapeFilter {
    /// The next piece without sequences.
    pub(crate) fn strip<'t>(&mut self, piece: &'t str) -> Cow<'t, str> {
        if self.unfinished.is_empty() && is_plain(piece) {
            return Cow::Borrowed(piece);
        }
        let text = std::mem::take(&mut self.unfinished) + piece;
        let (stripped, rest) = split_stripped(&text);
        self.unfinished = rest;
        Cow::Owned(stripped)
    }
}

fn is_plain(text: &str) -> bool {
    !text.contains(INTRODUCERS)
}

/// The text without sequences, and the beginning of one that its end cuts off.
fn split_stripped(text: &str) -> (String, String) {
    let mut stripped = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(INTRODUCERS) {
        stripped.push_str(&rest[..at]);
        rest = &rest[at..];
        match sequence_at_start(rest) {
            EscapeSequence::Complete(bytes) => rest = &rest[bytes..],
            EscapeSequence::Unfinished if rest.len() <= MAX_SEQUENCE_BYTES => {
                return (stripped, rest.to_owned());
            }
            EscapeSequence::Unfinished => rest = rest.trim_start_matches(INTRODUCERS),
        }
    }
    stripped.push_str(rest);
    (stripped, String::new())
}

/// The sequence at the start of a text, by the syntax of ECMA-48.
fn sequence_at_start(text: &str) -> EscapeSequence {
    let mut chars = text.char_indices().skip(1).peekable();
    let kind = match text.chars().next() {
        Some('\u{9b}') => '[',
        Some('\u{90}' | '\u{98}' | '\u{9d}' | '\u{9e}' | '\u{9f}') => ']',
        _ => match chars.next() {
            Some((_, kind)) => kind,
            None => return EscapeSequence::Unfinished,
        },
    };
    match kind {
        // Control sequence: parameters and intermediates, then one final character.
        '[' => {
            for (at, c) in chars {
                match c {
                    '\u{20}'..='\u{3f}' => {}
                    '\u{40}'..='\u{7e}' => return EscapeSequence::Complete(at + c.len_utf8()),
                    // Not a sequence: what follows is text.
                    _ => return EscapeSequence::Complete(at),
                }
            }
            EscapeSequence::Unfinished
        }
        // Strings: up to BEL, to ESC and a backslash, or to the control character for these two.
        ']' | 'P' | 'X' | '^' | '_' => {
            while let Some((at, c)) = chars.next() {
                match c {
                    '\u{9c}' => return EscapeSequence::Complete(at + c.len_utf8()),
                    '\u{7}' => return EscapeSequence::Complete(at + 1),
                    '\u{1b}' => match chars.peek() {
                        Some((end, '\\')) => return EscapeSequence::Complete(end + 1),
                        Some(_) => return EscapeSequence::Complete(at),
                        None => return EscapeSequence::Unfinished,
                    },
                    _ => {}
                }
            }
            EscapeSequence::Unfinished
        }
        // Two characters, or more with intermediates such as `ESC ( B`.
        '\u{20}'..='\u{2f}' => match chars.find(|(_, c)| !('\u{20}'..='\u{2f}').contains(c)) {
            Some((at, c)) => EscapeSequence::Complete(at + c.len_utf8()),
            None => EscapeSequence::Unfinished,
        },
        '\u{30}'..='\u{7e}' => EscapeSequence::Complete(2),
        _ => EscapeSequence::Complete(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sequences_are_removed_and_text_stays() {
        for (text, stripped) in [
            ("plain äöü", "plain äöü"),
            ("\u{1b}[31mred\u{1b}[0m!", "red!"),
            ("a\u{1b}[2K\u{1b}[1Gb", "ab"),
            ("\u{1b}]0;title\u{7}x\u{1b}]8;;http://h\u{1b}\\link", "xlink"),
            ("\u{1b}(Bx\u{1b}7y\u{9b}1mz", "xyz"),
            ("cut \u{1b}[3", "cut "),
            ("\u{1b}[äx", "äx"),
            ("a\u{9d}0;title\u{9c}b\u{90}q\u{1b}\\c\u{9e}d\u{7}e", "abce"),
        ] {
            assert_eq!(strip_escapes(text), stripped, "{text:?}");
        }
        let mut value = serde_json::json!({"a": ["\u{1b}[1mb\u{1b}[m", 1], "c": null});
        strip_escapes_in(&mut value);
        assert_eq!(value, serde_json::json!({"a": ["b", 1], "c": null}));
        let mut value = serde_json::json!({"\u{1b}[1ma": {"\u{1b}[2mb": "\u{1b}[3mc"}});
        strip_escapes_in(&mut value);
        assert_eq!(value, serde_json::json!({"a": {"b": "c"}}));
    }

    #[test]
    fn a_sequence_without_end_costs_only_its_beginning() {
        for introducer in ["\u{1b}[", "\u{9b}", "\u{1b}]", "\u{9d}"] {
            let text = format!("{introducer}{}", "1".repeat(2 * MAX_SEQUENCE_BYTES));
            assert!(
                strip_escapes(&text).ends_with(&"1".repeat(2 * MAX_SEQUENCE_BYTES)),
                "{introducer:?}"
            );
        }
    }

    #[test]
    fn no_text_of_an_event_has_escapes() {
        let red = "\u{1b}[31mred".to_owned();
        let mut usage = oubliette_protocol::JsonObject::new();
        usage.insert("note".into(), Value::String(red.clone()));
        for mut event in [
            EventBody::Plan {
                entries: serde_json::json!([{"content": red}]),
            },
            EventBody::Usage { usage },
            EventBody::error(oubliette_protocol::ErrorCode::Unavailable, red.clone()),
            EventBody::TurnCompleted {
                turn: 1,
                stop_reason: red.clone(),
                text: String::new(),
                usage: None,
            },
            EventBody::ToolResult {
                tool_call_id: red.clone(),
                ok: true,
                result: Value::Null,
            },
        ] {
            strip_event(&mut event);
            let text = serde_json::to_string(&event).unwrap();
            assert!(text.contains("red") && !text.contains("u001b"), "{text}");
        }
    }

    proptest! {
        #[test]
        fn pieces_give_what_the_whole_gives(pieces in proptest::collection::vec("[\u{1b}\u{9b}\u{9c}\u{9d}\\[\\]0-9;mK\u{7}\\\\ä(B ]{0,6}", 0..6)) {
            let mut filter = EscapeFilter::default();
            let stripped: String = pieces.iter().map(|piece| filter.strip(piece).into_owned()).collect();
            let whole = pieces.concat();
            prop_assert_eq!(stripped, strip_escapes(&whole));
        }
    }
}
