//! Whether the running agent knows its tools: it must have connected to them after its start, and have listed them again
//! when they changed.

use std::time::{Duration, Instant};

use oubliette_protocol::{Error, debug::DebugBody, event::EventBody};
use oubliette_store::SessionPatch;

use crate::agent_process::{AgentProcess, capabilities::ToolChanges};

use super::SessionTask;

/// The shortest time an agent that has listed its tools again is given to take them up before it is prompted: the listing
/// is reported when its answer is written.
const MIN_TAKE_UP: Duration = Duration::from_millis(300);
/// The longest such time.
const MAX_TAKE_UP: Duration = Duration::from_secs(5);

/// How long an agent is given to take up its tools, by how long it took to ask for them: on a busy machine it is slow in
/// both.
fn take_up_time(asked_after: Duration) -> Duration {
    (asked_after * 4).clamp(MIN_TAKE_UP, MAX_TAKE_UP)
}

impl SessionTask {
    /// Waits until a running agent has listed tools that changed since it last did. Returns `None` when it has to be
    /// started again for that.
    pub(super) async fn with_current_tools(&mut self, process: AgentProcess) -> Option<AgentProcess> {
        let listing = self.env.shown_tools.clone();
        let (plane, callers) = (self.live.plane.clone(), self.live.callers.clone());
        let Some(changes) = process.tool_changes() else {
            return Some(process);
        };
        if changes == ToolChanges::Ignored && listing.is_current(&plane, &callers) {
            return Some(process);
        }
        if changes == ToolChanges::Listed {
            let began = Instant::now();
            let limit = self.config().relist_timeout;
            let taken_up = async {
                tokio::time::timeout(limit, listing.wait_current(&plane, &callers)).await?;
                // Also when they were current: tools that changed just before this message are listed, and may not be
                // taken up yet.
                if let Some(relisted) = listing.relisted_at() {
                    let due = relisted + take_up_time(relisted.saturating_duration_since(began));
                    tokio::time::sleep_until(due.into()).await;
                }
                Ok::<(), tokio::time::error::Elapsed>(())
            };
            match self.unless_interrupted(taken_up).await {
                // What interrupts it is handled when the turn begins.
                Ok(Ok(())) | Err(_) => return Some(process),
                Ok(Err(_)) => {}
            }
        }
        tracing::info!(session = %self.env.session, "the agent is started again, because its tools changed");
        process.stop().await;
        None
    }

    /// Logs that an agent has not connected to its tools, if it has not.
    pub(super) async fn check_agent_tools(&mut self, process: &mut AgentProcess) {
        let Some(mut reason) = process.check_tools(&self.env.shown_tools) else {
            return;
        };
        self.env.plane.mask_text(&mut reason);
        let agent = self.live.state.borrow().agent.clone();
        let found = DebugBody::AgentWithoutTools {
            reason: reason.clone(),
        };
        self.live.debug.record(Some(&agent), found);
        let error = Error::unavailable(format!("the agent works without its tools: {reason}"));
        self.log_errors(vec![error]).await;
    }

    /// Logs what went wrong while the agent was opened, without stopping it.
    pub(super) async fn log_notices(&mut self, process: &mut AgentProcess) {
        let notices = process.take_notices();
        self.log_errors(notices).await;
    }

    async fn log_errors(&mut self, errors: Vec<Error>) {
        if errors.is_empty() {
            return;
        }
        let events = errors
            .into_iter()
            .map(|error| EventBody::error(error.code, error.message));
        // A log that cannot be written ends the task; that is noticed where it goes on.
        let _ = self.log(events.collect(), SessionPatch::default()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_was_slow_to_ask_has_longer_to_take_up_its_tools() {
        let ms = Duration::from_millis;
        assert_eq!(take_up_time(ms(0)), MIN_TAKE_UP);
        assert_eq!(take_up_time(ms(400)), ms(1_600));
        assert_eq!(take_up_time(ms(60_000)), MAX_TAKE_UP);
    }
}
