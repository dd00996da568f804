//! The event log of every session. In each session, indexes start at 0 and have no gaps, and an event is
//! durable before any reader can see it.

use std::{sync::Arc, time::Duration};

use futures::{TryStreamExt, future::BoxFuture};
use jiff::Timestamp;
use oubliette_protocol::{
    Error, Result, SessionId,
    event::{EventBody, SessionEvent},
};
use tokio::sync::{Semaphore, oneshot};

use super::{
    follow::{self, CHUNK_BYTES, CHUNK_ROWS, FollowableLog, LogBatch, LogFollower, run_detached},
    size::{BeyondLimit, LogSizes},
    tail::{LogTail, SessionTailHandle, SessionTails},
};
use crate::{
    db::{DbPool, query, query_scalar},
    db_error::read_error,
    tables::{
        approvals::ApprovalChange,
        sessions::{InsertSession, SessionPatch, SessionRow},
    },
    writer::{CommitUrgency, EventJob, SessionRowChange, WriterHandle, WriterTask},
};

/// Maximum size of one event, in bytes of JSON.
pub const MAX_EVENT_BYTES: usize = 32 * 1024 * 1024;
/// Maximum total size of events waiting to be written, in KiB of JSON.
const PENDING_LIMIT_KIB: usize = 16 * 1024;
/// Maximum result of one [`EventLog::read`], in bytes of JSON.
pub const READ_BYTES: usize = 8 * 1024 * 1024;

/// The event log.
#[derive(Clone)]
pub struct EventLog {
    readers: DbPool,
    writer: WriterHandle,
    tails: Arc<SessionTails>,
    sizes: Arc<LogSizes>,
    pending_budget: Arc<Semaphore>,
}

impl std::fmt::Debug for EventLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EventLog")
    }
}

impl EventLog {
    pub(crate) fn new(readers: DbPool, writer: WriterHandle, tails: Arc<SessionTails>) -> Self {
        Self {
            readers,
            writer,
            tails,
            sizes: Arc::default(),
            pending_budget: Arc::new(Semaphore::new(PENDING_LIMIT_KIB)),
        }
    }

    /// Limits the log of each session to so many bytes of JSON. Beyond it [`EventLog::append`] and
    /// [`EventLog::append_soon`] fail with `limit_exceeded`; what ends a turn or a session is still appended.
    pub fn set_session_limit(&self, bytes: u64) {
        self.sizes.set_limit(bytes);
    }

    /// Forgets how large a session's log is, because another server has appended to it.
    pub fn forget_size(&self, session: &SessionId) {
        self.sizes.forget(session);
    }

    /// An error if a session's log is so near its limit that no further turn should begin.
    pub async fn check_session_limit(&self, session: &SessionId) -> Result<()> {
        self.sizes.check(&self.readers, session).await
    }

    /// Appends events with consecutive indexes. They are durable when this returns.
    pub async fn append(
        &self,
        session: &SessionId,
        bodies: Vec<EventBody>,
    ) -> Result<Vec<Arc<SessionEvent>>> {
        if bodies.is_empty() {
            return Ok(Vec::new());
        }
        self.append_and_wait(session, bodies, None).await
    }

    /// Appends events and updates the session's row in one transaction.
    pub async fn append_with_patch(
        &self,
        session: &SessionId,
        bodies: Vec<EventBody>,
        patch: SessionPatch,
    ) -> Result<Vec<Arc<SessionEvent>>> {
        let change = SessionRowChange::Update(Box::new(patch));
        self.append_and_wait(session, bodies, Some(change)).await
    }

    /// Inserts a new session and appends the first events of its log in one transaction. `limit_exceeded`, in a cluster, if the
    /// project has `max_active` active sessions already; a server alone counts them before.
    pub async fn append_first(
        &self,
        row: SessionRow,
        bodies: Vec<EventBody>,
        max_active: Option<u64>,
    ) -> Result<Vec<Arc<SessionEvent>>> {
        let session = row.session_id.clone();
        let change = SessionRowChange::Insert(Box::new(InsertSession { row, max_active }));
        self.append_and_wait(&session, bodies, Some(change)).await
    }

    /// Appends events and changes an approval of the session in one transaction. `conflict` if it was decided already;
    /// nothing is appended then.
    pub async fn append_with_approval(
        &self,
        session: &SessionId,
        bodies: Vec<EventBody>,
        change: ApprovalChange,
    ) -> Result<Vec<Arc<SessionEvent>>> {
        let change = SessionRowChange::Approval(change);
        self.append_and_wait(session, bodies, Some(change)).await
    }

    /// Appends an event without waiting until it is durable; it keeps its order before whatever the same task
    /// appends later. Waits only while the events waiting to be written are at their limit. An event that cannot
    /// be written is kept in memory and written before the session's next one. Returns its size in bytes of JSON.
    pub async fn append_soon(&self, session: &SessionId, body: EventBody) -> Result<usize> {
        self.send(session, vec![body], None, None, CommitUrgency::Now)
            .await
    }

    /// Appends an event like [`EventLog::append_soon`], together with the next write, or a moment later.
    pub async fn append_with_next(&self, session: &SessionId, body: EventBody) -> Result<usize> {
        self.send(session, vec![body], None, None, CommitUrgency::WithNext)
            .await
    }

    /// Whether events of [`EventLog::append_soon`] could not be written and are kept in memory. Who appends for
    /// the session should wait for its next append then, or they grow without bound.
    pub fn has_unwritten(&self, session: &SessionId) -> bool {
        self.writer.unwritten().has(session)
    }

    async fn append_and_wait(
        &self,
        session: &SessionId,
        bodies: Vec<EventBody>,
        row_change: Option<SessionRowChange>,
    ) -> Result<Vec<Arc<SessionEvent>>> {
        let (reply, answer) = oneshot::channel();
        self.send(session, bodies, row_change, Some(reply), CommitUrgency::Now)
            .await
            .map(drop)?;
        answer
            .await
            .map_err(|_| Error::unavailable("the database was closed before the event was written"))?
    }

    async fn send(
        &self,
        session: &SessionId,
        bodies: Vec<EventBody>,
        row_change: Option<SessionRowChange>,
        reply: Option<oneshot::Sender<Result<Vec<Arc<SessionEvent>>>>>,
        urgency: CommitUrgency,
    ) -> Result<usize> {
        // A change of the session's row comes with the beginning or the end of something.
        let changes_session = matches!(
            row_change,
            Some(SessionRowChange::Insert(_) | SessionRowChange::Update(_))
        );
        let beyond = match changes_session || bodies.iter().all(is_ending) {
            true => BeyondLimit::Appended,
            false => BeyondLimit::Refused,
        };
        if let Some(SessionRowChange::Insert(_)) = &row_change {
            self.sizes.begin(session);
        }
        let written = bodies.into_iter().map(|body| {
            let text = serde_json::to_string(&body).map_err(Error::internal)?;
            match text.len() > MAX_EVENT_BYTES {
                true => Err(Error::limit_exceeded(format!(
                    "an event of {} MiB is too large: at most {} MiB",
                    text.len() >> 20,
                    MAX_EVENT_BYTES >> 20
                ))),
                false => Ok((body, text)),
            }
        });
        let bodies = written.collect::<Result<Vec<_>>>()?;
        let bytes: usize = bodies.iter().map(|(_, text)| text.len()).sum();
        self.sizes.add(&self.readers, session, bytes, beyond).await?;
        let kib = u32::try_from(bytes.div_ceil(1024).clamp(1, PENDING_LIMIT_KIB)).map_err(Error::internal)?;
        let budget = self
            .pending_budget
            .clone()
            .acquire_many_owned(kib)
            .await
            .map_err(Error::internal)?;
        let job = EventJob {
            session: session.clone(),
            bodies,
            row_change,
            reply,
            urgency,
            pending_budget: Some(budget),
        };
        self.writer.send(WriterTask::Events(job)).await?;
        Ok(bytes)
    }

    /// Reads up to `max` events with an index above `since` (-1: from the first). Returns fewer only at the end
    /// of the log or when they exceed 8 MiB together; returns none only when there are none.
    pub async fn read(&self, session: &SessionId, since: i64, max: usize) -> Result<Vec<Arc<SessionEvent>>> {
        let read = self.read_within(session, since, max, READ_BYTES).await?;
        Ok(read.0)
    }

    /// Like [`EventLog::read`], but returns no further event once they have `max_bytes` together; also how many bytes they
    /// have. None are read if that is 0.
    pub async fn read_within(
        &self,
        session: &SessionId,
        since: i64,
        max: usize,
        max_bytes: usize,
    ) -> Result<(Vec<Arc<SessionEvent>>, usize)> {
        match max_bytes {
            0 => Ok((Vec::new(), 0)),
            _ => read(&self.readers, session, since, i64::MAX, max, max_bytes).await,
        }
    }

    /// The last index of a session's log; -1 if it is empty.
    pub async fn last_index(&self, session: &SessionId) -> Result<i64> {
        last_index(&self.readers, session).await
    }

    /// Follows the log from the index after `since`: stored events, then live ones, each once and in order.
    pub fn follow(&self, session: &SessionId, since: i64) -> LogFollower<Arc<SessionEvent>> {
        LogFollower::new(self.followed_log(session), since)
    }

    /// Waits until the log has an index above `index`, at most for `timeout`. Returns the last index.
    pub async fn wait_beyond(&self, session: &SessionId, index: i64, timeout: Duration) -> Result<i64> {
        follow::wait_beyond(&self.followed_log(session), index, timeout).await
    }

    /// Like [`EventLog::read`], but waits up to `timeout` for a first event when there is none.
    pub async fn poll(
        &self,
        session: &SessionId,
        since: i64,
        max: usize,
        timeout: Duration,
    ) -> Result<Vec<Arc<SessionEvent>>> {
        let found = self.read(session, since, max).await?;
        follow::wait_if_empty(found, max, timeout, || self.follow(session, since)).await
    }

    fn followed_log(&self, session: &SessionId) -> FollowedEventLog {
        let attached = self.tails.handle_for(session);
        let tail = attached.tail().cloned().unwrap_or_default();
        FollowedEventLog {
            tail,
            _tail_handle: attached,
            readers: self.readers.clone(),
            session: session.clone(),
        }
    }
}

/// Whether an event says how something ended, and is therefore kept whatever the size of the log.
fn is_ending(body: &EventBody) -> bool {
    matches!(
        body,
        EventBody::Status { .. }
            | EventBody::Error { .. }
            | EventBody::TurnCompleted { .. }
            | EventBody::CallerToolDone { .. }
            | EventBody::ApprovalDecided(_)
    )
}

struct FollowedEventLog {
    // Declared, and so dropped, before `_tail_handle`, which checks whether any reference to the tail is left.
    tail: Arc<LogTail<Arc<SessionEvent>>>,
    _tail_handle: SessionTailHandle,
    readers: DbPool,
    session: SessionId,
}

impl FollowableLog for FollowedEventLog {
    type Item = Arc<SessionEvent>;
    type Out = Arc<SessionEvent>;

    fn tail(&self) -> &Arc<LogTail<Arc<SessionEvent>>> {
        &self.tail
    }

    fn last_index(&self) -> BoxFuture<'_, Result<i64>> {
        let (readers, session) = (self.readers.clone(), self.session.clone());
        Box::pin(run_detached(async move { last_index(&readers, &session).await }))
    }

    fn read(&self, since: i64, upto: i64) -> BoxFuture<'_, Result<LogBatch<Arc<SessionEvent>>>> {
        let (readers, session) = (self.readers.clone(), self.session.clone());
        Box::pin(run_detached(async move {
            let (items, _) = read(&readers, &session, since, upto, CHUNK_ROWS, CHUNK_BYTES).await?;
            // An index exists up to `upto`, so an empty result means that the session was deleted meanwhile.
            let scanned_to = items.last().map_or(upto, |last| last.index);
            Ok(LogBatch { items, scanned_to })
        }))
    }

    fn select(&self, item: &Arc<SessionEvent>) -> Option<Arc<SessionEvent>> {
        Some(item.clone())
    }
}

async fn last_index(readers: &DbPool, session: &SessionId) -> Result<i64> {
    let last: Option<i64> = query_scalar(
        "SELECT MAX(idx) FROM events WHERE log = (SELECT log FROM event_logs WHERE session_id = $1)",
    )
    .bind(session.as_str())
    .fetch_one(readers)
    .await
    .map_err(read_error)?;
    Ok(last.unwrap_or(-1))
}

async fn read(
    readers: &DbPool,
    session: &SessionId,
    since: i64,
    upto: i64,
    max: usize,
    max_bytes: usize,
) -> Result<(Vec<Arc<SessionEvent>>, usize)> {
    let mut rows = query(
        "SELECT idx, ts, body FROM events
         WHERE log = (SELECT log FROM event_logs WHERE session_id = $1) AND idx > $2 AND idx <= $3
         ORDER BY idx LIMIT $4",
    )
    .bind(session.as_str())
    .bind(since)
    .bind(upto)
    .bind(i64::try_from(max).unwrap_or(i64::MAX))
    .fetch(readers);
    let (mut events, mut bytes) = (Vec::new(), 0);
    while let Some(row) = rows.try_next().await.map_err(read_error)? {
        let text = row.text(2).map_err(read_error)?;
        bytes += text.len();
        let body =
            serde_json::from_str(&text).map_err(|e| Error::internal_during("reading a stored event", e))?;
        let ts = Timestamp::from_millisecond(row.try_get(1).map_err(read_error)?).map_err(Error::internal)?;
        let index = row.try_get(0).map_err(read_error)?;
        events.push(Arc::new(SessionEvent {
            index,
            ts,
            session_id: session.clone(),
            body,
        }));
        if bytes >= max_bytes {
            break;
        }
    }
    Ok((events, bytes))
}
