//! Rows that were read and have not changed since, so that what every request asks for need not be read
//! for every request.
//!
//! This process alone writes the database, and the writer forgets what a commit touched before it answers
//! whoever asked for that commit: nothing is known here past a change that anybody was told of.

use std::{collections::HashMap, hash::Hash};

use parking_lot::Mutex;

/// What was read, by what it was read by.
pub(crate) struct Known<K, V> {
    most: usize,
    state: Mutex<State<K, V>>,
}

struct State<K, V> {
    /// How often everything was forgotten.
    version: u64,
    rows: HashMap<K, V>,
}

/// A moment: what is read after it may be kept unless something was forgotten since.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment(u64);

impl<K: Eq + Hash, V: Clone> Known<K, V> {
    /// Holds at most so many.
    pub(crate) fn new(most: usize) -> Self {
        let state = State {
            version: 0,
            rows: HashMap::new(),
        };
        Self {
            most,
            state: Mutex::new(state),
        }
    }

    /// What is known, or the moment from which on it may be read to be kept.
    pub(crate) fn get(&self, key: &K) -> Result<V, Moment> {
        let state = self.state.lock();
        state.rows.get(key).cloned().ok_or(Moment(state.version))
    }

    /// Keeps what was read since `moment`, unless something changed meanwhile.
    pub(crate) fn keep(&self, moment: Moment, key: K, value: V) {
        let mut state = self.state.lock();
        if state.version != moment.0 {
            return;
        }
        if state.rows.len() >= self.most {
            state.rows.clear();
        }
        state.rows.insert(key, value);
    }

    /// Something changed.
    pub(crate) fn forget(&self) {
        let mut state = self.state.lock();
        state.version += 1;
        state.rows = HashMap::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_before_a_change_is_not_kept_after_it() {
        let known = Known::new(2);
        let before = known.get(&1).unwrap_err();
        known.forget();
        known.keep(before, 1, "old");
        let now = known.get(&1).unwrap_err();
        known.keep(now, 1, "new");
        assert_eq!(known.get(&1).unwrap(), "new");
        known.forget();
        assert!(known.get(&1).is_err());
    }

    #[test]
    fn it_is_bounded() {
        let known = Known::new(2);
        for key in 0..100 {
            let moment = known.get(&key).unwrap_err();
            known.keep(moment, key, ());
            assert!(known.state.lock().rows.len() <= 2);
        }
    }
}
