//! Shows a turn in the terminal as it runs: text as it streams in, each tool call and result folded to a line.
//!
//! On a terminal the text is rendered as Markdown above a footer with the running calls and the session's status
//! ([`LiveView`]); elsewhere it is written as it is.

use std::{
    io::{IsTerminal as _, Write as _},
    time::Duration,
};

use serde_json::Value;

use super::{
    approval_layout::quote_word,
    live_view::{FinishedCall, LiveView},
    output::field_text,
    status_line::SessionStatusLine,
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

/// How often the spinner advances.
pub(crate) const SPINNER_INTERVAL: Duration = Duration::from_millis(100);
/// Longest name of a tool that is shown, in columns.
const MAX_TOOL_NAME: usize = 64;

/// Prints the events of turns on stdout.
pub(crate) struct TurnDisplay {
    verbosity: TurnVerbosity,
    style: AnsiStyle,
    /// Whether the last text printed did not end with a newline; not used with `live`.
    mid_line: bool,
    /// Whether the current message was already printed from its `delta` events.
    streamed: bool,
    thinking: bool,
    /// Tool calls without a result yet, in the order they were made.
    calls: Vec<UnansweredCall>,
    /// Present on a terminal.
    live: Option<LiveView>,
}

/// A tool call without a result yet.
struct UnansweredCall {
    id: String,
    name: String,
    arguments: String,
    started: Option<jiff::Timestamp>,
}

impl TurnDisplay {
    /// Has a footer and renders Markdown when both stdout and stderr are terminals.
    pub(crate) fn new(verbosity: TurnVerbosity) -> Self {
        let on_terminal = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
        let is_smart = std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let for_people = matches!(verbosity, TurnVerbosity::All | TurnVerbosity::AgentText);
        let style = AnsiStyle::stdout();
        let live = (for_people && on_terminal && is_smart)
            .then(|| LiveView::new(style, verbosity == TurnVerbosity::All));
        Self {
            verbosity,
            style,
            mid_line: false,
            streamed: false,
            thinking: false,
            calls: Vec::new(),
            live,
        }
    }

    /// Resets the state for a new turn.
    pub(crate) fn begin_turn(&mut self) {
        self.streamed = false;
        self.calls.clear();
        if let Some(live) = &mut self.live {
            live.begin_turn();
        }
    }

    /// Ends what is being shown, so that others may print.
    pub(crate) fn end_turn(&mut self) {
        self.end_line();
        for call in std::mem::take(&mut self.calls) {
            if let Some(live) = &mut self.live {
                live.end_call(&call.id);
                let said = format!("· {} {}", call.name, call.arguments);
                let said = self
                    .style
                    .dim(&fold_to_line(&said, terminal_width().saturating_sub(12)));
                live.print_line(&format!("{said} no result"));
            }
        }
        if let Some(live) = &mut self.live {
            live.close();
        }
    }

    /// Whether [`advance_spinner`](Self::advance_spinner) has anything to do.
    pub(crate) fn has_spinner(&self) -> bool {
        self.live.as_ref().is_some_and(LiveView::has_footer)
    }

    /// Draws the footer's next frame.
    pub(crate) fn advance_spinner(&mut self) {
        if let Some(live) = &mut self.live {
            live.advance();
        }
    }

    /// Draws what may change again, after the terminal's size changed.
    pub(crate) fn redraw(&mut self) {
        if let Some(live) = &mut self.live {
            live.redraw();
        }
    }

    /// Shows what is being typed below the status.
    pub(crate) fn show_input(&mut self, typed: Option<&str>) {
        if let Some(live) = &mut self.live {
            live.set_input(typed);
        }
    }

    /// The session's status, if it is shown.
    pub(crate) fn status_mut(&mut self) -> Option<&mut SessionStatusLine> {
        self.live.as_mut().map(|live| &mut live.status)
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
        if let Some(live) = &mut self.live {
            live.status.observe_event(event);
        }
        match event["type"].as_str().unwrap_or_default() {
            "delta" => {
                self.stop_thinking();
                self.streamed = true;
                self.write_text(text);
            }
            "message" if event["role"] == "assistant" => {
                self.stop_thinking();
                if !std::mem::take(&mut self.streamed) {
                    self.write_text(text);
                }
                self.end_text();
            }
            "thought" if all => {
                if !self.thinking {
                    self.end_line();
                    self.thinking = true;
                }
                self.write_thought(text);
            }
            "tool_call" if all => self.render_tool_call(event),
            "tool_result" if all => self.render_tool_result(event),
            "plan" if all => self.render_plan(event),
            "caller_tool_request" if all => {
                let (caller, tool) = (field_text(event, "caller_id"), field_text(event, "tool"));
                let said = format!(
                    "· waiting for {caller} to run {} {}",
                    fold_to_line(&tool, MAX_TOOL_NAME),
                    format_arguments(&event["arguments"])
                );
                let said = self.style.dim(&fold_to_line(&said, terminal_width()));
                self.write_line(&said);
            }
            "approval_requested" => self.set_activity("waiting for approval"),
            "approval_decided" => self.set_activity("working"),
            "status" => self.render_status(event, all),
            "turn_completed" | "error" => self.end_text(),
            _ => {}
        }
    }

    fn render_status(&mut self, event: &Value, all: bool) {
        let status = event["status"].as_str().unwrap_or_default();
        let reason = event["reason"].as_str();
        self.set_activity(match (status, reason) {
            ("starting", Some(reason)) => reason,
            ("starting", None) => "starting the sandbox",
            ("running", _) => "working",
            (other, _) => other,
        });
        if let (true, Some(reason), "starting" | "switching") = (all, reason, status) {
            let said = self
                .style
                .dim(&fold_to_line(&format!("· {status}: {reason}"), terminal_width()));
            self.write_line(&said);
        }
    }

    fn render_tool_call(&mut self, event: &Value) {
        self.stop_thinking();
        let name = fold_to_line(event["tool"].as_str().unwrap_or("a tool"), MAX_TOOL_NAME);
        let call = UnansweredCall {
            id: field_text(event, "tool_call_id"),
            arguments: format_arguments(&event["arguments"]),
            started: event_time(event),
            name,
        };
        // An agent may report a call again, with more of its arguments.
        self.calls.retain(|open| open.id != call.id);
        match &mut self.live {
            Some(live) => {
                live.begin_call(&call.id, &call.name, &call.arguments);
            }
            None => {
                let room = terminal_width()
                    .saturating_sub(call.name.chars().count() + 3)
                    .max(20);
                let said = format!(
                    "{} {} {}",
                    self.style.cyan("▸"),
                    self.style.bold(&call.name),
                    fold_to_line(&call.arguments, room)
                );
                self.write_line(said.trim_end());
            }
        }
        self.calls.push(call);
    }

    fn render_tool_result(&mut self, event: &Value) {
        let ok = event["ok"] == true;
        let id = field_text(event, "tool_call_id");
        let call = self
            .calls
            .iter()
            .position(|call| call.id == id)
            .map(|at| self.calls.remove(at));
        let result = format_result(&event["result"]);
        let took = call.as_ref().and_then(|call| call.started).zip(event_time(event));
        let took = took.and_then(|(began, ended)| Duration::try_from(ended.duration_since(began)).ok());
        if self.live.is_some() {
            self.end_line();
        }
        if let Some(live) = &mut self.live {
            live.end_call(&id);
            live.print_call(&FinishedCall {
                ok,
                name: call.as_ref().map_or("a tool", |call| call.name.as_str()),
                arguments: call.as_ref().map_or("", |call| call.arguments.as_str()),
                took,
                result: &result,
            });
            return;
        }
        let mark = match ok {
            true => self.style.green("✓"),
            false => self.style.red("✗"),
        };
        // Results may come in another order than the calls: while others are open, say which tool this one is of.
        let whose = match (&call, self.calls.is_empty()) {
            (Some(call), false) => format!("{}: ", call.name),
            _ => String::new(),
        };
        let room = terminal_width().saturating_sub(whose.chars().count() + 4).max(20);
        let said = match (fold_to_line(&result, room), ok) {
            (said, _) if !said.is_empty() => said,
            (_, true) => "done".to_owned(),
            (_, false) => "failed".to_owned(),
        };
        let said = format!("  {mark} {}", self.style.dim(&format!("{whose}{said}")));
        self.write_line(&said);
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

    fn set_activity(&mut self, activity: &str) {
        if let Some(live) = &mut self.live {
            live.set_activity(activity);
        }
    }

    fn stop_thinking(&mut self) {
        if std::mem::take(&mut self.thinking) {
            self.end_line();
        }
    }

    /// Prints a piece of the agent's text.
    fn write_text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match &mut self.live {
            Some(live) => live.print_text(text),
            None => {
                let text = strip_control_chars(text);
                write_stdout(&text);
                self.mid_line = !text.ends_with('\n');
            }
        }
    }

    /// Prints a piece of the agent's reasoning.
    fn write_thought(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match &mut self.live {
            Some(live) => live.print_thought(text),
            None => {
                let text = strip_control_chars(text);
                write_stdout(&self.style.dim(&text));
                self.mid_line = !text.ends_with('\n');
            }
        }
    }

    /// Ends a message of the agent.
    fn end_text(&mut self) {
        self.end_line();
        if let Some(live) = &mut self.live {
            live.end_text();
        }
    }

    /// Prints a line of its own.
    pub(crate) fn write_line(&mut self, line: &str) {
        self.end_line();
        match &mut self.live {
            Some(live) => live.print_line(line),
            None => write_stdout(&format!("{line}\n")),
        }
    }

    /// Prints a note on stderr; nothing when the output is JSON.
    pub(crate) fn print_note(&mut self, line: &str) {
        if self.live.is_some() || matches!(self.verbosity, TurnVerbosity::All | TurnVerbosity::AgentText) {
            self.print_on_stderr(&AnsiStyle::stderr().dim(&strip_control_chars(line)));
        }
    }

    /// Prints a warning on stderr, whatever else is shown.
    pub(crate) fn print_warning(&mut self, line: &str) {
        let label = AnsiStyle::stderr().yellow("warning:");
        self.print_on_stderr(&format!("{label} {}", strip_control_chars(line)));
    }

    fn print_on_stderr(&mut self, said: &str) {
        self.end_line();
        match &mut self.live {
            Some(live) => live.print_line(said),
            None => eprintln!("{said}"),
        }
    }

    /// Prints a question, or what became of one, on stderr, whatever else is shown.
    pub(crate) fn print_question(&mut self, line: &str) {
        self.end_line();
        let said = format!("{} {}", AnsiStyle::stderr().bold("?"), strip_control_chars(line));
        match &mut self.live {
            Some(live) => live.print_question(&said),
            None => eprintln!("{said}"),
        }
    }

    /// Ends a line that was begun.
    pub(crate) fn end_line(&mut self) {
        if let Some(live) = &mut self.live {
            live.break_line();
        }
        if std::mem::take(&mut self.mid_line) {
            write_stdout("\n");
        }
    }
}

/// When an event happened.
fn event_time(event: &Value) -> Option<jiff::Timestamp> {
    event["ts"].as_str()?.parse().ok()
}

fn write_stdout(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// A tool call's arguments on one line, such as `path="a.txt" limit=3`. A command and nothing else is shown as it would be
/// typed; beside other fields it keeps its name, because a word of it could look like one of them.
pub(crate) fn format_arguments(value: &Value) -> String {
    if let Some(words) = sole_command(value) {
        let words: Vec<_> = words.into_iter().map(quote_word).collect();
        return words.join(" ");
    }
    match value {
        Value::Object(object) => {
            let pairs = object.iter().map(|(name, value)| format!("{name}={value}"));
            pairs.collect::<Vec<_>>().join(" ")
        }
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// The words of a command that is the only argument.
fn sole_command(value: &Value) -> Option<Vec<&str>> {
    let object = value.as_object().filter(|object| object.len() == 1)?;
    let words = object.get("argv").or_else(|| object.get("command"))?.as_array()?;
    let words: Option<Vec<&str>> = words.iter().map(Value::as_str).collect();
    words.filter(|words| !words.is_empty())
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
            format_arguments(&json!({"argv": ["ls", "a b", "n=3"]})),
            "ls 'a b' n=3"
        );
        assert_eq!(
            format_arguments(&json!({"argv": ["ls"], "n": 3})),
            r#"argv=["ls"] n=3"#
        );
        assert_eq!(format_arguments(&json!({"argv": []})), "argv=[]");
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
