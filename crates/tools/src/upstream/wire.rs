//! A persistent message connection, as the transport of the MCP library.
//!
//! Messages are read one at a time by the library's own loop. They are written by a task, which batches what is
//! queued into one write. Senders never wait for a server that does not read: messages are queued up to a limit
//! and refused beyond it.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use async_trait::async_trait;
use bytes::Bytes;
use oubliette_protocol::{ByteCharge, OverBudget, budget::UNCHARGED};
use rmcp::{
    RoleClient,
    model::{ClientJsonRpcMessage, ServerJsonRpcMessage},
    transport::Transport,
};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{
    dropped_message::DroppedMessage,
    limits,
    traffic::{ConnectionEnd, TrafficFilter},
};

/// A message read from a transport.
pub(super) enum ReceivedFrame {
    /// The whole message.
    Message(Bytes),
    /// One that the budget had no room for.
    Dropped(DroppedMessage),
}

/// The reading half of a transport that carries whole messages.
#[async_trait]
pub(super) trait FrameRead: Send {
    /// The next message; `None` when the server has closed. Must be cancel-safe: a dropped read loses nothing.
    async fn next(&mut self) -> Result<Option<ReceivedFrame>, String>;
}

/// The writing half of a transport that carries whole messages.
#[async_trait]
pub(super) trait FrameWrite: Send {
    /// Writes and flushes these messages.
    async fn write(&mut self, messages: Vec<Vec<u8>>) -> Result<(), String>;

    /// Closes the writing half: the server sees the end of its input.
    async fn close(&mut self);
}

/// Both halves. Clones share one connection, so that a second handshake can follow a refused first one; the
/// library's `Transport::close` therefore does not close it, [`UpstreamWire::close`] does.
#[derive(Clone)]
pub(super) struct UpstreamWire(Arc<UpstreamWireState>);

struct UpstreamWireState {
    reader: Mutex<Box<dyn FrameRead>>,
    outbox: mpsc::UnboundedSender<QueuedWrite>,
    backlog: Arc<WriteBacklog>,
    /// Cancelled when the writer has been closed.
    closed: CancellationToken,
    traffic: Arc<TrafficFilter>,
}

/// Why a message was not sent.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum SendFailure {
    /// Nothing of it was written.
    #[error("{0}")]
    NotWritten(String),
    /// There is no room to keep it until it is written.
    #[error("{0}")]
    OverBudget(#[from] OverBudget),
    /// Writing failed: some or all of it may have reached the server.
    #[error("{0}")]
    MaybeWritten(String),
}

/// A message waiting to be written.
struct QueuedWrite {
    bytes: Vec<u8>,
    observer: WriteObserver,
    charge: Option<ByteCharge>,
}

/// Who learns whether a message was written.
enum WriteObserver {
    /// A sender that awaits the write.
    Sender(oneshot::Sender<Result<(), SendFailure>>),
    /// The direct call with this id: it awaits its response, and a failed write completes it.
    Call(i64),
    /// No one.
    Ignored,
}

impl UpstreamWire {
    /// A wire over both halves of a transport.
    pub(super) fn new(
        reader: impl FrameRead + 'static,
        writer: impl FrameWrite + 'static,
        traffic: Arc<TrafficFilter>,
    ) -> Self {
        let (outbox, messages) = mpsc::unbounded_channel();
        let (backlog, closed) = (Arc::<WriteBacklog>::default(), CancellationToken::new());
        let task = WireWriter {
            writer: Box::new(writer),
            messages,
            backlog: backlog.clone(),
            traffic: traffic.clone(),
        };
        let done = closed.clone().drop_guard();
        tokio::spawn(async move {
            task.run().await;
            drop(done);
        });
        Self(Arc::new(UpstreamWireState {
            reader: Mutex::new(Box::new(reader)),
            outbox,
            backlog,
            closed,
            traffic,
        }))
    }

    /// Closes the connection: queued messages fail with `reason`, and the server sees the end of its input.
    pub(super) async fn close(&self, reason: &str) {
        self.0.traffic.ended.set(ConnectionEnd::Fault(reason.into()));
        self.0.closed.cancelled().await;
    }

    /// The filter its messages pass through.
    pub(super) fn traffic(&self) -> &Arc<TrafficFilter> {
        &self.0.traffic
    }

    /// Queues the request of direct call `id`; a failed write completes the call.
    pub(super) fn enqueue_call(&self, id: i64, bytes: Vec<u8>) -> Result<(), SendFailure> {
        self.0.enqueue(bytes, WriteObserver::Call(id))
    }

    /// Queues a message whose write no one awaits.
    pub(super) fn enqueue(&self, bytes: Vec<u8>) -> Result<(), SendFailure> {
        self.0.enqueue(bytes, WriteObserver::Ignored)
    }
}

impl UpstreamWireState {
    fn enqueue(&self, bytes: Vec<u8>, observer: WriteObserver) -> Result<(), SendFailure> {
        if bytes.len() > limits::MAX_MESSAGE_BYTES {
            let most = limits::MAX_MESSAGE_BYTES / 1024 / 1024;
            return Err(SendFailure::NotWritten(format!(
                "a message to it may have {most} MiB, this one is larger"
            )));
        }
        let length = bytes.len();
        let charge = match length > UNCHARGED {
            true => Some(self.traffic.buffers.charge(length)?),
            false => None,
        };
        self.backlog.reserve(length)?;
        let queued = QueuedWrite {
            bytes,
            observer,
            charge,
        };
        self.outbox.send(queued).map_err(|_| {
            self.backlog.release(length);
            input_closed()
        })
    }
}

impl Drop for UpstreamWireState {
    fn drop(&mut self) {
        // The last clone is gone: end the writing task even if a write is blocked.
        self.traffic.ended.set(ConnectionEnd::Closed);
    }
}

fn input_closed() -> SendFailure {
    SendFailure::NotWritten("its input is closed".into())
}

/// Size of the write queue, bounded by [`limits::MAX_QUEUED_BYTES`] and [`limits::MAX_QUEUED_MESSAGES`].
#[derive(Default)]
struct WriteBacklog {
    bytes: AtomicUsize,
    messages: AtomicUsize,
}

impl WriteBacklog {
    fn reserve(&self, bytes: usize) -> Result<(), SendFailure> {
        let before_bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let before = self.messages.fetch_add(1, Ordering::Relaxed);
        if before_bytes + bytes > limits::MAX_QUEUED_BYTES || before >= limits::MAX_QUEUED_MESSAGES {
            self.release(bytes);
            return Err(SendFailure::NotWritten("it does not read what it is sent".into()));
        }
        Ok(())
    }

    fn release(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.messages.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The task that writes queued messages.
struct WireWriter {
    writer: Box<dyn FrameWrite>,
    messages: mpsc::UnboundedReceiver<QueuedWrite>,
    backlog: Arc<WriteBacklog>,
    traffic: Arc<TrafficFilter>,
}

impl WireWriter {
    async fn run(mut self) {
        let traffic = self.traffic.clone();
        loop {
            let first = tokio::select! {
                biased;
                _ = traffic.ended.wait() => break,
                first = self.messages.recv() => first,
            };
            let Some(first) = first else { break };
            let (messages, observers, charges) = self.take_batch(first);
            let lengths: Vec<usize> = messages.iter().map(Vec::len).collect();
            let written = tokio::select! {
                biased;
                written = self.writer.write(messages) => written,
                ending = traffic.ended.wait() => Err(match ending {
                    ConnectionEnd::Closed => "it closed the connection".into(),
                    ConnectionEnd::Fault(reason) => reason.to_string(),
                }),
            };
            drop(charges);
            let written = written.map_err(SendFailure::MaybeWritten);
            for (length, observer) in lengths.into_iter().zip(observers) {
                self.backlog.release(length);
                self.report_write(observer, &written);
            }
        }
        // What is left in the queue was not written.
        self.messages.close();
        while let Ok(left) = self.messages.try_recv() {
            self.backlog.release(left.bytes.len());
            self.report_write(left.observer, &Err(input_closed()));
        }
        let _ = tokio::time::timeout(limits::DRAIN_TIMEOUT, self.writer.close()).await;
    }

    /// Takes from the queue what goes into one write with `first`.
    fn take_batch(&mut self, first: QueuedWrite) -> (Vec<Vec<u8>>, Vec<WriteObserver>, Vec<ByteCharge>) {
        const MAX_MESSAGES: usize = 64;
        const MAX_BYTES: usize = 64 * 1024;
        let mut bytes = first.bytes.len();
        let (mut messages, mut observers) = (vec![first.bytes], vec![first.observer]);
        let mut charges = Vec::from_iter(first.charge);
        while messages.len() < MAX_MESSAGES
            && bytes < MAX_BYTES
            && let Ok(next) = self.messages.try_recv()
        {
            bytes += next.bytes.len();
            messages.push(next.bytes);
            observers.push(next.observer);
            charges.extend(next.charge);
        }
        (messages, observers, charges)
    }

    fn report_write(&self, observer: WriteObserver, written: &Result<(), SendFailure>) {
        match (observer, written) {
            (WriteObserver::Sender(sender), _) => drop(sender.send(written.clone())),
            (WriteObserver::Call(id), Err(why)) => self.traffic.report_send_failure(id, why),
            (WriteObserver::Call(_), Ok(())) | (WriteObserver::Ignored, _) => {}
        }
    }
}

impl Transport<RoleClient> for UpstreamWire {
    type Error = SendFailure;

    fn send(
        &mut self,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), SendFailure>> + Send + 'static {
        let inner = self.0.clone();
        inner.traffic.register_outgoing(&message);
        async move {
            let bytes = serde_json::to_vec(&message).map_err(|error| {
                SendFailure::NotWritten(format!("the message cannot be written: {error}"))
            })?;
            let (sender, written) = oneshot::channel();
            inner.enqueue(bytes, WriteObserver::Sender(sender))?;
            written.await.unwrap_or_else(|_| Err(input_closed()))
        }
    }

    async fn receive(&mut self) -> Option<ServerJsonRpcMessage> {
        let traffic = &self.0.traffic;
        let mut reader = self.0.reader.lock().await;
        loop {
            traffic.throttle().await;
            let next = tokio::select! {
                biased;
                _ = traffic.ended.wait() => {
                    traffic.drop_direct_calls();
                    return None;
                }
                next = reader.next() => next,
            };
            match next {
                Ok(Some(ReceivedFrame::Message(text))) => {
                    if let Some(message) = traffic.handle_incoming(&text) {
                        return Some(message);
                    }
                }
                Ok(Some(ReceivedFrame::Dropped(dropped))) => {
                    if !traffic.fail_dropped(&dropped) {
                        // The call that waits for it would never be answered.
                        traffic
                            .ended
                            .set(ConnectionEnd::Fault(dropped.why().to_string().into()));
                    }
                }
                Ok(None) => traffic.ended.set(ConnectionEnd::Closed),
                Err(reason) => traffic.ended.set(ConnectionEnd::Fault(reason.into())),
            }
        }
    }

    async fn close(&mut self) -> Result<(), SendFailure> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that never sends.
    struct SilentReader;

    /// Records how many messages each write carried.
    struct BatchSizeRecorder(mpsc::UnboundedSender<usize>);

    #[async_trait]
    impl FrameRead for SilentReader {
        async fn next(&mut self) -> Result<Option<ReceivedFrame>, String> {
            std::future::pending().await
        }
    }

    #[async_trait]
    impl FrameWrite for BatchSizeRecorder {
        async fn write(&mut self, messages: Vec<Vec<u8>>) -> Result<(), String> {
            self.0.send(messages.len()).map_err(|error| error.to_string())
        }

        async fn close(&mut self) {}
    }

    #[tokio::test]
    async fn requests_queued_together_go_in_one_write() {
        let (counts, mut counted) = mpsc::unbounded_channel();
        let traffic = TrafficFilter::new("server".parse().unwrap(), Arc::default(), Default::default());
        let wire = UpstreamWire::new(SilentReader, BatchSizeRecorder(counts), traffic.clone());
        let open: Vec<_> = (0..3).map(|_| traffic.register_call(None)).collect();
        for (id, _) in &open {
            wire.enqueue_call(*id, b"{}".to_vec()).unwrap();
        }
        assert_eq!(counted.recv().await, Some(open.len()));
    }
}
