//! The cache of a stdio server: a directory at `/cache` that is kept between starts, and whether the server's version was
//! started before.

use std::{
    collections::HashSet,
    io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use oubliette_os::{DiskUsage, DiskWatch, DiskWriters, StoppedWriters, fnv1a, remove_tree};
use oubliette_protocol::catalog::{ServerStart, StdioTransport};
use oubliette_sandbox::{BindMount, SandboxGroup, SandboxHandle};
use tokio::task::AbortHandle;

use super::traffic::{ConnectionEnd, TrafficFilter};

/// The cache's path inside.
const CACHE_INSIDE: &str = "/cache";
/// Minimum time between two measurements of a cache.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum size of the file that names the version started last, in bytes.
const MAX_VERSION_BYTES: u64 = 64;

/// The cache of one stdio server.
pub(super) struct ServerCache {
    /// Its directory on the host; `files` in it is what the server sees.
    dir: PathBuf,
    cap_mb: u64,
    version: String,
}

impl ServerCache {
    /// The cache of the entry `id` beneath the caches of its project.
    pub(super) fn new(caches: &Path, id: &str, stdio: &StdioTransport) -> Self {
        let command = serde_json::json!([stdio.command, stdio.program, stdio.args]).to_string();
        Self {
            dir: caches.join(id),
            cap_mb: stdio.cache_mb,
            version: format!("{:016x}", fnv1a(command.as_bytes())),
        }
    }

    fn files(&self) -> PathBuf {
        self.dir.join("files")
    }

    fn version_file(&self) -> PathBuf {
        self.dir.join("started-version")
    }

    /// Whether the server's version was started before.
    pub(super) fn start(&self) -> ServerStart {
        let file = self.version_file();
        let short = file.metadata().is_ok_and(|of| of.len() <= MAX_VERSION_BYTES);
        match short && std::fs::read_to_string(file).is_ok_and(|version| version == self.version) {
            true => ServerStart::Later,
            false => ServerStart::First,
        }
    }

    /// Notes that the server's version was started.
    pub(super) fn set_started(&self) {
        if self.start() == ServerStart::First
            && let Err(error) = std::fs::write(self.version_file(), &self.version)
        {
            tracing::debug!(%error, "writing a cache's version failed; the next start counts as the first");
        }
    }

    /// Creates it, and empties it if it is larger than it may be.
    pub(super) async fn prepare(&self) -> io::Result<()> {
        let files = self.files();
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(&files)?;
        // Most servers keep nothing: their start does not wait until others are measured.
        if std::fs::read_dir(&files)?.next().is_none() {
            return Ok(());
        }
        if DiskWatch::new([files.clone()], self.cap_mb).measure().await.over {
            remove_tree(files.clone()).await?;
            builder.create(&files)?;
        }
        Ok(())
    }

    /// How the server sees it.
    pub(super) fn mount(&self) -> BindMount {
        BindMount::read_write(self.files(), CACHE_INSIDE)
    }

    /// The variables by which common programs find it.
    pub(super) fn variables() -> [(String, String); 4] {
        [
            ("XDG_CACHE_HOME", CACHE_INSIDE.to_owned()),
            ("npm_config_cache", format!("{CACHE_INSIDE}/npm")),
            ("PIP_CACHE_DIR", format!("{CACHE_INSIDE}/pip")),
            ("UV_CACHE_DIR", format!("{CACHE_INSIDE}/uv")),
        ]
        .map(|(name, value)| (name.to_owned(), value))
    }

    /// Prepares to watch its size. `group` is that of the server, which is not started yet: from now on whoever counts
    /// this cache, for servers of other sessions too, stops it meanwhile.
    pub(super) fn disk_watch(&self, group: Option<&SandboxGroup>) -> DiskWatch {
        let watch = DiskWatch::new([self.files()], self.cap_mb).every(WATCH_INTERVAL);
        match group {
            Some(group) => watch.with_writers(CacheWriters(group.clone())),
            None => watch,
        }
    }

    /// Kills the server when its cache is too large. The next start empties it.
    pub(super) fn watch(
        &self,
        watch: DiskWatch,
        handle: SandboxHandle,
        traffic: Arc<TrafficFilter>,
    ) -> CacheWatch {
        let cap_mb = self.cap_mb;
        let task = tokio::spawn(async move {
            watch.exceeded().await;
            let reason = format!(
                "it was stopped because its cache at {CACHE_INSIDE} has more than the {cap_mb} MiB of cache_mb; the \
                 next start empties it"
            );
            traffic.ended.set(ConnectionEnd::Fault(reason.into()));
            handle.kill();
        });
        CacheWatch(task.abort_handle())
    }
}

/// The sandboxes of a session as writers of a cache. Files without a name that they have open count against the
/// session's own limit.
struct CacheWriters(SandboxGroup);

impl DiskWriters for CacheWriters {
    fn hidden_usage(&self, _: &HashSet<u64>, _: u64) -> DiskUsage {
        DiskUsage::NOTHING
    }

    fn stop(&self) -> Box<dyn StoppedWriters> {
        self.0.stop()
    }
}

/// Ends watching a cache when dropped.
pub(super) struct CacheWatch(AbortHandle);

impl Drop for CacheWatch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn cache(dir: &Path, more: Value) -> ServerCache {
        let mut stdio = json!({"command": "x"});
        stdio
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        ServerCache::new(dir, "srv", &serde_json::from_value(stdio).unwrap())
    }

    #[tokio::test]
    async fn a_version_is_new_until_it_was_started() {
        let dir = tempfile::tempdir().unwrap();
        let one = cache(dir.path(), json!({}));
        one.prepare().await.unwrap();
        assert_eq!(one.start(), ServerStart::First);
        one.set_started();
        assert_eq!(one.start(), ServerStart::Later);
        assert_eq!(
            cache(dir.path(), json!({"args": ["y"]})).start(),
            ServerStart::First
        );
    }

    #[tokio::test]
    async fn a_cache_is_kept_until_it_is_too_large() {
        let dir = tempfile::tempdir().unwrap();
        let one = cache(dir.path(), json!({"cache_mb": 1}));
        one.prepare().await.unwrap();
        let file = one.files().join("kept");
        std::fs::write(&file, vec![1; 1000]).unwrap();
        one.prepare().await.unwrap();
        assert!(file.exists());
        std::fs::write(&file, vec![1; 3 << 20]).unwrap();
        one.prepare().await.unwrap();
        assert!(!file.exists() && one.files().is_dir());
    }
}
