//! A cache of rows that every request reads, such as its token.
//!
//! Only this process writes the database (with PostgreSQL: as long as it holds the lease), and the writer invalidates the caches a commit touches before it
//! answers that commit. So once a change has been acknowledged, no cached row is older than it.

use std::{collections::HashMap, hash::Hash};

use parking_lot::Mutex;

/// Cached rows by lookup key. It is emptied as a whole, on every change of its table and when it is full.
pub(crate) struct RowCache<K, V> {
    capacity: usize,
    state: Mutex<RowCacheState<K, V>>,
}

struct RowCacheState<K, V> {
    /// Number of invalidations so far.
    version: u64,
    rows: HashMap<K, V>,
    /// Nothing is cached any more.
    disabled: bool,
}

/// The cache's version when a lookup missed. A row read after that is cached only if the version is still
/// the same; otherwise the row may be from before a change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheVersion(u64);

impl<K: Eq + Hash, V: Clone> RowCache<K, V> {
    /// An empty cache for at most `capacity` rows.
    pub(crate) fn new(capacity: usize) -> Self {
        let state = RowCacheState {
            version: 0,
            rows: HashMap::new(),
            disabled: false,
        };
        Self {
            capacity,
            state: Mutex::new(state),
        }
    }

    /// The cached row, or the version to pass to [`RowCache::insert`] with the row read from the database.
    pub(crate) fn get(&self, key: &K) -> Result<V, CacheVersion> {
        let state = self.state.lock();
        state.rows.get(key).cloned().ok_or(CacheVersion(state.version))
    }

    /// Caches a row read since `version` was taken, unless the cache was invalidated meanwhile.
    pub(crate) fn insert(&self, version: CacheVersion, key: K, value: V) {
        let mut state = self.state.lock();
        if state.version != version.0 || state.disabled {
            return;
        }
        if state.rows.len() >= self.capacity {
            state.rows.clear();
        }
        state.rows.insert(key, value);
    }

    /// Empties the cache for good.
    pub(crate) fn disable(&self) {
        self.state.lock().disabled = true;
        self.invalidate();
    }

    /// Empties the cache because its table changed.
    pub(crate) fn invalidate(&self) {
        let mut state = self.state.lock();
        state.version += 1;
        state.rows = HashMap::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_read_before_an_invalidation_is_not_cached() {
        let cache = RowCache::new(2);
        let before = cache.get(&1).unwrap_err();
        cache.invalidate();
        cache.insert(before, 1, "old");
        let now = cache.get(&1).unwrap_err();
        cache.insert(now, 1, "new");
        assert_eq!(cache.get(&1).unwrap(), "new");
        cache.invalidate();
        assert!(cache.get(&1).is_err());
    }

    #[test]
    fn size_is_bounded() {
        let cache = RowCache::new(2);
        for key in 0..100 {
            let version = cache.get(&key).unwrap_err();
            cache.insert(version, key, ());
            assert!(cache.state.lock().rows.len() <= 2);
        }
    }
}
