//! [`Store`], the handle through which the rest of the program reads and writes the database.

use std::{path::Path, sync::Arc, time::Duration};

use jiff::Timestamp;
use oubliette_protocol::{Error, ProjectId, Result, SessionId, TokenId};
use tokio::sync::{Notify, broadcast, watch};

use crate::{
    cluster::{ClusterMember, MemberParts},
    db::{
        DbPool,
        connection::DbConnector,
        postgres::{self, listener::CommitListener},
        query, query_scalar,
    },
    db_error::read_error,
    log::{debugger::DebugLog, events::EventLog, tail::SessionTails},
    open::{self, DatabaseUrl, OpenError, StoreLocation, StoreOptions},
    page::{ListPage, PageRequest},
    row_cache::RowCache,
    tables::{
        projects::{ProjectFilter, ProjectRow},
        tokens::TokenRow,
    },
    writer::{StoreWrite, WebhookOutbox, WriteProbe, WriterHandle},
};

/// How many revocations may wait for whoever listens; streams look after their token by themselves too.
const MAX_UNHEARD_REVOCATIONS: usize = 256;

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
    /// Counts how often this process heard that definitions may have changed.
    pub(crate) library_changes: watch::Sender<u64>,
}

impl StoreCaches {
    /// Empties all of them.
    pub(crate) fn invalidate_all(&self) {
        self.tokens.invalidate();
        self.projects.invalidate();
        self.sessions.invalidate();
    }

    /// Wakes whoever keeps a copy of the definitions.
    pub(crate) fn library_changed(&self) {
        self.library_changes.send_modify(|heard| *heard += 1);
    }

    /// Empties all of them for good.
    pub(crate) fn disable(&self) {
        self.tokens.disable();
        self.projects.disable();
        self.sessions.disable();
    }
}

impl Default for StoreCaches {
    fn default() -> Self {
        Self {
            tokens: RowCache::new(1024),
            projects: RowCache::new(16),
            sessions: RowCache::new(1024),
            library_changes: watch::Sender::new(0),
        }
    }
}

struct StoreInner {
    readers: DbPool,
    caches: Arc<StoreCaches>,
    writer: WriterHandle,
    events: EventLog,
    debugger: DebugLog,
    /// This server as one of a cluster.
    cluster: Option<ClusterMember>,
    /// Tells of tokens that other servers have revoked.
    revoked_tokens: broadcast::Sender<TokenId>,
    /// Ends the listener of a store that only reads, and of a server of a cluster, which leaves it then.
    observed: watch::Sender<bool>,
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

    /// Opens the database in a file with these options.
    pub async fn open_with(path: &Path, options: &StoreOptions) -> Result<Self, OpenError> {
        Self::open_at(&StoreLocation::File(path.to_path_buf()), options).await
    }

    /// Opens the database at this location, creating its tables and migrating it as needed. Only one process can have it
    /// open like this.
    pub async fn open_at(location: &StoreLocation, options: &StoreOptions) -> Result<Self, OpenError> {
        let opened = open::open(location, options).await?;
        let readers = opened.readers.clone();
        let caches = Arc::new(StoreCaches::default());
        let (close, closed) = watch::channel(false);
        let servers_changed = Arc::new(Notify::new());
        let revoked_tokens = broadcast::Sender::new(MAX_UNHEARD_REVOCATIONS);
        let member = match (&opened.connector, &options.cluster) {
            (DbConnector::Postgres(lease), Some(cluster)) => lease.member().map(|server| MemberParts {
                server: server.clone(),
                address: cluster.address.clone(),
                url: lease.url().clone(),
                channel: lease.channel().to_owned(),
                readers: readers.clone(),
                servers_changed: servers_changed.clone(),
                closed: closed.clone(),
            }),
            _ => None,
        };
        if member.is_some() {
            // Other servers change rows too.
            caches.disable();
        }
        let (writer, tails, debug_queue) = WriterHandle::start(opened, caches.clone());
        let cluster = member.map(|parts| {
            if let DbPool::Postgres(pool) = &readers {
                let listener = CommitListener {
                    pool: pool.clone(),
                    channel: parts.channel.clone(),
                    tails: tails.clone(),
                    debug_queue: debug_queue.clone(),
                    caches: caches.clone(),
                    servers_changed,
                    revoked_tokens: revoked_tokens.clone(),
                    webhooks: writer.shared_webhooks(),
                };
                tokio::spawn(listener.run(closed));
            }
            let member = ClusterMember::start(parts);
            tokio::spawn(member.clone().follow_writer(writer.superseded()));
            member
        });
        let events = EventLog::new(readers.clone(), writer.clone(), tails);
        let debugger = DebugLog::new(readers.clone(), debug_queue);
        Ok(Self {
            inner: Arc::new(StoreInner {
                readers,
                caches,
                writer,
                events,
                debugger,
                cluster,
                revoked_tokens,
                observed: close,
            }),
        })
    }

    /// Opens a PostgreSQL database for reading, beside the server that writes it: every write is refused. Its logs can be
    /// followed. Nothing is cached, so that a row is never older than the database.
    pub async fn observe(url: &DatabaseUrl) -> Result<Self, OpenError> {
        let opened = postgres::open::open_for_reading(url).await?;
        let (close, closed) = watch::channel(false);
        let (caches, tails) = (
            Arc::new(StoreCaches::default()),
            Arc::new(SessionTails::default()),
        );
        caches.disable();
        let (writer, debug_queue) = WriterHandle::refusing(closed.clone());
        let revoked_tokens = broadcast::Sender::new(MAX_UNHEARD_REVOCATIONS);
        let listener = CommitListener {
            pool: opened.readers.clone(),
            channel: opened.channel,
            tails: tails.clone(),
            debug_queue: debug_queue.clone(),
            caches: caches.clone(),
            servers_changed: Arc::default(),
            revoked_tokens: revoked_tokens.clone(),
            webhooks: writer.shared_webhooks(),
        };
        tokio::spawn(listener.run(closed));
        let readers = DbPool::Postgres(opened.readers);
        Ok(Self {
            inner: Arc::new(StoreInner {
                events: EventLog::new(readers.clone(), writer.clone(), tails),
                debugger: DebugLog::new(readers.clone(), debug_queue),
                readers,
                caches,
                writer,
                cluster: None,
                revoked_tokens,
                observed: close,
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

    /// This server as one of a cluster; none if it uses its database alone.
    pub fn cluster(&self) -> Option<&ClusterMember> {
        self.inner.cluster.as_ref()
    }

    /// Commits all queued writes, checkpoints the write-ahead log and closes the database. Followers of a log
    /// see their stream end.
    pub async fn close(&self) {
        if self.inner.cluster.is_none() {
            self.inner.observed.send_replace(true);
        }
        self.inner.writer.close().await;
        if let Some(member) = &self.inner.cluster {
            // After the last write, because others may take over at once.
            self.inner.observed.send_replace(true);
            member.wait_until_left().await;
        }
        self.inner.readers.close().await;
    }

    /// Checks that the database can be read and written. If the last commit failed, this tries a write, so
    /// that a recovered database is reported as healthy.
    pub async fn healthy(&self) -> Result<()> {
        let look = self.while_active(async {
            query("SELECT 1")
                .execute(&self.inner.readers)
                .await
                .map_err(read_error)?;
            match self.inner.writer.last_error() {
                Some(_) => self.write(WriteProbe).await,
                None => self.inner.writer.check_open(),
            }
        });
        match tokio::time::timeout(Duration::from_secs(5), look).await {
            Ok(health) => health,
            Err(_) => Err(Error::unavailable(
                "the database does not answer: look at the server's log",
            )),
        }
    }

    /// An answer of the database, or `unavailable` once this server of a cluster cannot reach it or may not run sessions: it
    /// must not wait for an answer that does not come, nor use what it read before.
    pub(crate) async fn while_active<T>(&self, answer: impl Future<Output = Result<T>>) -> Result<T> {
        let Some(member) = &self.inner.cluster else {
            return answer.await;
        };
        tokio::select! {
            biased;
            state = member.wait_until_inactive() => Err(state.error()),
            answer = answer => answer,
        }
    }

    /// Whether this server does what is done now and then for all: delivering to webhooks, deleting what has expired. In a
    /// cluster one server at a time does.
    pub fn has_duty(&self) -> bool {
        self.inner.cluster.as_ref().is_none_or(ClusterMember::has_duty)
    }

    /// Waits until this server does what is done for all; not at all without a cluster.
    pub async fn wait_for_duty(&self) {
        if let Some(member) = &self.inner.cluster {
            member.wait_for_duty().await;
        }
    }

    /// The time that rows are written with: the database's in a cluster, whose servers' clocks may differ, and this machine's
    /// otherwise.
    pub async fn shared_now(&self) -> Result<Timestamp> {
        match &self.inner.cluster {
            Some(member) => member.database_now().await,
            None => Ok(crate::now()),
        }
    }

    /// Tokens that are revoked from now on, by any server of the cluster.
    pub fn revoked_tokens(&self) -> broadcast::Receiver<TokenId> {
        self.inner.revoked_tokens.subscribe()
    }

    /// Waits until another server has taken over the database, so that this one cannot write any more; for ever if none
    /// does. A server notices it at its next write. For ever, too, of a server of a cluster: one that has lost its lease is
    /// fenced, which the writer knows a moment before [`ClusterMember::wait_until_fenced`] returns, and starts anew.
    pub async fn wait_until_superseded(&self) {
        match &self.inner.cluster {
            Some(_) => std::future::pending().await,
            None => self.inner.writer.wait_until_superseded().await,
        }
    }

    /// Size of a PostgreSQL database, in bytes; none of a SQLite database, whose files tell it, and if it does not answer.
    pub async fn database_bytes(&self) -> Option<u64> {
        let DbPool::Postgres(_) = &self.inner.readers else {
            return None;
        };
        let size = query_scalar("SELECT pg_database_size(current_database())");
        let size = size.fetch_one::<i64>(&self.inner.readers).await.ok()?;
        u64::try_from(size).ok()
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

    /// The writer task.
    pub(crate) fn writer(&self) -> &WriterHandle {
        &self.inner.writer
    }

    /// The outbox of webhooks.
    pub(crate) fn webhook_outbox(&self) -> &WebhookOutbox {
        self.inner.writer.webhooks()
    }

    /// The row caches.
    pub(crate) fn caches(&self) -> &StoreCaches {
        &self.inner.caches
    }

    /// The read-only connection pool.
    pub(crate) fn readers(&self) -> &DbPool {
        &self.inner.readers
    }
}
