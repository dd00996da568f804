//! `script:` models: a file is followed instead of a model being asked. No network, no surprise.

use oubliette_protocol::{Object, strict};
use serde::Deserialize;

/// What to do in each turn.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Script {
    turns: Vec<Vec<Step>>,
}

/// One step of a turn.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Step {
    /// Say something.
    Say(String),
    /// Call one tool and wait for its result.
    Call(Call),
    /// Call several at once and wait for all.
    Parallel(Vec<Call>),
    /// Wait.
    SleepMs(u64),
}

/// A tool call.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Call {
    /// The tool's name, used as it stands, listed or not.
    pub(crate) tool: String,
    /// Its arguments.
    #[serde(default)]
    pub(crate) arguments: Object,
}

impl Script {
    /// Reads a script strictly.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let script: Script = strict::from_str(text).map_err(|e| format!("the script is wrong: {e}"))?;
        if script.turns.is_empty() {
            return Err(
                "the script is wrong: turns: must hold at least one turn (an empty list is one)".to_owned(),
            );
        }
        Ok(script)
    }

    /// The steps of the turn with this number, counted from 0; the last turn repeats.
    pub(crate) fn turn(&self, number: usize) -> &[Step] {
        let last = self.turns.len().saturating_sub(1);
        self.turns.get(number.min(last)).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_kind_of_step_is_read() {
        let script = Script::parse(
            r#"{"turns":[[{"say":"hi"},{"call":{"tool":"t","arguments":{"a":1}}},
                {"parallel":[{"tool":"x"},{"tool":"y","arguments":{}}]},{"sleep_ms":5}],[]]}"#,
        )
        .unwrap();
        let steps = script.turn(0);
        assert_eq!(steps[0], Step::Say("hi".into()));
        let Step::Call(call) = &steps[1] else {
            panic!("{steps:?}")
        };
        assert_eq!(json!(call.arguments), json!({ "a": 1 }));
        assert!(
            matches!(&steps[2], Step::Parallel(calls) if calls.len() == 2 && calls[0].arguments.is_empty())
        );
        assert_eq!(steps[3], Step::SleepMs(5));
        assert_eq!(script.turn(1), &[]);
        assert_eq!(script.turn(99), script.turn(1), "the last turn repeats");
    }

    #[test]
    fn a_wrong_script_says_where() {
        for (text, parts) in [
            (r#"{"turns":[[{"says":"x"}]]}"#, ["turns[0][0]", "says"]),
            (
                r#"{"turns":[[{"say":"x"},{"call":{"tool":"t","args":{}}}]]}"#,
                ["turns[0][1]", "args"],
            ),
            (
                r#"{"turns":[[{"call":{"arguments":{}}}]]}"#,
                ["turns[0][0]", "tool"],
            ),
            (
                r#"{"turns":[[{"call":{"tool":"t","arguments":[]}}]]}"#,
                ["arguments", "turns[0][0]"],
            ),
            (
                r#"{"turns":[[{"say":"a","sleep_ms":1}]]}"#,
                ["turns[0][0]", "script"],
            ),
            (r#"{"turns":[]}"#, ["turns", "at least one"]),
            (r#"{"turn":[]}"#, ["turn", "script"]),
            ("nonsense", ["script", "wrong"]),
        ] {
            let error = Script::parse(text).unwrap_err();
            assert!(parts.iter().all(|p| error.contains(p)), "{text}: {error}");
        }
    }
}
