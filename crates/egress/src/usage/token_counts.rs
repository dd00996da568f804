//! The token counts of one answer, whichever API's words it uses for them.

use serde_json::Value;

/// More tokens than any request can have; a larger count is taken for none.
const MAX_TOKENS: u64 = 1_000_000_000;

/// The counts an answer has reported so far. A stream reports some of them at its beginning and some at its end, or all
/// of them again and again; they only grow, so the largest of each is the last.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct TokenCounts {
    /// `prompt_tokens`, `input_tokens`, `promptTokenCount`.
    input: Option<u64>,
    /// Input that Anthropic reports beside `input_tokens`: written to the cache.
    cache_written: Option<u64>,
    /// Input that Anthropic reports beside `input_tokens`: read from the cache.
    cache_read: Option<u64>,
    /// Input that Gemini reports beside `promptTokenCount`: results of its own tools.
    tool_input: Option<u64>,
    /// Whether `input` is `prompt_tokens`, of which what was read from and written to a cache is a part.
    input_includes_cache: bool,
    /// Input read from a cache that is part of `input`.
    cached: Option<u64>,
    /// `completion_tokens`, `output_tokens`, `candidatesTokenCount`.
    output: Option<u64>,
    /// Thinking that Gemini reports beside `candidatesTokenCount`.
    thoughts: Option<u64>,
    /// `total_tokens`, with which some report thinking that is in no other count.
    total: Option<u64>,
}

impl TokenCounts {
    /// Adds what one `usage` or `usageMetadata` says. Counts that are negative, too large or no numbers are ignored.
    pub(super) fn merge(&mut self, usage: &Value) {
        let count = |field: &str| whole_number(&usage[field]);
        let detail = |field: &str| whole_number(&usage[field]["cached_tokens"]);
        let largest =
            |kept: Option<u64>, reported: &[Option<u64>]| reported.iter().copied().fold(kept, Option::max);
        let inputs = [
            count("prompt_tokens"),
            count("input_tokens"),
            count("promptTokenCount"),
        ];
        let cached = [
            detail("prompt_tokens_details"),
            detail("input_tokens_details"),
            count("prompt_cache_hit_tokens"),
            count("cachedContentTokenCount"),
        ];
        let outputs = [
            count("completion_tokens"),
            count("output_tokens"),
            count("candidatesTokenCount"),
        ];
        self.input = largest(self.input, &inputs);
        self.input_includes_cache |= count("prompt_tokens").is_some();
        self.cache_written = largest(self.cache_written, &[count("cache_creation_input_tokens")]);
        self.cache_read = largest(self.cache_read, &[count("cache_read_input_tokens")]);
        self.tool_input = largest(self.tool_input, &[count("toolUsePromptTokenCount")]);
        self.cached = largest(self.cached, &cached);
        self.output = largest(self.output, &outputs);
        self.thoughts = largest(self.thoughts, &[count("thoughtsTokenCount")]);
        self.total = largest(self.total, &[count("total_tokens"), count("totalTokenCount")]);
    }

    /// All tokens of the input; `None` if the answer did not say.
    pub(super) fn input(&self) -> Option<u64> {
        let beside = match self.input_includes_cache {
            true => [None, None, self.tool_input],
            false => [self.cache_written, self.cache_read, self.tool_input],
        };
        let parts = beside.iter().flatten().sum::<u64>();
        match self.input {
            Some(input) => Some(input + parts),
            None => (parts > 0).then_some(parts),
        }
    }

    /// The part of the input that was read from a cache.
    pub(super) fn cached(&self) -> u64 {
        let cached = self.cached.or(self.cache_read).unwrap_or(0);
        cached.min(self.input().unwrap_or(0))
    }

    /// All tokens of the output, thinking included; `None` if the answer did not say.
    pub(super) fn output(&self) -> Option<u64> {
        let reported = match (self.output, self.thoughts) {
            (None, None) => None,
            (output, thoughts) => Some(output.unwrap_or(0) + thoughts.unwrap_or(0)),
        };
        let rest = match (self.total, self.input()) {
            (Some(total), Some(input)) => total.checked_sub(input),
            _ => None,
        };
        reported.max(rest)
    }
}

/// A count as JSON: a whole number from 0 to [`MAX_TOKENS`], also written as `12.0`.
fn whole_number(value: &Value) -> Option<u64> {
    let number = match value.as_u64() {
        Some(number) => number,
        None => value
            .as_f64()
            .filter(|number| *number >= 0.0 && number.fract() == 0.0)
            .map(|number| number as u64)?,
    };
    (number <= MAX_TOKENS).then_some(number)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn counts(reports: &[Value]) -> (Option<u64>, Option<u64>, u64) {
        let mut counts = TokenCounts::default();
        for report in reports {
            counts.merge(report);
        }
        (counts.input(), counts.output(), counts.cached())
    }

    #[test]
    fn every_api_counts_all_input_and_thinking_as_output() {
        let chat = json!({"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120,
            "prompt_tokens_details": {"cached_tokens": 60}, "completion_tokens_details": {"reasoning_tokens": 5}});
        assert_eq!(counts(&[chat]), (Some(100), Some(20), 60));
        // Gateways that speak this API for others say both.
        let both = json!({"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120,
            "prompt_tokens_details": {"cached_tokens": 60}, "cache_creation_input_tokens": 30, "cache_read_input_tokens": 60});
        assert_eq!(counts(&[both]), (Some(100), Some(20), 60));
        // Thinking that only the total has.
        let beside = json!({"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 150});
        assert_eq!(counts(&[beside]), (Some(100), Some(50), 0));
        let responses = json!({"input_tokens": 100, "input_tokens_details": {"cached_tokens": 7},
            "output_tokens": 20, "output_tokens_details": {"reasoning_tokens": 15}, "total_tokens": 120});
        assert_eq!(counts(&[responses]), (Some(100), Some(20), 7));
        let begun = json!({"input_tokens": 10, "cache_creation_input_tokens": 30, "cache_read_input_tokens": 60, "output_tokens": 1});
        assert_eq!(
            counts(&[begun.clone(), json!({"output_tokens": 25})]),
            (Some(100), Some(25), 60)
        );
        assert_eq!(
            counts(&[begun.clone(), begun]),
            (Some(100), Some(1), 60),
            "repeated, not added"
        );
        let gemini = json!({"promptTokenCount": 90, "toolUsePromptTokenCount": 10, "cachedContentTokenCount": 40,
            "candidatesTokenCount": 12, "thoughtsTokenCount": 8, "totalTokenCount": 120});
        assert_eq!(counts(&[gemini]), (Some(100), Some(20), 40));
        assert_eq!(
            counts(&[json!({"prompt_tokens": 8, "total_tokens": 8})]),
            (Some(8), Some(0), 0)
        );
    }

    #[test]
    fn counts_that_cannot_be_are_as_if_absent() {
        for bad in [
            json!(-5),
            json!("12"),
            json!(null),
            json!(1.5),
            json!(1e30),
            json!(u64::MAX),
            json!([1]),
            json!({"a": 1}),
        ] {
            let usage = json!({"prompt_tokens": bad, "completion_tokens": bad, "total_tokens": bad, "prompt_tokens_details": bad});
            assert_eq!(
                counts(&[usage.clone(), json!(3), json!(null)]),
                (None, None, 0),
                "{usage}"
            );
        }
        assert_eq!(
            counts(&[json!({"prompt_tokens": 12.0, "completion_tokens": 0})]),
            (Some(12), Some(0), 0)
        );
        // More cached than there was.
        let usage = json!({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 50}});
        assert_eq!(counts(&[usage]), (Some(5), None, 5));
    }
}
