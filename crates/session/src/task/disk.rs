//! What the task does when the session exceeds its disk limit.

use oubliette_protocol::{Error, event::EventBody};
use oubliette_store::SessionPatch;

use super::SessionTask;

impl SessionTask {
    /// Stops everything that runs because the session exceeds its disk limit, and logs why.
    pub(super) async fn stop_for_disk(&mut self, error: Error) {
        if let Some(processes) = self.processes.take() {
            processes.stop(&self.env).await;
        }
        let event = EventBody::error(error.code, error.message);
        // If it cannot be logged, neither can whatever follows, which reports that.
        let _ = self.log(vec![event], SessionPatch::default()).await;
    }

    /// The reason why something of the session could not be started: the disk limit, if it was exceeded meanwhile.
    pub(super) fn start_error(&self, error: Error) -> Error {
        self.env.disk_alarm.take().unwrap_or(error)
    }
}
