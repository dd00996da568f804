//! Terminal colours and width, and removal of control characters from text that others wrote.

use std::{borrow::Cow, io::IsTerminal as _};

/// Wraps text in ANSI colour codes; leaves it alone when the output is not a terminal or colours are off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AnsiStyle {
    enabled: bool,
}

impl AnsiStyle {
    /// Coloured if stdout is a terminal.
    pub(crate) fn stdout() -> Self {
        Self {
            enabled: std::io::stdout().is_terminal() && colour_wanted(),
        }
    }

    /// Coloured if stderr is a terminal.
    pub(crate) fn stderr() -> Self {
        Self {
            enabled: std::io::stderr().is_terminal() && colour_wanted(),
        }
    }

    fn wrap(self, code: &str, text: &str) -> String {
        match self.enabled && !text.is_empty() {
            true => format!("\x1b[{code}m{text}\x1b[0m"),
            false => text.to_owned(),
        }
    }

    /// Bold: headings and names that stand out.
    pub(crate) fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    /// Dim: hints and secondary details.
    pub(crate) fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }

    /// Red: failures.
    pub(crate) fn red(self, text: &str) -> String {
        self.wrap("31", text)
    }

    /// Green: success.
    pub(crate) fn green(self, text: &str) -> String {
        self.wrap("32", text)
    }

    /// Yellow: warnings.
    pub(crate) fn yellow(self, text: &str) -> String {
        self.wrap("33", text)
    }

    /// Cyan: names and kinds.
    pub(crate) fn cyan(self, text: &str) -> String {
        self.wrap("36", text)
    }
}

/// False when `NO_COLOR` is set or `TERM` is `dumb`.
fn colour_wanted() -> bool {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    set("NO_COLOR").is_none() && set("TERM").is_none_or(|term| term != "dumb")
}

/// The terminal's width in columns, at least 40; 200 when stdout is not a terminal, 80 when the size is unknown.
pub(crate) fn terminal_width() -> usize {
    if !std::io::stdout().is_terminal() {
        return 200;
    }
    match crossterm::terminal::size() {
        Ok((columns, _)) if columns > 0 => usize::from(columns).max(40),
        _ => 80,
    }
}

/// Removes what would act on the terminal: control characters other than newline and tab, and the Unicode marks
/// that change the direction of writing. Applied to all text from agents, tools and definitions.
pub(crate) fn strip_control_chars(text: &str) -> Cow<'_, str> {
    let harmful = |c: char| {
        (c.is_control() && c != '\n' && c != '\t')
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}')
    };
    match text.contains(harmful) {
        true => Cow::Owned(text.replace("\r\n", "\n").replace(harmful, "")),
        false => Cow::Borrowed(text),
    }
}

/// Folds text to one line of at most `most` characters: runs of white space become one space, a cut ends in `…`.
pub(crate) fn fold_to_line(text: &str, most: usize) -> String {
    let text = strip_control_chars(text);
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
    fn control_characters_are_removed() {
        assert_eq!(strip_control_chars("a\x1b[2Jb\r\n\tc\u{202e}d"), "a[2Jb\n\tcd");
        assert_eq!(strip_control_chars("plain"), "plain");
    }

    #[test]
    fn long_text_is_folded_to_a_line() {
        assert_eq!(fold_to_line("one\n  two\tthree", 40), "one two three");
        assert_eq!(fold_to_line("one two three", 8), "one two…");
        assert_eq!(fold_to_line("abcdefghij", 5), "abcd…");
        assert_eq!(fold_to_line("", 5), "");
        assert_eq!(fold_to_line("ab c", 2), "a…");
        assert_eq!(fold_to_line("ab", 2), "ab");
    }

    proptest! {
        #[test]
        fn a_folded_line_fits(text in "\\PC{0,80}", most in 1usize..40) {
            let folded = fold_to_line(&text, most);
            prop_assert!(folded.chars().count() <= most, "{folded:?}");
            prop_assert!(!folded.contains('\n'));
        }
    }
}
