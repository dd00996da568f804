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
use oubliette_protocol::Object;
use serde_json::{Value, json};

use super::{context, failure::Failure, names::Names};
use crate::{
    config::ModelConfig,
    memory::{Entry, Keeper, Memory, Native},
    turn::{Ended, Turn},
};

/// How often one request is tried.
const ATTEMPTS: u32 = 5;
/// The longest wait a provider may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// A model that can be asked.
pub(crate) struct Model {
    client: Client,
    target: ServiceTarget,
    provider: String,
    retry: Duration,
}

/// What came of a request.
pub(crate) enum Asked {
    /// All of an answer.
    Answered(Box<Reply>),
    /// The turn was cancelled first.
    Cancelled {
        /// What had been said by then.
        said: String,
    },
}

/// A whole answer.
pub(crate) struct Reply {
    text: String,
    native: Option<Native>,
    called: Vec<crate::memory::Called>,
    /// The tools the model wants called.
    pub(crate) calls: Vec<Wanted>,
    /// What it cost, where the provider says so.
    pub(crate) usage: Option<Usage>,
    /// How the turn ends, if no call was wanted.
    pub(crate) ended: Ended,
}

/// A call the model wants.
#[derive(Clone)]
pub(crate) struct Wanted {
    /// The provider's id of it.
    pub(crate) id: String,
    /// The name as the model wrote it.
    pub(crate) tool: String,
    /// The arguments, or what is wrong with them.
    pub(crate) arguments: Result<Object, String>,
}

impl Reply {
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.calls.is_empty()
    }

    /// The answer as it is remembered.
    pub(crate) fn entry(&self) -> Entry {
        Entry::Assistant {
            text: self.text.clone(),
            calls: self.called.clone(),
            native: self.native.clone(),
        }
    }
}

impl Model {
    pub(crate) fn new(config: &ModelConfig) -> Result<Self, Error> {
        // The forwarder is on loopback and plain HTTP. A proxy of the sandbox's environment is not
        // for it, and neither are certificates, which a sandbox may not even have.
        let _already = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none());
        let http = http
            .tls_certs_only([])
            .build()
            .map_err(|e| internal(format!("HTTP cannot be used: {e}")))?;
        let client = Client::builder().with_reqwest(http).build();
        let client = client.map_err(|e| internal(format!("the model client cannot be made: {e}")))?;
        let (adapter, version) = adapter(&config.provider, &config.model);
        let endpoint = Endpoint::from_owned(format!("{}/{}/{version}/", config.base_url, config.provider));
        // No key: the server adds it on the way, and drops this.
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

    /// How many tokens the model can take, roughly: providers do not say.
    pub(crate) fn window(&self) -> u64 {
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

    /// Asks until there is an answer, an error worth telling, or a cancel.
    pub(crate) async fn ask<K: Keeper>(
        &self,
        turn: &Turn<'_>,
        prompt: &str,
        memory: &mut Memory<K>,
        names: &Names,
    ) -> Result<Asked, Error> {
        let mut attempt = 1;
        loop {
            let request = self.request(prompt, memory.entries(), names);
            let failure = match self.attempt(turn, request, names).await {
                Ok(asked) => return Ok(asked),
                Err(failure) => failure,
            };
            if !failure.shown && failure.says_too_long() && context::halve(memory).await? {
                continue;
            }
            if failure.shown || !failure.again || attempt == ATTEMPTS {
                return Err(self.error(&failure, attempt));
            }
            let wait = failure
                .wait
                .unwrap_or(self.retry * 2_u32.pow(attempt - 1))
                .min(LONGEST_WAIT);
            if turn.unless_cancelled(tokio::time::sleep(wait)).await.is_none() {
                return Ok(Asked::Cancelled { said: String::new() });
            }
            attempt += 1;
        }
    }

    fn request(&self, prompt: &str, entries: &[Entry], names: &Names) -> ChatRequest {
        let mut messages = context::messages(entries, self.adapter_name());
        if self.target.model.adapter_kind == AdapterKind::Anthropic
            && let Some(last) = messages.pop()
        {
            // The next request begins with all of this one: worth keeping over there.
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

    async fn attempt(&self, turn: &Turn<'_>, request: ChatRequest, names: &Names) -> Result<Asked, Failure> {
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
            None => return Ok(Asked::Cancelled { said: String::new() }),
            Some(Err(error)) => return Err(Failure::new(&error, false)),
            Some(Ok(response)) => response.stream,
        };
        let (mut said, mut shown, mut end) = (String::new(), false, None);
        // As far as each call has come, for providers whose stream just stops.
        let mut partial: Vec<ToolCall> = Vec::new();
        while end.is_none() {
            let event = match turn.unless_cancelled(stream.next()).await {
                None => return Ok(Asked::Cancelled { said }),
                Some(None) => break,
                Some(Some(Err(error))) => return Err(Failure::new(&error, shown)),
                Some(Some(Ok(event))) => event,
            };
            match event {
                ChatStreamEvent::Chunk(chunk) if !chunk.content.is_empty() => {
                    said.push_str(&chunk.content);
                    shown = true;
                    turn.voice().say(chunk.content);
                }
                ChatStreamEvent::ReasoningChunk(chunk) if !chunk.content.is_empty() => {
                    shown = true;
                    turn.voice().think(chunk.content);
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
            None if said.is_empty() && partial.is_empty() => return Err(Failure::broken_off(shown)),
            None => StreamEnd {
                captured_content: Some(MessageContent::from_tool_calls(partial)),
                ..Default::default()
            },
        };
        Ok(Asked::Answered(Box::new(self.reply(said, end, names))))
    }

    fn reply(&self, text: String, end: StreamEnd, names: &Names) -> Reply {
        let content = end.captured_content.unwrap_or_default();
        let calls: Vec<Wanted> = content.tool_calls().into_iter().map(Wanted::from).collect();
        let called = calls.iter().map(|call| call.called(names)).collect();
        // Worth keeping only for what plain text and calls cannot say: signed reasoning.
        let special = content.parts().iter().any(|part| {
            matches!(
                part,
                ContentPart::ThoughtSignature(_) | ContentPart::ReasoningContent(_) | ContentPart::Custom(_)
            ) || matches!(part, ContentPart::ToolCall(call) if call.thought_signatures.is_some())
        });
        let native = match special.then(|| serde_json::to_value(&content)) {
            Some(Ok(content)) => Some(Native {
                adapter: self.adapter_name().to_owned(),
                content,
            }),
            _ => None,
        };
        let ended = match end.captured_stop_reason {
            Some(StopReason::MaxTokens(_)) => Ended::TooLong,
            Some(StopReason::ContentFilter(_)) => Ended::Refused,
            Some(StopReason::Other(reason)) if reason == "refusal" => Ended::Refused,
            _ => Ended::Done,
        };
        Reply {
            text,
            native,
            called,
            calls,
            usage: end.captured_usage,
            ended,
        }
    }

    fn error(&self, failure: &Failure, attempts: u32) -> Error {
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
        internal(message).data(json!({ "provider": provider, "status": failure.status }))
    }
}

impl From<&ToolCall> for Wanted {
    fn from(call: &ToolCall) -> Self {
        let arguments = match &call.fn_arguments {
            Value::Object(object) => Ok(object.clone()),
            Value::Null => Ok(Object::new()),
            Value::String(text) if text.trim().is_empty() => Ok(Object::new()),
            Value::String(text) => serde_json::from_str::<Object>(text).map_err(|e| e.to_string()),
            _ => Err("they are JSON of another kind".to_owned()),
        };
        Self {
            id: call.call_id.clone(),
            tool: call.fn_name.clone(),
            arguments,
        }
    }
}

/// Which API a provider speaks, and the version its paths begin with.
fn adapter(provider: &str, model: &str) -> (AdapterKind, &'static str) {
    match provider {
        "anthropic" => (AdapterKind::Anthropic, "v1"),
        "gemini" | "google" => (AdapterKind::Gemini, "v1beta"),
        // Some of OpenAI's models are only served by its newer API.
        "openai" => match AdapterKind::from_model(model) {
            Ok(AdapterKind::OpenAIResp) => (AdapterKind::OpenAIResp, "v1"),
            _ => (AdapterKind::OpenAI, "v1"),
        },
        _ => (AdapterKind::OpenAI, "v1"),
    }
}

fn internal(message: String) -> Error {
    Error::new(ErrorCode::INTERNAL_ERROR.value(), message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read_as_far_as_they_can_be() {
        let of = |fn_arguments| {
            let call = ToolCall {
                call_id: "1".into(),
                fn_name: "t".into(),
                fn_arguments,
                thought_signatures: None,
            };
            Wanted::from(&call).arguments
        };
        assert_eq!(of(json!({ "a": 1 })).unwrap().len(), 1);
        assert_eq!(of(Value::Null).unwrap().len(), 0);
        assert_eq!(of(json!(" ")).unwrap().len(), 0);
        assert_eq!(of(json!("{\"a\":1}")).unwrap().len(), 1);
        assert!(of(json!("{\"a\":")).is_err());
        assert!(of(json!([1])).is_err());
    }
}
