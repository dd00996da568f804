//! A turn as it happens: text as it comes, tool calls and their results folded to a line, a spinner while
//! nothing else moves.

use std::{
    collections::HashMap,
    io::{IsTerminal as _, Write as _},
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{
    output::field,
    style::{Paint, clean, fold, width},
};

/// How much of a turn is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Show {
    /// Everything, for people.
    All,
    /// The agent's words alone.
    Words,
    /// Every event as a line of JSON.
    Events,
    /// Nothing.
    Nothing,
}

/// Frames of the spinner.
const FRAMES: [&str; 10] = ["⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"];
/// How often it moves.
pub const TICK: Duration = Duration::from_millis(100);

/// What shows a turn.
pub struct Live {
    show: Show,
    paint: Paint,
    /// Whether what is on the screen ends in the middle of a line.
    in_line: bool,
    /// Whether the message that is being said was shown piece by piece.
    said_in_pieces: bool,
    thinking: bool,
    calls: HashMap<String, (String, Instant)>,
    spinner: Option<Spinner>,
}

struct Spinner {
    what: String,
    since: Instant,
    frame: usize,
    drawn: bool,
}

impl Live {
    /// Shows turns on stdout.
    pub fn new(show: Show) -> Self {
        let looks = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
        let spinner = (show == Show::All && looks && std::env::var_os("TERM").is_none_or(|t| t != "dumb"))
            .then(|| Spinner {
                what: String::new(),
                since: Instant::now(),
                frame: 0,
                drawn: false,
            });
        Self {
            show,
            paint: Paint::stdout(),
            in_line: false,
            said_in_pieces: false,
            thinking: false,
            calls: HashMap::new(),
            spinner,
        }
    }

    /// A turn begins.
    pub fn begin(&mut self) {
        self.said_in_pieces = false;
        self.calls.clear();
        if let Some(spinner) = &mut self.spinner {
            spinner.since = Instant::now();
            spinner.what = "starting".into();
        }
    }

    /// Whether there is a spinner to move.
    pub fn spins(&self) -> bool {
        self.spinner.is_some()
    }

    /// Moves the spinner. It has no place in the middle of a line.
    pub fn tick(&mut self) {
        let (paint, in_line) = (self.paint, self.in_line);
        if let Some(spinner) = self.spinner.as_mut().filter(|_| !in_line) {
            spinner.frame = (spinner.frame + 1) % FRAMES.len();
            spinner.drawn = true;
            let seconds = spinner.since.elapsed().as_secs();
            let words = format!(
                "{} {}… {seconds}s · Ctrl-C cancels",
                FRAMES[spinner.frame], spinner.what
            );
            write(&format!("\r\x1b[K{}", paint.dim(&fold(&words, width() - 1))));
        }
    }

    fn hide_spinner(&mut self) {
        if let Some(spinner) = self.spinner.as_mut().filter(|s| s.drawn) {
            spinner.drawn = false;
            write("\r\x1b[K");
        }
    }

    fn doing(&mut self, what: &str) {
        if let Some(spinner) = &mut self.spinner {
            spinner.what = what.to_owned();
        }
    }

    /// Shows an event.
    pub fn event(&mut self, event: &Value) {
        match self.show {
            Show::Nothing => {}
            Show::Events => write(&format!("{event}\n")),
            Show::Words | Show::All => self.shown(event),
        }
    }

    fn shown(&mut self, event: &Value) {
        let all = self.show == Show::All;
        let text = event["text"].as_str().unwrap_or_default();
        match event["type"].as_str().unwrap_or_default() {
            "delta" => {
                self.stop_thinking();
                self.said_in_pieces = true;
                self.text(&clean(text));
            }
            "message" if event["role"] == "assistant" => {
                self.stop_thinking();
                if !std::mem::take(&mut self.said_in_pieces) {
                    self.text(&clean(text));
                }
                self.end_line();
            }
            "thought" if all => {
                if !self.thinking {
                    self.end_line();
                    self.thinking = true;
                }
                let text = self.paint.dim(&clean(text));
                self.text(&text);
            }
            "tool_call" if all => self.tool_call(event),
            "tool_result" if all => self.tool_result(event),
            "plan" if all => self.plan(event),
            "caller_tool_request" if all => {
                let (caller, tool) = (field(event, "caller_id"), field(event, "tool"));
                let said = format!(
                    "· waiting for {caller} to run {tool} {}",
                    arguments(&event["arguments"])
                );
                let said = self.paint.dim(&fold(&said, width()));
                self.line(&said);
            }
            "status" => self.status(event, all),
            "turn_completed" | "error" => self.end_line(),
            _ => {}
        }
    }

    fn status(&mut self, event: &Value, all: bool) {
        let status = event["status"].as_str().unwrap_or_default();
        self.doing(match status {
            "starting" => "starting the sandbox",
            "running" => "working",
            other => other,
        });
        if let (true, Some(reason), "switching") = (all, event["reason"].as_str(), status) {
            let said = self.paint.dim(&fold(&format!("· {status}: {reason}"), width()));
            self.line(&said);
        }
    }

    fn tool_call(&mut self, event: &Value) {
        self.stop_thinking();
        let tool = event["tool"].as_str().unwrap_or("a tool");
        let id = event["tool_call_id"].as_str().unwrap_or_default();
        self.calls
            .insert(id.to_owned(), (tool.to_owned(), Instant::now()));
        let name = fold(tool, 64);
        let room = width().saturating_sub(name.chars().count() + 3).max(20);
        let said = format!(
            "{} {} {}",
            self.paint.cyan("▸"),
            self.paint.bold(&name),
            fold(&arguments(&event["arguments"]), room)
        );
        self.line(said.trim_end());
        self.doing(&format!("running {name}"));
    }

    fn tool_result(&mut self, event: &Value) {
        let ok = event["ok"] == true;
        let id = event["tool_call_id"].as_str().unwrap_or_default();
        let call = self.calls.remove(id);
        let mark = match ok {
            true => self.paint.green("✓"),
            false => self.paint.red("✗"),
        };
        // Results may come in another order than the calls were made.
        let whose = match (&call, self.calls.is_empty()) {
            (Some((tool, _)), false) => format!("{}: ", fold(tool, 64)),
            _ => String::new(),
        };
        let room = width().saturating_sub(whose.chars().count() + 4).max(20);
        let said = fold(&result(&event["result"]), room);
        let said = if said.is_empty() {
            if ok {
                "done".to_owned()
            } else {
                "failed".to_owned()
            }
        } else {
            said
        };
        let said = format!("  {mark} {}", self.paint.dim(&format!("{whose}{said}")));
        self.line(&said);
        self.doing("working");
    }

    fn plan(&mut self, event: &Value) {
        for step in event["entries"].as_array().into_iter().flatten() {
            let mark = match step["status"].as_str() {
                Some("completed") => "☑",
                Some("in_progress") => "▶",
                _ => "☐",
            };
            let said = format!(
                "  {mark} {}",
                fold(
                    step["content"].as_str().unwrap_or_default(),
                    width().saturating_sub(4)
                )
            );
            let said = self.paint.dim(&said);
            self.line(&said);
        }
    }

    fn stop_thinking(&mut self) {
        if std::mem::take(&mut self.thinking) {
            self.end_line();
        }
    }

    /// A piece of text, as it is.
    fn text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.hide_spinner();
        write(text);
        // Colour ends after the text: what the text ends in is before it.
        self.in_line = !text.trim_end_matches("\x1b[0m").ends_with('\n');
    }

    /// A whole line.
    pub fn line(&mut self, line: &str) {
        self.end_line();
        self.hide_spinner();
        write(&format!("{line}\n"));
    }

    /// A line for people alone, on stderr.
    pub fn note(&mut self, line: &str) {
        self.end_line();
        self.hide_spinner();
        if matches!(self.show, Show::All | Show::Words) {
            eprintln!("{}", Paint::stderr().dim(&clean(line)));
        }
    }

    /// Nothing is left in the middle of a line.
    pub fn end_line(&mut self) {
        if std::mem::take(&mut self.in_line) {
            write("\n");
        }
        self.hide_spinner();
    }
}

fn write(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes());
    let _ = out.flush();
}

/// A call's arguments: `path="a.txt" limit=3`.
pub fn arguments(value: &Value) -> String {
    match value {
        Value::Object(object) => {
            let pairs = object.iter().map(|(name, value)| format!("{name}={value}"));
            pairs.collect::<Vec<_>>().join(" ")
        }
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// A result as text: MCP's and ACP's text blocks, else its JSON.
pub fn result(value: &Value) -> String {
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
            Some(content) if content.is_array() => result(content),
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
    fn arguments_and_results_are_read_as_people_would() {
        assert_eq!(arguments(&json!({"path": "a b", "n": 3})), r#"path="a b" n=3"#);
        assert_eq!(arguments(&json!(null)), "");
        assert_eq!(
            result(
                &json!([{"type": "text", "text": "x"}, {"type": "content", "content": {"type": "text", "text": "y"}}])
            ),
            "x y"
        );
        assert_eq!(
            result(&json!({"content": [{"type": "text", "text": "x"}], "isError": false})),
            "x"
        );
        assert_eq!(result(&json!({"a": 1})), r#"{"a":1}"#);
        assert_eq!(result(&json!(null)), "");
    }
}
