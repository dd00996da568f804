//! What a server says unasked, counted.

use tokio::time::Instant;

use super::limits;

/// What came in unasked in the current window.
pub(super) struct Unasked {
    since: Instant,
    pub(super) messages: u32,
    bytes: usize,
}

impl Unasked {
    /// Nothing yet.
    pub(super) fn new() -> Self {
        Self {
            since: Instant::now(),
            messages: 0,
            bytes: 0,
        }
    }

    /// One more message.
    pub(super) fn count(&mut self, bytes: usize) {
        if self.since.elapsed() >= limits::UNASKED_WINDOW {
            *self = Self::new();
        }
        self.messages += 1;
        self.bytes += bytes;
    }

    /// Until when nothing more is read, when it was too much.
    pub(super) fn pause(&self) -> Option<Instant> {
        let over = self.messages > limits::UNASKED_MESSAGES || self.bytes > limits::UNASKED_BYTES;
        let until = self.since + limits::UNASKED_WINDOW;
        (over && until > Instant::now()).then_some(until)
    }
}
