//! The status of a session on one line: agent, state, what was used, and approvals that wait.

use serde_json::Value;

use super::{
    output::field_text,
    style::{fold_to_line, short_count},
};

/// Longest agent name that is shown, in columns.
const MAX_AGENT: usize = 32;

/// What the status line says of a session.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct SessionStatusLine {
    /// The agent's slug; empty if it is not known yet.
    pub agent: String,
    tokens: u64,
    cost_usd: Option<f64>,
    /// Ids of the approvals that wait.
    approvals: Vec<String>,
}

impl SessionStatusLine {
    /// Takes over what `session_get` answered.
    pub(crate) fn observe_session(&mut self, session: &Value) {
        self.agent = field_text(session, "agent");
        let usage = &session["usage"];
        let tokens = ["input_tokens", "output_tokens"].map(|field| usage[field].as_u64().unwrap_or(0));
        self.tokens = tokens.iter().fold(0, |sum, count| sum.saturating_add(*count));
        self.cost_usd = usage["cost_usd"].as_f64();
        let waiting = session["pending_approvals"].as_array();
        self.approvals = waiting
            .into_iter()
            .flatten()
            .filter_map(|id| id.as_str().map(str::to_owned))
            .collect();
    }

    /// Takes an event of the session: approvals that are requested and decided.
    pub(crate) fn observe_event(&mut self, event: &Value) {
        let id = || field_text(event, "approval_id");
        match event["type"].as_str().unwrap_or_default() {
            "approval_requested" if !self.approvals.contains(&id()) => self.approvals.push(id()),
            "approval_decided" => {
                let decided = id();
                self.approvals.retain(|waiting| *waiting != decided);
            }
            _ => {}
        }
    }

    /// Whether a call waits for approval.
    pub(crate) fn waits_for_approval(&self) -> bool {
        !self.approvals.is_empty()
    }

    /// The line, with what the session does at its place: `assistant · working 3s · 1.2k tokens · $0.0041`.
    pub(crate) fn format(&self, state: &str) -> String {
        let agent = match self.agent.is_empty() {
            true => "the project's agent".to_owned(),
            false => fold_to_line(&self.agent, MAX_AGENT),
        };
        let mut parts = vec![agent, state.to_owned()];
        if self.tokens > 0 {
            parts.push(format!("{} tokens", short_count(self.tokens)));
        }
        if let Some(usd) = self.cost_usd {
            parts.push(format!("${usd:.4}"));
        }
        match self.approvals.len() {
            0 => {}
            1 => parts.push("1 approval waits".into()),
            several => parts.push(format!("{several} approvals wait")),
        }
        parts.join(" · ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_line_has_agent_state_usage_and_approvals() {
        let mut line = SessionStatusLine::default();
        assert_eq!(line.format("idle"), "the project's agent · idle");
        line.observe_session(&json!({
            "agent": "demo", "usage": { "input_tokens": 1200, "output_tokens": 34, "cost_usd": 0.0123 },
            "pending_approvals": ["appr_1"]
        }));
        assert_eq!(
            line.format("idle"),
            "demo · idle · 1.2k tokens · $0.0123 · 1 approval waits"
        );
        line.observe_event(&json!({ "type": "approval_requested", "approval_id": "appr_2" }));
        assert!(line.format("x").ends_with("2 approvals wait"));
        for id in ["appr_1", "appr_2"] {
            line.observe_event(&json!({ "type": "approval_decided", "approval_id": id }));
        }
        assert!(!line.format("x").contains("wait"));
    }
}
