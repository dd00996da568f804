//! The debugger's log: context builds, tool calls, blocks, health. Its index is server-wide and never
//! given out twice, also after a restart.
//!
//! Recording is for code that must not wait: it puts the event into a queue of bounded size and returns.
//! The writer takes the queue after a moment, or at once when somebody waits for it: a commit of
//! its own for every tool call would cost more than the call.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use futures::{TryStreamExt, future::BoxFuture};
use jiff::Timestamp;
use oubliette_protocol::{
    Error, ProjectId, Result, SessionId, Slug,
    debug::{DebugBody, DebugEvent},
};
use parking_lot::Mutex;
use sqlx::{QueryBuilder, Row, Sqlite, SqlitePool};
use tokio::{
    sync::{Notify, oneshot, watch},
    time::Instant,
};

use super::{
    events::gather,
    follow::{Batch, CHUNK, CHUNK_BYTES, Follow, Source, detached},
    tail::{Indexed, Tail},
};
use crate::{fault::read_error, writer::Counter};

/// What may wait to be written, in bytes of JSON. Past it events are dropped, and the log says so.
const QUEUE_BYTES: usize = 8 * 1024 * 1024;
/// How long what nobody waits for may gather: many events in one commit cost little more than a few.
const GATHER: Duration = Duration::from_millis(60);
/// And how long while somebody follows.
const GATHER_FOLLOWED: Duration = Duration::from_millis(20);
/// How much may gather, in bytes of JSON.
const GATHER_BYTES: usize = 1024 * 1024;
/// The most one [`DebugLog::read`] gives, in bytes of JSON.
const READ_BYTES: usize = 8 * 1024 * 1024;

/// Which debugger events. Absent fields want all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DebugFilter {
    /// Of this session.
    pub session: Option<SessionId>,
    /// Of this agent.
    pub agent: Option<Slug>,
    /// Of these kinds.
    pub kinds: Option<Vec<String>>,
    /// Of this project's sessions.
    pub project: Option<ProjectId>,
}

/// The debugger's log.
#[derive(Clone)]
pub struct DebugLog {
    readers: SqlitePool,
    queue: Arc<Queue>,
}

impl std::fmt::Debug for DebugLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DebugLog")
    }
}

impl DebugLog {
    pub(crate) fn new(readers: SqlitePool, queue: Arc<Queue>) -> Self {
        Self { readers, queue }
    }

    /// Records an event and does not wait: it is durable soon, in the order of recording.
    pub fn record(&self, session: Option<SessionId>, agent: Option<Slug>, body: DebugBody) {
        self.push(session, agent, body, None);
    }

    /// Records an event and waits until it is durable.
    pub async fn record_durable(
        &self,
        session: Option<SessionId>,
        agent: Option<Slug>,
        body: DebugBody,
    ) -> Result<()> {
        let (reply, answer) = oneshot::channel();
        self.push(session, agent, body, Some(reply));
        let lost = || Error::unavailable("the database is too slow or closed: the event was not written");
        answer.await.map_err(|_| lost())?
    }

    /// Records an event that is JSON already: the text of a [`DebugBody`] of this kind.
    pub fn record_text(
        &self,
        session: Option<SessionId>,
        agent: Option<Slug>,
        kind: &'static str,
        text: String,
    ) {
        self.queue.push(DebugJob {
            session,
            agent,
            kind,
            text,
            reply: None,
        });
    }

    fn push(
        &self,
        session: Option<SessionId>,
        agent: Option<Slug>,
        body: DebugBody,
        reply: Option<oneshot::Sender<Result<()>>>,
    ) {
        match serde_json::to_string(&body) {
            Ok(text) => self.queue.push(DebugJob {
                session,
                agent,
                kind: body.kind(),
                text,
                reply,
            }),
            Err(error) => tracing::error!(%error, "a debugger event that is no JSON"),
        }
    }

    /// Waits until everything recorded so far is written.
    pub async fn flush(&self) {
        let (target, mut written) = (self.queue.hurry(), self.queue.written.subscribe());
        let _ = written.wait_for(|written| *written >= target).await;
    }

    /// Up to `max` events past `since` (-1: from the first) that pass the filter.
    pub async fn read(&self, filter: &DebugFilter, since: i64, max: usize) -> Result<Vec<Arc<DebugEvent>>> {
        Ok(read(&self.readers, filter, since, i64::MAX, max, READ_BYTES)
            .await?
            .items)
    }

    /// The last index of the whole log; -1 if there is none.
    pub async fn last_index(&self) -> Result<i64> {
        last_index(&self.readers).await
    }

    /// Everything past `since` that passes the filter: what is there, then what comes.
    pub fn follow(&self, filter: DebugFilter, since: i64) -> Follow<Arc<DebugEvent>> {
        Follow::new(
            DebugSource {
                readers: self.readers.clone(),
                queue: self.queue.clone(),
                filter,
            },
            since,
        )
    }

    /// Waits until there is something past `index`, whatever it is, at most for `timeout`. Gives the
    /// last index of the whole log.
    pub async fn wait_beyond(&self, index: i64, timeout: Duration) -> Result<i64> {
        let mut marks = self.queue.tail.marks();
        self.queue.tail.reached(last_index(&self.readers).await?);
        let beyond = marks.wait_for(|mark| mark.last > index || mark.closed);
        let _ = tokio::time::timeout(timeout, beyond).await;
        let mark = *self.queue.tail.marks().borrow();
        Ok(mark.last)
    }

    /// Like [`DebugLog::read`], but waits up to `timeout` for a first event when there is none.
    pub async fn poll(
        &self,
        filter: &DebugFilter,
        since: i64,
        max: usize,
        timeout: Duration,
    ) -> Result<Vec<Arc<DebugEvent>>> {
        let found = self.read(filter, since, max).await?;
        if !found.is_empty() || timeout.is_zero() || max == 0 {
            return Ok(found);
        }
        gather(self.follow(filter.clone(), since), max, timeout).await
    }
}

/// A debugger event with what filters need besides.
#[derive(Debug, Clone)]
pub(crate) struct Recorded {
    pub(crate) event: Arc<DebugEvent>,
    pub(crate) project: Option<ProjectId>,
}

impl Indexed for Recorded {
    fn index(&self) -> i64 {
        self.event.index
    }
}

/// A debugger event on its way to the writer.
pub(crate) struct DebugJob {
    pub(crate) session: Option<SessionId>,
    pub(crate) agent: Option<Slug>,
    pub(crate) kind: &'static str,
    pub(crate) text: String,
    pub(crate) reply: Option<oneshot::Sender<Result<()>>>,
}

impl DebugJob {
    /// The event it became.
    pub(crate) fn event(&self, index: i64, ts: Timestamp) -> Result<DebugEvent> {
        Ok(DebugEvent {
            index,
            ts,
            session_id: self.session.clone(),
            agent: self.agent.clone(),
            body: serde_json::from_str(&self.text).map_err(Error::internal)?,
        })
    }
}

/// What waits to be written, and the live end of the log.
pub(crate) struct Queue {
    waiting: Mutex<Waiting>,
    wake: Notify,
    written: watch::Sender<u64>,
    pub(crate) tail: Arc<Tail<Recorded>>,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<DebugJob>,
    bytes: usize,
    /// When the writer is to take it.
    due: Option<Instant>,
    pushed: u64,
    dropped: u64,
    closed: bool,
}

impl Default for Queue {
    fn default() -> Self {
        let (waiting, wake) = (Mutex::default(), Notify::new());
        Self {
            waiting,
            wake,
            written: watch::Sender::new(0),
            tail: Arc::default(),
        }
    }
}

impl Queue {
    fn push(&self, job: DebugJob) {
        let mut waiting = self.waiting.lock();
        if waiting.closed || waiting.bytes + job.text.len() > QUEUE_BYTES {
            // Dropping the job's reply tells whoever waits for it.
            waiting.dropped += 1;
            if waiting.dropped == 1 {
                drop(waiting);
                tracing::warn!("the database is too slow or closed: debugger events are dropped");
            }
            return;
        }
        waiting.bytes += job.text.len();
        waiting.pushed += 1;
        let now = Instant::now();
        let before = waiting.due;
        let due = match job.reply.is_some() || waiting.bytes > GATHER_BYTES {
            true => now,
            false => before.unwrap_or_else(|| match self.tail.is_followed() {
                true => now + GATHER_FOLLOWED,
                false => now + GATHER,
            }),
        };
        waiting.due = Some(due);
        waiting.jobs.push_back(job);
        drop(waiting);
        // The writer knows of a time that has not changed.
        if before != Some(due) {
            self.wake.notify_one();
        }
    }

    /// Has what waits written at once; how much was pushed until now.
    fn hurry(&self) -> u64 {
        let mut waiting = self.waiting.lock();
        if waiting.due.is_some() {
            waiting.due = Some(Instant::now());
            self.wake.notify_one();
        }
        waiting.pushed
    }

    /// Whether something is to be taken now.
    pub(crate) fn is_due(&self) -> bool {
        self.waiting.lock().due.is_some_and(|due| due <= Instant::now())
    }

    /// Waits until something is to be taken.
    pub(crate) async fn due(&self) {
        loop {
            // Copied out: the lock must not be held while waiting.
            let due = self.waiting.lock().due;
            match due {
                Some(due) if due <= Instant::now() => return,
                Some(due) => {
                    let _ = tokio::time::timeout_at(due, self.wake.notified()).await;
                }
                None => self.wake.notified().await,
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.lock().jobs.is_empty()
    }

    /// Takes the first of what waits.
    pub(crate) fn take(&self, most: usize) -> Vec<DebugJob> {
        let mut waiting = self.waiting.lock();
        let count = most.min(waiting.jobs.len());
        let taken: Vec<DebugJob> = waiting.jobs.drain(..count).collect();
        waiting.bytes -= taken.iter().map(|job| job.text.len()).sum::<usize>();
        if waiting.jobs.is_empty() {
            waiting.due = None;
            waiting.jobs = VecDeque::new();
            let dropped = std::mem::take(&mut waiting.dropped);
            if dropped > 0 && !waiting.closed {
                tracing::warn!(
                    dropped,
                    "debugger events were dropped; they are recorded again now"
                );
            }
        } else {
            waiting.due = Some(Instant::now());
            self.wake.notify_one();
        }
        taken
    }

    /// That so many of what was taken are written or given up.
    pub(crate) fn done(&self, count: usize) {
        if count > 0 {
            self.written.send_modify(|written| *written += count as u64);
        }
    }

    /// Takes nothing more.
    pub(crate) fn close(&self) {
        self.waiting.lock().closed = true;
    }
}

struct DebugSource {
    readers: SqlitePool,
    queue: Arc<Queue>,
    filter: DebugFilter,
}

impl Source for DebugSource {
    type Item = Recorded;
    type Out = Arc<DebugEvent>;

    fn tail(&self) -> &Arc<Tail<Recorded>> {
        &self.queue.tail
    }

    fn last(&self) -> BoxFuture<'_, Result<i64>> {
        let readers = self.readers.clone();
        Box::pin(detached(async move { last_index(&readers).await }))
    }

    fn read(&self, since: i64, upto: i64) -> BoxFuture<'_, Result<Batch<Arc<DebugEvent>>>> {
        let (readers, filter) = (self.readers.clone(), self.filter.clone());
        Box::pin(detached(async move {
            read(&readers, &filter, since, upto, CHUNK, CHUNK_BYTES).await
        }))
    }

    fn show(&self, item: &Recorded) -> Option<Arc<DebugEvent>> {
        let (filter, event) = (&self.filter, &item.event);
        let wanted = filter
            .session
            .as_ref()
            .is_none_or(|session| event.session_id.as_ref() == Some(session))
            && filter
                .agent
                .as_ref()
                .is_none_or(|agent| event.agent.as_ref() == Some(agent))
            && filter
                .project
                .as_ref()
                .is_none_or(|project| item.project.as_ref() == Some(project))
            && filter
                .kinds
                .as_ref()
                .is_none_or(|kinds| kinds.iter().any(|kind| kind == event.body.kind()));
        wanted.then(|| event.clone())
    }
}

async fn last_index(readers: &SqlitePool) -> Result<i64> {
    let next: Option<i64> = sqlx::query_scalar("SELECT value FROM counters WHERE name = $1")
        .bind(Counter::Debug.name())
        .fetch_optional(readers)
        .await
        .map_err(read_error)?;
    Ok(next.unwrap_or(0) - 1)
}

async fn read(
    readers: &SqlitePool,
    filter: &DebugFilter,
    since: i64,
    upto: i64,
    max: usize,
    max_bytes: usize,
) -> Result<Batch<Arc<DebugEvent>>> {
    let mut query =
        QueryBuilder::<Sqlite>::new("SELECT idx, ts, session_id, agent, body FROM debug_events WHERE idx > ");
    query.push_bind(since).push(" AND idx <= ").push_bind(upto);
    if let Some(session) = &filter.session {
        query.push(" AND session_id = ").push_bind(session.as_str());
    }
    if let Some(agent) = &filter.agent {
        query.push(" AND agent = ").push_bind(agent.as_str());
    }
    if let Some(project) = &filter.project {
        query.push(" AND project_id = ").push_bind(project.as_str());
    }
    if let Some(kinds) = &filter.kinds {
        // Never true, where a list of none would be no SQL.
        query.push(" AND kind IN (''");
        for kind in kinds {
            query.push(", ").push_bind(kind.as_str());
        }
        query.push(")");
    }
    query
        .push(" ORDER BY idx LIMIT ")
        .push_bind(i64::try_from(max).unwrap_or(i64::MAX));
    let mut rows = query.build().fetch(readers);
    let (mut items, mut bytes) = (Vec::new(), 0);
    let mut full = false;
    while let Some(row) = rows.try_next().await.map_err(read_error)? {
        let text: &str = row.try_get("body").map_err(read_error)?;
        bytes += text.len();
        items.push(Arc::new(debug_event(&row, text)?));
        full = items.len() >= max || bytes >= max_bytes;
        if full {
            break;
        }
    }
    let covered = if full {
        items.last().map_or(since, |last| last.index)
    } else {
        upto
    };
    Ok(Batch { items, covered })
}

fn debug_event(row: &sqlx::sqlite::SqliteRow, text: &str) -> Result<DebugEvent> {
    let id = |column| row.try_get::<Option<&str>, _>(column).map_err(read_error);
    Ok(DebugEvent {
        index: row.try_get("idx").map_err(read_error)?,
        ts: Timestamp::from_millisecond(row.try_get("ts").map_err(read_error)?).map_err(Error::internal)?,
        session_id: id("session_id")?.map(str::parse).transpose()?,
        agent: id("agent")?.map(str::parse).transpose()?,
        body: serde_json::from_str(text)
            .map_err(|e| Error::internal(format!("a stored debugger event: {e}")))?,
    })
}
