//! One clock for every process of a run: the machine's monotonic one.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Now, in nanoseconds since the machine started.
pub(crate) fn now() -> u64 {
    let at = clock_gettime(ClockId::Monotonic);
    at.tv_sec as u64 * 1_000_000_000 + at.tv_nsec as u64
}

/// From then until now.
pub(crate) fn since(then: u64) -> Duration {
    between(then, now())
}

/// From one moment to a later one.
pub(crate) fn between(then: u64, later: u64) -> Duration {
    Duration::from_nanos(later.saturating_sub(then))
}
