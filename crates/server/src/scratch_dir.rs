//! A temporary directory that programs in sandboxes write into.

use std::{
    io,
    path::{Path, PathBuf},
};

/// A private directory, removed with everything in it when this is dropped. A library's own
/// removal calls itself for each level, and a program can make a hundred thousand levels.
pub(crate) struct ScratchDir(PathBuf);

impl ScratchDir {
    /// Makes one among the system's temporary directories, whose name begins with `prefix`.
    pub(crate) fn new(prefix: &str) -> io::Result<Self> {
        Self::new_in(&std::env::temp_dir(), prefix)
    }

    /// Makes one in `parent`.
    pub(crate) fn new_in(parent: &Path, prefix: &str) -> io::Result<Self> {
        let made = tempfile::Builder::new().prefix(prefix).tempdir_in(parent)?;
        Ok(Self(made.keep()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Removes it, and waits until it is gone.
    pub(crate) async fn remove(mut self) {
        let path = std::mem::take(&mut self.0);
        log_failure(&path, oubliette_os::remove_tree(path.clone()).await);
    }
}

fn log_failure(path: &Path, removed: io::Result<u64>) {
    if let Err(error) = removed {
        tracing::warn!(%error, dir = %path.display(), "removing a temporary directory failed; the rest of it stays");
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.0);
        if path.as_os_str().is_empty() {
            return;
        }
        let remove = move || log_failure(&path, oubliette_os::remove_tree_blocking(&path));
        // Removing many files takes time, which no thread that serves others has.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(remove)),
            Err(_) => remove(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_many_levels_are_removed() {
        let scratch = ScratchDir::new("oubliette-test-").unwrap();
        let top = scratch.path().to_owned();
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY;
        let mut at = rustix::fs::open(&top, flags, rustix::fs::Mode::empty()).unwrap();
        for _ in 0..20_000 {
            rustix::fs::mkdirat(&at, "d", rustix::fs::Mode::RWXU).unwrap();
            at = rustix::fs::openat(&at, "d", flags, rustix::fs::Mode::empty()).unwrap();
        }
        // A stack as threads of the server have it.
        let removal = std::thread::Builder::new().stack_size(2 << 20);
        removal.spawn(move || drop(scratch)).unwrap().join().unwrap();
        assert!(!top.exists());
    }
}
