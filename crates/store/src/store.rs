//! [`Store`]: what everything else of the program holds on to.

use std::{path::Path, sync::Arc, time::Duration};

use oubliette_protocol::{Error, ProjectId, Result, SessionId};
use sqlx::SqlitePool;

use crate::{
    fault::read_error,
    known::Known,
    log::{debugger::DebugLog, events::EventLog},
    open::{self, OpenError, Options},
    page::{Page, Paged},
    tables::{
        projects::{ProjectFilter, ProjectRow},
        tokens::TokenRow,
    },
    writer::{Probe, Write, WriterHandle},
};

/// The database. Cheap to clone; the last one dropped ends the writer.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

/// What is remembered between requests.
pub(crate) struct Remembered {
    /// Tokens by their hash.
    pub(crate) tokens: Known<[u8; 32], TokenRow>,
    /// Pages of projects.
    pub(crate) projects: Known<(ProjectFilter, Page), Arc<Paged<ProjectRow>>>,
    /// Whose sessions are. A session goes only with its project.
    pub(crate) sessions: Known<SessionId, ProjectId>,
}

impl Default for Remembered {
    fn default() -> Self {
        Self {
            tokens: Known::new(1024),
            projects: Known::new(16),
            sessions: Known::new(1024),
        }
    }
}

struct Inner {
    readers: SqlitePool,
    remembered: Arc<Remembered>,
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
    /// Opens the database, making and migrating it as needed. Only one process can have it open.
    pub async fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_with(path, &Options::default()).await
    }

    /// The same, with a say in how.
    pub async fn open_with(path: &Path, options: &Options) -> Result<Self, OpenError> {
        let opened = open::open(path, options).await?;
        let readers = opened.readers.clone();
        let remembered = Arc::new(Remembered::default());
        let (writer, hub, queue) = WriterHandle::start(opened, remembered.clone());
        let events = EventLog::new(readers.clone(), writer.clone(), hub);
        let debugger = DebugLog::new(readers.clone(), queue);
        Ok(Self {
            inner: Arc::new(Inner {
                readers,
                remembered,
                writer,
                events,
                debugger,
            }),
        })
    }

    /// Every session's events.
    pub fn events(&self) -> &EventLog {
        &self.inner.events
    }

    /// The debugger's events.
    pub fn debugger(&self) -> &DebugLog {
        &self.inner.debugger
    }

    /// Writes what waits, folds the write-ahead log into the database and lets go of it. Whoever follows
    /// a log is told that it ends.
    pub async fn close(&self) {
        self.inner.writer.close().await;
        self.inner.readers.close().await;
    }

    /// Whether it can be read and written. After a failed commit this tries a write, so it also says
    /// when things are good again.
    pub async fn healthy(&self) -> Result<()> {
        let look = async {
            sqlx::query("SELECT 1")
                .execute(&self.inner.readers)
                .await
                .map_err(read_error)?;
            match self.inner.writer.last_fault() {
                Some(_) => self.write(Probe).await,
                None => self.inner.writer.alive(),
            }
        };
        match tokio::time::timeout(Duration::from_secs(5), look).await {
            Ok(health) => health,
            Err(_) => Err(Error::unavailable(
                "the database does not answer: look at the server's log",
            )),
        }
    }

    /// Has the writer do something, and waits until it is durable.
    pub(crate) async fn write<W: Write>(&self, write: W) -> Result<W::Out> {
        self.inner.writer.run(write).await
    }

    /// What is remembered between requests.
    pub(crate) fn remembered(&self) -> &Remembered {
        &self.inner.remembered
    }

    /// Where reads go.
    pub(crate) fn readers(&self) -> &SqlitePool {
        &self.inner.readers
    }
}
