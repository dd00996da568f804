//! Colour where somebody looks, and text that cannot act on the terminal.

use std::{borrow::Cow, io::IsTerminal as _};

/// Colours one of the two outputs, or does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paint {
    on: bool,
}

impl Paint {
    /// For stdout.
    pub fn stdout() -> Self {
        Self {
            on: std::io::stdout().is_terminal() && wanted(),
        }
    }

    /// For stderr.
    pub fn stderr() -> Self {
        Self {
            on: std::io::stderr().is_terminal() && wanted(),
        }
    }

    /// None at all.
    pub fn plain() -> Self {
        Self { on: false }
    }

    fn wrap(self, code: &str, text: &str) -> String {
        match self.on && !text.is_empty() {
            true => format!("\x1b[{code}m{text}\x1b[0m"),
            false => text.to_owned(),
        }
    }

    /// What matters most.
    pub fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    /// What matters least.
    pub fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }

    /// Failed.
    pub fn red(self, text: &str) -> String {
        self.wrap("31", text)
    }

    /// Good.
    pub fn green(self, text: &str) -> String {
        self.wrap("32", text)
    }

    /// Not yet, or not quite.
    pub fn yellow(self, text: &str) -> String {
        self.wrap("33", text)
    }

    /// A name.
    pub fn cyan(self, text: &str) -> String {
        self.wrap("36", text)
    }
}

/// `NO_COLOR` and terminals that know none say no.
fn wanted() -> bool {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    set("NO_COLOR").is_none() && set("TERM").is_none_or(|term| term != "dumb")
}

/// How wide the terminal is; generous where there is none.
pub fn width() -> usize {
    if !std::io::stdout().is_terminal() {
        return 200;
    }
    match crossterm::terminal::size() {
        Ok((columns, _)) if columns > 0 => usize::from(columns).max(40),
        _ => 80,
    }
}

/// Text from elsewhere without what would act on the terminal: control characters but newline and tab, and
/// the marks that turn the direction of writing around.
pub fn clean(text: &str) -> Cow<'_, str> {
    let harmful = |c: char| {
        (c.is_control() && c != '\n' && c != '\t')
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}')
    };
    match text.contains(harmful) {
        true => Cow::Owned(text.replace("\r\n", "\n").replace(harmful, "")),
        false => Cow::Borrowed(text),
    }
}

/// One line of at most `most` characters: white space runs together, what is cut off is marked.
pub fn fold(text: &str, most: usize) -> String {
    let text = clean(text);
    let words = text.split_whitespace().enumerate();
    let mut letters = words.flat_map(|(n, word)| (n > 0).then_some(' ').into_iter().chain(word.chars()));
    let mut line: String = letters.clone().take(most).collect();
    if letters.nth(most).is_some() {
        line.pop();
        line.truncate(line.trim_end().len());
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_terminal_is_not_told_what_to_do() {
        assert_eq!(clean("a\x1b[2Jb\r\n\tc\u{202e}d"), "a[2Jb\n\tcd");
        assert_eq!(clean("plain"), "plain");
    }

    #[test]
    fn long_text_is_folded_to_a_line() {
        assert_eq!(fold("one\n  two\tthree", 40), "one two three");
        assert_eq!(fold("one two three", 8), "one two…");
        assert_eq!(fold("abcdefghij", 5), "abcd…");
        assert_eq!(fold("", 5), "");
        assert_eq!(fold("ab c", 2), "a…");
        assert_eq!(fold("ab", 2), "ab");
    }

    proptest! {
        #[test]
        fn a_folded_line_fits(text in "\\PC{0,80}", most in 1usize..40) {
            let folded = fold(&text, most);
            prop_assert!(folded.chars().count() <= most, "{folded:?}");
            prop_assert!(!folded.contains('\n'));
        }
    }
}
