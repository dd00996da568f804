//! `script:` models: fixed steps per turn from a file instead of a model's answers. No network, always the same.

use oubliette_protocol::{JsonObject, strict};
use serde::Deserialize;

/// The steps of each turn.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Script {
    turns: Vec<Vec<ScriptStep>>,
}

/// One step of a turn.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ScriptStep {
    /// Send this text as part of the answer.
    Say(String),
    /// Call one tool and wait for its result.
    Call(ScriptedCall),
    /// Call several tools at once and wait for all results.
    Parallel(Vec<ScriptedCall>),
    /// Wait this many milliseconds.
    SleepMs(u64),
}

/// A tool call of a script.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScriptedCall {
    /// The tool's name, sent unchanged even if no server lists it.
    pub(crate) tool: String,
    /// Its arguments.
    #[serde(default)]
    pub(crate) arguments: JsonObject,
}

impl Script {
    /// Parses a script; unknown fields and an empty list of turns are errors.
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
    pub(crate) fn steps_of_turn(&self, number: usize) -> &[ScriptStep] {
        let last = self.turns.len().saturating_sub(1);
        self.turns.get(number.min(last)).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_kind_of_step_is_parsed() {
        let script = Script::parse(
            r#"{"turns":[[{"say":"hi"},{"call":{"tool":"t","arguments":{"a":1}}},
                {"parallel":[{"tool":"x"},{"tool":"y","arguments":{}}]},{"sleep_ms":5}],[]]}"#,
        )
        .unwrap();
        let steps = script.steps_of_turn(0);
        assert_eq!(steps[0], ScriptStep::Say("hi".into()));
        let ScriptStep::Call(call) = &steps[1] else {
            panic!("{steps:?}")
        };
        assert_eq!(json!(call.arguments), json!({ "a": 1 }));
        assert!(
            matches!(&steps[2], ScriptStep::Parallel(calls) if calls.len() == 2 && calls[0].arguments.is_empty())
        );
        assert_eq!(steps[3], ScriptStep::SleepMs(5));
        assert_eq!(script.steps_of_turn(1), &[]);
        assert_eq!(
            script.steps_of_turn(99),
            script.steps_of_turn(1),
            "the last turn repeats"
        );
    }

    #[test]
    fn a_script_error_names_its_place() {
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
