//! What the writer is asked to do.

use std::{future::Future, sync::Arc};

use futures::future::BoxFuture;
use jiff::Timestamp;
use oubliette_protocol::{
    Error, Result, SessionId,
    event::{Event, EventBody},
};
use sqlx::{Row, SqliteConnection};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::{fault::Fault, tables::sessions::SessionPatch};

/// What a write has to survive before it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Survives {
    /// `kill -9` of the server.
    Crash,
    /// A power cut: the disk is waited for.
    PowerCut,
}

/// A write of any kind. It may be applied twice: once in its group, and again alone when the group
/// could not be committed.
pub(crate) trait Write: Send + Sync + 'static {
    /// What it gives back.
    type Out: Send + 'static;
    /// What it has to survive.
    const SURVIVES: Survives = Survives::Crash;
    /// Does it, within the group's transaction.
    fn apply(&self, tx: &mut Tx) -> impl Future<Output = Result<Self::Out, Fault>> + Send;
}

/// The transaction a write is part of.
pub(crate) struct Tx {
    /// The connection, inside the transaction.
    pub(crate) db: SqliteConnection,
    /// When the group is written.
    pub(crate) now: Timestamp,
    /// Sessions that are gone once this is committed.
    pub(crate) gone: Vec<SessionId>,
    /// Whether there is something to purge once this is committed.
    pub(crate) purge: bool,
    /// What is remembered no longer once this is committed.
    pub(crate) touched: Touched,
}

/// What of the remembered a transaction changes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Touched {
    pub(crate) tokens: bool,
    pub(crate) projects: bool,
}

/// A sequence whose numbers are never given out twice.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Counter {
    Debug,
    Audit,
    EventLog,
}

impl Counter {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Counter::Debug => "debug",
            Counter::Audit => "audit",
            Counter::EventLog => "event_log",
        }
    }
}

impl Tx {
    /// The first of `count` new numbers, from 0.
    pub(crate) async fn next(&mut self, counter: Counter, count: usize) -> Result<i64, Fault> {
        let count = i64::try_from(count).map_err(Error::internal)?;
        let row = sqlx::query(
            "INSERT INTO counters (name, value) VALUES ($1, $2)
             ON CONFLICT (name) DO UPDATE SET value = counters.value + $2 RETURNING value",
        )
        .bind(counter.name())
        .bind(count)
        .fetch_one(&mut self.db)
        .await?;
        Ok(row.try_get::<i64, _>(0)? - count)
    }

    pub(crate) fn millis(&self) -> i64 {
        self.now.as_millisecond()
    }
}

/// One thing the writer is asked to do.
pub(crate) enum Task {
    /// Events to append.
    Events(EventJob),
    /// Anything else.
    Work(Box<dyn Job>),
    /// Nothing more.
    Close,
}

/// Events to append to a session's log.
pub(crate) struct EventJob {
    pub(crate) session: SessionId,
    /// Each with its JSON, made by whoever appends: the writer has enough to do.
    pub(crate) bodies: Vec<(EventBody, String)>,
    /// A change of the session that must not be seen without the events, nor they without it.
    pub(crate) patch: Option<Box<SessionPatch>>,
    pub(crate) reply: Option<oneshot::Sender<Result<Vec<Arc<Event>>>>>,
    /// Room in the memory that waiting events may take.
    pub(crate) _room: OwnedSemaphorePermit,
}

/// A write with its type forgotten.
pub(crate) trait Job: Send {
    fn survives(&self) -> Survives;
    fn apply<'a>(&'a mut self, tx: &'a mut Tx) -> BoxFuture<'a, Result<(), Fault>>;
    fn answer(self: Box<Self>, outcome: Result<()>);
}

/// A write and whoever waits for it.
pub(crate) struct Pending<W: Write> {
    pub(crate) write: W,
    pub(crate) done: Option<W::Out>,
    pub(crate) reply: oneshot::Sender<Result<W::Out>>,
}

impl<W: Write> Job for Pending<W> {
    fn survives(&self) -> Survives {
        W::SURVIVES
    }

    fn apply<'a>(&'a mut self, tx: &'a mut Tx) -> BoxFuture<'a, Result<(), Fault>> {
        Box::pin(async move {
            self.done = Some(self.write.apply(tx).await?);
            Ok(())
        })
    }

    fn answer(self: Box<Self>, outcome: Result<()>) {
        let Pending { done, reply, .. } = *self;
        let done = outcome.and_then(|()| done.ok_or_else(|| Error::internal("a write without a result")));
        // Whoever asked may have gone; the write stands all the same.
        let _ = reply.send(done);
    }
}

/// Writes something that changes nothing, to see whether writing works.
pub(crate) struct Probe;

impl Write for Probe {
    type Out = ();
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut Tx) -> Result<(), Fault> {
        sqlx::query(
            "INSERT INTO counters (name, value) VALUES ('probe', 1)
             ON CONFLICT (name) DO UPDATE SET value = counters.value + 1",
        )
        .execute(&mut tx.db)
        .await?;
        Ok(())
    }
}
