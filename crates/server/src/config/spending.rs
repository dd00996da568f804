//! `[prices]` and `[budget]`: what models cost, and what the server may use.

use std::collections::BTreeMap;

use oubliette_protocol::{Result, id::quoted};
use oubliette_session::{DayBudget, ModelPrice, PriceTable, ServerBudget};

use super::{
    field_error,
    raw::{RawBudget, RawPrice},
};

/// The highest price of a million tokens, in US dollars.
const MAX_PRICE: f64 = 1e6;
/// The longest pattern, in bytes.
const MAX_PATTERN: usize = 200;

/// Resolves `[prices]`.
pub(super) fn resolve_prices(raw: BTreeMap<String, RawPrice>) -> Result<PriceTable> {
    let mut prices = Vec::with_capacity(raw.len());
    for (pattern, price) in raw {
        let field = format!("prices.{}", quoted(&pattern));
        if !pattern.contains('/') || pattern.len() > MAX_PATTERN {
            return Err(field_error(
                &field,
                "name it \"provider/model\", where * matches any text, such as \"openai/gpt-5*\"",
            ));
        }
        let checked = |name: &str, value: f64| match (0.0..=MAX_PRICE).contains(&value) {
            true => Ok(value),
            false => Err(field_error(
                &format!("{field}.{name}"),
                format!("must be 0 to {MAX_PRICE}"),
            )),
        };
        let price = ModelPrice {
            input: checked("input", price.input)?,
            output: checked("output", price.output)?,
            cached: checked("cached", price.cached.unwrap_or(price.input))?,
        };
        prices.push((pattern, price));
    }
    Ok(PriceTable::new(prices))
}

/// Resolves `[budget]`.
pub(super) fn resolve_budget(raw: RawBudget) -> Result<ServerBudget> {
    if raw
        .cost_usd_per_day
        .is_some_and(|usd| !usd.is_finite() || usd < 0.0)
    {
        return Err(field_error("budget.cost_usd_per_day", "must be at least 0"));
    }
    Ok(ServerBudget {
        day: DayBudget {
            tokens: raw.tokens_per_day,
            cost_usd: raw.cost_usd_per_day,
        },
        tool_calls_per_turn: raw.tool_calls_per_turn,
    })
}
