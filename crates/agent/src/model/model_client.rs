//! One request to a model, its stream, and its retries.

use std::time::Duration;

use agent_client_protocol::{Error, ErrorCode};
use futures::StreamExt;
use genai::{
    Client, ModelIden, ServiceTarget,
    adapter::AdapterKind,
    chat::{
        CacheControl, ChatMessage, ChatOptions, ChatRequest, ChatStreamEvent, ContentPart, MessageContent,
        StopReason, StreamEnd, Tool, ToolCall, Usage,
    },
    resolver::{AuthData, Endpoint},
};
use oubliette_protocol::JsonObject;
use serde_json::{Value, json};

use super::{context, model_failure::ModelFailure, tool_names::ProviderToolNames};
use crate::{
    config::ModelConfig,
    memory::{ConversationMemory, MemoryEntry, MemoryHost, ProviderMessage},
    turn::{AgentTurn, AgentTurnEnd},
};

/// How often one request is attempted.
const MAX_ATTEMPTS: u32 = 5;
/// The longest wait between attempts, whatever the provider's `retry-after` says.
const MAX_RETRY_WAIT: Duration = Duration::from_secs(30);

/// A client for one model of one provider.
pub(crate) struct ModelClient {
    client: Client,
    target: ServiceTarget,
    provider: String,
    retry: Duration,
}

/// How a request ended, other than with an error.
pub(crate) enum AskOutcome {
    /// A complete answer.
    Answered(Box<ModelReply>),
    /// The turn was cancelled first.
    Cancelled {
        /// The text received until then.
        said: String,
    },
}

/// A complete answer of the model.
pub(crate) struct ModelReply {
    text: String,
    native: Option<ProviderMessage>,
    called: Vec<crate::memory::RememberedCall>,
    /// The tool calls the model asks for.
    pub(crate) calls: Vec<WantedCall>,
    /// Tokens used, if the provider reports them.
    pub(crate) usage: Option<Usage>,
    /// How the turn ends if there are no calls.
    pub(crate) ended: AgentTurnEnd,
}

/// A tool call the model asks for.
#[derive(Clone)]
pub(crate) struct WantedCall {
    /// The id the provider gave the call.
    pub(crate) id: String,
    /// The name as the model wrote it.
    pub(crate) tool: String,
    /// The arguments, or why they are not a JSON object.
    pub(crate) arguments: Result<JsonObject, String>,
}

impl ModelReply {
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.calls.is_empty()
    }

    /// The answer as an entry of the conversation.
    pub(crate) fn to_memory_entry(&self) -> MemoryEntry {
        MemoryEntry::Assistant {
            text: self.text.clone(),
            calls: self.called.clone(),
            native: self.native.clone(),
        }
    }
}

impl ModelClient {
    pub(crate) fn new(config: &ModelConfig) -> Result<Self, Error> {
        // The forwarder is plain HTTP on loopback: the sandbox's proxy variables do not apply, and no
        // certificates are loaded, which a sandbox may not have.
        let _already = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none());
        let http = http
            .tls_certs_only([])
            .build()
            .map_err(|e| internal_error(format!("HTTP cannot be used: {e}")))?;
        let client = Client::builder().with_reqwest(http).build();
        let client = client.map_err(|e| internal_error(format!("the model client cannot be made: {e}")))?;
        let (adapter, version) = adapter_for(&config.provider, &config.model);
        let endpoint = Endpoint::from_owned(format!("{}/{}/{version}/", config.base_url, config.provider));
        // A placeholder: the server replaces it with the provider's key.
        let auth = AuthData::from_single("none");
        let target = ServiceTarget {
            endpoint,
            auth,
            model: ModelIden::new(adapter, config.model.clone()),
        };
        Ok(Self {
            client,
            target,
            provider: config.provider.clone(),
            retry: config.retry,
        })
    }

    /// The model's approximate context window; providers do not report it.
    pub(crate) fn context_window_tokens(&self) -> u64 {
        match self.target.model.adapter_kind {
            AdapterKind::Anthropic => 200_000,
            AdapterKind::Gemini => 1_048_576,
            AdapterKind::OpenAIResp => 400_000,
            _ => 128_000,
        }
    }

    fn adapter_name(&self) -> &'static str {
        self.target.model.adapter_kind.as_str()
    }

    /// Sends the conversation, with retries, until there is an answer, a final error or a cancel. A conversation
    /// that the provider finds too long is halved and sent again.
    pub(crate) async fn ask<K: MemoryHost>(
        &self,
        turn: &AgentTurn<'_>,
        prompt: &str,
        memory: &mut ConversationMemory<K>,
        names: &ProviderToolNames,
    ) -> Result<AskOutcome, Error> {
        let mut attempt = 1;
        loop {
            let request = self.build_request(prompt, memory.entries(), names);
            let failure = match self.attempt(turn, request, names).await {
                Ok(asked) => return Ok(asked),
                Err(failure) => failure,
            };
            if !failure.output_shown
                && failure.is_context_too_long()
                && context::shorten_to_half(memory).await?
            {
                continue;
            }
            if failure.output_shown || !failure.retryable || attempt == MAX_ATTEMPTS {
                return Err(self.final_error(&failure, attempt));
            }
            let wait = failure
                .retry_after
                .unwrap_or(self.retry * 2_u32.pow(attempt - 1))
                .min(MAX_RETRY_WAIT);
            if turn.unless_cancelled(tokio::time::sleep(wait)).await.is_none() {
                return Ok(AskOutcome::Cancelled { said: String::new() });
            }
            attempt += 1;
        }
    }

    fn build_request(&self, prompt: &str, entries: &[MemoryEntry], names: &ProviderToolNames) -> ChatRequest {
        let mut messages = context::chat_messages(entries, self.adapter_name());
        if self.target.model.adapter_kind == AdapterKind::Anthropic
            && let Some(last) = messages.pop()
        {
            // The next request begins with all of this one, so ask the provider to cache it.
            messages.push(ChatMessage {
                options: Some(CacheControl::Ephemeral.into()),
                ..last
            });
        }
        let mut request = ChatRequest::from_messages(messages);
        if !prompt.is_empty() {
            request = request.with_system(prompt);
        }
        if names.tools().is_empty() {
            return request;
        }
        request.with_tools(names.tools().iter().map(|tool| {
            Tool::new(tool.name.as_str())
                .with_description(tool.description.as_str())
                .with_schema(tool.input_schema.clone())
        }))
    }

    async fn attempt(
        &self,
        turn: &AgentTurn<'_>,
        request: ChatRequest,
        names: &ProviderToolNames,
    ) -> Result<AskOutcome, ModelFailure> {
        let options = ChatOptions::default()
            .with_capture_usage(true)
            .with_capture_content(true)
            .with_capture_reasoning_content(true)
            .with_capture_tool_calls(true)
            .with_stream_read_timeout(Duration::from_secs(600));
        let asking = self
            .client
            .exec_chat_stream(self.target.clone(), request, Some(&options));
        let mut stream = match turn.unless_cancelled(asking).await {
            None => return Ok(AskOutcome::Cancelled { said: String::new() }),
            Some(Err(error)) => return Err(ModelFailure::new(&error, false)),
            Some(Ok(response)) => response.stream,
        };
        let (mut said, mut shown, mut end) = (String::new(), false, None);
        // The calls received so far: some providers end the stream without an end event.
        let mut partial: Vec<ToolCall> = Vec::new();
        while end.is_none() {
            let event = match turn.unless_cancelled(stream.next()).await {
                None => return Ok(AskOutcome::Cancelled { said }),
                Some(None) => break,
                Some(Some(Err(error))) => return Err(ModelFailure::new(&error, shown)),
                Some(Some(Ok(event))) => event,
            };
            match event {
                ChatStreamEvent::Chunk(chunk) if !chunk.content.is_empty() => {
                    said.push_str(&chunk.content);
                    shown = true;
                    turn.updates().send_text(chunk.content);
                }
                ChatStreamEvent::ReasoningChunk(chunk) if !chunk.content.is_empty() => {
                    shown = true;
                    turn.updates().send_thought(chunk.content);
                }
                ChatStreamEvent::ToolCallChunk(chunk) => {
                    match partial
                        .iter_mut()
                        .find(|call| call.call_id == chunk.tool_call.call_id)
                    {
                        Some(call) => *call = chunk.tool_call,
                        None => partial.push(chunk.tool_call),
                    }
                }
                ChatStreamEvent::End(ended) => end = Some(ended),
                ChatStreamEvent::Start
                | ChatStreamEvent::Chunk(_)
                | ChatStreamEvent::ReasoningChunk(_)
                | ChatStreamEvent::ThoughtSignatureChunk(_)
                | ChatStreamEvent::Heartbeat => {}
            }
        }
        let end = match end {
            Some(end) => end,
            None if said.is_empty() && partial.is_empty() => {
                return Err(ModelFailure::stream_ended_early(shown));
            }
            None => StreamEnd {
                captured_content: Some(MessageContent::from_tool_calls(partial)),
                ..Default::default()
            },
        };
        Ok(AskOutcome::Answered(Box::new(self.build_reply(said, end, names))))
    }

    fn build_reply(&self, text: String, end: StreamEnd, names: &ProviderToolNames) -> ModelReply {
        let content = end.captured_content.unwrap_or_default();
        let calls: Vec<WantedCall> = content.tool_calls().into_iter().map(WantedCall::from).collect();
        let called = calls.iter().map(|call| call.to_remembered(names)).collect();
        // The provider's form is stored only if it has what text and calls cannot express: signed reasoning.
        let special = content.parts().iter().any(|part| {
            matches!(
                part,
                ContentPart::ThoughtSignature(_) | ContentPart::ReasoningContent(_) | ContentPart::Custom(_)
            ) || matches!(part, ContentPart::ToolCall(call) if call.thought_signatures.is_some())
        });
        let native = match special.then(|| serde_json::to_value(&content)) {
            Some(Ok(content)) => Some(ProviderMessage {
                adapter: self.adapter_name().to_owned(),
                content,
            }),
            _ => None,
        };
        let ended = match end.captured_stop_reason {
            Some(StopReason::MaxTokens(_)) => AgentTurnEnd::OutputLimit,
            Some(StopReason::ContentFilter(_)) => AgentTurnEnd::Refused,
            Some(StopReason::Other(reason)) if reason == "refusal" => AgentTurnEnd::Refused,
            _ => AgentTurnEnd::Completed,
        };
        ModelReply {
            text,
            native,
            called,
            calls,
            usage: end.captured_usage,
            ended,
        }
    }

    fn final_error(&self, failure: &ModelFailure, attempts: u32) -> Error {
        let provider = &self.provider;
        let times = if attempts > 1 {
            format!(" (asked {attempts} times)")
        } else {
            String::new()
        };
        let message = format!(
            "the model provider {provider:?} failed{times}: {}",
            failure.message
        );
        internal_error(message).data(json!({ "provider": provider, "status": failure.status }))
    }
}

impl From<&ToolCall> for WantedCall {
    fn from(call: &ToolCall) -> Self {
        let arguments = match &call.fn_arguments {
            Value::Object(object) => Ok(object.clone()),
            Value::Null => Ok(JsonObject::new()),
            Value::String(text) if text.trim().is_empty() => Ok(JsonObject::new()),
            Value::String(text) => serde_json::from_str::<JsonObject>(text).map_err(|e| e.to_string()),
            _ => Err("they are JSON of another kind".to_owned()),
        };
        Self {
            id: call.call_id.clone(),
            tool: call.fn_name.clone(),
            arguments,
        }
    }
}

/// The API of a provider, and the version segment of its paths.
fn adapter_for(provider: &str, model: &str) -> (AdapterKind, &'static str) {
    match provider {
        "anthropic" => (AdapterKind::Anthropic, "v1"),
        "gemini" | "google" => (AdapterKind::Gemini, "v1beta"),
        // Some OpenAI models are only available through the Responses API.
        "openai" => match AdapterKind::from_model(model) {
            Ok(AdapterKind::OpenAIResp) => (AdapterKind::OpenAIResp, "v1"),
            _ => (AdapterKind::OpenAI, "v1"),
        },
        _ => (AdapterKind::OpenAI, "v1"),
    }
}

fn internal_error(message: String) -> Error {
    Error::new(ErrorCode::INTERNAL_ERROR.value(), message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_may_be_an_object_or_json_text_of_one() {
        let of = |fn_arguments| {
            let call = ToolCall {
                call_id: "1".into(),
                fn_name: "t".into(),
                fn_arguments,
                thought_signatures: None,
            };
            WantedCall::from(&call).arguments
        };
        assert_eq!(of(json!({ "a": 1 })).unwrap().len(), 1);
        assert_eq!(of(Value::Null).unwrap().len(), 0);
        assert_eq!(of(json!(" ")).unwrap().len(), 0);
        assert_eq!(of(json!("{\"a\":1}")).unwrap().len(), 1);
        assert!(of(json!("{\"a\":")).is_err());
        assert!(of(json!([1])).is_err());
    }
}
