//! The tokens a turn used.

use genai::chat::Usage;
use oubliette_protocol::JsonObject;

/// Token counts summed over a turn's requests.
#[derive(Debug, Default, Clone)]
pub(crate) struct TokenUsage {
    requests: u64,
    input: u64,
    output: u64,
    cached: u64,
    reasoning: u64,
    last_request: u64,
}

impl TokenUsage {
    pub(crate) fn add(&mut self, spent: &Usage) {
        let count = |tokens: Option<i32>| u64::try_from(tokens.unwrap_or(0)).unwrap_or(0);
        let (input, output) = (count(spent.prompt_tokens), count(spent.completion_tokens));
        self.requests += 1;
        self.input += input;
        self.output += output;
        self.cached += count(spent.prompt_tokens_details.as_ref().and_then(|d| d.cached_tokens));
        self.reasoning += count(
            spent
                .completion_tokens_details
                .as_ref()
                .and_then(|d| d.reasoning_tokens),
        );
        self.last_request = input + output;
    }

    /// Input and output tokens of the last request: the current size of the conversation.
    pub(crate) fn last_request_tokens(&self) -> u64 {
        self.last_request
    }

    /// The sums as a JSON object, with ACP's field names.
    pub(crate) fn to_json(&self) -> JsonObject {
        let sums = [
            ("requests", self.requests),
            ("inputTokens", self.input),
            ("outputTokens", self.output),
            ("totalTokens", self.input + self.output),
            ("cachedInputTokens", self.cached),
            ("reasoningTokens", self.reasoning),
        ];
        sums.into_iter()
            .map(|(name, count)| (name.to_owned(), count.into()))
            .collect()
    }
}
