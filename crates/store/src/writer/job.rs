//! What can be sent to the writer.

use std::{future::Future, sync::Arc};

use futures::future::BoxFuture;
use jiff::Timestamp;
use oubliette_protocol::{
    Error, Result, ServerId, SessionId, TokenId,
    event::{EventBody, SessionEvent},
};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::audit::AuditJob;
use crate::{
    db::{DbConnection, query},
    db_error::WriteError,
    tables::{
        approvals::ApprovalChange,
        sessions::{InsertSession, SessionPatch},
    },
};

/// What a write must survive once it has been answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Survives {
    /// `kill -9` of the server: SQLite's `synchronous = NORMAL`.
    Crash,
    /// A power cut: `synchronous = FULL`, the commit waits for the disk.
    PowerCut,
}

/// When a write is to be committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommitUrgency {
    /// At once.
    Now,
    /// With the next write, which follows at once, or a moment later.
    WithNext,
}

/// A write operation. `apply` may run twice: once in its group, and again alone when the group could not
/// be committed.
pub(crate) trait StoreWrite: Send + Sync + 'static {
    /// Its result.
    type Out: Send + 'static;
    /// What it must survive once answered.
    const SURVIVES: Survives = Survives::Crash;
    /// Executes it within the group's transaction.
    fn apply(&self, tx: &mut WriteTx) -> impl Future<Output = Result<Self::Out, WriteError>> + Send;
}

/// The transaction of a group, and what is to be done once it is committed.
pub(crate) struct WriteTx {
    /// The connection, inside the transaction.
    pub(crate) db: DbConnection,
    /// The time the group is written, the same for all its rows.
    pub(crate) now: Timestamp,
    /// Sessions deleted by this transaction.
    pub(crate) deleted_sessions: Vec<SessionId>,
    /// Whether rows of a deleted project are left to be purged.
    pub(crate) needs_purge: bool,
    /// Caches to invalidate.
    pub(crate) touched: TouchedCaches,
    /// This server, if it is one of a cluster.
    pub(crate) member: Option<ServerId>,
    /// Trees that this transaction claimed or released: what is cached of their logs may be old.
    pub(crate) moved_trees: Vec<SessionId>,
    /// Tokens revoked by this transaction.
    pub(crate) revoked_tokens: Vec<TokenId>,
}

/// Which row caches a transaction makes stale.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TouchedCaches {
    pub(crate) tokens: bool,
    pub(crate) projects: bool,
    /// No rows are cached of these, but others are told of a change.
    pub(crate) definitions: bool,
}

/// A persistent sequence whose numbers are never reused.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SequenceCounter {
    Debug,
    EventLog,
    Definitions,
}

impl SequenceCounter {
    pub(crate) fn name(self) -> &'static str {
        match self {
            SequenceCounter::Debug => "debug",
            SequenceCounter::EventLog => "event_log",
            SequenceCounter::Definitions => "definitions",
        }
    }
}

impl WriteTx {
    /// Reserves `count` consecutive numbers of a sequence, which starts at 0, and returns the first.
    pub(crate) async fn reserve_numbers(
        &mut self,
        counter: SequenceCounter,
        count: usize,
    ) -> Result<i64, WriteError> {
        let count = i64::try_from(count).map_err(Error::internal)?;
        let row = query(
            "INSERT INTO counters (name, value) VALUES ($1, $2)
             ON CONFLICT (name) DO UPDATE SET value = counters.value + $2 RETURNING value",
        )
        .bind(counter.name())
        .bind(count)
        .fetch_one(&mut self.db)
        .await?;
        Ok(row.try_get::<i64>(0)? - count)
    }

    /// The group's time in milliseconds since the epoch.
    pub(crate) fn now_millis(&self) -> i64 {
        self.now.as_millisecond()
    }
}

/// A task for the writer.
pub(crate) enum WriterTask {
    /// Append events to a session's log.
    Events(EventJob),
    /// Append entries to the audit log.
    Audit(AuditJob),
    /// Any other write.
    Work(Box<dyn WriteJob>),
    /// Finish queued tasks and end.
    Close,
}

impl WriterTask {
    pub(super) fn urgency(&self) -> CommitUrgency {
        match self {
            WriterTask::Events(job) => job.urgency,
            WriterTask::Audit(_) | WriterTask::Work(_) | WriterTask::Close => CommitUrgency::Now,
        }
    }
}

/// A change of a session's row, or of one of its approvals, that is committed with events.
pub(crate) enum SessionRowChange {
    Insert(Box<InsertSession>),
    Update(Box<SessionPatch>),
    Approval(ApprovalChange),
}

impl SessionRowChange {
    pub(crate) async fn apply(&self, session: &SessionId, tx: &mut WriteTx) -> Result<(), WriteError> {
        match self {
            SessionRowChange::Insert(insert) => insert.apply(tx).await,
            SessionRowChange::Update(patch) => patch.apply(session, tx).await,
            SessionRowChange::Approval(change) => change.apply(session, tx).await,
        }
    }
}

/// Events to append to a session's log.
pub(crate) struct EventJob {
    pub(crate) session: SessionId,
    /// Each with its JSON, encoded by the appending task to keep the writer's work small.
    pub(crate) bodies: Vec<(EventBody, String)>,
    /// A change of a row to be committed in the same transaction.
    pub(crate) row_change: Option<SessionRowChange>,
    /// Where to send the committed events; none if nobody waits.
    pub(crate) reply: Option<oneshot::Sender<Result<Vec<Arc<SessionEvent>>>>>,
    pub(crate) urgency: CommitUrgency,
    /// Its share of the memory limit for waiting events, released when the job is dropped.
    pub(crate) pending_budget: Option<OwnedSemaphorePermit>,
}

/// A type-erased [`StoreWrite`] with its reply channel.
pub(crate) trait WriteJob: Send {
    fn survives(&self) -> Survives;
    fn apply<'a>(&'a mut self, tx: &'a mut WriteTx) -> BoxFuture<'a, Result<(), WriteError>>;
    fn answer(self: Box<Self>, outcome: Result<()>);
}

/// A write, its result once applied, and where to send that.
pub(crate) struct PendingWrite<W: StoreWrite> {
    pub(crate) write: W,
    pub(crate) output: Option<W::Out>,
    pub(crate) reply: oneshot::Sender<Result<W::Out>>,
}

impl<W: StoreWrite> WriteJob for PendingWrite<W> {
    fn survives(&self) -> Survives {
        W::SURVIVES
    }

    fn apply<'a>(&'a mut self, tx: &'a mut WriteTx) -> BoxFuture<'a, Result<(), WriteError>> {
        Box::pin(async move {
            self.output = Some(self.write.apply(tx).await?);
            Ok(())
        })
    }

    fn answer(self: Box<Self>, outcome: Result<()>) {
        let PendingWrite {
            output: done, reply, ..
        } = *self;
        let done = outcome.and_then(|()| done.ok_or_else(|| Error::internal("a write without a result")));
        // The caller may have stopped waiting; the write is committed all the same.
        let _ = reply.send(done);
    }
}

/// Increments a counter nobody reads, to check whether writing works.
pub(crate) struct WriteProbe;

impl StoreWrite for WriteProbe {
    type Out = ();
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        query(
            "INSERT INTO counters (name, value) VALUES ('probe', 1)
             ON CONFLICT (name) DO UPDATE SET value = counters.value + 1",
        )
        .execute(&mut tx.db)
        .await?;
        Ok(())
    }
}
