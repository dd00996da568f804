//! When and why a start, a turn or a switch ends early: pending commands and their deadlines.

use std::{future::Future, time::Instant};

use super::{SessionTask, sleep_until};

/// Why a start, a turn or a switch is interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Interruption {
    Cancelled,
    Ended,
    Stopped,
    /// A pending switch has waited for the drain timeout.
    DrainTimeout,
}

impl SessionTask {
    /// Why what is running should be interrupted now, if it should.
    pub(super) fn interruption(&self) -> Option<Interruption> {
        let past = |at: Option<Instant>| at.is_some_and(|at| at <= Instant::now());
        if !self.pending.end.is_empty() {
            Some(Interruption::Ended)
        } else if past(self.pending.stop_at) {
            Some(Interruption::Stopped)
        } else if self.pending.cancel {
            Some(Interruption::Cancelled)
        } else if past(self.pending.switch.as_ref().map(|switch| switch.deadline)) {
            Some(Interruption::DrainTimeout)
        } else {
            None
        }
    }

    /// When [`interruption`](Self::interruption) may change by time alone.
    pub(super) fn interruption_at(&self) -> Option<Instant> {
        let drain = self.pending.switch.as_ref().map(|switch| switch.deadline);
        [self.pending.stop_at, drain]
            .into_iter()
            .flatten()
            .filter(|at| *at > Instant::now())
            .min()
    }

    /// Runs `work`, recording commands meanwhile, until it is done or interrupted.
    pub(super) async fn unless_interrupted<T>(
        &mut self,
        work: impl Future<Output = T>,
    ) -> Result<T, Interruption> {
        let mut work = std::pin::pin!(work);
        loop {
            if let Some(interruption) = self.interruption() {
                return Err(interruption);
            }
            let at = self.interruption_at();
            tokio::select! {
                done = &mut work => return Ok(done),
                command = self.commands.recv() => match command {
                    Some(command) => self.take_command(command).await,
                    None => return Err(Interruption::Stopped),
                },
                () = sleep_until(at) => {}
            }
        }
    }
}
