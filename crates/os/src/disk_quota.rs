//! [`DiskQuota`]: admits what the caller itself writes into a directory that others write into, too.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::disk_usage::disk_usage;

/// How long a measured size is used: others write there too.
const FRESH: Duration = Duration::from_secs(2);
/// A directory that is full is measured again after ten times as long as measuring took, so that asking again and again
/// costs little.
const MEASURE_PAUSE: u32 = 10;
/// How long the end of that pause is waited for before a file is refused: something may just have been removed.
const MAX_PAUSE_WAIT: Duration = Duration::from_secs(2);
/// Files take whole blocks.
const BLOCK_BYTES: u64 = 4096;

/// The size of a directory as it was last measured, with what was admitted since.
#[derive(Debug, Default)]
pub struct DiskQuota {
    state: Mutex<QuotaState>,
}

#[derive(Debug, Default)]
struct QuotaState {
    measured: Option<MeasuredSize>,
    /// Bytes that were admitted and are being written: measuring may find a part of them, or none.
    in_progress: u64,
}

#[derive(Debug)]
struct MeasuredSize {
    /// What was found, and what was written since.
    bytes: u64,
    at: Instant,
    took: Duration,
}

/// A file that was admitted. Held until it is written: what is held counts in full, whatever is measured meanwhile.
#[derive(Debug)]
pub struct AdmittedWrite {
    quota: Arc<DiskQuota>,
    adds: u64,
    replaced: u64,
}

impl DiskQuota {
    /// Admits a file of this size, in the place of one that takes `replaced` bytes on disk, if it leaves the directory
    /// within `cap` bytes. Measures it if need be, which blocks the thread. A refusal rests on what was there after this
    /// was called, unless measuring takes long.
    pub fn admit(
        self: &Arc<Self>,
        dir: &Path,
        cap: u64,
        size: usize,
        replaced: u64,
    ) -> Option<AdmittedWrite> {
        let size = u64::try_from(size).unwrap_or(u64::MAX);
        let adds = size.div_ceil(BLOCK_BYTES).max(1).saturating_mul(BLOCK_BYTES);
        let mut state = self.lock();
        let in_progress = state.in_progress;
        let after = |held: u64| {
            held.saturating_add(in_progress)
                .saturating_add(adds)
                .saturating_sub(replaced)
        };
        let known = state.measured.take().filter(|size| {
            let age = size.at.elapsed();
            if after(size.bytes) <= cap {
                return age < FRESH;
            }
            let left = (size.took * MEASURE_PAUSE).saturating_sub(age);
            if left > MAX_PAUSE_WAIT {
                return true;
            }
            std::thread::sleep(left);
            false
        });
        let size = state.measured.insert(known.unwrap_or_else(|| {
            let at = Instant::now();
            let usage = disk_usage(dir, cap);
            MeasuredSize {
                // What cannot be counted is taken to be too much.
                bytes: if usage.complete { usage.bytes } else { u64::MAX },
                at,
                took: at.elapsed(),
            }
        }));
        // Less than before is always admitted.
        if after(size.bytes) > cap && adds > replaced {
            return None;
        }
        state.in_progress = in_progress.saturating_add(adds);
        Some(AdmittedWrite {
            quota: self.clone(),
            adds,
            replaced,
        })
    }

    fn lock(&self) -> MutexGuard<'_, QuotaState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AdmittedWrite {
    fn drop(&mut self) {
        let mut state = self.quota.lock();
        state.in_progress = state.in_progress.saturating_sub(self.adds);
        // As if it had been written, which errs on the safe side; the next measuring tells.
        if let Some(measured) = &mut state.measured {
            measured.bytes = measured
                .bytes
                .saturating_add(self.adds)
                .saturating_sub(self.replaced);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;
    const CAP: u64 = 3 << 20;

    #[test]
    fn files_are_admitted_up_to_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let quota = Arc::new(DiskQuota::default());
        let admit = |size: usize, replaced: u64| quota.admit(dir.path(), CAP, size, replaced);
        let write = |name: &str| std::fs::write(dir.path().join(name), vec![1; MIB]).unwrap();
        for name in ["a", "b"] {
            let admitted = admit(MIB, 0);
            assert!(admitted.is_some());
            write(name);
        }
        // The same file again and again.
        for _ in 0..10 {
            let admitted = admit(MIB, 1 << 20);
            assert!(admitted.is_some());
            write("a");
        }
        assert!(admit(2 * MIB, 0).is_none());
        assert!(admit(MIB / 2, 0).is_some());
    }

    #[test]
    fn what_is_being_written_counts() {
        let dir = tempfile::tempdir().unwrap();
        let quota = Arc::new(DiskQuota::default());
        let held: Vec<_> = (0..1000)
            .map_while(|_| quota.admit(dir.path(), CAP, 0, 0))
            .collect();
        // The directory itself may take a block.
        assert!(
            (CAP / BLOCK_BYTES).abs_diff(held.len() as u64) <= 1,
            "{}",
            held.len()
        );
        drop(held);
        assert!(
            quota.admit(dir.path(), CAP, 0, 0).is_some(),
            "none of them was written"
        );
    }

    #[test]
    fn what_was_removed_makes_room_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("big");
        let quota = Arc::new(DiskQuota::default());
        for _ in 0..20 {
            std::fs::write(&file, vec![1; 4 * MIB]).unwrap();
            // Measured less than two seconds ago, it may not have been seen yet.
            let _ = quota.admit(dir.path(), CAP, 3 * MIB, 0);
            assert!(quota.admit(dir.path(), CAP, 3 * MIB, 0).is_none());
            std::fs::remove_file(&file).unwrap();
            assert!(quota.admit(dir.path(), CAP, MIB, 0).is_some());
        }
    }

    #[test]
    fn what_others_wrote_counts_and_a_full_directory_may_shrink() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("big"), vec![1; 4 * MIB]).unwrap();
        let quota = Arc::new(DiskQuota::default());
        assert!(quota.admit(dir.path(), CAP, 10, 0).is_none());
        assert!(quota.admit(dir.path(), CAP, MIB, 4 << 20).is_some());
    }
}
