//! Lays out the arguments of a call that waits for approval, so that a person at the terminal can read what is asked.
//!
//! Everything in them comes from an agent: what would act on the terminal, or could not be seen, is written out.

use std::fmt::Write as _;

use serde_json::Value;

use crate::hidden_chars::is_deceptive_char;

/// The most lines that are shown.
const MAX_LINES: usize = 200;
/// The most lines of one text that are shown, so that the fields after it are seen.
const MAX_TEXT_LINES: usize = 40;
/// The longest JSON of a list or an object that is shown on one line, in bytes; of a longer one each part has its own.
const MAX_JSON_BYTES: usize = 80;
/// The most characters of a line that are shown.
const MAX_LINE_CHARS: usize = 400;

/// The arguments as lines: texts as they are, commands as a shell would take them, parts of what is nested under names such as
/// `toolCall.rawInput.command`, anything else as JSON. The last line says so if something was left out.
pub(crate) fn layout_arguments(arguments: &Value) -> Vec<String> {
    let mut layout = ArgumentLayout::default();
    match (recorded_beginning(arguments), arguments) {
        (Some((bytes, start)), _) => {
            layout.add_line("", start);
            layout.add_line(
                "",
                &format!("these arguments are {bytes} bytes; only their beginning is kept"),
            );
        }
        (None, Value::Object(fields)) => fields
            .iter()
            .for_each(|(name, value)| layout.add_field(&quote_name(name), value)),
        (None, Value::Null) => {}
        (None, other) => layout.add_line("", &other.to_string()),
    }
    layout.into_lines()
}

/// Size and beginning of arguments that are too large to be recorded whole. With any other field, or a field of another
/// type, these are an agent's own arguments.
fn recorded_beginning(arguments: &Value) -> Option<(u64, &str)> {
    let is_record = arguments.as_object()?.len() == 3 && arguments["truncated"] == Value::Bool(true);
    let recorded = arguments["bytes"].as_u64().zip(arguments["start"].as_str());
    recorded.filter(|_| is_record)
}

#[derive(Default)]
struct ArgumentLayout {
    lines: Vec<String>,
    left_out_lines: usize,
    cut: bool,
}

impl ArgumentLayout {
    fn add_field(&mut self, name: &str, value: &Value) {
        match value {
            Value::String(text) if text.contains('\n') => {
                self.add_line("", &format!("{name}:"));
                let mut lines = text.lines();
                let shown = lines.by_ref().take(MAX_TEXT_LINES);
                shown.for_each(|line| self.add_line("  | ", line));
                let left_out = lines.count();
                if left_out > 0 {
                    self.add_line("", &format!("… and {left_out} more lines"));
                    self.cut = true;
                }
            }
            Value::String(text) => self.add_line("", &format!("{name}: {text}")),
            Value::Array(words) if !words.is_empty() && words.iter().all(Value::is_string) => {
                let words = words.iter().filter_map(Value::as_str).map(quote_word);
                let command = words.collect::<Vec<_>>().join(" ");
                self.add_line("", &format!("{name}: {command}"));
            }
            Value::Object(fields) if is_long(value) => fields
                .iter()
                .for_each(|(part, value)| self.add_field(&format!("{name}.{}", quote_name(part)), value)),
            Value::Array(items) if is_long(value) => (0..)
                .zip(items)
                .for_each(|(at, value)| self.add_field(&format!("{name}[{at}]"), value)),
            other => self.add_line("", &format!("{name}: {other}")),
        }
    }

    fn add_line(&mut self, prefix: &str, text: &str) {
        if self.lines.len() >= MAX_LINES {
            self.left_out_lines += 1;
            return;
        }
        let mut line = prefix.to_owned();
        let mut chars = text.chars();
        chars
            .by_ref()
            .take(MAX_LINE_CHARS)
            .for_each(|c| push_visible(&mut line, c));
        let left_out = chars.count();
        if left_out > 0 {
            let _ = write!(line, "… and {left_out} more characters");
            self.cut = true;
        }
        self.lines.push(line);
    }

    fn into_lines(mut self) -> Vec<String> {
        if self.left_out_lines > 0 {
            self.lines
                .push(format!("… and {} more lines", self.left_out_lines));
        }
        if self.cut || self.left_out_lines > 0 {
            let all = "this is not all of it; `oubliette approvals --json` shows what is kept of it";
            self.lines.push(all.to_owned());
        }
        self.lines
    }
}

/// Whether the parts of a list or an object are shown on lines of their own.
fn is_long(value: &Value) -> bool {
    value.to_string().len() > MAX_JSON_BYTES
}

/// The name of a field, in quotes if it could be read as that of a part of another.
fn quote_name(name: &str) -> String {
    match name.is_empty() || name.contains(['.', '[', ':', '"', '\n']) {
        true => Value::from(name).to_string(),
        false => name.to_owned(),
    }
}

/// Appends a character, written out as `\u{…}` if it could not be seen, or would act on the terminal.
fn push_visible(line: &mut String, c: char) {
    match c {
        '\t' => line.push('\t'),
        c if c == '\n' || is_deceptive_char(c) => line.extend(c.escape_unicode()),
        c => line.push(c),
    }
}

/// A word of a command, in single quotes if a shell would read it otherwise.
pub(crate) fn quote_word(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_-./=:,@%+".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn texts_and_commands_are_laid_out_as_a_person_reads_them() {
        let arguments = json!({"path": "a b.txt", "content": "one\n  two\n", "mode": 7});
        assert_eq!(
            layout_arguments(&arguments),
            ["path: a b.txt", "content:", "  | one", "  |   two", "mode: 7"]
        );
        let command = json!({"argv": ["sh", "-c", "rm -rf 'x'; echo $HOME"]});
        assert_eq!(
            layout_arguments(&command),
            [r"argv: sh -c 'rm -rf '\''x'\''; echo $HOME'"]
        );
        assert_eq!(layout_arguments(&json!(null)), Vec::<String>::new());
        assert_eq!(layout_arguments(&json!([1])), ["[1]"]);
    }

    #[test]
    fn nothing_hides_and_what_is_left_out_is_said() {
        let hidden = json!({"path": "a\u{1b}[2K\u{202e}b\u{200b}\r"});
        assert_eq!(
            layout_arguments(&hidden),
            [r"path: a\u{1b}[2K\u{202e}b\u{200b}\u{d}"]
        );
        let long = layout_arguments(&json!({"argv": ["x".repeat(1_000), "; rm -rf /"]}));
        assert!(long[0].ends_with("… and 619 more characters"), "{}", long[0]);
        assert!(long[1].contains("not all of it"), "{long:?}");
        let huge = layout_arguments(&json!({"truncated": true, "bytes": 4_000_000, "start": "{\"a\":1"}));
        assert_eq!(huge[0], "{\"a\":1");
        assert!(huge[1].contains("4000000 bytes"), "{huge:?}");
        let forged = layout_arguments(&json!({"truncated": true, "bytes": 1, "start": "", "path": "/x"}));
        assert!(forged.iter().any(|line| line == "path: /x"), "{forged:?}");
        let hidden = layout_arguments(&json!({"truncated": true, "argv": ["rm", "x"], "start": "ls"}));
        assert!(hidden.iter().any(|line| line == "argv: rm x"), "{hidden:?}");
        let spaces = layout_arguments(&json!({"path": "a\u{a0}b\u{2800}"}));
        assert_eq!(spaces, [r"path: a\u{a0}b\u{2800}"]);
        let tall = layout_arguments(&json!({"content": "a\n".repeat(100)}));
        assert_eq!(tall.len(), 1 + MAX_TEXT_LINES + 2);
        assert_eq!(tall[1 + MAX_TEXT_LINES], "… and 60 more lines");
        let behind = layout_arguments(&json!({"content": "a\n".repeat(100), "path": "/etc/passwd"}));
        assert!(
            behind.iter().any(|line| line == "path: /etc/passwd"),
            "{behind:?}"
        );
        assert!(
            behind.last().is_some_and(|line| line.contains("not all of it")),
            "{behind:?}"
        );
        let endless = layout_arguments(&json!({"items": vec![json!({"a": 1}); 10_000]}));
        assert_eq!(endless.len(), MAX_LINES + 2);
    }

    #[test]
    fn what_is_nested_is_laid_out_by_its_parts() {
        let command = format!("cd build\nmake {}", "x".repeat(100));
        let asked = json!({
            "toolCall": {"kind": "execute", "rawInput": {"command": command, "cwd": "/workspace"},
                         "content": [{"type": "diff", "path": "a", "newText": "x".repeat(70)}], "locations": []},
            "options": [{"optionId": "y", "name": "Yes, once", "kind": "allow_once"}, {"optionId": "n", "kind": "reject_once"}],
            "toolCall.kind": "read",
        });
        let lines = layout_arguments(&asked);
        assert_eq!(lines[0], "toolCall.kind: execute");
        assert_eq!(lines[1..3], ["toolCall.rawInput.command:", "  | cd build"]);
        assert_eq!(lines[4], "toolCall.rawInput.cwd: /workspace");
        assert_eq!(lines[5], "toolCall.content[0].type: diff");
        assert_eq!(
            lines[7],
            format!("toolCall.content[0].newText: {}", "x".repeat(70))
        );
        assert_eq!(lines[8], "toolCall.locations: []");
        let yes = r#"options[0]: {"optionId":"y","name":"Yes, once","kind":"allow_once"}"#;
        assert_eq!(lines[9], yes);
        assert_eq!(lines[11], r#""toolCall.kind": read"#);
    }
}
