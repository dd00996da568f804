//! How often: requests of a token, failed logins of an address.

use std::{
    collections::HashMap,
    hash::Hash,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Token buckets by key, full at first, forgotten when full again.
#[derive(Debug)]
pub struct Buckets<K> {
    per_second: f64,
    burst: f64,
    levels: Mutex<HashMap<K, Level>>,
}

#[derive(Debug, Clone, Copy)]
struct Level {
    left: f64,
    at: Instant,
}

/// Keys kept before those that are full again are swept out.
const SWEEP_AT: usize = 4096;

impl<K: Hash + Eq + Clone> Buckets<K> {
    /// Buckets of `burst`, filled at `per_second`.
    pub fn new(per_second: f64, burst: f64) -> Self {
        Self {
            per_second,
            burst,
            levels: Mutex::new(HashMap::new()),
        }
    }

    /// Takes one, or says how long until there is one.
    pub fn take(&self, key: &K, now: Instant) -> Result<(), Duration> {
        let mut levels = self.levels.lock();
        if levels.len() >= SWEEP_AT && !levels.contains_key(key) {
            let (rate, burst) = (self.per_second, self.burst);
            levels.retain(|_, l| l.left + now.duration_since(l.at).as_secs_f64() * rate < burst);
        }
        // Looked up by reference first: the common case must not allocate a key.
        let level = match levels.get_mut(key) {
            Some(level) => level,
            None => levels.entry(key.clone()).or_insert(Level {
                left: self.burst,
                at: now,
            }),
        };
        let gained = now.saturating_duration_since(level.at).as_secs_f64() * self.per_second;
        *level = Level {
            left: (level.left + gained).min(self.burst),
            at: now,
        };
        if level.left >= 1.0 {
            level.left -= 1.0;
            return Ok(());
        }
        Err(Duration::from_secs_f64((1.0 - level.left) / self.per_second))
    }

    /// Whether one could be taken; takes none.
    pub fn peek(&self, key: &K, now: Instant) -> Result<(), Duration> {
        let levels = self.levels.lock();
        let Some(level) = levels.get(key) else {
            return Ok(());
        };
        let gained = now.saturating_duration_since(level.at).as_secs_f64() * self.per_second;
        let left = (level.left + gained).min(self.burst);
        match left >= 1.0 {
            true => Ok(()),
            false => Err(Duration::from_secs_f64((1.0 - left) / self.per_second)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_then_the_rate_holds() {
        let buckets = Buckets::new(10.0, 3.0);
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
        assert!(buckets.peek(&"a", start).is_err());
        assert!(buckets.take(&"a", start + wait).is_ok());
    }
}
