//! Text as PostgreSQL can store it. Its text has no U+0000, which SQLite's has and which messages may contain. It is stored
//! as an escape sequence that begins with U+FFFE, a code point that is no character; that one is escaped as well.

use std::borrow::Cow;

const ESCAPE: char = '\u{fffe}';
const NUL: char = '0';
const ITSELF: char = '1';

/// A text as it is stored.
pub(crate) fn encode(text: Cow<'_, str>) -> Cow<'_, str> {
    if !text.contains(['\0', ESCAPE]) {
        return text;
    }
    let mut stored = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            '\0' => stored.extend([ESCAPE, NUL]),
            ESCAPE => stored.extend([ESCAPE, ITSELF]),
            c => stored.push(c),
        }
    }
    Cow::Owned(stored)
}

/// The text that was stored.
pub(crate) fn decode(stored: &str) -> Cow<'_, str> {
    if !stored.contains(ESCAPE) {
        return Cow::Borrowed(stored);
    }
    let mut text = String::with_capacity(stored.len());
    let mut chars = stored.chars();
    while let Some(c) = chars.next() {
        match c {
            ESCAPE => match chars.next() {
                Some(NUL) => text.push('\0'),
                Some(ITSELF) | None => text.push(ESCAPE),
                // Not written by this program; kept as it is.
                Some(other) => text.extend([ESCAPE, other]),
            },
            c => text.push(c),
        }
    }
    Cow::Owned(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_text_is_read_as_it_was_written(text in "[\\x00\\u{fffe}01a-c]{0,20}") {
            let stored = encode(Cow::Borrowed(&text));
            prop_assert!(!stored.contains('\0'));
            prop_assert_eq!(decode(&stored), text.as_str());
        }
    }

    #[test]
    fn ordinary_text_is_not_copied() {
        assert!(matches!(encode(Cow::Borrowed("a")), Cow::Borrowed("a")));
        assert!(matches!(decode("a"), Cow::Borrowed("a")));
    }
}
