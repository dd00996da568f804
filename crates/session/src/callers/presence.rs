//! Whether a caller is there.
//!
//! It is while it holds a stream, a poll or a waiting message, and for a while after the last of these
//! was answered. One that it breaks off is leaving, at once.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

/// Names one open stream, poll or waiting message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HoldId(pub u64);

/// How a stream, poll or waiting message ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// Oubliette answered it.
    Answered,
    /// The caller let go of it.
    BrokenOff,
}

/// One caller's presence in one session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presence {
    holds: HashSet<HoldId>,
    /// With no holds: present until then, absent since.
    until: Instant,
}

impl Presence {
    /// Present by these holds, or without any until then.
    pub fn new(holds: impl IntoIterator<Item = HoldId>, until: Instant) -> Self {
        Self {
            holds: holds.into_iter().collect(),
            until,
        }
    }

    /// Since when the caller is absent; `None` while it is there.
    pub fn absent_since(&self, now: Instant) -> Option<Instant> {
        (self.holds.is_empty() && self.until <= now).then_some(self.until)
    }

    /// When it will be absent if nothing else happens; `None` while it holds something.
    pub fn leaves_at(&self) -> Option<Instant> {
        self.holds.is_empty().then_some(self.until)
    }

    /// A stream, poll or waiting message was opened.
    pub fn arrive(&mut self, hold: HoldId) {
        self.holds.insert(hold);
    }

    /// It ended; nothing happens when it did not speak for this caller.
    pub fn depart(&mut self, hold: HoldId, how: Departure, now: Instant, linger: Duration) {
        if self.holds.remove(&hold) {
            self.until = match how {
                Departure::Answered => now + linger,
                Departure::BrokenOff => now,
            };
        }
    }

    /// Gone, whatever looks open.
    pub fn leave(&mut self, now: Instant) {
        self.holds.clear();
        self.until = now;
    }
}
