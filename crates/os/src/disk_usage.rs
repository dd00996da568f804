//! Measuring the disk usage of workspaces.
//!
//! There is no quota that works for every user on every file system, so usage is measured from outside. A
//! single file cannot exceed the limit between two measurements: the inner stage sets RLIMIT_FSIZE.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A measured disk usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskUsage {
    /// Bytes on disk; a lower bound if `over`.
    pub bytes: u64,
    /// Whether it exceeds the cap; measuring stopped there.
    pub over: bool,
}

/// Measures a directory's usage on disk, stopping when it exceeds `cap` bytes. Symbolic links are not followed,
/// other file systems not entered, and a file with several hard links is counted once. What cannot be read is
/// not counted.
pub fn disk_usage(path: &Path, cap: u64) -> DiskUsage {
    let mut bytes = 0;
    let mut linked = HashSet::new();
    let Ok(root) = path.symlink_metadata() else {
        return DiskUsage { bytes, over: false };
    };
    let mut rest = vec![path.to_path_buf()];
    while let Some(directory) = rest.pop() {
        let Ok(entries) = std::fs::read_dir(directory) else {
            continue;
        };
        for entry in entries.flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            if meta.dev() != root.dev() {
                continue;
            }
            if meta.is_dir() {
                rest.push(entry.path());
            } else if meta.nlink() > 1 && !linked.insert(meta.ino()) {
                continue;
            }
            bytes += meta.blocks() * 512;
            if bytes > cap {
                return DiskUsage { bytes, over: true };
            }
        }
    }
    DiskUsage { bytes, over: false }
}

/// Measures directories periodically until they exceed a limit.
#[derive(Debug)]
pub struct DiskWatch {
    paths: Vec<PathBuf>,
    cap: u64,
    every: Duration,
}

impl DiskWatch {
    /// Watches these directories, which together may use `cap_mb` MiB.
    pub fn new(paths: impl IntoIterator<Item = PathBuf>, cap_mb: u64) -> Self {
        Self {
            paths: paths.into_iter().collect(),
            cap: cap_mb.saturating_mul(1024 * 1024),
            every: Duration::from_secs(2),
        }
    }

    /// Sets the minimum time between measurements; default 2 s.
    #[must_use]
    pub fn every(mut self, every: Duration) -> Self {
        self.every = every;
        self
    }

    /// Measures once.
    pub async fn measure(&self) -> DiskUsage {
        let (paths, cap) = (self.paths.clone(), self.cap);
        let counted = tokio::task::spawn_blocking(move || {
            let mut sum = DiskUsage {
                bytes: 0,
                over: false,
            };
            for path in paths {
                let usage = disk_usage(&path, cap - sum.bytes.min(cap));
                sum.bytes += usage.bytes;
                sum.over = sum.bytes > cap;
                if sum.over {
                    break;
                }
            }
            sum
        });
        counted.await.unwrap_or(DiskUsage {
            bytes: 0,
            over: false,
        })
    }

    /// Waits until the limit is exceeded. The pause between measurements is at least twenty times as long as a
    /// measurement took, so that measuring uses at most about 5 % of one processor.
    pub async fn exceeded(&self) -> DiskUsage {
        loop {
            let begun = Instant::now();
            let usage = self.measure().await;
            if usage.over {
                return usage;
            }
            tokio::time::sleep(self.every.max(begun.elapsed() * 20)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_files_once_and_stops_at_the_cap() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        let big = dir.path().join("sub/big");
        std::fs::write(&big, vec![1; 1 << 20]).unwrap();
        let one = disk_usage(dir.path(), u64::MAX);
        assert!(one.bytes >= 1 << 20 && !one.over);
        std::fs::hard_link(&big, dir.path().join("again")).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("root")).unwrap();
        assert!(disk_usage(dir.path(), u64::MAX).bytes < one.bytes + 65_536);
        assert!(disk_usage(dir.path(), 1 << 19).over);
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
}
