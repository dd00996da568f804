//! What models used: tokens and cost, of one request and in sums.

use std::ops::AddAssign;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A budget, by the name of its setting in a project's `limits` and in `[budget]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BudgetName {
    /// Tokens of model requests in a day.
    TokensPerDay,
    /// What model requests cost in a day, in US dollars.
    CostUsdPerDay,
    /// Tool calls of an agent in a turn.
    ToolCallsPerTurn,
}

impl BudgetName {
    /// The setting's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TokensPerDay => "tokens_per_day",
            Self::CostUsdPerDay => "cost_usd_per_day",
            Self::ToolCallsPerTurn => "tool_calls_per_turn",
        }
    }
}

/// An amount of money in billionths of a US dollar; on the wire a number of dollars. Whole numbers, so that sums are
/// exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct UsdNanos(pub u64);

impl UsdNanos {
    const PER_USD: f64 = 1e9;

    /// The amount nearest to a number of dollars; 0 for a negative one.
    pub fn from_usd(usd: f64) -> Self {
        // A cast from a float saturates, and makes 0 of what is not a number.
        Self((usd * Self::PER_USD).round() as u64)
    }

    /// The amount in dollars.
    pub fn as_usd(self) -> f64 {
        self.0 as f64 / Self::PER_USD
    }
}

impl AddAssign for UsdNanos {
    fn add_assign(&mut self, other: Self) {
        self.0 = self.0.saturating_add(other.0);
    }
}

impl Serialize for UsdNanos {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.as_usd())
    }
}

impl<'de> Deserialize<'de> for UsdNanos {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        f64::deserialize(deserializer).map(Self::from_usd)
    }
}

impl JsonSchema for UsdNanos {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "UsDollars".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "number", "minimum": 0 })
    }
}

/// What one model request used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RequestUsage {
    /// The model that was asked; empty if neither request nor answer name one.
    pub model: String,
    /// All tokens of the input, cached ones included.
    pub input_tokens: u64,
    /// All tokens of the output, thinking included.
    pub output_tokens: u64,
    /// The part of `input_tokens` that was read from a cache.
    pub cached_tokens: u64,
    /// What it cost; absent without a price for the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<UsdNanos>,
    /// Whether a number is an estimate, because the answer did not say it.
    pub estimated: bool,
}

/// What several model requests used together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UsageTotals {
    /// How many requests.
    pub requests: u64,
    /// All tokens of their inputs, cached ones included.
    pub input_tokens: u64,
    /// All tokens of their outputs, thinking included.
    pub output_tokens: u64,
    /// The part of `input_tokens` that was read from a cache.
    pub cached_tokens: u64,
    /// What those with a price cost; absent if none has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<UsdNanos>,
    /// Whether a part of it is an estimate.
    pub estimated: bool,
}

impl UsageTotals {
    /// Input and output tokens together.
    pub fn tokens(&self) -> u64 {
        self.input_tokens.saturating_add(self.output_tokens)
    }
}

impl From<&RequestUsage> for UsageTotals {
    fn from(usage: &RequestUsage) -> Self {
        Self {
            requests: 1,
            input_tokens: usage.input_tokens,
            output_tokens: usage.output_tokens,
            cached_tokens: usage.cached_tokens,
            cost_usd: usage.cost_usd,
            estimated: usage.estimated,
        }
    }
}

impl AddAssign<&UsageTotals> for UsageTotals {
    fn add_assign(&mut self, other: &UsageTotals) {
        self.requests = self.requests.saturating_add(other.requests);
        self.input_tokens = self.input_tokens.saturating_add(other.input_tokens);
        self.output_tokens = self.output_tokens.saturating_add(other.output_tokens);
        self.cached_tokens = self.cached_tokens.saturating_add(other.cached_tokens);
        if let Some(cost) = other.cost_usd {
            *self.cost_usd.get_or_insert_default() += cost;
        }
        self.estimated |= other.estimated;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sums_of_money_are_exact_and_shown_in_dollars() {
        let mut sum = UsageTotals::default();
        let one = UsageTotals {
            requests: 1,
            input_tokens: 3,
            cost_usd: Some(UsdNanos::from_usd(0.1)),
            ..UsageTotals::default()
        };
        for _ in 0..3 {
            sum += &one;
        }
        assert_eq!(serde_json::to_value(sum).unwrap()["cost_usd"], json!(0.3));
        assert_eq!((sum.requests, sum.tokens()), (3, 9));
        let read: UsageTotals = serde_json::from_value(serde_json::to_value(sum).unwrap()).unwrap();
        assert_eq!(read, sum);
        assert_eq!(UsdNanos::from_usd(-1.0), UsdNanos(0));
        assert_eq!(UsdNanos::from_usd(f64::NAN), UsdNanos(0));
    }
}
