//! The debugger's log: context builds, tool calls, blocked calls, health. Its index is server-wide and never
//! reused, not even after a restart.
//!
//! Recording must not block a tool call: it puts the event into a bounded queue and returns. The writer drains
//! the queue after a short delay, or at once when somebody waits for it, because one commit per tool call
//! would cost more than the call.

use std::{borrow::Cow, collections::VecDeque, sync::Arc, time::Duration};

use futures::{TryStreamExt, future::BoxFuture};
use jiff::Timestamp;
use oubliette_protocol::{
    Error, ProjectId, Result, SessionId, Slug,
    debug::{DebugBody, DebugEvent},
};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, oneshot, watch},
    time::Instant,
};

use super::{
    debug_size::{CountedSession, DebugSizes},
    follow::{self, CHUNK_BYTES, CHUNK_ROWS, FollowableLog, LogBatch, LogFollower, run_detached},
    tail::{HasLogIndex, LogTail},
};
use crate::{
    db::{DbPool, DbRow, QueryBuilder, query_scalar},
    db_error::read_error,
    writer::SequenceCounter,
};

/// Maximum size of the queue, in bytes of JSON. Beyond it events are dropped and a warning is logged.
const QUEUE_BYTES: usize = 8 * 1024 * 1024;
/// How long events that nobody waits for may gather before they are committed: a commit of many events costs
/// little more than one of a few.
const GATHER_WAIT: Duration = Duration::from_millis(60);
/// The same while the log is being followed.
const GATHER_WAIT_FOLLOWED: Duration = Duration::from_millis(20);
/// Queue size, in bytes of JSON, at which it is written without further delay.
const GATHER_BYTES: usize = 1024 * 1024;
/// Maximum result of one [`DebugLog::read`], in bytes of JSON.
const READ_BYTES: usize = 8 * 1024 * 1024;

/// Selects debugger events. Absent fields match all.
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
    readers: DbPool,
    queue: Arc<DebugQueue>,
}

impl std::fmt::Debug for DebugLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DebugLog")
    }
}

impl DebugLog {
    pub(crate) fn new(readers: DbPool, queue: Arc<DebugQueue>) -> Self {
        Self { readers, queue }
    }

    /// Limits what each session may have of the log to so many bytes of JSON. Beyond it [`CountedSession::check`] fails.
    pub fn set_session_limit(&self, bytes: u64) {
        self.queue.sizes.set_limit(bytes);
    }

    /// Begins to count what a session has.
    pub fn count_session(&self, session: SessionId) -> CountedSession {
        CountedSession::begin(session, self.queue.sizes.clone(), self.readers.clone())
    }

    /// Records an event without waiting until it is durable. Events keep the order they were recorded in.
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

    /// Records an event given as JSON: `text` is a [`DebugBody`] of this kind, already encoded.
    pub fn record_json(
        &self,
        session: Option<SessionId>,
        agent: Option<Slug>,
        kind: &'static str,
        text: String,
    ) {
        self.queue.push(session, agent, kind, text, None);
    }

    fn push(
        &self,
        session: Option<SessionId>,
        agent: Option<Slug>,
        body: DebugBody,
        reply: Option<oneshot::Sender<Result<()>>>,
    ) {
        match serde_json::to_string(&body) {
            Ok(text) => self.queue.push(session, agent, body.kind(), text, reply),
            Err(error) => {
                tracing::error!(%error, "encoding a debugger event as JSON failed; it is not recorded")
            }
        }
    }

    /// Waits until everything recorded so far is written.
    pub async fn flush(&self) {
        let (target, mut written) = (self.queue.request_flush(), self.queue.written.subscribe());
        let _ = written.wait_for(|written| *written >= target).await;
    }

    /// Reads up to `max` events that pass the filter and have an index above `since` (-1: from the first).
    pub async fn read(&self, filter: &DebugFilter, since: i64, max: usize) -> Result<Vec<Arc<DebugEvent>>> {
        Ok(read(&self.readers, filter, since, i64::MAX, max, READ_BYTES)
            .await?
            .items)
    }

    /// The last index of the whole log; -1 if it is empty.
    pub async fn last_index(&self) -> Result<i64> {
        last_index(&self.readers).await
    }

    /// Follows the events that pass the filter, from the index after `since`: stored ones, then live ones.
    pub fn follow(&self, filter: DebugFilter, since: i64) -> LogFollower<Arc<DebugEvent>> {
        LogFollower::new(self.followed_log(filter), since)
    }

    /// Waits until the log has an index above `index`, whatever the event, at most for `timeout`. Returns the
    /// last index of the whole log.
    pub async fn wait_beyond(&self, index: i64, timeout: Duration) -> Result<i64> {
        let log = self.followed_log(DebugFilter::default());
        follow::wait_beyond(&log, index, timeout).await
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
        follow::wait_if_empty(found, max, timeout, || self.follow(filter.clone(), since)).await
    }

    fn followed_log(&self, filter: DebugFilter) -> FollowedDebugLog {
        FollowedDebugLog {
            readers: self.readers.clone(),
            queue: self.queue.clone(),
            filter,
        }
    }
}

/// A committed debugger event with its session's project, which filters need.
#[derive(Debug, Clone)]
pub(crate) struct RecordedDebugEvent {
    pub(crate) event: Arc<DebugEvent>,
    pub(crate) project: Option<ProjectId>,
}

impl HasLogIndex for RecordedDebugEvent {
    fn index(&self) -> i64 {
        self.event.index
    }
}

/// A debugger event on its way to the writer.
pub(crate) struct DebugJob {
    /// When it was recorded.
    pub(crate) ts: Timestamp,
    pub(crate) session: Option<SessionId>,
    pub(crate) agent: Option<Slug>,
    pub(crate) kind: &'static str,
    pub(crate) text: String,
    pub(crate) reply: Option<oneshot::Sender<Result<()>>>,
}

impl DebugJob {
    /// The event as followers see it once it is committed with this index, and its size in bytes of JSON.
    pub(crate) fn recorded(
        &self,
        index: i64,
        project: Option<ProjectId>,
    ) -> Option<(RecordedDebugEvent, usize)> {
        let body = serde_json::from_str(&self.text)
            .inspect_err(|error| tracing::error!(%error, "decoding a recorded debugger event failed; followers read it from the database"))
            .ok()?;
        let event = Arc::new(DebugEvent {
            index,
            ts: self.ts,
            session_id: self.session.clone(),
            agent: self.agent.clone(),
            body,
        });
        Some((RecordedDebugEvent { event, project }, self.text.len()))
    }
}

/// Events waiting to be written, and the live end of the log.
pub(crate) struct DebugQueue {
    backlog: Mutex<DebugBacklog>,
    wake: Notify,
    written: watch::Sender<u64>,
    sizes: Arc<DebugSizes>,
    pub(crate) tail: Arc<LogTail<RecordedDebugEvent>>,
}

#[derive(Default)]
struct DebugBacklog {
    jobs: VecDeque<DebugJob>,
    bytes: usize,
    /// When the writer is to take the jobs; none if there are none.
    due: Option<Instant>,
    /// Events ever accepted.
    pushed: u64,
    /// Events dropped since the queue was last empty.
    dropped: u64,
    closed: bool,
}

impl Default for DebugQueue {
    fn default() -> Self {
        let (backlog, wake) = (Mutex::default(), Notify::new());
        Self {
            backlog,
            wake,
            written: watch::Sender::new(0),
            sizes: Arc::default(),
            tail: Arc::default(),
        }
    }
}

impl DebugQueue {
    fn push(
        &self,
        session: Option<SessionId>,
        agent: Option<Slug>,
        kind: &'static str,
        text: String,
        reply: Option<oneshot::Sender<Result<()>>>,
    ) {
        if let Some(session) = &session {
            self.sizes.add(session, text.len());
        }
        let mut backlog = self.backlog.lock();
        if backlog.closed || backlog.bytes + text.len() > QUEUE_BYTES {
            // Dropping the reply channel fails a waiting `record_durable`.
            backlog.dropped += 1;
            if backlog.dropped == 1 {
                drop(backlog);
                tracing::warn!("the database is too slow or closed: debugger events are dropped");
            }
            return;
        }
        backlog.bytes += text.len();
        backlog.pushed += 1;
        let now = Instant::now();
        let before = backlog.due;
        let due = match reply.is_some() || backlog.bytes > GATHER_BYTES {
            true => now,
            false => before.unwrap_or_else(|| match self.tail.is_followed() {
                true => now + GATHER_WAIT_FOLLOWED,
                false => now + GATHER_WAIT,
            }),
        };
        backlog.due = Some(due);
        backlog.jobs.push_back(DebugJob {
            // Under the lock, so that times are in the order of the indexes.
            ts: oubliette_protocol::now(),
            session,
            agent,
            kind,
            text,
            reply,
        });
        drop(backlog);
        // If the due time has not changed, the writer is already waiting for it.
        if before != Some(due) {
            self.wake.notify_one();
        }
    }

    /// Makes the queued events due now. Returns how many events were accepted so far.
    fn request_flush(&self) -> u64 {
        let mut backlog = self.backlog.lock();
        if backlog.due.is_some() {
            backlog.due = Some(Instant::now());
            self.wake.notify_one();
        }
        backlog.pushed
    }

    /// Whether queued events are due now.
    pub(crate) fn is_due(&self) -> bool {
        self.backlog.lock().due.is_some_and(|due| due <= Instant::now())
    }

    /// Waits until queued events are due.
    pub(crate) async fn wait_until_due(&self) {
        loop {
            // Copied out: the lock must not be held while waiting.
            let due = self.backlog.lock().due;
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
        self.backlog.lock().jobs.is_empty()
    }

    /// Takes up to `most` of the oldest queued events.
    pub(crate) fn take_batch(&self, most: usize) -> Vec<DebugJob> {
        let mut backlog = self.backlog.lock();
        let count = most.min(backlog.jobs.len());
        let taken: Vec<DebugJob> = backlog.jobs.drain(..count).collect();
        backlog.bytes -= taken.iter().map(|job| job.text.len()).sum::<usize>();
        if backlog.jobs.is_empty() {
            backlog.due = None;
            backlog.jobs = VecDeque::new();
            let dropped = std::mem::take(&mut backlog.dropped);
            if dropped > 0 && !backlog.closed {
                tracing::warn!(
                    dropped,
                    "debugger events were dropped; they are recorded again now"
                );
            }
        } else {
            backlog.due = Some(Instant::now());
            self.wake.notify_one();
        }
        taken
    }

    /// Records that `count` taken events were written or given up, for [`DebugLog::flush`].
    pub(crate) fn mark_written(&self, count: usize) {
        if count > 0 {
            self.written.send_modify(|written| *written += count as u64);
        }
    }

    /// Refuses further events.
    pub(crate) fn close(&self) {
        self.backlog.lock().closed = true;
    }
}

struct FollowedDebugLog {
    readers: DbPool,
    queue: Arc<DebugQueue>,
    filter: DebugFilter,
}

impl FollowableLog for FollowedDebugLog {
    type Item = RecordedDebugEvent;
    type Out = Arc<DebugEvent>;

    fn tail(&self) -> &Arc<LogTail<RecordedDebugEvent>> {
        &self.queue.tail
    }

    fn last_index(&self) -> BoxFuture<'_, Result<i64>> {
        let readers = self.readers.clone();
        Box::pin(run_detached(async move { last_index(&readers).await }))
    }

    fn read(&self, since: i64, upto: i64) -> BoxFuture<'_, Result<LogBatch<Arc<DebugEvent>>>> {
        let (readers, filter) = (self.readers.clone(), self.filter.clone());
        Box::pin(run_detached(async move {
            read(&readers, &filter, since, upto, CHUNK_ROWS, CHUNK_BYTES).await
        }))
    }

    fn select(&self, item: &RecordedDebugEvent) -> Option<Arc<DebugEvent>> {
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

pub(crate) async fn last_index(readers: &DbPool) -> Result<i64> {
    let next: Option<i64> = query_scalar("SELECT value FROM counters WHERE name = $1")
        .bind(SequenceCounter::Debug.name())
        .fetch_optional(readers)
        .await
        .map_err(read_error)?;
    Ok(next.unwrap_or(0) - 1)
}

async fn read(
    readers: &DbPool,
    filter: &DebugFilter,
    since: i64,
    upto: i64,
    max: usize,
    max_bytes: usize,
) -> Result<LogBatch<Arc<DebugEvent>>> {
    let mut query =
        QueryBuilder::new("SELECT idx, ts, session_id, agent, body FROM debug_events WHERE idx > ");
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
        // No kind is '', so an empty list matches nothing; `IN ()` would be invalid SQL.
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
        let text = row.text("body").map_err(read_error)?;
        bytes += text.len();
        items.push(Arc::new(debug_event(&row, &text)?));
        full = items.len() >= max || bytes >= max_bytes;
        if full {
            break;
        }
    }
    let scanned_to = if full {
        items.last().map_or(since, |last| last.index)
    } else {
        upto
    };
    Ok(LogBatch { items, scanned_to })
}

fn debug_event(row: &DbRow, text: &str) -> Result<DebugEvent> {
    let id = |column: &'static str| row.try_get::<Option<Cow<'_, str>>>(column).map_err(read_error);
    Ok(DebugEvent {
        index: row.try_get("idx").map_err(read_error)?,
        ts: Timestamp::from_millisecond(row.try_get("ts").map_err(read_error)?).map_err(Error::internal)?,
        session_id: id("session_id")?.map(|id| id.parse()).transpose()?,
        agent: id("agent")?.map(|id| id.parse()).transpose()?,
        body: serde_json::from_str(text)
            .map_err(|e| Error::internal_during("reading a stored debugger event", e))?,
    })
}
