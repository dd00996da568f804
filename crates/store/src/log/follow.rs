//! Following a log: replay from the database, then live.
//!
//! No gap and no repeat at the seam: a reader subscribes to the tail *before* it asks the database for the
//! last index. What is committed before the query is in its result; what is committed after it advances the
//! extent. Every index up to the extent is read exactly once, in order: from the ring if it reaches back far
//! enough, else from the database, which holds all of them.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{FutureExt, Stream, StreamExt, future::BoxFuture, stream::BoxStream};
use oubliette_protocol::{Error, Result};
use tokio::sync::watch;

use super::tail::{HasLogIndex, LogExtent, LogTail};

/// Maximum rows read from the database at once.
pub(crate) const CHUNK_ROWS: usize = 256;
/// Maximum bytes of JSON read from the database at once.
pub(crate) const CHUNK_BYTES: usize = 256 * 1024;

/// A log that can be followed.
pub(crate) trait FollowableLog: Send + Sync + 'static {
    /// What the ring holds of each entry.
    type Item: HasLogIndex;
    /// What the follower receives.
    type Out: Send + 'static;
    /// The log's live end.
    fn tail(&self) -> &Arc<LogTail<Self::Item>>;
    /// The last committed index, read from the database.
    fn last_index(&self) -> BoxFuture<'_, Result<i64>>;
    /// Reads a bounded batch of entries from the database: after `since`, up to and including `upto`, in order.
    fn read(&self, since: i64, upto: i64) -> BoxFuture<'_, Result<LogBatch<Self::Out>>>;
    /// What the follower receives for a ring entry; none if its filter excludes it.
    fn select(&self, item: &Self::Item) -> Option<Self::Out>;
}

/// Runs a database read on its own task. A follower may never be polled again; a read it began must finish
/// all the same, or it would hold one of the pool's few connections for ever.
pub(crate) async fn run_detached<T: Send + 'static>(
    read: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    tokio::spawn(read).await.map_err(Error::internal)?
}

/// Waits until a log has an index above `index`, at most for `timeout`. Returns the last index.
pub(super) async fn wait_beyond(log: &impl FollowableLog, index: i64, timeout: Duration) -> Result<i64> {
    // Before the database is asked, so that no commit is missed between.
    let mut extent = log.tail().watch_extent();
    log.tail().advance_to(log.last_index().await?);
    let beyond = extent.wait_for(|extent| extent.last > index || extent.closed);
    // On a timeout too, the current last index is the result.
    let _ = tokio::time::timeout(timeout, beyond).await;
    let extent = *log.tail().watch_extent().borrow();
    Ok(extent.last)
}

/// Returns `found`, or, if it is empty, waits up to `timeout` for a first entry and collects what is available
/// then without further waiting, up to `max`.
pub(super) async fn wait_if_empty<T: Send + 'static>(
    found: Vec<T>,
    max: usize,
    timeout: Duration,
    follow: impl FnOnce() -> LogFollower<T>,
) -> Result<Vec<T>> {
    if !found.is_empty() || timeout.is_zero() || max == 0 {
        return Ok(found);
    }
    let mut follow = follow();
    let Ok(Some(first)) = tokio::time::timeout(timeout, follow.next()).await else {
        return Ok(Vec::new());
    };
    let mut found = vec![first?];
    while found.len() < max
        && let Some(Some(next)) = follow.next().now_or_never()
    {
        found.push(next?);
    }
    Ok(found)
}

/// A batch of log entries read from the database.
pub(crate) struct LogBatch<T> {
    /// The entries that pass the filter.
    pub(crate) items: Vec<T>,
    /// The index up to which the log has been searched.
    pub(crate) scanned_to: i64,
}

/// A stream of a log's entries from an index on; it ends when the log is closed. It has no queue: a follower
/// that polls slowly reads more from the database and costs the writer and other followers nothing.
pub struct LogFollower<T> {
    stream: BoxStream<'static, Result<T>>,
}

impl<T> std::fmt::Debug for LogFollower<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LogFollower")
    }
}

impl<T> Stream for LogFollower<T> {
    type Item = Result<T>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.stream.poll_next_unpin(cx)
    }
}

impl<T: Send + 'static> LogFollower<T> {
    pub(crate) fn new<S: FollowableLog<Out = T>>(source: S, since: i64) -> Self {
        let reader = FollowerState::new(source, since.max(-1).saturating_add(1));
        let stream = futures::stream::unfold(reader, |mut reader| async move {
            let item = reader.next().await?;
            Some((item, reader))
        });
        Self {
            stream: stream.boxed(),
        }
    }
}

/// One follower's position in a log.
struct FollowerState<S: FollowableLog> {
    source: S,
    subscription: u64,
    extent: watch::Receiver<LogExtent>,
    /// The index to read next, once `ready` is empty.
    next: i64,
    /// Entries read and not yet returned.
    ready: VecDeque<S::Out>,
    /// Whether the last index has been read from the database.
    extent_loaded: bool,
}

impl<S: FollowableLog> FollowerState<S> {
    fn new(source: S, next: i64) -> Self {
        let (subscription, extent) = (source.tail().subscribe(next), source.tail().watch_extent());
        Self {
            source,
            subscription,
            extent,
            next,
            ready: VecDeque::new(),
            extent_loaded: false,
        }
    }

    async fn next(&mut self) -> Option<Result<S::Out>> {
        if !self.extent_loaded {
            match self.source.last_index().await {
                Ok(last) => self.source.tail().advance_to(last),
                Err(error) => return Some(Err(error)),
            }
            self.extent_loaded = true;
        }
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Some(Ok(item));
            }
            let extent = *self.extent.borrow_and_update();
            let recent = self.source.tail().take_from(self.subscription, self.next);
            if let Some(last) = recent.last() {
                self.next = last.index() + 1;
                self.ready
                    .extend(recent.iter().filter_map(|item| self.source.select(item)));
            } else if self.next <= extent.last {
                match self.source.read(self.next - 1, extent.last).await {
                    Ok(batch) => {
                        self.next = batch.scanned_to.max(self.next - 1) + 1;
                        self.ready.extend(batch.items);
                    }
                    Err(error) => return Some(Err(error)),
                }
            } else if extent.closed {
                return None;
            } else {
                // Frees the last batch's memory while the follower is idle.
                self.ready = VecDeque::new();
                self.extent.changed().await.ok()?;
            }
        }
    }
}

impl<S: FollowableLog> Drop for FollowerState<S> {
    fn drop(&mut self) {
        self.source.tail().unsubscribe(self.subscription);
    }
}
