//! What sessions use: model requests, tool calls and turns; their cost, and the budgets they are held to.
//!
//! In the order data flows:
//!
//! - [`price`]: what a model's tokens cost.
//! - [`budget`]: limits a day, and what was spent of them, by day and project. No clock and no I/O of its own.
//! - [`ledger`]: [`UsageLedger`], one for the server: charges what was used at once and writes it to the database.
//! - [`meter`]: [`SessionMeter`], one for each session: decides about its requests and calls, and counts its turns.

mod budget;
mod ledger;
mod meter;
mod price;

pub use budget::{DayBudget, ServerBudget};
pub(crate) use ledger::write_pending;
pub use ledger::{ProviderUsage, UsageLedger};
pub(crate) use meter::{SessionMeter, SessionModelSink};
pub use price::{ModelPrice, PriceTable};
