//! The machine's monotonic clock, whose readings are comparable between processes.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The current time, in nanoseconds since the machine started.
pub(crate) fn now() -> u64 {
    let at = clock_gettime(ClockId::Monotonic);
    at.tv_sec as u64 * 1_000_000_000 + at.tv_nsec as u64
}

/// The time elapsed since `then`.
pub(crate) fn since(then: u64) -> Duration {
    between(then, now())
}

/// The time between two readings; zero if `later` is the earlier one.
pub(crate) fn between(then: u64, later: u64) -> Duration {
    Duration::from_nanos(later.saturating_sub(then))
}
