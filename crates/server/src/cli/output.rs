//! Prints results, hints and errors, as text for people or as JSON for programs.

use std::io::{IsTerminal as _, Write as _};

use oubliette_protocol::Error;
use serde_json::Value;

use super::style::{AnsiStyle, display_width, fold_to_line, pad, strip_control_chars, terminal_width};

/// Text, or JSON with `--json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputFormat {
    /// Text for people.
    Text,
    /// One JSON value a line, for programs.
    Json,
}

impl OutputFormat {
    /// Prints the result on stdout: the JSON value itself, or what `text` makes of it.
    pub fn print_result(self, value: &Value, text: impl FnOnce(&Value) -> String) {
        match self {
            OutputFormat::Json => print_line(&value.to_string()),
            OutputFormat::Text => print_line(&text(value)),
        }
    }

    /// Prints additional information on stderr; nothing with `--json`.
    pub fn print_hint(self, text: &str) {
        if self == OutputFormat::Text {
            eprintln!("{}", AnsiStyle::stderr().dim(&strip_control_chars(text)));
        }
    }

    /// Prints an error on stderr; with `--json` also as an object on stdout.
    pub fn print_error(self, error: &Error) {
        if self == OutputFormat::Json {
            print_line(&error.body().to_string());
        }
        // Whoever runs the command owns the server, so the part of the error meant for the log is shown as well.
        eprintln!(
            "{} {}",
            AnsiStyle::stderr().red("error:"),
            strip_control_chars(&error.for_log())
        );
    }
}

/// Prints a line on stdout. A write error, such as a closed pipe, is ignored.
pub(crate) fn print_line(line: &str) {
    try_print_line(line);
}

/// Prints a line on stdout; false when that failed. For endless output, which stops when the reader is gone.
pub(crate) fn try_print_line(line: &str) -> bool {
    writeln!(std::io::stdout().lock(), "{line}").is_ok()
}

/// The least width to which a column of text is cut on a terminal.
const MIN_TEXT_WIDTH: usize = 16;
/// A column this wide or narrower, such as a time, is never cut.
const MAX_SHORT_WIDTH: usize = 20;
/// A column of words without spaces, such as ids, is never cut unless one of them is wider than this.
const MAX_WORD_WIDTH: usize = 40;
/// Spaces between columns.
const COLUMN_GAP: usize = 2;

/// Formats rows in aligned columns under a heading. On a terminal they fit its width ([`fit_columns`]).
pub(crate) fn format_table(heading: &[&str], rows: &[Vec<String>]) -> String {
    let width = std::io::stdout().is_terminal().then(terminal_width);
    format_table_within(heading, rows, width)
}

fn format_table_within(heading: &[&str], rows: &[Vec<String>], terminal: Option<usize>) -> String {
    let cell = |text: &String| fold_to_line(text, 2000);
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(cell).collect()).collect();
    let columns = heading.iter().enumerate().map(|(number, title)| {
        let cells = rows.iter().filter_map(|row| row.get(number));
        let widest = cells.clone().map(|cell| display_width(cell)).max().unwrap_or(0);
        TableColumn {
            number,
            width: widest.max(display_width(title)),
            is_text: widest > MAX_WORD_WIDTH
                || widest > MAX_SHORT_WIDTH && cells.clone().any(|cell| cell.contains(' ')),
            is_empty: widest == 0,
        }
    });
    let mut columns: Vec<TableColumn> = columns.collect();
    if let Some(terminal) = terminal {
        fit_columns(&mut columns, terminal);
    }
    let line = |cells: Vec<&str>| {
        let padded = columns.iter().map(|column| {
            let text = cells.get(column.number).copied().unwrap_or_default();
            pad(text, column.width)
        });
        padded
            .collect::<Vec<_>>()
            .join(&" ".repeat(COLUMN_GAP))
            .trim_end()
            .to_owned()
    };
    let mut lines = vec![AnsiStyle::stdout().bold(&line(heading.to_vec()))];
    lines.extend(
        rows.iter()
            .map(|row| line(row.iter().map(String::as_str).collect())),
    );
    lines.join("\n")
}

/// A column of a table that is shown.
struct TableColumn {
    /// Its place among all columns.
    number: usize,
    width: usize,
    /// Whether its cells can be cut: text for people, not ids or times.
    is_text: bool,
    /// Whether no row has anything in it.
    is_empty: bool,
}

impl TableColumn {
    fn min_width(&self) -> usize {
        match self.is_text {
            true => self.width.min(MIN_TEXT_WIDTH),
            false => self.width,
        }
    }
}

/// Makes a table as narrow as the terminal: text is cut, the widest first. Where that is not enough, columns are left out:
/// the empty ones, then those before the last, from the right. The first column, which names the row, stays.
fn fit_columns(columns: &mut Vec<TableColumn>, terminal: usize) {
    while total_width(columns, TableColumn::min_width) > terminal && columns.len() > 2 {
        let last = columns.len() - 1;
        let empty = (1..=last).rev().find(|number| columns[*number].is_empty);
        columns.remove(empty.unwrap_or(last - 1));
    }
    loop {
        let is_too_wide = total_width(columns, |column| column.width) > terminal;
        let cut = columns
            .iter_mut()
            .filter(|column| column.width > column.min_width());
        match cut.max_by_key(|column| column.width) {
            Some(widest) if is_too_wide => widest.width -= 1,
            _ => break,
        }
    }
}

/// The width of a table whose columns are as wide as `width` says.
fn total_width(columns: &[TableColumn], width: fn(&TableColumn) -> usize) -> usize {
    columns.iter().map(width).sum::<usize>() + COLUMN_GAP * columns.len().saturating_sub(1)
}

/// Formats some fields of each item as a table. `columns` are (heading, field name); `none` is the text for no items.
pub(crate) fn format_listing(items: &[Value], columns: &[(&str, &str)], none: &str) -> String {
    if items.is_empty() {
        return none.to_owned();
    }
    let heading: Vec<&str> = columns.iter().map(|(heading, _)| *heading).collect();
    let row = |item: &Value| {
        columns
            .iter()
            .map(|(_, name)| shorten_timestamp(name, &field_text(item, name)))
            .collect()
    };
    format_table(&heading, &items.iter().map(row).collect::<Vec<Vec<String>>>())
}

/// Colours the rows of a listing whose items have an `error`. The heading is its first line.
pub(crate) fn mark_broken(items: &[Value], listing: String) -> String {
    if items.iter().all(|item| item["error"].is_null()) {
        return listing;
    }
    let paint = AnsiStyle::stdout();
    let broken = std::iter::once(false).chain(items.iter().map(|item| item["error"].is_string()));
    let lines = listing.lines().zip(broken).map(|(line, broken)| match broken {
        true => paint.red(line),
        false => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Shows a timestamp field in this machine's time zone, in whole seconds; other fields stay as they are.
fn shorten_timestamp(name: &str, text: &str) -> String {
    let time = name.ends_with("_at") || matches!(name, "ts" | "last_check");
    match text.parse::<jiff::Timestamp>() {
        Ok(moment) if time => local_time(moment, jiff::tz::TimeZone::system()),
        _ => text.to_owned(),
    }
}

fn local_time(moment: jiff::Timestamp, zone: jiff::tz::TimeZone) -> String {
    moment.to_zoned(zone).strftime("%Y-%m-%d %H:%M:%S").to_string()
}

/// Formats some fields of an object, one a line. Missing and empty fields are left out.
pub(crate) fn format_fields(value: &Value, names: &[&str]) -> String {
    let widest = names.iter().map(|name| name.len()).max().unwrap_or(0);
    let paint = AnsiStyle::stdout();
    let lines = names.iter().filter_map(|name| {
        let text = shorten_timestamp(name, &field_text(value, name));
        let shown = !text.is_empty() && text != "{}" && text != "[]";
        let label = paint.dim(&format!("{:widest$}", name.replace('_', " ")));
        shown.then(|| format!("{label}  {}", strip_control_chars(&text)))
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The value as indented JSON.
pub(crate) fn pretty_json(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

/// A field as text: a string without quotes, other values as JSON, a missing one as "".
pub(crate) fn field_text(value: &Value, name: &str) -> String {
    match &value[name] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_in_the_time_zone_of_the_machine() {
        let moment = "2026-11-17T16:00:00.123Z".parse().unwrap();
        let zone = jiff::tz::TimeZone::fixed(jiff::tz::offset(2));
        assert_eq!(local_time(moment, zone), "2026-11-17 18:00:00");
        assert_eq!(
            shorten_timestamp("name", "2026-11-17T16:00:00Z"),
            "2026-11-17T16:00:00Z"
        );
        assert_eq!(shorten_timestamp("created_at", "never"), "never");
    }

    #[test]
    fn columns_are_aligned_whatever_the_width_of_characters() {
        let rows = [
            vec!["日本語".to_owned(), "1".to_owned()],
            vec!["ab".to_owned(), "2".to_owned()],
        ];
        let table = format_table(&["NAME", "N"], &rows);
        assert_eq!(table, "NAME    N\n日本語  1\nab      2");
    }

    #[test]
    fn a_table_fits_the_terminal_and_ids_stay_whole() {
        let id = "gogol_01ARZ3NDEKTSV4RRFFQ69G5FAV";
        let heading = [
            "ID", "STATUS", "AGENT", "TURN", "TOKENS", "USD", "CREATED", "TITLE",
        ];
        let title = "a title of very many words ".repeat(20);
        let row = [
            id,
            "idle",
            "assistant",
            "12",
            "",
            "",
            "2026-11-17 18:00:00",
            &title,
        ];
        let rows = [row.map(str::to_owned).to_vec()];
        for width in 50..300 {
            let table = format_table_within(&heading, &rows, Some(width));
            assert!(
                table.lines().all(|line| display_width(line) <= width),
                "{width}:\n{table}"
            );
            assert!(
                table.contains(id) && table.contains("a title of"),
                "{width}:\n{table}"
            );
            assert_eq!(table.lines().count(), 2);
        }
        assert!(format_table_within(&heading, &rows, Some(140)).contains("18:00:00"));
        assert!(format_table_within(&heading, &rows, None).contains(title.trim_end()));
        // An empty column is left out before one that says something.
        let narrow = format_table_within(&heading, &rows, Some(105));
        assert!(!narrow.contains("USD") && narrow.contains("CREATED"), "{narrow}");
    }

    #[test]
    fn rows_with_an_error_keep_their_text() {
        let items = [serde_json::json!({ "error": "x" }), serde_json::json!({})];
        assert_eq!(mark_broken(&items, "HEAD\na\nb".into()), "HEAD\na\nb");
    }
}
