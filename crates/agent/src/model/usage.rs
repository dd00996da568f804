//! What a turn cost, in tokens.

use genai::chat::Usage;
use oubliette_protocol::Object;

/// The sum over a turn's requests.
#[derive(Debug, Default, Clone)]
pub(crate) struct Total {
    requests: u64,
    input: u64,
    output: u64,
    cached: u64,
    reasoning: u64,
    last: u64,
}

impl Total {
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
        self.last = input + output;
    }

    /// What the conversation takes now.
    pub(crate) fn in_context(&self) -> u64 {
        self.last
    }

    /// The sums, by name.
    pub(crate) fn details(&self) -> Object {
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
