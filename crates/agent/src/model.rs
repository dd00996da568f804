//! Turns answered by a model provider over HTTP, through the server's forwarder.
//!
//! The loop: send the conversation, stream text and reasoning to the host, call the tools the model asks
//! for concurrently, store their results, and send the conversation again, until the model asks for no
//! more tools.
//!
//! - [`model_client`]: one request, its stream and its retries; [`model_failure`]: why a request
//!   failed and whether to retry.
//! - [`context`]: stored entries as the messages of a request, and keeping them within the limit.
//! - [`tool_names`]: tool names that providers accept.
//! - [`usage`]: tokens used.

mod context;
mod model_client;
mod model_failure;
mod tool_names;
mod usage;

use agent_client_protocol::Error;
use futures::future::join_all;
use oubliette_protocol::{JsonObject, tool::CallResult};
use serde_json::Value;

use self::{model_client::AskOutcome, tool_names::ProviderToolNames, usage::TokenUsage};
use crate::{
    config::ModelConfig,
    memory::{ConversationMemory, MemoryEntry, MemoryHost, RememberedCall, RememberedResult},
    turn::{AgentTurn, AgentTurnEnd},
};

/// The maximum length of one tool result in the conversation, in characters.
const MAX_RESULT_CHARS: usize = 60_000;

/// How a turn ended, and the tokens it used.
pub(crate) struct ModelTurnOutcome {
    /// How the turn ended.
    pub(crate) ended: AgentTurnEnd,
    usage: TokenUsage,
}

impl ModelTurnOutcome {
    /// The `_meta` of the response to the prompt: `usage`.
    pub(crate) fn meta(&self) -> JsonObject {
        let mut meta = JsonObject::new();
        meta.insert("usage".to_owned(), Value::Object(self.usage.to_json()));
        meta
    }
}

/// Runs a turn whose prompt is the last entry of `memory`.
pub(crate) async fn run_turn<K: MemoryHost>(
    turn: &AgentTurn<'_>,
    config: &ModelConfig,
    prompt: &str,
    memory: &mut ConversationMemory<K>,
) -> Result<ModelTurnOutcome, Error> {
    let model = model_client::ModelClient::new(config)?;
    let mut usage = TokenUsage::default();
    for _ in 0..config.max_iterations {
        context::shorten_if_longer(memory, config.context_chars).await?;
        let Some(listed) = turn.unless_cancelled(turn.tools().list()).await else {
            return Ok(ModelTurnOutcome {
                ended: AgentTurnEnd::Cancelled,
                usage,
            });
        };
        let names = ProviderToolNames::new(listed);
        let answer = match model.ask(turn, prompt, memory, &names).await? {
            AskOutcome::Answered(answer) => answer,
            AskOutcome::Cancelled { said } => {
                if !said.is_empty() {
                    memory
                        .append(MemoryEntry::Assistant {
                            text: said,
                            calls: Vec::new(),
                            native: None,
                        })
                        .await?;
                }
                return Ok(ModelTurnOutcome {
                    ended: AgentTurnEnd::Cancelled,
                    usage,
                });
            }
        };
        if let Some(spent) = &answer.usage {
            usage.add(spent);
            turn.updates().send_usage(
                usage.last_request_tokens(),
                model.context_window_tokens(),
                usage.to_json(),
            );
        }
        let calls = answer.calls.clone();
        if !answer.is_empty() {
            memory.append(answer.to_memory_entry()).await?;
        }
        if calls.is_empty() {
            return Ok(ModelTurnOutcome {
                ended: answer.ended,
                usage,
            });
        }
        let results = join_all(calls.iter().map(|call| call_wanted_tool(turn, &names, call))).await;
        memory.append(MemoryEntry::Results { results }).await?;
        if turn.is_cancelled() {
            return Ok(ModelTurnOutcome {
                ended: AgentTurnEnd::Cancelled,
                usage,
            });
        }
    }
    Ok(ModelTurnOutcome {
        ended: AgentTurnEnd::RequestLimit,
        usage,
    })
}

/// Makes one tool call the model asked for.
async fn call_wanted_tool(
    turn: &AgentTurn<'_>,
    names: &ProviderToolNames,
    call: &model_client::WantedCall,
) -> RememberedResult {
    let tool = names.original_name(&call.tool);
    let result = match &call.arguments {
        Ok(arguments) => turn.call(tool, arguments.clone()).await,
        Err(why) => turn.report_invalid_call(
            tool,
            format!("the arguments of {tool} are not a JSON object: {why}"),
        ),
    };
    RememberedResult {
        id: call.id.clone(),
        tool: tool.to_owned(),
        text: result_text(&result),
    }
}

/// A tool result as text for the model.
fn result_text(result: &CallResult) -> String {
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
    context::truncate_text(text, MAX_RESULT_CHARS)
}

impl model_client::WantedCall {
    fn to_remembered(&self, names: &ProviderToolNames) -> RememberedCall {
        RememberedCall {
            id: self.id.clone(),
            tool: names.original_name(&self.tool).to_owned(),
            arguments: self.arguments.clone().unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_result_is_given_to_the_model_as_text() {
        assert_eq!(result_text(&CallResult::text("hi")), "hi");
        assert_eq!(
            result_text(&CallResult {
                is_error: true,
                ..CallResult::text("no")
            }),
            "Error: no"
        );
        assert_eq!(result_text(&CallResult::default()), "(nothing)");
        let data = CallResult {
            structured_content: Some(json!({ "a": 1 })),
            ..CallResult::default()
        };
        assert_eq!(result_text(&data), "{\"a\":1}");
        let image = CallResult {
            content: vec![json!({ "type": "image", "data": "…" })],
            ..CallResult::default()
        };
        assert!(result_text(&image).contains("image content"));
        assert!(
            result_text(&CallResult::text("x".repeat(MAX_RESULT_CHARS * 2)))
                .chars()
                .count()
                < MAX_RESULT_CHARS + 200
        );
    }
}
