//! Rate limits: requests of each token, failed logins of each address.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

/// One token bucket for each key. A bucket starts full; one that is full again may be removed.
#[derive(Debug)]
pub(crate) struct RateLimiter<K> {
    rate: ArcSwap<BucketRate>,
    levels: Mutex<HashMap<K, BucketLevel>>,
}

/// What every bucket holds, and how fast it fills.
#[derive(Debug, Clone, Copy)]
struct BucketRate {
    per_second: f64,
    burst: f64,
}

/// How full a bucket was when it was last used.
#[derive(Debug, Clone, Copy)]
struct BucketLevel {
    available: f64,
    updated_at: Instant,
}

/// Number of buckets at which full ones are removed before another is added.
const SWEEP_AT: usize = 4096;

impl<K: Hash + Eq + Clone> RateLimiter<K> {
    /// Allows `burst` at once, and `per_second` in the long run.
    pub(crate) fn new(per_second: f64, burst: f64) -> Self {
        Self {
            rate: ArcSwap::from_pointee(BucketRate { per_second, burst }),
            levels: Mutex::new(HashMap::new()),
        }
    }

    /// Changes what is allowed from now on.
    pub(crate) fn set_rate(&self, per_second: f64, burst: f64) {
        self.rate.store(Arc::new(BucketRate { per_second, burst }));
    }

    /// Takes one unit of a key's bucket; the error is how long until one is available.
    pub(crate) fn take(&self, key: &K, now: Instant) -> Result<(), Duration> {
        let burst = self.rate.load().burst;
        let mut levels = self.levels.lock();
        if levels.len() >= SWEEP_AT && !levels.contains_key(key) {
            levels.retain(|_, level| self.refilled(level, now) < burst);
        }
        // Looked up by reference first: the common case must not allocate a key.
        let level = match levels.get_mut(key) {
            Some(level) => level,
            None => levels.entry(key.clone()).or_insert(BucketLevel {
                available: burst,
                updated_at: now,
            }),
        };
        *level = BucketLevel {
            available: self.refilled(level, now),
            updated_at: now,
        };
        self.require_one(level.available)?;
        level.available -= 1.0;
        Ok(())
    }

    /// Like [`take`](Self::take), but takes nothing.
    pub(crate) fn check(&self, key: &K, now: Instant) -> Result<(), Duration> {
        let levels = self.levels.lock();
        let Some(level) = levels.get(key) else {
            return Ok(());
        };
        self.require_one(self.refilled(level, now))
    }

    /// What a bucket holds at `now`.
    fn refilled(&self, level: &BucketLevel, now: Instant) -> f64 {
        let rate = **self.rate.load();
        let gained = now.saturating_duration_since(level.updated_at).as_secs_f64() * rate.per_second;
        (level.available + gained).min(rate.burst)
    }

    /// Fails with the time until one unit is available.
    fn require_one(&self, available: f64) -> Result<(), Duration> {
        match available >= 1.0 {
            true => Ok(()),
            false => Err(Duration::from_secs_f64(
                (1.0 - available) / self.rate.load().per_second,
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_then_the_rate_holds() {
        let buckets = RateLimiter::new(10.0, 3.0);
        let start = Instant::now();
        for _ in 0..3 {
            assert!(buckets.take(&"a", start).is_ok());
        }
        let wait = buckets.take(&"a", start).unwrap_err();
        assert!(
            wait > Duration::ZERO && wait <= Duration::from_millis(100),
            "{wait:?}"
        );
        assert!(buckets.take(&"b", start).is_ok(), "another key is not held up");
        assert!(buckets.check(&"a", start).is_err());
        assert!(buckets.take(&"a", start + wait).is_ok());
    }
}
