//! [`Store`], the handle through which the rest of the program reads and writes the database.

use std::{path::Path, sync::Arc, time::Duration};

use oubliette_protocol::{Error, ProjectId, Result, SessionId};
use sqlx::SqlitePool;

use crate::{
    db_error::read_error,
    log::{debugger::DebugLog, events::EventLog},
    open::{self, OpenError, StoreOptions},
    page::{ListPage, PageRequest},
    row_cache::RowCache,
    tables::{
        projects::{ProjectFilter, ProjectRow},
        tokens::TokenRow,
    },
    writer::{StoreWrite, WriteProbe, WriterHandle},
};

/// A handle to the open database. Cheap to clone; dropping the last clone ends the writer task.
#[derive(Clone)]
pub struct Store {
    inner: Arc<StoreInner>,
}

/// Rows cached between requests. The writer invalidates them when a commit changes their table.
pub(crate) struct StoreCaches {
    /// Token rows by token hash.
    pub(crate) tokens: RowCache<[u8; 32], TokenRow>,
    /// Pages of the project list, by filter and page.
    pub(crate) projects: RowCache<(ProjectFilter, PageRequest), Arc<ListPage<ProjectRow>>>,
    /// The project of each session. Invalidated with the projects: a session is deleted only with its project.
    pub(crate) sessions: RowCache<SessionId, ProjectId>,
}

impl Default for StoreCaches {
    fn default() -> Self {
        Self {
            tokens: RowCache::new(1024),
            projects: RowCache::new(16),
            sessions: RowCache::new(1024),
        }
    }
}

struct StoreInner {
    readers: SqlitePool,
    caches: Arc<StoreCaches>,
    writer: WriterHandle,
    events: EventLog,
    debugger: DebugLog,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Store")
    }
}

impl Store {
    /// Opens the database with default options, creating and migrating it as needed. Only one process can
    /// have it open.
    pub async fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_with(path, &StoreOptions::default()).await
    }

    /// Opens the database with these options.
    pub async fn open_with(path: &Path, options: &StoreOptions) -> Result<Self, OpenError> {
        let opened = open::open(path, options).await?;
        let readers = opened.readers.clone();
        let caches = Arc::new(StoreCaches::default());
        let (writer, tails, debug_queue) = WriterHandle::start(opened, caches.clone());
        let events = EventLog::new(readers.clone(), writer.clone(), tails);
        let debugger = DebugLog::new(readers.clone(), debug_queue);
        Ok(Self {
            inner: Arc::new(StoreInner {
                readers,
                caches,
                writer,
                events,
                debugger,
            }),
        })
    }

    /// The event log of all sessions.
    pub fn events(&self) -> &EventLog {
        &self.inner.events
    }

    /// The debugger's log.
    pub fn debugger(&self) -> &DebugLog {
        &self.inner.debugger
    }

    /// Commits all queued writes, checkpoints the write-ahead log and closes the database. Followers of a log
    /// see their stream end.
    pub async fn close(&self) {
        self.inner.writer.close().await;
        self.inner.readers.close().await;
    }

    /// Checks that the database can be read and written. If the last commit failed, this tries a write, so
    /// that a recovered database is reported as healthy.
    pub async fn healthy(&self) -> Result<()> {
        let look = async {
            sqlx::query("SELECT 1")
                .execute(&self.inner.readers)
                .await
                .map_err(read_error)?;
            match self.inner.writer.last_error() {
                Some(_) => self.write(WriteProbe).await,
                None => self.inner.writer.check_open(),
            }
        };
        match tokio::time::timeout(Duration::from_secs(5), look).await {
            Ok(health) => health,
            Err(_) => Err(Error::unavailable(
                "the database does not answer: look at the server's log",
            )),
        }
    }

    /// Makes every write fail as on a full disk, or no longer.
    #[cfg(feature = "test-support")]
    pub fn set_write_fault(&self, failing: bool) {
        let fault = &self.inner.writer.write_fault;
        fault.store(failing, std::sync::atomic::Ordering::SeqCst);
    }

    /// Sends a write to the writer and waits until it is durable.
    pub(crate) async fn write<W: StoreWrite>(&self, write: W) -> Result<W::Out> {
        self.inner.writer.run(write).await
    }

    /// The row caches.
    pub(crate) fn caches(&self) -> &StoreCaches {
        &self.inner.caches
    }

    /// The read-only connection pool.
    pub(crate) fn readers(&self) -> &SqlitePool {
        &self.inner.readers
    }
}
