//! Lines of the server's log: cut out of bytes, and chosen by level and time.

use std::collections::VecDeque;

use clap::ValueEnum;
use jiff::Timestamp;
use serde_json::Value;

/// Maximum length of a line, in bytes; more is cut off.
const MAX_LINE_BYTES: usize = 64 * 1024;

/// How serious a line of the log is, the most serious first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum LogLevel {
    /// What failed.
    Error,
    /// What somebody should look at.
    Warn,
    /// What happened.
    Info,
    /// How it happened.
    Debug,
    /// Every step.
    Trace,
}

/// Which lines are shown.
#[derive(Debug, Clone, Default)]
pub(crate) struct LogFilter {
    /// Only lines of this level and more serious ones.
    pub(crate) level: Option<LogLevel>,
    /// Only lines from this time on.
    pub(crate) since: Option<Timestamp>,
    /// Whether the last line that began an entry was shown: a line without time and level belongs to it.
    continues: Option<bool>,
}

impl LogFilter {
    /// A filter by level and time.
    pub(crate) fn new(level: Option<LogLevel>, since: Option<Timestamp>) -> Self {
        Self {
            level,
            since,
            continues: None,
        }
    }

    /// Whether a line is shown. Lines must be given in order.
    pub(crate) fn shows(&mut self, line: &str) -> bool {
        let unfiltered = self.level.is_none() && self.since.is_none();
        match entry_head(line) {
            Some((at, level)) => {
                let shown =
                    self.level.is_none_or(|most| level <= most) && self.since.is_none_or(|since| at >= since);
                self.continues = Some(shown);
                shown
            }
            None => self.continues.unwrap_or(unfiltered),
        }
    }
}

/// The time and level that a line begins with, in either format of the log.
fn entry_head(line: &str) -> Option<(Timestamp, LogLevel)> {
    let (at, level) = if line.starts_with('{') {
        let entry: Value = serde_json::from_str(line).ok()?;
        let text = |field: &str| entry[field].as_str().map(str::to_owned);
        (text("timestamp")?, text("level")?)
    } else {
        let mut words = line.split_ascii_whitespace();
        (words.next()?.to_owned(), words.next()?.to_owned())
    };
    let level = LogLevel::from_str(&level, true).ok()?;
    Some((at.parse().ok()?, level))
}

/// Cuts bytes into lines.
#[derive(Debug, Default)]
pub(crate) struct LogLineSplitter {
    unfinished: Vec<u8>,
    overlong: bool,
}

impl LogLineSplitter {
    /// The lines that these bytes complete.
    pub(crate) fn push(&mut self, mut bytes: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
            self.keep(&bytes[..end]);
            lines.push(String::from_utf8_lossy(&self.unfinished).into_owned());
            self.unfinished.clear();
            self.overlong = false;
            bytes = &bytes[end + 1..];
        }
        self.keep(bytes);
        lines
    }

    fn keep(&mut self, bytes: &[u8]) {
        let room = MAX_LINE_BYTES
            .saturating_sub(self.unfinished.len())
            .min(bytes.len());
        self.unfinished.extend_from_slice(&bytes[..room]);
        if room < bytes.len() && !self.overlong {
            self.unfinished.extend_from_slice("…".as_bytes());
            self.overlong = true;
        }
    }
}

/// Keeps the last lines of many.
#[derive(Debug)]
pub(crate) struct LastLines {
    lines: VecDeque<String>,
    most: usize,
}

impl LastLines {
    /// Keeps at most this many.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            lines: VecDeque::new(),
            most,
        }
    }

    /// Adds a line, and drops the first if there are too many.
    pub(crate) fn push(&mut self, line: String) {
        if self.lines.len() == self.most {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    /// The lines, oldest first.
    pub(crate) fn into_lines(self) -> Vec<String> {
        self.lines.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_chosen_by_level_and_time_with_what_belongs_to_them() {
        let log = [
            "2026-11-17T10:00:00.000001Z  INFO began",
            "Oubliette is serving",
            "2026-11-17T11:00:00Z ERROR failed",
            "  caused by this",
            r#"{"timestamp":"2026-11-17T12:00:00Z","level":"WARN","message":"look"}"#,
            "2026-11-17T13:00:00Z DEBUG step",
        ];
        let shown = |level, since: Option<&str>| {
            let mut filter = LogFilter::new(level, since.map(|at| at.parse().unwrap()));
            let shown = log.iter().enumerate().filter(|(_, line)| filter.shows(line));
            shown.map(|(at, _)| at).collect::<Vec<_>>()
        };
        assert_eq!(shown(None, None), [0, 1, 2, 3, 4, 5]);
        assert_eq!(shown(Some(LogLevel::Warn), None), [2, 3, 4]);
        assert_eq!(shown(None, Some("2026-11-17T11:30:00Z")), [4, 5]);
        assert_eq!(shown(Some(LogLevel::Error), Some("2026-11-17T11:30:00Z")), [0; 0]);
    }

    #[test]
    fn lines_are_whole_however_the_bytes_come_and_never_endless() {
        let mut splitter = LogLineSplitter::default();
        assert!(splitter.push(b"on").is_empty());
        assert_eq!(splitter.push(b"e\ntwo\nthr"), ["one", "two"]);
        assert_eq!(splitter.push(b"ee\n"), ["three"]);
        let endless = vec![b'x'; 10 * MAX_LINE_BYTES];
        assert!(splitter.push(&endless).is_empty() && splitter.push(&endless).is_empty());
        let lines = splitter.push(b"\nnext\n");
        assert!(lines[0].len() < MAX_LINE_BYTES + 10 && lines[0].ends_with('…'));
        assert_eq!(lines[1], "next");
    }

    #[test]
    fn only_the_last_lines_are_kept() {
        let mut last = LastLines::new(2);
        ["a", "b", "c"]
            .into_iter()
            .for_each(|line| last.push(line.into()));
        assert_eq!(last.into_lines(), ["b", "c"]);
    }
}
