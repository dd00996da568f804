//! Lines on their way out.
//!
//! Three kinds of line, three rules, so that the reader never waits and memory stays bounded:
//!
//! - *Calls and notifications of this side* wait for room ([`Queue::send`]): whoever makes them can wait.
//! - *Answers* to requests we accepted wait for room too, but in the request's own task, never in the
//!   reader; their number is bounded by the requests in flight, whose slot they hold until they are
//!   written.
//! - *Refusals* and *cancels* come from places that cannot wait (the reader, a destructor). They are
//!   small and jump the wait, counted in bytes; a side that provokes refusals without reading them is
//!   hung up on.
//!
//! So each side's reader always reads on, each side's writer therefore always gets to write, and two
//! peers that flood each other slow each other down without ever stopping.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
};

use crate::{Closed, Peer, lines::gone};

/// How much is gathered into one write.
const BATCH: usize = 64 * 1024;
/// How long what is queued may take to be written once the connection is ending.
const GRACE: Duration = Duration::from_secs(1);

/// The sending half, shared by all of a connection's users.
pub(crate) struct Queue {
    lines: mpsc::UnboundedSender<Line>,
    room: Arc<Semaphore>,
    capacity: usize,
    /// Bytes queued that did not wait for room.
    unroomed: Arc<AtomicUsize>,
}

struct Line {
    bytes: Vec<u8>,
    /// Given back when the line is taken for writing.
    room: Option<OwnedSemaphorePermit>,
    /// The request's place among those in flight.
    _slot: Option<OwnedSemaphorePermit>,
}

/// The receiving half.
pub(crate) struct Outbox {
    lines: mpsc::UnboundedReceiver<Line>,
    unroomed: Arc<AtomicUsize>,
}

pub(crate) fn queue(capacity: usize) -> (Queue, Outbox) {
    let (tx, rx) = mpsc::unbounded_channel();
    let unroomed = Arc::new(AtomicUsize::new(0));
    let capacity = capacity.clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
    let room = Arc::new(Semaphore::new(capacity));
    (
        Queue {
            lines: tx,
            room,
            capacity,
            unroomed: unroomed.clone(),
        },
        Outbox { lines: rx, unroomed },
    )
}

/// The connection ended.
#[derive(Debug)]
pub(crate) struct Gone;

impl Queue {
    /// Queues a line once there is room; `slot` is held until it is written.
    pub(crate) async fn send(&self, bytes: Vec<u8>, slot: Option<OwnedSemaphorePermit>) -> Result<(), Gone> {
        let room = self
            .room
            .clone()
            .acquire_many_owned(self.cost(&bytes))
            .await
            .map_err(|_| Gone)?;
        self.lines
            .send(Line {
                bytes,
                room: Some(room),
                _slot: slot,
            })
            .map_err(|_| Gone)
    }

    /// Queues a line if there is room now.
    pub(crate) fn try_send(&self, bytes: Vec<u8>) -> bool {
        let Ok(room) = self.room.clone().try_acquire_many_owned(self.cost(&bytes)) else {
            return false;
        };
        self.lines
            .send(Line {
                bytes,
                room: Some(room),
                _slot: None,
            })
            .is_ok()
    }

    /// Queues a small line at once. Says how many bytes such lines now take.
    pub(crate) fn send_now(&self, bytes: Vec<u8>) -> usize {
        let queued = self.unroomed.fetch_add(bytes.len(), Ordering::Relaxed) + bytes.len();
        // A connection that is gone needs no answer.
        let _ = self.lines.send(Line {
            bytes,
            room: None,
            _slot: None,
        });
        queued
    }

    /// Nobody waits for room any longer.
    pub(crate) fn close(&self) {
        self.room.close();
    }

    /// A line longer than the whole queue takes all of it.
    fn cost(&self, bytes: &[u8]) -> u32 {
        u32::try_from(bytes.len().min(self.capacity)).unwrap_or(u32::MAX)
    }
}

impl Outbox {
    /// Writes until the connection ends; then what is queued, for a moment.
    pub(crate) async fn run<W: AsyncWrite + Unpin>(mut self, mut io: W, peer: &Peer) -> Option<Closed> {
        let stop = peer.stop();
        let ended = async {
            stop.cancelled().await;
            tokio::time::sleep(GRACE).await;
        };
        let closed = tokio::select! {
            closed = self.write_all(&mut io, peer) => closed,
            () = ended => None,
        };
        // Nothing can be done about a stream that will not close either.
        let _ = tokio::time::timeout(GRACE, io.shutdown()).await;
        closed
    }

    async fn write_all<W: AsyncWrite + Unpin>(&mut self, io: &mut W, peer: &Peer) -> Option<Closed> {
        let stop = peer.stop();
        let mut batch = Vec::new();
        loop {
            let line = match self.lines.try_recv() {
                Ok(line) => line,
                Err(_) => tokio::select! {
                    line = self.lines.recv() => line?,
                    () = stop.cancelled() => self.lines.try_recv().ok()?,
                },
            };
            // Where several are under way, others are about to have their line ready: it goes with this one.
            if peer.crowded() {
                tokio::task::yield_now().await;
            }
            batch.clear();
            batch.shrink_to(BATCH);
            let mut next = Some(line);
            while let Some(line) = next.take() {
                let bytes = self.taken(line);
                match batch.is_empty() {
                    true => batch = bytes,
                    false => batch.extend_from_slice(&bytes),
                }
                if batch.len() < BATCH {
                    next = self.lines.try_recv().ok();
                }
            }
            let written = async {
                io.write_all(&batch).await?;
                io.flush().await
            };
            if let Err(why) = written.await {
                let lost = gone(why.kind());
                return Some(if lost {
                    Closed::ByPeer
                } else {
                    Closed::Broken(why.to_string())
                });
            }
        }
    }

    /// Room and slot are given back before the line is on the wire: whoever reads it may act on it.
    fn taken(&self, line: Line) -> Vec<u8> {
        if line.room.is_none() {
            self.unroomed.fetch_sub(line.bytes.len(), Ordering::Relaxed);
        }
        line.bytes
    }
}
