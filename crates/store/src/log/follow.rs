//! Following a log: replay from the database, then live.
//!
//! The seam: a reader sits down at the tail *before* it asks the database how far the log goes. What is
//! committed before the question is in the answer; what is committed after it moves the mark. Every
//! index up to the mark is read exactly once, in order, from the ring if it reaches back far enough and
//! else from the database, which holds all of it.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::{Stream, StreamExt, future::BoxFuture, stream::BoxStream};
use oubliette_protocol::{Error, Result};
use tokio::sync::watch;

use super::tail::{Indexed, Mark, Tail};

/// Most rows read from the database at once.
pub(crate) const CHUNK: usize = 256;
/// And most bytes of them.
pub(crate) const CHUNK_BYTES: usize = 256 * 1024;

/// A log, as a follower sees it.
pub(crate) trait Source: Send + Sync + 'static {
    /// What the ring holds.
    type Item: Indexed;
    /// What the follower is given.
    type Out: Send + 'static;
    /// Its live end.
    fn tail(&self) -> &Arc<Tail<Self::Item>>;
    /// The last committed index, by the database.
    fn last(&self) -> BoxFuture<'_, Result<i64>>;
    /// Some of what lies past `since`, up to `upto`, in order.
    fn read(&self, since: i64, upto: i64) -> BoxFuture<'_, Result<Batch<Self::Out>>>;
    /// What of an item the follower is given, if it wants it.
    fn show(&self, item: &Self::Item) -> Option<Self::Out>;
}

/// Reads on a task of its own. A follower is polled when its reader has time, which may be never again;
/// a read that it began must not wait for that, or it would keep a connection from everybody else.
pub(crate) async fn detached<T: Send + 'static>(
    read: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    tokio::spawn(read).await.map_err(Error::internal)?
}

/// A piece of a log.
pub(crate) struct Batch<T> {
    /// What was wanted.
    pub(crate) items: Vec<T>,
    /// The index up to which the log has been looked through.
    pub(crate) covered: i64,
}

/// A log from an index on: a stream that ends only with the log. It holds no queue: whoever polls it
/// slowly reads more from the database, and nobody else notices.
pub struct Follow<T> {
    stream: BoxStream<'static, Result<T>>,
}

impl<T> std::fmt::Debug for Follow<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Follow")
    }
}

impl<T> Stream for Follow<T> {
    type Item = Result<T>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.stream.poll_next_unpin(cx)
    }
}

impl<T: Send + 'static> Follow<T> {
    pub(crate) fn new<S: Source<Out = T>>(source: S, since: i64) -> Self {
        let reader = Reader::new(source, since.max(-1).saturating_add(1));
        let stream = futures::stream::unfold(reader, |mut reader| async move {
            let item = reader.next().await?;
            Some((item, reader))
        });
        Self {
            stream: stream.boxed(),
        }
    }
}

/// One follower's place in a log.
struct Reader<S: Source> {
    source: S,
    seat: u64,
    marks: watch::Receiver<Mark>,
    /// The index it wants next, once `ready` is empty.
    next: i64,
    ready: VecDeque<S::Out>,
    asked: bool,
}

impl<S: Source> Reader<S> {
    fn new(source: S, next: i64) -> Self {
        let (seat, marks) = (source.tail().sit(next), source.tail().marks());
        Self {
            source,
            seat,
            marks,
            next,
            ready: VecDeque::new(),
            asked: false,
        }
    }

    async fn next(&mut self) -> Option<Result<S::Out>> {
        if !self.asked {
            match self.source.last().await {
                Ok(last) => self.source.tail().reached(last),
                Err(error) => return Some(Err(error)),
            }
            self.asked = true;
        }
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Some(Ok(item));
            }
            let mark = *self.marks.borrow_and_update();
            let recent = self.source.tail().take(self.seat, self.next);
            if let Some(last) = recent.last() {
                self.next = last.index() + 1;
                self.ready
                    .extend(recent.iter().filter_map(|item| self.source.show(item)));
            } else if self.next <= mark.last {
                match self.source.read(self.next - 1, mark.last).await {
                    Ok(batch) => {
                        self.next = batch.covered.max(self.next - 1) + 1;
                        self.ready.extend(batch.items);
                    }
                    Err(error) => return Some(Err(error)),
                }
            } else if mark.closed {
                return None;
            } else {
                // Memory of the last piece is not kept while nothing happens.
                self.ready = VecDeque::new();
                self.marks.changed().await.ok()?;
            }
        }
    }
}

impl<S: Source> Drop for Reader<S> {
    fn drop(&mut self) {
        self.source.tail().rise(self.seat);
    }
}
