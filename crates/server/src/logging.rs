//! Structured logs on stderr, filtered by `RUST_LOG` or else by `[log]` in the configuration.
//!
//! Agents, tool servers and clients have a say in what is logged. So control characters are escaped for every value, in
//! both formats: no text starts a line of its own, moves a terminal's cursor or hides what was written before it.

use std::{
    fmt,
    io::{self, IsTerminal as _},
    sync::OnceLock,
};

use tracing_subscriber::{
    EnvFilter,
    field::RecordFields,
    fmt::{
        FormatFields, MakeWriter,
        format::{DefaultFields, Writer},
    },
};

use crate::config::{LogConfig, LogFormat};

/// Changes the filter of the subscriber that was started.
type ChangeFilter = Box<dyn Fn(EnvFilter) + Send + Sync>;

/// How the filter is changed; empty until logging is started.
static CHANGE_FILTER: OnceLock<ChangeFilter> = OnceLock::new();

/// Starts logging. A second call changes nothing.
pub(crate) fn start(config: &LogConfig) {
    let builder = tracing_subscriber::fmt().with_env_filter(filter_of(config));
    // Starting fails if a subscriber is installed already: only tests start twice in one process.
    let change: Option<ChangeFilter> = match config.format {
        LogFormat::Json => {
            let builder = builder
                .json()
                .flatten_event(true)
                .with_writer(EscapedLines)
                .with_filter_reloading();
            let handle = builder.reload_handle();
            let change: ChangeFilter = Box::new(move |filter| {
                // Fails only if the subscriber is gone, which lives as long as the process.
                let _ = handle.reload(filter);
            });
            builder.try_init().is_ok().then_some(change)
        }
        LogFormat::Text => {
            let builder = builder
                .with_ansi(io::stderr().is_terminal())
                .with_target(false)
                .fmt_fields(EscapedFields(DefaultFields::new()))
                .with_writer(io::stderr)
                .with_filter_reloading();
            let handle = builder.reload_handle();
            let change: ChangeFilter = Box::new(move |filter| {
                // Fails only if the subscriber is gone, which lives as long as the process.
                let _ = handle.reload(filter);
            });
            builder.try_init().is_ok().then_some(change)
        }
    };
    if let Some(change) = change {
        let _ = CHANGE_FILTER.set(change);
    }
}

/// Changes what is logged from now on to `[log] level`, unless `RUST_LOG` says it.
pub(crate) fn set_level(config: &LogConfig) {
    if let Some(change) = CHANGE_FILTER.get() {
        change(filter_of(config));
    }
}

/// `RUST_LOG`, else `[log] level`.
fn filter_of(config: &LogConfig) -> EnvFilter {
    let filter = std::env::var("RUST_LOG").ok().filter(|v| !v.is_empty());
    let filter = filter.unwrap_or_else(|| {
        // rmcp logs every client that disconnects, which is normal; hyper and sqlx are verbose below `warn`.
        format!("{},rmcp=off,hyper=warn,sqlx=warn", config.level)
    });
    EnvFilter::try_new(&filter).unwrap_or_else(|_| EnvFilter::new("info"))
}

/// Formats the fields of events and spans, the message among them, and escapes control characters in them.
struct EscapedFields(DefaultFields);

impl<'writer> FormatFields<'writer> for EscapedFields {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut text = String::new();
        // A writer without colours: a colour's escape sequence could not be told from one in a value.
        self.0.format_fields(Writer::new(&mut text), fields)?;
        write_escaped(&mut writer, &text)
    }
}

/// Writes text with its control characters, and the characters that change lines or the direction of writing, escaped.
fn write_escaped(writer: &mut impl fmt::Write, text: &str) -> fmt::Result {
    let mut rest = text;
    while let Some(at) = rest.find(acts_on_terminal) {
        let (plain, after) = rest.split_at(at);
        writer.write_str(plain)?;
        let mut chars = after.chars();
        if let Some(c) = chars.next() {
            write!(writer, "\\u{:04x}", u32::from(c))?;
        }
        rest = chars.as_str();
    }
    writer.write_str(rest)
}

fn acts_on_terminal(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}')
}

/// Writes JSON lines to stderr. JSON escapes the control characters of ASCII itself; this escapes the others.
#[derive(Debug, Clone, Copy)]
struct EscapedLines;

impl<'a> MakeWriter<'a> for EscapedLines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self::Writer {
        *self
    }
}

impl io::Write for EscapedLines {
    /// Writes one event, which is one line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let (event, end) = match text.strip_suffix('\n') {
            Some(event) => (event, "\n"),
            None => (&*text, ""),
        };
        let mut escaped = String::with_capacity(text.len());
        write_escaped(&mut escaped, event).map_err(io::Error::other)?;
        escaped.push_str(end);
        io::stderr().write_all(escaped.as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_acts_on_a_terminal_is_written() {
        let mut out = String::new();
        let text = "a\x1b[2Jb\nc\r\u{9b}31m\u{202e}d\te\u{7f} ü";
        write_escaped(&mut out, text).unwrap();
        assert_eq!(out, r"a\u001b[2Jb\u000ac\u000d\u009b31m\u202ed\u0009e\u007f ü");
    }
}
