//! Every session's events. An index is a promise: it starts at 0, has no holes, and whatever has one is
//! durable before anybody is shown it.

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, StreamExt, TryStreamExt, future::BoxFuture};
use jiff::Timestamp;
use oubliette_protocol::{
    Error, Result, SessionId,
    event::{Event, EventBody},
};
use sqlx::{Row, SqlitePool};
use tokio::sync::{Semaphore, oneshot};

use super::{
    follow::{Batch, CHUNK, CHUNK_BYTES, Follow, Source, detached},
    tail::{Attached, Hub, Tail},
};
use crate::{
    fault::read_error,
    tables::sessions::SessionPatch,
    writer::{EventJob, Task, WriterHandle},
};

/// The largest event, in bytes of JSON.
pub const MAX_EVENT_BYTES: usize = 32 * 1024 * 1024;
/// What events that wait to be written may take together, in KiB.
const ROOM_KIB: usize = 16 * 1024;
/// The most one [`EventLog::read`] gives, in bytes of JSON.
const READ_BYTES: usize = 8 * 1024 * 1024;

/// The event log.
#[derive(Clone)]
pub struct EventLog {
    readers: SqlitePool,
    writer: WriterHandle,
    hub: Arc<Hub>,
    room: Arc<Semaphore>,
}

impl std::fmt::Debug for EventLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EventLog")
    }
}

impl EventLog {
    pub(crate) fn new(readers: SqlitePool, writer: WriterHandle, hub: Arc<Hub>) -> Self {
        Self {
            readers,
            writer,
            hub,
            room: Arc::new(Semaphore::new(ROOM_KIB)),
        }
    }

    /// Appends events, one after the other. They are durable when this returns.
    pub async fn append(&self, session: &SessionId, bodies: Vec<EventBody>) -> Result<Vec<Arc<Event>>> {
        if bodies.is_empty() {
            return Ok(Vec::new());
        }
        self.append_answered(session, bodies, None).await
    }

    /// Appends events and changes the session, both or neither.
    pub async fn append_with(
        &self,
        session: &SessionId,
        bodies: Vec<EventBody>,
        patch: SessionPatch,
    ) -> Result<Vec<Arc<Event>>> {
        self.append_answered(session, bodies, Some(patch)).await
    }

    /// Appends an event without waiting until it is durable; it comes before whatever the same task
    /// appends later. Waits only while too much waits to be written.
    pub async fn append_soon(&self, session: &SessionId, body: EventBody) -> Result<()> {
        self.send(session, vec![body], None, None).await
    }

    async fn append_answered(
        &self,
        session: &SessionId,
        bodies: Vec<EventBody>,
        patch: Option<SessionPatch>,
    ) -> Result<Vec<Arc<Event>>> {
        let (reply, answer) = oneshot::channel();
        self.send(session, bodies, patch, Some(reply)).await?;
        answer
            .await
            .map_err(|_| Error::unavailable("the database was closed before the event was written"))?
    }

    async fn send(
        &self,
        session: &SessionId,
        bodies: Vec<EventBody>,
        patch: Option<SessionPatch>,
        reply: Option<oneshot::Sender<Result<Vec<Arc<Event>>>>>,
    ) -> Result<()> {
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
        let kib = u32::try_from(bytes.div_ceil(1024).clamp(1, ROOM_KIB)).map_err(Error::internal)?;
        let room = self
            .room
            .clone()
            .acquire_many_owned(kib)
            .await
            .map_err(Error::internal)?;
        let job = EventJob {
            session: session.clone(),
            bodies,
            patch: patch.map(Box::new),
            reply,
            _room: room,
        };
        self.writer.send(Task::Events(job)).await
    }

    /// Up to `max` events past `since` (-1: from the first). Fewer only at the end of the log or when
    /// they are very large; none only when there are none.
    pub async fn read(&self, session: &SessionId, since: i64, max: usize) -> Result<Vec<Arc<Event>>> {
        read(&self.readers, session, since, i64::MAX, max, READ_BYTES).await
    }

    /// The last index; -1 if there is none.
    pub async fn last_index(&self, session: &SessionId) -> Result<i64> {
        last_index(&self.readers, session).await
    }

    /// Everything past `since`: what is there, then what comes, each once and in order.
    pub fn follow(&self, session: &SessionId, since: i64) -> Follow<Arc<Event>> {
        Follow::new(self.source(session), since)
    }

    /// Waits until there is something past `index`, at most for `timeout`. Gives the last index.
    pub async fn wait_beyond(&self, session: &SessionId, index: i64, timeout: Duration) -> Result<i64> {
        let source = self.source(session);
        let mut marks = source.tail.marks();
        source.tail.reached(source.last().await?);
        let beyond = marks.wait_for(|mark| mark.last > index || mark.closed);
        // Whether it came or not: what is known now is the answer.
        let _ = tokio::time::timeout(timeout, beyond).await;
        let mark = *source.tail.marks().borrow();
        Ok(mark.last)
    }

    /// Like [`EventLog::read`], but waits up to `timeout` for a first event when there is none.
    pub async fn poll(
        &self,
        session: &SessionId,
        since: i64,
        max: usize,
        timeout: Duration,
    ) -> Result<Vec<Arc<Event>>> {
        let found = self.read(session, since, max).await?;
        if !found.is_empty() || timeout.is_zero() || max == 0 {
            return Ok(found);
        }
        gather(self.follow(session, since), max, timeout).await
    }

    fn source(&self, session: &SessionId) -> EventSource {
        let attached = self.hub.attach(session);
        let tail = attached.tail().cloned().unwrap_or_default();
        EventSource {
            tail,
            _attached: attached,
            readers: self.readers.clone(),
            session: session.clone(),
        }
    }
}

/// The first of a stream, and what is there at once after it.
pub(super) async fn gather<T: Send + 'static>(
    mut follow: Follow<T>,
    max: usize,
    timeout: Duration,
) -> Result<Vec<T>> {
    let Ok(first) = tokio::time::timeout(timeout, follow.next()).await else {
        return Ok(Vec::new());
    };
    let Some(first) = first else { return Ok(Vec::new()) };
    let mut found = vec![first?];
    while found.len() < max
        && let Some(Some(next)) = follow.next().now_or_never()
    {
        found.push(next?);
    }
    Ok(found)
}

struct EventSource {
    // Before `_attached`: that one looks whether it was the last to hold the tail.
    tail: Arc<Tail<Arc<Event>>>,
    _attached: Attached,
    readers: SqlitePool,
    session: SessionId,
}

impl Source for EventSource {
    type Item = Arc<Event>;
    type Out = Arc<Event>;

    fn tail(&self) -> &Arc<Tail<Arc<Event>>> {
        &self.tail
    }

    fn last(&self) -> BoxFuture<'_, Result<i64>> {
        let (readers, session) = (self.readers.clone(), self.session.clone());
        Box::pin(detached(async move { last_index(&readers, &session).await }))
    }

    fn read(&self, since: i64, upto: i64) -> BoxFuture<'_, Result<Batch<Arc<Event>>>> {
        let (readers, session) = (self.readers.clone(), self.session.clone());
        Box::pin(detached(async move {
            let items = read(&readers, &session, since, upto, CHUNK, CHUNK_BYTES).await?;
            // Nothing where something was promised: the session was deleted meanwhile.
            let covered = items.last().map_or(upto, |last| last.index);
            Ok(Batch { items, covered })
        }))
    }

    fn show(&self, item: &Arc<Event>) -> Option<Arc<Event>> {
        Some(item.clone())
    }
}

async fn last_index(readers: &SqlitePool, session: &SessionId) -> Result<i64> {
    let last: Option<i64> = sqlx::query_scalar(
        "SELECT MAX(idx) FROM events WHERE log = (SELECT log FROM event_logs WHERE session_id = $1)",
    )
    .bind(session.as_str())
    .fetch_one(readers)
    .await
    .map_err(read_error)?;
    Ok(last.unwrap_or(-1))
}

async fn read(
    readers: &SqlitePool,
    session: &SessionId,
    since: i64,
    upto: i64,
    max: usize,
    max_bytes: usize,
) -> Result<Vec<Arc<Event>>> {
    let mut rows = sqlx::query(
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
        let text: &str = row.try_get(2).map_err(read_error)?;
        bytes += text.len();
        let body = serde_json::from_str(text).map_err(|e| Error::internal(format!("a stored event: {e}")))?;
        let ts = Timestamp::from_millisecond(row.try_get(1).map_err(read_error)?).map_err(Error::internal)?;
        let index = row.try_get(0).map_err(read_error)?;
        events.push(Arc::new(Event {
            index,
            ts,
            session_id: session.clone(),
            body,
        }));
        if bytes >= max_bytes {
            break;
        }
    }
    Ok(events)
}
