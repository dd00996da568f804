//! `[prices."provider/model-pattern"]`: what a model's tokens cost.

use oubliette_protocol::usage::{RequestUsage, UsdNanos};

/// Prices in US dollars for a million tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelPrice {
    /// Of the input that was not read from a cache.
    pub input: f64,
    /// Of the output.
    pub output: f64,
    /// Of the input that was read from a cache.
    pub cached: f64,
}

impl ModelPrice {
    /// What a request costs.
    fn cost(&self, usage: &RequestUsage) -> UsdNanos {
        let fresh = usage.input_tokens.saturating_sub(usage.cached_tokens);
        let parts = [
            (fresh, self.input),
            (usage.cached_tokens, self.cached),
            (usage.output_tokens, self.output),
        ];
        UsdNanos::from_usd(
            parts
                .iter()
                .map(|(tokens, price)| *tokens as f64 * price)
                .sum::<f64>()
                / 1e6,
        )
    }
}

/// The prices of all models, by patterns of `provider/model` in which `*` matches any text.
#[derive(Debug, Clone, Default)]
pub struct PriceTable {
    /// The most specific pattern first.
    patterns: Vec<(String, ModelPrice)>,
}

impl PriceTable {
    /// A table of these patterns. Of several that match a model the one with the most other characters than `*` counts.
    pub fn new(patterns: impl IntoIterator<Item = (String, ModelPrice)>) -> Self {
        let mut patterns: Vec<_> = patterns.into_iter().collect();
        let literal = |pattern: &str| pattern.bytes().filter(|b| *b != b'*').count();
        patterns.sort_by(|(a, _), (b, _)| literal(b).cmp(&literal(a)).then_with(|| a.cmp(b)));
        Self { patterns }
    }

    /// What a request to this provider costs; none if no pattern matches its model.
    pub(super) fn cost(&self, provider: &str, usage: &RequestUsage) -> Option<UsdNanos> {
        let model = format!("{provider}/{}", usage.model);
        let price = self
            .patterns
            .iter()
            .find(|(pattern, _)| matches_pattern(pattern, &model));
        price.map(|(_, price)| price.cost(usage))
    }
}

/// Whether a text matches a pattern, in time linear in the text for each `*`.
fn matches_pattern(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    let Some((last, between)) = parts.split_last() else {
        return rest.is_empty();
    };
    for part in between {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(model: &str) -> RequestUsage {
        RequestUsage {
            model: model.into(),
            input_tokens: 1_000_000,
            output_tokens: 100_000,
            cached_tokens: 400_000,
            cost_usd: None,
            estimated: false,
        }
    }

    #[test]
    fn the_most_specific_pattern_sets_the_price() {
        let price = |input| ModelPrice {
            input,
            output: 10.0,
            cached: 0.5,
        };
        let table = PriceTable::new([
            ("openai/*".to_owned(), price(1.0)),
            ("openai/gpt-5*".to_owned(), price(2.0)),
            ("openai/gpt-5-mini".to_owned(), price(3.0)),
            ("*/llama*70b*".to_owned(), price(4.0)),
        ]);
        let cost = |provider, model| table.cost(provider, &usage(model)).map(UsdNanos::as_usd);
        assert_eq!(cost("openai", "other"), Some(0.6 + 0.2 + 1.0));
        assert_eq!(cost("openai", "gpt-5-2026"), Some(1.2 + 0.2 + 1.0));
        assert_eq!(cost("openai", "gpt-5-mini"), Some(1.8 + 0.2 + 1.0));
        assert_eq!(cost("vllm", "llama-4-70b-q4"), Some(2.4 + 0.2 + 1.0));
        assert_eq!(cost("vllm", "llama-4-7b"), None);
        assert_eq!(cost("openai2", "gpt-5"), None);
    }

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, text, expected) in [
            ("a/b", "a/b", true),
            ("a/b", "a/bc", false),
            ("a/*", "a/", true),
            ("a/*b", "a/bab", true),
            ("a/*b*c", "a/bbc", true),
            ("a/*bc*bc", "a/bc", false),
            ("*", "anything", true),
            ("a/b*b", "a/b", false),
        ] {
            assert_eq!(matches_pattern(pattern, text), expected, "{pattern} {text}");
        }
    }
}
