//! Counts a server's unsolicited messages, to detect a flood.

use tokio::time::Instant;

use super::limits;

/// Unsolicited messages of the current window of [`limits::UNSOLICITED_WINDOW`].
pub(super) struct UnsolicitedCounter {
    since: Instant,
    pub(super) messages: u32,
    bytes: usize,
}

impl UnsolicitedCounter {
    /// An empty window that begins now.
    pub(super) fn new() -> Self {
        Self {
            since: Instant::now(),
            messages: 0,
            bytes: 0,
        }
    }

    /// Counts one message, in a new window if the current one is over.
    pub(super) fn count(&mut self, bytes: usize) {
        if self.since.elapsed() >= limits::UNSOLICITED_WINDOW {
            *self = Self::new();
        }
        self.messages += 1;
        self.bytes += bytes;
    }

    /// If the window's limits are exceeded, the time until which reading pauses: the end of the window.
    pub(super) fn paused_until(&self) -> Option<Instant> {
        let over =
            self.messages > limits::MAX_UNSOLICITED_MESSAGES || self.bytes > limits::MAX_UNSOLICITED_BYTES;
        let until = self.since + limits::UNSOLICITED_WINDOW;
        (over && until > Instant::now()).then_some(until)
    }
}
