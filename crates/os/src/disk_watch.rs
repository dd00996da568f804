//! Waiting until directories exceed a limit.
//!
//! There is no quota that works for every user on every file system, so usage is measured from outside: now and then,
//! oftener while something is written on the file system, and soon when its free space shrinks by a good part of what
//! is left until the limit. A single file cannot exceed the limit between two measurements: the inner stage of a sandbox
//! sets RLIMIT_FSIZE.
//!
//! Whoever writes can move files from where it was not yet counted to where it was, and so hide them. What is used on the
//! file system beyond the count shows that, when it grows. If it could be enough to exceed the limit, it is counted again
//! while the writers are stopped, and with them all others who write into the same directories ([`crate::disk_writers`]).
//! What cannot be counted even then is taken to be theirs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use crate::disk_usage::{DiskUsage, disk_usage};
use crate::disk_writers::{DiskWriters, RegisteredWriters};

/// How often the free space is looked at.
const SPACE_INTERVAL: Duration = Duration::from_millis(250);
/// The least that free space has to shrink before it is a reason to measure.
const SPACE_MIN: u64 = 1 << 20;
/// It is measured soon when free space shrinks by a good part of what is left until the limit, and within the usual
/// interval when it shrinks by a small part. Less cannot make a difference.
const GOOD_PART: u64 = 8;
const SMALL_PART: u64 = 64;
/// Time between measurements while hardly anything is written. Others may free as much as is written.
const QUIET_INTERVAL: Duration = Duration::from_secs(30);
/// The pause after a measurement is at least so many times as long as it took: while hardly anything is written, while
/// something is, after free space shrank by much.
const QUIET_PAUSE: u32 = 100;
const BUSY_PAUSE: u32 = 20;
const HURRIED_PAUSE: u32 = 5;
/// The same for measurements for which writers are stopped.
const STOPPED_PAUSE: u32 = 50;
/// How often a measurement that is not complete is repeated.
const TRIES: usize = 3;
/// How often in a row it is put off to take what cannot be counted to be the writers', because more of them were starting.
const MAX_POSTPONED: u32 = 5;
/// Maximum number of measurements at once, of all watches.
static MEASURING: Semaphore = Semaphore::const_new(2);
/// Only one measurement at a time stops writers: it lets them go on in the end, and others may share them.
static STOPPING: Semaphore = Semaphore::const_new(1);

/// Measures directories periodically until they exceed a limit.
pub struct DiskWatch {
    paths: Vec<PathBuf>,
    cap: u64,
    every: Duration,
    writers: Option<Arc<RegisteredWriters>>,
}

impl std::fmt::Debug for DiskWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskWatch")
            .field("paths", &self.paths)
            .field("cap", &self.cap)
            .finish_non_exhaustive()
    }
}

/// Whether writers go on while it is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WriterActivity {
    Running,
    Stopped,
}

/// A measurement and the space that was used on the file system then.
#[derive(Clone, Copy)]
struct DiskMeasurement {
    usage: DiskUsage,
    used_space: u64,
    took: Duration,
    /// Whether writers were just starting that could not be stopped.
    saw_starts: bool,
}

impl DiskMeasurement {
    /// Bytes used on the file system beyond what was counted: of others, or hidden. Less than nothing where files count
    /// more than they take.
    fn uncounted(&self) -> i128 {
        i128::from(self.used_space) - i128::from(self.usage.bytes)
    }
}

/// What others have on the file system, as far as is known: the least that was not counted since nothing can have been
/// hidden.
#[derive(Clone, Copy)]
struct ForeignSpace(i128);

impl ForeignSpace {
    /// After a measurement that may have missed something. What others remove must not make room to hide in.
    fn lower(&mut self, now: &DiskMeasurement) {
        self.0 = self.0.min(now.uncounted());
    }

    /// All that is used beyond it, which may be the writers'.
    fn own_bytes(self, now: &DiskMeasurement) -> u64 {
        let own = i128::from(now.used_space) - self.0;
        u64::try_from(own.max(0)).unwrap_or(u64::MAX)
    }
}

impl DiskWatch {
    /// Watches these directories, which together may use `cap_mb` MiB.
    pub fn new(paths: impl IntoIterator<Item = PathBuf>, cap_mb: u64) -> Self {
        Self {
            paths: paths.into_iter().collect(),
            cap: cap_mb.saturating_mul(1024 * 1024),
            every: Duration::from_secs(2),
            writers: None,
        }
    }

    /// Sets the minimum time between measurements while something is written; default 2 s.
    #[must_use]
    pub fn every(mut self, every: Duration) -> Self {
        self.every = every;
        self
    }

    /// Names who writes into the directories, so that what they hide counts too. Other watches of the directories know
    /// them from then on, so it comes before they are started.
    #[must_use]
    pub fn with_writers(mut self, writers: impl DiskWriters + 'static) -> Self {
        self.writers = Some(RegisteredWriters::register(self.paths.clone(), writers));
        self
    }

    /// Measures once.
    pub async fn measure(&self) -> DiskUsage {
        self.measure_while(WriterActivity::Running).await.usage
    }

    /// Waits until the limit is exceeded.
    pub async fn exceeded(&self) -> DiskUsage {
        let mut last = self.measure_while(WriterActivity::Running).await;
        let mut foreign = ForeignSpace(last.uncounted());
        let mut postponed = 0;
        while !last.usage.over {
            self.wait(last).await;
            last = self.measure_while(WriterActivity::Running).await;
            foreign.lower(&last);
            if last.usage.over || foreign.own_bytes(&last) <= self.cap {
                continue;
            }
            let writers = self.writers.as_ref();
            if writers.is_some_and(|writers| writers.were_stopped_within(STOPPED_PAUSE)) {
                continue;
            }
            last = self.measure_while(WriterActivity::Stopped).await;
            if last.usage.complete {
                foreign = ForeignSpace(last.uncounted());
                postponed = 0;
            } else if last.saw_starts && postponed < MAX_POSTPONED {
                postponed += 1;
            } else if foreign.own_bytes(&last) > self.cap {
                last.usage.bytes = last.usage.bytes.max(foreign.own_bytes(&last));
                last.usage.over = true;
            }
        }
        last.usage
    }

    /// Waits until it is time to measure again.
    async fn wait(&self, last: DiskMeasurement) {
        let begun = Instant::now();
        let left = self.cap.saturating_sub(last.usage.bytes);
        let part_of_left = |part: u64| (left / part).max(SPACE_MIN);
        let quiet = self.every.max(QUIET_INTERVAL);
        loop {
            tokio::time::sleep(SPACE_INTERVAL.min(self.every)).await;
            let written = self.used_space().saturating_sub(last.used_space);
            let (interval, pause) = match written {
                much if much > part_of_left(GOOD_PART) => (Duration::ZERO, HURRIED_PAUSE),
                some if some > part_of_left(SMALL_PART) => (self.every, BUSY_PAUSE),
                _ => (quiet, QUIET_PAUSE),
            };
            if begun.elapsed() >= interval.max(last.took * pause) {
                return;
            }
        }
    }

    async fn measure_while(&self, state: WriterActivity) -> DiskMeasurement {
        let only_one = match state {
            WriterActivity::Running => None,
            WriterActivity::Stopped => STOPPING.acquire().await.ok(),
        };
        let _one_of_few = MEASURING.acquire().await;
        let (paths, cap, writers) = (self.paths.clone(), self.cap, self.writers.clone());
        // Before it is counted: what is written meanwhile is uncounted next time, too.
        let used_space = self.used_space();
        let counted = tokio::task::spawn_blocking(move || {
            // Until it has ended, also if nobody waits for it any more.
            let _only_one = only_one;
            let begun = Instant::now();
            let (mut usage, mut saw_starts) = (DiskUsage::UNKNOWN, false);
            for _ in 0..TRIES {
                let count = || measure_all(&paths, cap, writers.as_deref());
                (usage, saw_starts) = match (&writers, state) {
                    (Some(writers), WriterActivity::Stopped) => {
                        let counted = writers.count_while_stopped(count);
                        (counted.usage, counted.saw_starts)
                    }
                    _ => (count(), false),
                };
                if usage.complete || usage.over {
                    break;
                }
            }
            (usage, begun.elapsed(), saw_starts)
        });
        let (usage, took, saw_starts) = counted
            .await
            .unwrap_or((DiskUsage::UNKNOWN, Duration::ZERO, false));
        DiskMeasurement {
            usage,
            used_space,
            took,
            saw_starts,
        }
    }

    /// Bytes used on the file system of the first directory.
    fn used_space(&self) -> u64 {
        let space = self.paths.first().and_then(|path| rustix::fs::statvfs(path).ok());
        space.map_or(0, |space| {
            space
                .f_blocks
                .saturating_sub(space.f_bfree)
                .saturating_mul(space.f_frsize)
        })
    }
}

fn measure_all(paths: &[PathBuf], cap: u64, registered: Option<&RegisteredWriters>) -> DiskUsage {
    let mut sum = DiskUsage::NOTHING;
    for path in paths {
        sum.add(disk_usage(path, cap.saturating_sub(sum.bytes)), cap);
        if sum.over {
            return sum;
        }
    }
    if let Some(RegisteredWriters { writers, .. }) = registered {
        let stats = paths.iter().filter_map(|path| rustix::fs::stat(path).ok());
        let devices = stats.map(|stat| stat.st_dev).collect();
        sum.add(writers.hidden_usage(&devices, cap.saturating_sub(sum.bytes)), cap);
    }
    sum
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::disk_writers::StoppedWriters;

    #[test]
    fn what_others_remove_makes_no_room_to_hide_in() {
        let measured = |bytes: u64, used_space: u64| DiskMeasurement {
            usage: DiskUsage {
                bytes,
                ..DiskUsage::NOTHING
            },
            used_space,
            took: Duration::ZERO,
            saw_starts: false,
        };
        let first = measured(10, 1000);
        let mut foreign = ForeignSpace(first.uncounted());
        assert_eq!(foreign.own_bytes(&first), 10);
        // Others remove 500; then the writers hide 200.
        foreign.lower(&measured(10, 500));
        assert_eq!(foreign.own_bytes(&measured(10, 700)), 210);
        // What they write and remove in sight is no more than what is counted.
        foreign.lower(&measured(310, 800));
        foreign.lower(&measured(10, 500));
        assert_eq!(foreign.own_bytes(&measured(110, 600)), 110);
    }

    #[tokio::test]
    async fn several_directories_are_counted_together() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(a.path().join("x"), vec![1; 700 * 1024]).unwrap();
        let watch = DiskWatch::new([a.path().to_path_buf(), b.path().to_path_buf()], 1);
        assert!(!watch.measure().await.over);
        std::fs::write(b.path().join("x"), vec![1; 700 * 1024]).unwrap();
        assert!(watch.exceeded().await.over);
    }

    /// Writers that hide a file while they run, or behind something that cannot be counted.
    struct HidingWriters {
        hidden: DiskUsage,
        moved: Option<PathBuf>,
    }

    impl DiskWriters for HidingWriters {
        fn hidden_usage(&self, _: &HashSet<u64>, _: u64) -> DiskUsage {
            self.hidden
        }

        fn stop(&self) -> Box<dyn StoppedWriters> {
            if let Some(dir) = &self.moved {
                let _ = std::fs::rename(dir.join("x"), dir.join("seen/x"));
            }
            Box::new(StoppedHiding(self.moved.clone()))
        }
    }

    /// Hides the file again when it is dropped.
    struct StoppedHiding(Option<PathBuf>);

    impl StoppedWriters for StoppedHiding {
        fn have_not_run(&self) -> bool {
            true
        }

        fn saw_starts(&self) -> bool {
            false
        }
    }

    impl Drop for StoppedHiding {
        fn drop(&mut self) {
            if let Some(dir) = &self.0 {
                let _ = std::fs::rename(dir.join("seen/x"), dir.join("x"));
            }
        }
    }

    #[tokio::test]
    async fn what_is_hidden_counts() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("x"), vec![1; 700 * 1024]).unwrap();
        let writers = HidingWriters {
            hidden: DiskUsage {
                bytes: 600 * 1024,
                ..DiskUsage::NOTHING
            },
            moved: None,
        };
        let watch = DiskWatch::new([dir.path().to_path_buf()], 1).with_writers(writers);
        assert!(watch.measure().await.over);
    }

    /// A file that is never where it is counted, unless its writers are stopped.
    #[tokio::test]
    async fn what_is_moved_away_from_the_count_is_found_while_writers_are_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let seen = dir.path().join("seen");
        std::fs::create_dir(&seen).unwrap();
        let writers = HidingWriters {
            hidden: DiskUsage::NOTHING,
            moved: Some(dir.path().to_path_buf()),
        };
        let watch = DiskWatch::new([seen], 4)
            .every(Duration::from_millis(5))
            .with_writers(writers);
        assert!(!watch.measure().await.over);
        assert!(exceeded_after_writing(&watch, &dir.path().join("x")).await.over);
    }

    #[tokio::test]
    async fn what_cannot_be_counted_is_taken_to_be_the_writers() {
        let dir = tempfile::tempdir().unwrap();
        let seen = dir.path().join("seen");
        std::fs::create_dir(&seen).unwrap();
        let writers = HidingWriters {
            hidden: DiskUsage::UNKNOWN,
            moved: None,
        };
        let watch = DiskWatch::new([seen], 4)
            .every(Duration::from_millis(5))
            .with_writers(writers);
        assert!(exceeded_after_writing(&watch, &dir.path().join("x")).await.over);
    }

    /// Writes after the first measurement, and again and again, since others on this machine may free as much.
    async fn exceeded_after_writing(watch: &DiskWatch, file: &std::path::Path) -> DiskUsage {
        let write = async {
            let mut mib = 0;
            loop {
                tokio::time::sleep(Duration::from_millis(50)).await;
                mib = (mib + 16).min(256);
                std::fs::write(file, vec![1; mib << 20]).unwrap();
            }
        };
        let noticed = async {
            tokio::select! {
                usage = watch.exceeded() => usage,
                () = write => unreachable!(),
            }
        };
        tokio::time::timeout(Duration::from_secs(60), noticed)
            .await
            .unwrap()
    }

    /// Much is written right after a measurement: it is noticed long before the next one is due.
    #[tokio::test]
    async fn free_space_that_shrinks_is_a_reason_to_measure() {
        let dir = tempfile::tempdir().unwrap();
        let watch = DiskWatch::new([dir.path().to_path_buf()], 4).every(Duration::from_secs(3600));
        let write = async {
            let first = watch.measure().await;
            assert!(!first.over);
            std::fs::write(dir.path().join("x"), vec![1; 16 << 20]).unwrap();
            std::future::pending::<()>().await;
        };
        let noticed = async {
            tokio::select! {
                usage = watch.exceeded() => usage,
                () = write => unreachable!(),
            }
        };
        let noticed = tokio::time::timeout(Duration::from_secs(60), noticed).await;
        assert!(noticed.unwrap().over);
    }
}
