//! [`EventPace`]: how fast an agent may fill its session's log.
//!
//! An agent that reports faster than it may is not read from for a while: it blocks on its own pipe, and nothing is lost.

use std::time::{Duration, Instant};

/// What may be logged at once, in bytes of JSON.
const BURST_BYTES: f64 = 16.0 * 1024.0 * 1024.0;
/// What may be logged in a second beyond that.
const BYTES_PER_SECOND: f64 = 4.0 * 1024.0 * 1024.0;

/// The bytes that one turn may log now.
pub(super) struct EventPace {
    left: f64,
    at: Instant,
}

impl EventPace {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            left: BURST_BYTES,
            at: now,
        }
    }

    /// Counts bytes that were logged; returns when the agent may be read from again, if not now.
    pub(super) fn count(&mut self, bytes: usize, now: Instant) -> Option<Instant> {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        self.left = (self.left + since * BYTES_PER_SECOND).min(BURST_BYTES) - bytes as f64;
        self.at = now;
        (self.left < 0.0).then(|| now + Duration::from_secs_f64(-self.left / BYTES_PER_SECOND))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1024 * 1024;

    #[test]
    fn a_flood_is_slowed_down_and_ordinary_reports_are_not() {
        let start = Instant::now();
        let mut pace = EventPace::new(start);
        assert!((0..16).all(|_| pace.count(MIB, start).is_none()));
        let wait = pace.count(4 * MIB, start).unwrap() - start;
        assert!(
            (Duration::from_millis(999)..Duration::from_millis(1001)).contains(&wait),
            "{wait:?}"
        );
        // Three seconds of a flood.
        let (mut now, mut logged) = (start, 0);
        let mut pace = EventPace::new(start);
        while now < start + Duration::from_secs(3) {
            logged += MIB;
            now = pace.count(MIB, now).unwrap_or(now);
        }
        assert!(logged < 32 * MIB, "{logged}");
        assert_eq!(pace.count(MIB, now + Duration::from_secs(60)), None);
    }
}
