//! Whether a caller is present.
//!
//! A caller is present while it holds a stream, a poll or a waiting message open, and for the linger time after
//! the last of these was answered. If the caller aborts the last one, it is absent at once.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

/// Identifies one open stream, poll or waiting message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct HoldId(pub u64);

/// How a stream, poll or waiting message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HoldEnd {
    /// Oubliette completed it with an answer.
    Answered,
    /// The caller closed the connection before it was answered.
    Aborted,
}

/// One caller's presence in one session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CallerPresence {
    holds: HashSet<HoldId>,
    /// When there are no holds: the moment from which the caller is absent.
    until: Instant,
}

impl CallerPresence {
    /// Present while one of these holds is open; without any, until the given moment.
    pub(super) fn new(holds: impl IntoIterator<Item = HoldId>, until: Instant) -> Self {
        Self {
            holds: holds.into_iter().collect(),
            until,
        }
    }

    /// Since when the caller is absent; `None` while it is present.
    pub(super) fn absent_since(&self, now: Instant) -> Option<Instant> {
        (self.holds.is_empty() && self.until <= now).then_some(self.until)
    }

    /// When the caller becomes absent if nothing else happens; `None` while it holds something open.
    pub(super) fn absent_at(&self) -> Option<Instant> {
        self.holds.is_empty().then_some(self.until)
    }

    /// Notes an opened stream, poll or waiting message.
    pub(super) fn add_hold(&mut self, hold: HoldId) {
        self.holds.insert(hold);
    }

    /// Notes its end; does nothing when it was not one of this caller's.
    pub(super) fn end_hold(&mut self, hold: HoldId, how: HoldEnd, now: Instant, linger: Duration) {
        if self.holds.remove(&hold) {
            self.until = match how {
                HoldEnd::Answered => now + linger,
                HoldEnd::Aborted => now,
            };
        }
    }

    /// Marks the caller as absent, even if it seems to hold something open.
    pub(super) fn mark_left(&mut self, now: Instant) {
        self.holds.clear();
        self.until = now;
    }
}
