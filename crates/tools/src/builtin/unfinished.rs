//! The temporary files of `fs_write`: their names, and removing those that a killed server left in a workspace.

use std::{
    os::fd::OwnedFd,
    path::Path,
    time::{Duration, SystemTime},
};

use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags};

/// A random name for the temporary file that `fs_write` renames into place.
pub(super) fn unfinished_name() -> String {
    format!(".oubliette-{:016x}.tmp", rand::random::<u64>())
}

fn is_unfinished(name: &str) -> bool {
    let number = name
        .strip_prefix(".oubliette-")
        .and_then(|rest| rest.strip_suffix(".tmp"));
    number.is_some_and(|n| n.len() == 16 && n.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Removes temporary files of `fs_write` that were last written before `since`. Links are not followed, so
/// nothing outside the workspace is touched. Blocks the thread.
pub fn remove_unfinished_writes(workspace: &Path, since: SystemTime) {
    // File times come from a clock that may lag behind by a tick.
    let since = since
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .saturating_sub(Duration::from_millis(20));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(root) = fs::open(workspace, flags, Mode::empty()) else {
        return;
    };
    // Deeper than any real workspace, and bounded because each level holds a file descriptor.
    remove_in(&root, since, flags, 64);
}

fn remove_in(dir: &OwnedFd, since: Duration, flags: OFlags, levels: usize) {
    let Ok(entries) = Dir::read_from(dir) else { return };
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().to_str() else {
            continue;
        };
        if matches!(name, "." | "..") {
            continue;
        }
        if entry.file_type() == FileType::Directory && levels > 0 {
            if let Ok(below) = fs::openat(dir, name, flags, Mode::empty()) {
                remove_in(&below, since, flags, levels - 1);
            }
        } else if is_unfinished(name)
            && let Ok(stat) = fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
            && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && written(&stat) < since
        {
            let _ = fs::unlinkat(dir, name, AtFlags::empty());
        }
    }
}

/// A file's modification time, since 1970.
fn written(stat: &fs::Stat) -> Duration {
    let (seconds, nanos) = (u64::try_from(stat.st_mtime), u32::try_from(stat.st_mtime_nsec));
    Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_temporary_files_older_than_the_given_time_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        let name = unfinished_name();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("out")).unwrap();
        let left = [dir.path().join(&name), dir.path().join("a/b").join(&name)];
        let kept = [
            dir.path().join("a/.oubliette-notes.tmp"),
            dir.path().join("a/plain"),
            outside.path().join(&name),
        ];
        for file in left.iter().chain(&kept) {
            std::fs::write(file, "x").unwrap();
        }
        remove_unfinished_writes(dir.path(), SystemTime::UNIX_EPOCH);
        assert!(
            left.iter().all(|file| file.exists()),
            "they are younger than that"
        );
        remove_unfinished_writes(dir.path(), SystemTime::now() + std::time::Duration::from_secs(10));
        assert!(!left.iter().any(|file| file.exists()));
        assert!(kept.iter().all(|file| file.exists()));
    }
}
