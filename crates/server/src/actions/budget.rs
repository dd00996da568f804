//! Budgets of a project: what its sessions may use in a day or a turn.

use oubliette_protocol::{Error, Result, Scope};
use serde_json::Value;

use super::{ActionCall, project_settings::ProjectLimits};

/// The largest number of tokens or calls a budget may have.
const MAX_COUNT: u64 = 1_000_000_000_000_000;
/// The largest amount a budget may have, in US dollars.
const MAX_USD: f64 = 1e9;

impl ProjectLimits {
    /// The budgets that are given: their names, and the new values; none to remove one.
    fn given_budgets(&self) -> impl Iterator<Item = (&'static str, Option<f64>)> {
        let count = |given: Option<Option<u64>>| given.map(|value| value.map(|n| n as f64));
        [
            ("tokens_per_day", count(self.tokens_per_day)),
            ("cost_usd_per_day", self.cost_usd_per_day),
            ("tool_calls_per_turn", count(self.tool_calls_per_turn)),
        ]
        .into_iter()
        .filter_map(|(name, given)| given.map(|value| (name, value)))
    }

    /// The first budget that is given, for callers that may change none.
    pub(super) fn first_given_budget(&self) -> Option<&'static str> {
        self.given_budgets().next().map(|(name, _)| name)
    }

    /// Checks that budgets are in their range, and that an admin raises or removes one. Anybody who may change the project
    /// may set a first one, or lower it.
    pub(super) fn check_budgets(&self, call: &ActionCall<'_>, before: &Value) -> Result<()> {
        for (name, given) in self.given_budgets() {
            let most = if name == "cost_usd_per_day" {
                MAX_USD
            } else {
                MAX_COUNT as f64
            };
            // Not a number is in no range.
            if given.is_some_and(|value| !(0.0..=most).contains(&value)) {
                return Err(Error::invalid(format!("limits.{name} must be 0 to {most}")));
            }
            let raises = match (before[name].as_f64(), given) {
                (Some(before), Some(given)) => given > before,
                (Some(_), None) => true,
                (None, _) => false,
            };
            if raises {
                call.grant
                    .require(Scope::Admin, &format!("raising limits.{name}"))?;
            }
        }
        Ok(())
    }
}
