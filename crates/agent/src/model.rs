//! A model asked over HTTP, through the server's forwarder.
//!
//! The loop: the conversation goes out, text and reasoning stream in, the tools the model wants are
//! called side by side, their results are remembered, and the conversation goes out again, until the
//! model wants no more.
//!
//! - [`ask`]: one request and its retries; [`failure`]: what went wrong with it.
//! - [`context`]: what was remembered as the messages of a request, and keeping that bounded.
//! - [`names`]: tool names that providers accept.
//! - [`usage`]: what it cost.

mod ask;
mod context;
mod failure;
mod names;
mod usage;

use agent_client_protocol::Error;
use futures::future::join_all;
use oubliette_protocol::{Object, tool::CallResult};
use serde_json::Value;

use self::{ask::Asked, names::Names, usage::Total};
use crate::{
    config::ModelConfig,
    memory::{Answer, Called, Entry, Keeper, Memory},
    turn::{Ended, Turn},
};

/// The most of one tool result a model is shown.
const RESULT_CHARS: usize = 60_000;

/// What came of a turn.
pub(crate) struct Outcome {
    /// How it ended.
    pub(crate) ended: Ended,
    usage: Total,
}

impl Outcome {
    /// What is said about the turn beside its end.
    pub(crate) fn meta(&self) -> Object {
        let mut meta = Object::new();
        meta.insert("usage".to_owned(), Value::Object(self.usage.details()));
        meta
    }
}

/// Runs a turn whose prompt is the last entry of `memory`.
pub(crate) async fn run<K: Keeper>(
    turn: &Turn<'_>,
    config: &ModelConfig,
    prompt: &str,
    memory: &mut Memory<K>,
) -> Result<Outcome, Error> {
    let model = ask::Model::new(config)?;
    let mut usage = Total::default();
    for _ in 0..config.max_iterations {
        context::keep_bounded(memory, config.context_chars).await?;
        let Some(listed) = turn.unless_cancelled(turn.tools().list()).await else {
            return Ok(Outcome {
                ended: Ended::Cancelled,
                usage,
            });
        };
        let names = Names::new(listed);
        let answer = match model.ask(turn, prompt, memory, &names).await? {
            Asked::Answered(answer) => answer,
            Asked::Cancelled { said } => {
                if !said.is_empty() {
                    memory
                        .append(Entry::Assistant {
                            text: said,
                            calls: Vec::new(),
                            native: None,
                        })
                        .await?;
                }
                return Ok(Outcome {
                    ended: Ended::Cancelled,
                    usage,
                });
            }
        };
        if let Some(spent) = &answer.usage {
            usage.add(spent);
            turn.voice()
                .usage(usage.in_context(), model.window(), usage.details());
        }
        let calls = answer.calls.clone();
        if !answer.is_empty() {
            memory.append(answer.entry()).await?;
        }
        if calls.is_empty() {
            return Ok(Outcome {
                ended: answer.ended,
                usage,
            });
        }
        let results = join_all(calls.iter().map(|call| perform(turn, &names, call))).await;
        memory.append(Entry::Results { results }).await?;
        if turn.cancelled() {
            return Ok(Outcome {
                ended: Ended::Cancelled,
                usage,
            });
        }
    }
    Ok(Outcome {
        ended: Ended::TooMany,
        usage,
    })
}

/// Makes one call the model wants.
async fn perform(turn: &Turn<'_>, names: &Names, call: &ask::Wanted) -> Answer {
    let tool = names.real(&call.tool);
    let result = match &call.arguments {
        Ok(arguments) => turn.call(tool, arguments.clone()).await,
        Err(why) => turn.cannot_call(
            tool,
            format!("the arguments of {tool} are not a JSON object: {why}"),
        ),
    };
    Answer {
        id: call.id.clone(),
        tool: tool.to_owned(),
        text: shown(&result),
    }
}

/// A result as the model reads it.
fn shown(result: &CallResult) -> String {
    let mut text = result.joined_text();
    let others = result
        .content
        .iter()
        .filter_map(|block| block.get("type").and_then(Value::as_str));
    for kind in others.filter(|kind| *kind != "text") {
        text.push_str(&format!("\n[{kind} content, which cannot be shown here]"));
    }
    if text.is_empty() {
        text = match &result.structured_content {
            Some(data) => data.to_string(),
            None => "(nothing)".to_owned(),
        };
    }
    if result.is_error {
        text.insert_str(0, "Error: ");
    }
    context::cut(text, RESULT_CHARS)
}

impl ask::Wanted {
    fn called(&self, names: &Names) -> Called {
        Called {
            id: self.id.clone(),
            tool: names.real(&self.tool).to_owned(),
            arguments: self.arguments.clone().unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_result_is_shown_as_text() {
        assert_eq!(shown(&CallResult::text("hi")), "hi");
        assert_eq!(
            shown(&CallResult {
                is_error: true,
                ..CallResult::text("no")
            }),
            "Error: no"
        );
        assert_eq!(shown(&CallResult::default()), "(nothing)");
        let data = CallResult {
            structured_content: Some(json!({ "a": 1 })),
            ..CallResult::default()
        };
        assert_eq!(shown(&data), "{\"a\":1}");
        let image = CallResult {
            content: vec![json!({ "type": "image", "data": "…" })],
            ..CallResult::default()
        };
        assert!(shown(&image).contains("image content"));
        assert!(
            shown(&CallResult::text("x".repeat(RESULT_CHARS * 2)))
                .chars()
                .count()
                < RESULT_CHARS + 200
        );
    }
}
