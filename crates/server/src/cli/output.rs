//! How a command says what came of it.

use std::io::{IsTerminal as _, Write as _};

use oubliette_protocol::Error;
use serde_json::Value;

use super::style::{Paint, clean, fold, width};

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

    /// Something beside the result that people may want to know.
    pub fn hint(self, text: &str) {
        if self == Output::Text {
            eprintln!("{}", Paint::stderr().dim(&clean(text)));
        }
    }

    /// What went wrong, on stderr; for programs also as an object on stdout.
    pub fn error(self, error: &Error) {
        if self == Output::Json {
            say(&error.body().to_string());
        }
        // The person at the keyboard owns the server, so the log's part is theirs too.
        eprintln!("{} {}", Paint::stderr().red("error:"), clean(&error.for_log()));
    }
}

/// A line on stdout. Nobody listening is not an error of ours.
pub fn say(line: &str) {
    heard(line);
}

/// The same, for what goes on and on: whether anybody still listens.
pub fn heard(line: &str) -> bool {
    writeln!(std::io::stdout().lock(), "{line}").is_ok()
}

/// Rows in columns, under a heading. On a terminal the last column gives way to its width.
pub fn table(heading: &[&str], rows: &[Vec<String>]) -> String {
    let cell = |text: &String| fold(text, 2000);
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(cell).collect()).collect();
    let mut widths: Vec<usize> = heading.iter().map(|h| h.chars().count()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    if let (true, Some((last, others))) = (std::io::stdout().is_terminal(), widths.split_last_mut()) {
        let taken: usize = others.iter().map(|w| w + 2).sum();
        *last = (*last).min(width().saturating_sub(taken).max(20));
    }
    let line = |cells: Vec<&str>| {
        let padded = cells
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{:width$}", fold(cell, *width)));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines = vec![Paint::stdout().bold(&line(heading.to_vec()))];
    lines.extend(
        rows.iter()
            .map(|row| line(row.iter().map(String::as_str).collect())),
    );
    lines.join("\n")
}

/// A table of some fields of each item; `none` when there is no item.
pub fn listing(items: &[Value], columns: &[(&str, &str)], none: &str) -> String {
    if items.is_empty() {
        return none.to_owned();
    }
    let heading: Vec<&str> = columns.iter().map(|(heading, _)| *heading).collect();
    let row = |item: &Value| {
        columns
            .iter()
            .map(|(_, name)| short(name, &field(item, name)))
            .collect()
    };
    table(&heading, &items.iter().map(row).collect::<Vec<Vec<String>>>())
}

/// Times to the second: the rest is for programs.
fn short(name: &str, text: &str) -> String {
    let time = name.ends_with("_at") || matches!(name, "ts" | "last_check");
    match (time, text.split_once('.')) {
        (true, Some((seconds, _))) => format!("{seconds}Z"),
        _ => text.to_owned(),
    }
}

/// One object, a field a line; what is not there or empty is left out.
pub fn fields(value: &Value, names: &[&str]) -> String {
    let widest = names.iter().map(|name| name.len()).max().unwrap_or(0);
    let paint = Paint::stdout();
    let lines = names.iter().filter_map(|name| {
        let text = short(name, &field(value, name));
        let shown = !text.is_empty() && text != "{}" && text != "[]";
        let label = paint.dim(&format!("{:widest$}", name.replace('_', " ")));
        shown.then(|| format!("{label}  {}", clean(&text)))
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// An object as people read JSON.
pub fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

/// A field of a result as text; empty when it is not there.
pub fn field(value: &Value, name: &str) -> String {
    match &value[name] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
