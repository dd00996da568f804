//! Removes directories that agents wrote to, which may be large.
//!
//! A directory is first moved away, which takes no time whatever is in it, and then removed in the background. What is
//! left of it when the server is killed is removed after the next start.

use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use oubliette_os::remove_tree;

use crate::HomeDir;

/// How long a removal is waited for, so that what is small is gone when the answer is sent.
const REMOVAL_WAIT: Duration = Duration::from_secs(3);

static NEXT_NAME: AtomicU64 = AtomicU64::new(0);

impl HomeDir {
    /// Directory of what is being removed.
    fn discarded_dir(&self) -> PathBuf {
        self.root().join("removed")
    }

    /// Removes a directory of the home with everything in it. It is gone from its place when this returns; its
    /// content may be removed later. Failures are logged.
    pub async fn discard(&self, path: &Path) {
        let moved = match self.move_away(path) {
            Ok(moved) => moved,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "moving a directory away failed; it is removed in place");
                path.to_path_buf()
            }
        };
        let removal = tokio::spawn(remove_and_log(moved));
        let _ = tokio::time::timeout(REMOVAL_WAIT, removal).await;
    }

    /// Removes in the background what was discarded before and is not gone yet. Call it once, before anything is
    /// discarded.
    pub fn remove_discarded(&self) {
        let left: Vec<_> = std::fs::read_dir(self.discarded_dir())
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .collect();
        tokio::spawn(async move {
            for path in left {
                remove_and_log(path).await;
            }
        });
    }

    fn move_away(&self, path: &Path) -> io::Result<PathBuf> {
        // Not created for what is not there.
        path.symlink_metadata()?;
        let dir = self.discarded_dir();
        crate::safe_fs::create_private_dir(&dir).map_err(|error| io::Error::other(error.message))?;
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let number = NEXT_NAME.fetch_add(1, Ordering::Relaxed);
        let moved = dir.join(format!("{}-{number}", now.as_nanos()));
        std::fs::rename(path, &moved)?;
        Ok(moved)
    }
}

async fn remove_and_log(path: PathBuf) {
    if let Err(error) = remove_tree(path.clone()).await {
        tracing::warn!(path = %path.display(), %error, "removing a directory failed; the rest of it stays on disk");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_discarded_is_gone_from_its_place_and_then_altogether() {
        let dir = tempfile::tempdir().unwrap();
        let home = HomeDir::at(dir.path()).unwrap();
        home.create().unwrap();
        let project = home.projects_dir().join("p");
        std::fs::create_dir_all(project.join("a/b")).unwrap();
        std::fs::write(project.join("a/b/c"), "x").unwrap();
        home.discard(&project).await;
        home.discard(&project).await;
        assert!(!project.exists());
        assert_eq!(std::fs::read_dir(home.discarded_dir()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn what_is_left_of_an_earlier_removal_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let home = HomeDir::at(dir.path()).unwrap();
        home.create().unwrap();
        let left = home.discarded_dir().join("left/a");
        std::fs::create_dir_all(&left).unwrap();
        home.remove_discarded();
        while std::fs::read_dir(home.discarded_dir()).unwrap().count() > 0 {
            tokio::task::yield_now().await;
        }
    }
}
