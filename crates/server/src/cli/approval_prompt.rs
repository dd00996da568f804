//! Asks at the terminal about calls that wait for approval, while a turn is shown: `y` or `n` and Enter.

use std::{
    collections::{HashSet, VecDeque},
    io::BufRead as _,
    time::{Duration, Instant},
};

use oubliette_protocol::{ErrorCode, Result};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{
    approval_layout::layout_arguments, client::ActionClient, output::field_text, style::fold_to_line,
    turn_display::TurnDisplay,
};

/// A line that comes sooner after a question took the place of another is not an answer to it: nobody reads that fast.
const READING_TIME: Duration = Duration::from_secs(1);

/// Lines of stdin, read on a thread of its own because the read blocks. The thread starts with the first line wanted, so
/// that a command that asks nothing leaves its stdin alone.
#[derive(Default)]
pub(crate) struct StdinLines {
    lines: Option<mpsc::Receiver<String>>,
}

impl StdinLines {
    /// The next line; `None` at the end of stdin. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<String> {
        self.lines.get_or_insert_with(read_lines).recv().await
    }
}

fn read_lines() -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { return };
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    lines
}

/// The approvals of one session that wait, in the order they were requested. The first is being asked about.
#[derive(Default)]
pub(crate) struct ApprovalPrompt {
    waiting: VecDeque<WaitingQuestion>,
    /// Everything that was asked about.
    asked: HashSet<String>,
    /// When what was being asked about was decided elsewhere, so that another question took its place.
    replaced_at: Option<Instant>,
}

struct WaitingQuestion {
    approval_id: String,
    text: String,
}

/// What a line typed at the prompt means.
#[derive(Debug, PartialEq, Eq)]
enum TypedAnswer<'a> {
    Allow,
    AllowForSession,
    Deny { reason: Option<&'a str> },
    Unclear,
}

impl TypedAnswer<'_> {
    fn parse(line: &str) -> TypedAnswer<'_> {
        let (word, rest) = line
            .trim()
            .split_once(char::is_whitespace)
            .unwrap_or((line.trim(), ""));
        match (word.to_ascii_lowercase().as_str(), rest.trim()) {
            ("y" | "yes", "") => TypedAnswer::Allow,
            ("a" | "always", "") => TypedAnswer::AllowForSession,
            ("n" | "no", "") => TypedAnswer::Deny { reason: None },
            ("n" | "no", reason) => TypedAnswer::Deny { reason: Some(reason) },
            _ => TypedAnswer::Unclear,
        }
    }
}

impl ApprovalPrompt {
    /// Whether something is being asked.
    pub(crate) fn is_asking(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes an event of the session: asks about a new approval, and no longer about one that is decided.
    pub(crate) fn observe(&mut self, event: &Value, display: &mut TurnDisplay) {
        let id = field_text(event, "approval_id");
        let asked = self.waiting.front().map(|question| question.approval_id.clone());
        match event["type"].as_str().unwrap_or_default() {
            "approval_requested" if self.asked.insert(id.clone()) => {
                let mut text = format!("allow {}?", fold_to_line(&field_text(event, "tool"), 200));
                for line in layout_arguments(&event["arguments"]) {
                    text.push_str("\n  ");
                    text.push_str(&line);
                }
                text.push_str("\n  y or n, a for all of this session");
                self.waiting.push_back(WaitingQuestion {
                    approval_id: id,
                    text,
                });
            }
            "approval_decided" => {
                if asked.as_ref() == Some(&id) {
                    self.replaced_at = Some(Instant::now());
                }
                self.waiting.retain(|question| question.approval_id != id);
                display.print_question(&format!("{id} {}", field_text(event, "decision")));
            }
            _ => return,
        }
        let now = self.waiting.front().map(|question| &question.approval_id);
        if now != asked.as_ref() {
            self.ask(display);
        }
    }

    /// Asks about the approvals of the session that wait already: what comes next waits for them. `page` is an answer of
    /// `approval_list`.
    pub(crate) fn ask_about_waiting(&mut self, page: &Value, display: &mut TurnDisplay) {
        for row in page["approvals"].as_array().into_iter().flatten().rev() {
            let mut requested = row.clone();
            requested["type"] = json!("approval_requested");
            self.observe(&requested, display);
        }
    }

    /// Whether a line that comes now can be meant for what is being asked, and not for the question before.
    fn takes_answers(&self, now: Instant) -> bool {
        self.replaced_at
            .is_none_or(|at| now.saturating_duration_since(at) >= READING_TIME)
    }

    fn ask(&self, display: &mut TurnDisplay) {
        if let Some(question) = self.waiting.front() {
            display.print_question(&question.text);
        }
    }

    /// Says how to decide elsewhere what cannot be decided here, because stdin has ended.
    pub(crate) fn point_elsewhere(&self, display: &mut TurnDisplay) {
        if let Some(question) = self.waiting.front() {
            let id = &question.approval_id;
            display.print_question(&format!(
                "decide with: oubliette approve {id}, or oubliette deny {id}"
            ));
        }
    }

    /// Decides what is being asked as this line says; asks again if it does not.
    pub(crate) async fn answer(
        &mut self,
        line: &str,
        client: &ActionClient,
        display: &mut TurnDisplay,
    ) -> Result<()> {
        let Some(question) = self.waiting.front() else {
            return Ok(());
        };
        if !self.takes_answers(Instant::now()) {
            display.print_question("the question has changed; nothing was decided");
            self.ask(display);
            return Ok(());
        }
        let mut arguments = json!({ "approval_id": question.approval_id, "decision": "allow" });
        match TypedAnswer::parse(line) {
            TypedAnswer::Allow => {}
            TypedAnswer::AllowForSession => arguments["remember"] = json!("session"),
            TypedAnswer::Deny { reason } => {
                arguments["decision"] = json!("deny");
                arguments["reason"] = json!(reason);
            }
            TypedAnswer::Unclear => {
                self.ask(display);
                return Ok(());
            }
        }
        self.waiting.pop_front();
        match client.call("approval_decide", arguments).await {
            Ok(_) => {}
            // Somebody else was faster.
            Err(error) if error.code == ErrorCode::Conflict => display.print_question(&error.message),
            Err(error) => return Err(error),
        }
        self.ask(display);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::turn_display::TurnVerbosity;

    #[test]
    fn a_line_typed_for_a_question_that_was_decided_elsewhere_is_not_an_answer_to_the_next() {
        let mut display = TurnDisplay::new(TurnVerbosity::Nothing);
        let mut prompt = ApprovalPrompt::default();
        let asked = |id: &str| json!({ "type": "approval_requested", "approval_id": id, "tool": "x" });
        let decided =
            |id: &str| json!({ "type": "approval_decided", "approval_id": id, "decision": "allowed" });
        for id in ["one", "two", "three"] {
            prompt.observe(&asked(id), &mut display);
        }
        // One that is not being asked about yet changes nothing.
        prompt.observe(&decided("three"), &mut display);
        assert!(prompt.is_asking() && prompt.takes_answers(Instant::now()));
        prompt.observe(&decided("one"), &mut display);
        assert_eq!(prompt.waiting.len(), 1);
        let at = prompt.replaced_at.unwrap();
        assert!(!prompt.takes_answers(at));
        assert!(prompt.takes_answers(at + READING_TIME));
    }

    #[test]
    fn what_waits_already_is_asked_about_once_and_the_oldest_first() {
        let mut display = TurnDisplay::new(TurnVerbosity::Nothing);
        let mut prompt = ApprovalPrompt::default();
        let row = |id: &str| json!({ "approval_id": id, "tool": "x", "status": "pending" });
        prompt.ask_about_waiting(
            &json!({ "approvals": [row("newer"), row("older")] }),
            &mut display,
        );
        let event = json!({ "type": "approval_requested", "approval_id": "newer", "tool": "x" });
        prompt.observe(&event, &mut display);
        let asked: Vec<&str> = prompt
            .waiting
            .iter()
            .map(|question| &*question.approval_id)
            .collect();
        assert_eq!(asked, ["older", "newer"]);
    }

    #[test]
    fn an_answer_is_y_or_n_with_a_reason() {
        for (line, answer) in [
            ("y", TypedAnswer::Allow),
            (" YES ", TypedAnswer::Allow),
            ("a", TypedAnswer::AllowForSession),
            ("n", TypedAnswer::Deny { reason: None }),
            (
                "n not now",
                TypedAnswer::Deny {
                    reason: Some("not now"),
                },
            ),
            ("y but", TypedAnswer::Unclear),
            ("", TypedAnswer::Unclear),
            ("hello", TypedAnswer::Unclear),
        ] {
            assert_eq!(TypedAnswer::parse(line), answer, "{line:?}");
        }
    }
}
