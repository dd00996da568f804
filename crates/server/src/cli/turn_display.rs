//! Shows a turn in the terminal as it runs: text as it streams in, each tool call and result folded to a line, and a
//! spinner while nothing is printed.

use std::{
    collections::HashMap,
    io::{IsTerminal as _, Write as _},
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{
    output::field_text,
    style::{AnsiStyle, fold_to_line, strip_control_chars, terminal_width},
};

/// How much of a turn is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TurnVerbosity {
    /// Everything, for people.
    All,
    /// Only the agent's text.
    AgentText,
    /// Every event as a line of JSON.
    JsonEvents,
    /// Nothing.
    Nothing,
}

/// Frames of the spinner.
const SPINNER_FRAMES: [&str; 10] = ["⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"];
/// How often the spinner advances.
pub(crate) const SPINNER_INTERVAL: Duration = Duration::from_millis(100);

/// Prints the events of turns on stdout.
pub(crate) struct TurnDisplay {
    verbosity: TurnVerbosity,
    style: AnsiStyle,
    /// Whether the last text printed did not end with a newline.
    mid_line: bool,
    /// Whether the current message was already printed from its `delta` events.
    streamed: bool,
    thinking: bool,
    /// Tool calls without a result yet, by id: the tool's name.
    calls: HashMap<String, String>,
    spinner: Option<Spinner>,
}

struct Spinner {
    activity: String,
    since: Instant,
    frame: usize,
    drawn: bool,
}

impl TurnDisplay {
    /// Has a spinner when everything is shown and both stdout and stderr are terminals.
    pub(crate) fn new(verbosity: TurnVerbosity) -> Self {
        let on_terminal = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
        let spinner = (verbosity == TurnVerbosity::All
            && on_terminal
            && std::env::var_os("TERM").is_none_or(|t| t != "dumb"))
        .then(|| Spinner {
            activity: String::new(),
            since: Instant::now(),
            frame: 0,
            drawn: false,
        });
        Self {
            verbosity,
            style: AnsiStyle::stdout(),
            mid_line: false,
            streamed: false,
            thinking: false,
            calls: HashMap::new(),
            spinner,
        }
    }

    /// Resets the state for a new turn.
    pub(crate) fn begin_turn(&mut self) {
        self.streamed = false;
        self.calls.clear();
        if let Some(spinner) = &mut self.spinner {
            spinner.since = Instant::now();
            spinner.activity = "starting".into();
        }
    }

    /// Whether [`advance_spinner`](Self::advance_spinner) has anything to do.
    pub(crate) fn has_spinner(&self) -> bool {
        self.spinner.is_some()
    }

    /// Draws the spinner's next frame, unless text was printed without a newline at its end.
    pub(crate) fn advance_spinner(&mut self) {
        let (style, in_line) = (self.style, self.mid_line);
        if let Some(spinner) = self.spinner.as_mut().filter(|_| !in_line) {
            spinner.frame = (spinner.frame + 1) % SPINNER_FRAMES.len();
            spinner.drawn = true;
            let seconds = spinner.since.elapsed().as_secs();
            let words = format!(
                "{} {}… {seconds}s · Ctrl-C cancels",
                SPINNER_FRAMES[spinner.frame], spinner.activity
            );
            write_stdout(&format!(
                "\r\x1b[K{}",
                style.dim(&fold_to_line(&words, terminal_width() - 1))
            ));
        }
    }

    fn hide_spinner(&mut self) {
        if let Some(spinner) = self.spinner.as_mut().filter(|s| s.drawn) {
            spinner.drawn = false;
            write_stdout("\r\x1b[K");
        }
    }

    fn set_activity(&mut self, what: &str) {
        if let Some(spinner) = &mut self.spinner {
            spinner.activity = what.to_owned();
        }
    }

    /// Shows an event of a session.
    pub(crate) fn show_event(&mut self, event: &Value) {
        match self.verbosity {
            TurnVerbosity::Nothing => {}
            TurnVerbosity::JsonEvents => write_stdout(&format!("{event}\n")),
            TurnVerbosity::AgentText | TurnVerbosity::All => self.render_event(event),
        }
    }

    fn render_event(&mut self, event: &Value) {
        let all = self.verbosity == TurnVerbosity::All;
        let text = event["text"].as_str().unwrap_or_default();
        match event["type"].as_str().unwrap_or_default() {
            "delta" => {
                self.stop_thinking();
                self.streamed = true;
                self.write_text(&strip_control_chars(text));
            }
            "message" if event["role"] == "assistant" => {
                self.stop_thinking();
                if !std::mem::take(&mut self.streamed) {
                    self.write_text(&strip_control_chars(text));
                }
                self.end_line();
            }
            "thought" if all => {
                if !self.thinking {
                    self.end_line();
                    self.thinking = true;
                }
                let text = self.style.dim(&strip_control_chars(text));
                self.write_text(&text);
            }
            "tool_call" if all => self.render_tool_call(event),
            "tool_result" if all => self.render_tool_result(event),
            "plan" if all => self.render_plan(event),
            "caller_tool_request" if all => {
                let (caller, tool) = (field_text(event, "caller_id"), field_text(event, "tool"));
                let said = format!(
                    "· waiting for {caller} to run {tool} {}",
                    format_arguments(&event["arguments"])
                );
                let said = self.style.dim(&fold_to_line(&said, terminal_width()));
                self.write_line(&said);
            }
            "status" => self.render_status(event, all),
            "turn_completed" | "error" => self.end_line(),
            _ => {}
        }
    }

    fn render_status(&mut self, event: &Value, all: bool) {
        let status = event["status"].as_str().unwrap_or_default();
        self.set_activity(match status {
            "starting" => "starting the sandbox",
            "running" => "working",
            other => other,
        });
        if let (true, Some(reason), "switching") = (all, event["reason"].as_str(), status) {
            let said = self
                .style
                .dim(&fold_to_line(&format!("· {status}: {reason}"), terminal_width()));
            self.write_line(&said);
        }
    }

    fn render_tool_call(&mut self, event: &Value) {
        self.stop_thinking();
        let tool = event["tool"].as_str().unwrap_or("a tool");
        let id = event["tool_call_id"].as_str().unwrap_or_default();
        self.calls.insert(id.to_owned(), tool.to_owned());
        let name = fold_to_line(tool, 64);
        let room = terminal_width().saturating_sub(name.chars().count() + 3).max(20);
        let said = format!(
            "{} {} {}",
            self.style.cyan("▸"),
            self.style.bold(&name),
            fold_to_line(&format_arguments(&event["arguments"]), room)
        );
        self.write_line(said.trim_end());
        self.set_activity(&format!("running {name}"));
    }

    fn render_tool_result(&mut self, event: &Value) {
        let ok = event["ok"] == true;
        let id = event["tool_call_id"].as_str().unwrap_or_default();
        let call = self.calls.remove(id);
        let mark = match ok {
            true => self.style.green("✓"),
            false => self.style.red("✗"),
        };
        // Results may come in another order than the calls: while others are open, say which tool this one is of.
        let whose = match (&call, self.calls.is_empty()) {
            (Some(tool), false) => format!("{}: ", fold_to_line(tool, 64)),
            _ => String::new(),
        };
        let room = terminal_width().saturating_sub(whose.chars().count() + 4).max(20);
        let said = fold_to_line(&format_result(&event["result"]), room);
        let said = if said.is_empty() {
            if ok {
                "done".to_owned()
            } else {
                "failed".to_owned()
            }
        } else {
            said
        };
        let said = format!("  {mark} {}", self.style.dim(&format!("{whose}{said}")));
        self.write_line(&said);
        self.set_activity("working");
    }

    fn render_plan(&mut self, event: &Value) {
        for step in event["entries"].as_array().into_iter().flatten() {
            let mark = match step["status"].as_str() {
                Some("completed") => "☑",
                Some("in_progress") => "▶",
                _ => "☐",
            };
            let said = format!(
                "  {mark} {}",
                fold_to_line(
                    step["content"].as_str().unwrap_or_default(),
                    terminal_width().saturating_sub(4)
                )
            );
            let said = self.style.dim(&said);
            self.write_line(&said);
        }
    }

    fn stop_thinking(&mut self) {
        if std::mem::take(&mut self.thinking) {
            self.end_line();
        }
    }

    /// Prints text without a newline at its end.
    fn write_text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.hide_spinner();
        write_stdout(text);
        // The code that resets the colour comes after the text's own last character.
        self.mid_line = !text.trim_end_matches("\x1b[0m").ends_with('\n');
    }

    /// Prints a line of its own.
    pub(crate) fn write_line(&mut self, line: &str) {
        self.end_line();
        self.hide_spinner();
        write_stdout(&format!("{line}\n"));
    }

    /// Prints a note on stderr; nothing when the output is JSON.
    pub(crate) fn print_note(&mut self, line: &str) {
        self.end_line();
        self.hide_spinner();
        if matches!(self.verbosity, TurnVerbosity::All | TurnVerbosity::AgentText) {
            eprintln!("{}", AnsiStyle::stderr().dim(&strip_control_chars(line)));
        }
    }

    /// Ends a line that was begun, and hides the spinner.
    pub(crate) fn end_line(&mut self) {
        if std::mem::take(&mut self.mid_line) {
            write_stdout("\n");
        }
        self.hide_spinner();
    }
}

fn write_stdout(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes());
    let _ = out.flush();
}

/// A tool call's arguments on one line, such as `path="a.txt" limit=3`.
pub(crate) fn format_arguments(value: &Value) -> String {
    match value {
        Value::Object(object) => {
            let pairs = object.iter().map(|(name, value)| format!("{name}={value}"));
            pairs.collect::<Vec<_>>().join(" ")
        }
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// A tool result as text: the text blocks of MCP or ACP content, else its JSON.
pub(crate) fn format_result(value: &Value) -> String {
    let text = |block: &Value| {
        block["text"]
            .as_str()
            .or(block["content"]["text"].as_str())
            .map(str::to_owned)
    };
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(blocks) if blocks.iter().any(|b| text(b).is_some()) => {
            blocks.iter().filter_map(text).collect::<Vec<_>>().join(" ")
        }
        Value::Object(object) => match object.get("content") {
            Some(content) if content.is_array() => format_result(content),
            _ => value.to_string(),
        },
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_and_results_are_formatted_as_text() {
        assert_eq!(
            format_arguments(&json!({"path": "a b", "n": 3})),
            r#"path="a b" n=3"#
        );
        assert_eq!(format_arguments(&json!(null)), "");
        assert_eq!(
            format_result(
                &json!([{"type": "text", "text": "x"}, {"type": "content", "content": {"type": "text", "text": "y"}}])
            ),
            "x y"
        );
        assert_eq!(
            format_result(&json!({"content": [{"type": "text", "text": "x"}], "isError": false})),
            "x"
        );
        assert_eq!(format_result(&json!({"a": 1})), r#"{"a":1}"#);
        assert_eq!(format_result(&json!(null)), "");
    }
}
