//! Terminal colours and width, and removal of control characters from text that others wrote.

use std::{borrow::Cow, io::IsTerminal as _, time::Duration};

use unicode_width::UnicodeWidthChar as _;

pub(crate) use crate::hidden_chars::is_hidden_char;

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

    /// Whether text is coloured.
    pub(crate) fn is_enabled(self) -> bool {
        self.enabled
    }

    /// Never coloured.
    pub(crate) fn plain() -> Self {
        Self { enabled: false }
    }

    /// Always coloured.
    #[cfg(test)]
    pub(crate) fn coloured() -> Self {
        Self { enabled: true }
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

    /// Bold, italic, underlined and struck text, or code, as Markdown marks it.
    pub(crate) fn codes(self, codes: &str, text: &str) -> String {
        match codes.is_empty() {
            true => text.to_owned(),
            false => self.wrap(codes, text),
        }
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

/// Removes what would act on the terminal or could not be seen ([`is_hidden_char`]). Applied to all text from agents,
/// tools and definitions.
pub(crate) fn strip_control_chars(text: &str) -> Cow<'_, str> {
    match text.contains(is_hidden_char) {
        true => Cow::Owned(text.replace("\r\n", "\n").replace(is_hidden_char, "")),
        false => Cow::Borrowed(text),
    }
}

/// How many columns a text takes in the terminal, without colour codes in it.
pub(crate) fn display_width(text: &str) -> usize {
    text.chars().map(char_width).sum()
}

/// How many columns a character takes in the terminal.
pub(crate) fn char_width(c: char) -> usize {
    c.width().unwrap_or(0)
}

/// Folds text to one line of at most `most` characters and columns: runs of white space become one space, a cut ends in `…`.
pub(crate) fn fold_to_line(text: &str, most: usize) -> String {
    let mut line = String::new();
    let (mut chars, mut columns) = (0, 0);
    let text = strip_control_chars(text);
    let words = text.split_whitespace().enumerate();
    let letters = words.flat_map(|(n, word)| (n > 0).then_some(' ').into_iter().chain(word.chars()));
    for letter in letters {
        let width = char_width(letter);
        if chars == most || columns + width > most {
            while chars >= most || columns >= most {
                let Some(last) = line.pop() else { break };
                chars -= 1;
                columns -= char_width(last);
            }
            line.truncate(line.trim_end().len());
            line.push('…');
            return line;
        }
        line.push(letter);
        (chars, columns) = (chars + 1, columns + width);
    }
    line
}

/// The text in exactly this many columns: cut, or with spaces after it.
pub(crate) fn pad(text: &str, width: usize) -> String {
    let text = fold_to_line(text, width);
    let missing = width.saturating_sub(display_width(&text));
    format!("{text}{}", " ".repeat(missing))
}

/// A number of things in words, such as `1 session` or `2 sessions`.
pub(crate) fn plural(count: usize, word: &str) -> String {
    format!("{count} {word}{}", if count == 1 { "" } else { "s" })
}

/// A number of tokens in few characters, such as `950`, `12.3k` or `4.5M`.
pub(crate) fn short_count(count: u64) -> String {
    match count {
        0..=999 => count.to_string(),
        1_000..=999_949 => format!("{:.1}k", count as f64 / 1e3),
        _ => format!("{:.1}M", count as f64 / 1e6),
    }
}

/// A duration in few characters, such as `0.3s`, `42s`, `3m05s` or `2d03h`.
pub(crate) fn short_duration(duration: Duration) -> String {
    match duration.as_secs() {
        0..=9 => format!("{:.1}s", duration.as_secs_f64()),
        seconds @ 10..=59 => format!("{seconds}s"),
        seconds @ 60..=3599 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        seconds @ 3600..=86_399 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        seconds => format!("{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// Seconds as a short duration, without a fraction.
pub(crate) fn age_text(seconds: u64) -> String {
    match seconds {
        0..=9 => format!("{seconds}s"),
        _ => short_duration(Duration::from_secs(seconds)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn control_characters_are_removed() {
        assert_eq!(strip_control_chars("a\x1b[2Jb\r\n\tc\u{202e}d"), "a[2Jb\n\tcd");
        assert_eq!(strip_control_chars("plain"), "plain");
        assert_eq!(
            strip_control_chars("a\u{200b}b\u{feff}c\u{2066}d\u{9b}31m"),
            "abcd31m"
        );
    }

    #[test]
    fn durations_are_short() {
        for (seconds, text) in [
            (0, "0s"),
            (42, "42s"),
            (185, "3m05s"),
            (3_660, "1h01m"),
            (183_600, "2d03h"),
        ] {
            assert_eq!(age_text(seconds), text);
        }
        assert_eq!(short_duration(Duration::from_millis(300)), "0.3s");
    }

    #[test]
    fn long_text_is_folded_to_a_line() {
        assert_eq!(fold_to_line("one\n  two\tthree", 40), "one two three");
        assert_eq!(fold_to_line("one two three", 8), "one two…");
        assert_eq!(fold_to_line("abcdefghij", 5), "abcd…");
        assert_eq!(fold_to_line("", 5), "");
        assert_eq!(fold_to_line("ab c", 2), "a…");
        assert_eq!(fold_to_line("ab", 2), "ab");
        // A wide character takes two columns.
        assert_eq!(fold_to_line("日本語", 6), "日本語");
        assert_eq!(fold_to_line("日本語", 5), "日本…");
        assert_eq!(fold_to_line(&"n".repeat(10_000), 12).chars().count(), 12);
    }

    proptest! {
        #[test]
        fn a_folded_line_fits(text in "\\PC{0,80}", most in 1usize..40) {
            let folded = fold_to_line(&text, most);
            prop_assert!(folded.chars().count() <= most && display_width(&folded) <= most, "{folded:?}");
            prop_assert!(!folded.contains('\n'));
        }
    }
}
