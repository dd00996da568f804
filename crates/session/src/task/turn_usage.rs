//! What a turn used: durable before the turn's end is in the log.

use oubliette_protocol::{ErrorCode, usage::UsageTotals};

use super::SessionTask;

impl SessionTask {
    /// Begins to count a turn's tool calls.
    pub(super) async fn begin_usage(&self) {
        if let Err(error) = self.env.meter.begin_turn().await {
            tracing::warn!(session = %self.env.session, error = %error.for_log(), "reading a project's limits failed; those of the turn before hold");
        }
    }

    /// Ends the count of a turn; returns what it used once that is durable. While the database cannot be written this waits,
    /// as logging the end of the turn would have to.
    pub(super) async fn settle_usage(&mut self) -> UsageTotals {
        let meter = self.env.meter.clone();
        let used = loop {
            match meter.end_turn().await {
                Ok(used) => break used,
                Err(error) if error.code == ErrorCode::Unavailable && self.pending.stop.is_empty() => {
                    self.wait_to_retry(error).await;
                }
                Err(error) => {
                    tracing::error!(session = %self.env.session, error = %error.for_log(), "counting a turn failed");
                    return UsageTotals::default();
                }
            }
        };
        while let Err(error) = meter.flush().await {
            if error.code != ErrorCode::Unavailable || !self.pending.stop.is_empty() {
                tracing::error!(session = %self.env.session, error = %error.for_log(), "writing what a turn used failed");
                break;
            }
            self.wait_to_retry(error).await;
        }
        used
    }
}
