//! Those who write into watched directories, and how all who write into the same ones are stopped.
//!
//! Several watches may share a directory: sessions a workspace, the tool servers of several sessions a cache. Whoever is
//! not stopped while it is counted can move files for those who are, so a count stops the writers of every watch that
//! shares a directory with it.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::disk_usage::DiskUsage;

/// The processes that write into watched directories.
pub trait DiskWriters: Send + Sync {
    /// What they have on disk in none of the directories, such as files that were removed and are still open, on these
    /// devices. `cap` bytes are left until the limit. Blocks the thread.
    fn hidden_usage(&self, devices: &HashSet<u64>, cap: u64) -> DiskUsage;

    /// Stops them until the returned value is dropped. Blocks the thread until they have stopped, or some do not.
    fn stop(&self) -> Box<dyn StoppedWriters>;
}

/// Writers that are stopped until this is dropped.
pub trait StoppedWriters {
    /// Whether all of them stopped, none has run since, and none was started.
    fn have_not_run(&self) -> bool;

    /// Whether some were just starting, which is a reason for an incomplete count that is nobody's fault.
    fn saw_starts(&self) -> bool;
}

/// A count for which writers were stopped.
pub(crate) struct StoppedCount {
    pub(crate) usage: DiskUsage,
    /// Whether writers were just starting.
    pub(crate) saw_starts: bool,
}

/// The writers of every watch.
static REGISTERED: Mutex<Vec<Weak<RegisteredWriters>>> = Mutex::new(Vec::new());

/// The writers of one watch, known to all others until they are dropped.
pub(crate) struct RegisteredWriters {
    dirs: Vec<PathBuf>,
    pub(crate) writers: Box<dyn DiskWriters>,
    /// When they were stopped last, by whichever watch, and for how long.
    last_stop: Mutex<Option<(Instant, Duration)>>,
}

impl RegisteredWriters {
    pub(crate) fn register(dirs: Vec<PathBuf>, writers: impl DiskWriters + 'static) -> Arc<Self> {
        let registered = Arc::new(Self {
            dirs,
            writers: Box::new(writers),
            last_stop: Mutex::new(None),
        });
        let mut all = lock(&REGISTERED);
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(&registered));
        registered
    }

    /// Counts while all who write into one of the same directories are stopped. The count is not complete if one of them
    /// may have run meanwhile. Only one such count may be under way, because it lets writers go on in the end. Blocks the
    /// thread.
    pub(crate) fn count_while_stopped(&self, count: impl FnOnce() -> DiskUsage) -> StoppedCount {
        let begun = Instant::now();
        let sharing = self.sharing();
        let stopped: Vec<_> = sharing.iter().map(|other| other.writers.stop()).collect();
        let mut usage = count();
        usage.complete &= stopped.iter().all(|stopped| stopped.have_not_run());
        // Whoever came meanwhile was not stopped.
        let was_stopped = |other: &Arc<Self>| sharing.iter().any(|known| Arc::ptr_eq(known, other));
        let somebody_came = !self.sharing().iter().all(was_stopped);
        usage.complete &= !somebody_came;
        let saw_starts = somebody_came || stopped.iter().any(|stopped| stopped.saw_starts());
        drop(stopped);
        let now = Instant::now();
        for other in &sharing {
            *lock(&other.last_stop) = Some((now, now - begun));
        }
        StoppedCount { usage, saw_starts }
    }

    /// Whether they were stopped less than `pause` times as long ago as that took.
    pub(crate) fn were_stopped_within(&self, pause: u32) -> bool {
        lock(&self.last_stop).is_some_and(|(at, took)| at.elapsed() < took * pause)
    }

    /// All that share a directory with these, themselves included.
    fn sharing(&self) -> Vec<Arc<Self>> {
        let all = lock(&REGISTERED);
        let all = all.iter().filter_map(Weak::upgrade);
        all.filter(|other| self.shares_with(other)).collect()
    }

    fn shares_with(&self, other: &Self) -> bool {
        let pairs = |dir: &PathBuf| {
            let mut others = other.dirs.iter();
            others.any(|other| dir.starts_with(other) || other.starts_with(dir))
        };
        self.dirs.iter().any(pairs)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Writers that note how many of them are stopped.
    #[derive(Clone, Default)]
    struct CountedWriters {
        stopped: Arc<AtomicU32>,
    }

    impl DiskWriters for CountedWriters {
        fn hidden_usage(&self, _: &HashSet<u64>, _: u64) -> DiskUsage {
            DiskUsage::NOTHING
        }

        fn stop(&self) -> Box<dyn StoppedWriters> {
            self.stopped.fetch_add(1, Ordering::SeqCst);
            Box::new(self.clone())
        }
    }

    impl StoppedWriters for CountedWriters {
        fn have_not_run(&self) -> bool {
            true
        }

        fn saw_starts(&self) -> bool {
            false
        }
    }

    #[test]
    fn all_who_write_into_the_same_directory_are_stopped() {
        let root = tempfile::tempdir().unwrap();
        let dirs = |names: &[&str]| names.iter().map(|name| root.path().join(name)).collect();
        let (same, below, other) = <(CountedWriters, CountedWriters, CountedWriters)>::default();
        let own = RegisteredWriters::register(dirs(&["shared", "own"]), CountedWriters::default());
        let same_writers = RegisteredWriters::register(dirs(&["shared", "theirs"]), same.clone());
        let below_writers = RegisteredWriters::register(dirs(&["own/below"]), below.clone());
        let other_writers = RegisteredWriters::register(dirs(&["shared-not", "o"]), other.clone());
        let counted = own.count_while_stopped(|| DiskUsage::NOTHING);
        assert!(counted.usage.complete && !counted.saw_starts);
        let stopped = [same, below, other].map(|writers| writers.stopped.load(Ordering::SeqCst));
        assert_eq!(stopped, [1, 1, 0]);
        let within = |writers: &RegisteredWriters| writers.were_stopped_within(u32::MAX);
        assert!(within(&own) && within(&same_writers) && within(&below_writers) && !within(&other_writers));
    }

    #[test]
    fn a_count_during_which_somebody_came_is_not_complete() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = vec![dir.path().to_owned()];
        let own = RegisteredWriters::register(dirs.clone(), CountedWriters::default());
        let mut came = None;
        let counted = own.count_while_stopped(|| {
            came = Some(RegisteredWriters::register(dirs, CountedWriters::default()));
            DiskUsage::NOTHING
        });
        assert!(!counted.usage.complete && counted.saw_starts);
        drop(came);
        assert!(own.count_while_stopped(|| DiskUsage::NOTHING).usage.complete);
    }
}
