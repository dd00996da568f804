//! How a command says what came of it.

use std::io::Write as _;

use oubliette_protocol::Error;
use serde_json::Value;

/// For whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// People.
    Text,
    /// Programs.
    Json,
}

impl Output {
    /// The result: as it is for programs, as `text` for people.
    pub fn result(self, value: &Value, text: impl FnOnce(&Value) -> String) {
        match self {
            Output::Json => say(&value.to_string()),
            Output::Text => say(&text(value)),
        }
    }

    /// What went wrong, on stderr; for programs also as an object on stdout.
    pub fn error(self, error: &Error) {
        if self == Output::Json {
            say(&error.body().to_string());
        }
        // The person at the keyboard owns the server, so the log's part is theirs too.
        eprintln!("error: {}", error.for_log());
    }
}

/// A line on stdout. Nobody listening is not an error of ours.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// Rows in columns, under a heading.
pub fn table(heading: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = heading.iter().map(|h| h.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: Vec<&str>| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines = vec![line(heading.to_vec())];
    lines.extend(rows.iter().map(|row| line(row.iter().map(String::as_str).collect())));
    lines.join("\n")
}

/// A field of a result as text; empty when it is not there.
pub fn field(value: &Value, name: &str) -> String {
    match &value[name] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
