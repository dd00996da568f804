//! A connection that carries whole messages both ways, as the MCP client wants one.
//!
//! Reading is done by the client's own loop, a message at a time. Writing is done by a task, which puts what
//! comes together into one write and never makes anyone wait for a server that does not read: what cannot be
//! written yet is held up to a limit, and past it refused.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use rmcp::{
    RoleClient,
    model::{ClientJsonRpcMessage, ServerJsonRpcMessage},
    transport::Transport,
};
use tokio::{
    sync::{Mutex, mpsc, oneshot},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    limits,
    traffic::{Ending, Traffic},
};

/// So many calls under way at once are a crowd.
const CROWD: usize = 4;
/// How long the first of a crowd waits for others to go with it.
const TOGETHER: Duration = Duration::from_micros(20);

/// The reading half of a transport.
#[async_trait]
pub(super) trait FrameRead: Send {
    /// The next message; `None` when the server has closed. May be given up and asked again.
    async fn next(&mut self) -> Result<Option<Bytes>, String>;
}

/// The writing half of a transport.
#[async_trait]
pub(super) trait FrameWrite: Send {
    /// Writes these messages.
    async fn write(&mut self, messages: Vec<Vec<u8>>) -> Result<(), String>;

    /// Says that nothing more comes.
    async fn close(&mut self);
}

/// Both halves. Clones are the same connection, so that a second handshake can follow a failed first one;
/// the client's own closing does not close it, [`Wire::close`] does.
#[derive(Clone)]
pub(super) struct Wire(Arc<Inner>);

struct Inner {
    reader: Mutex<Box<dyn FrameRead>>,
    outbox: mpsc::UnboundedSender<Outgoing>,
    queued: Arc<Queued>,
    /// Fires when the writer is closed.
    closed: CancellationToken,
    traffic: Arc<Traffic>,
}

/// A message that was not sent.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum NotSent {
    /// None of it was.
    #[error("{0}")]
    Refused(String),
    /// Some of it may have been.
    #[error("{0}")]
    Broken(String),
}

/// A message on its way to the server.
struct Outgoing {
    bytes: Vec<u8>,
    whose: Whose,
}

/// Who is told how the writing went.
enum Whose {
    /// Somebody who waits for it.
    Waiting(oneshot::Sender<Result<(), NotSent>>),
    /// A call: it waits for its answer, and a failure is one.
    Call(i64),
    /// Nobody.
    Nobody,
}

impl Wire {
    /// A wire over both halves of a transport.
    pub(super) fn new(
        reader: impl FrameRead + 'static,
        writer: impl FrameWrite + 'static,
        traffic: Arc<Traffic>,
    ) -> Self {
        let (outbox, messages) = mpsc::unbounded_channel();
        let (queued, closed) = (Arc::<Queued>::default(), CancellationToken::new());
        let task = Writing {
            writer: Box::new(writer),
            messages,
            queued: queued.clone(),
            traffic: traffic.clone(),
        };
        let done = closed.clone().drop_guard();
        tokio::spawn(async move {
            task.run().await;
            drop(done);
        });
        Self(Arc::new(Inner {
            reader: Mutex::new(Box::new(reader)),
            outbox,
            queued,
            closed,
            traffic,
        }))
    }

    /// Closes it for this reason: what waits to be written is given up, the server sees its input end.
    pub(super) async fn close(&self, reason: &str) {
        self.0.traffic.ended.set(Ending::Fault(reason.into()));
        self.0.closed.cancelled().await;
    }

    /// What passes on it.
    pub(super) fn traffic(&self) -> &Arc<Traffic> {
        &self.0.traffic
    }

    /// Has the request of call `id` written; that it could not be is its answer.
    pub(super) fn post_call(&self, id: i64, bytes: Vec<u8>) -> Result<(), NotSent> {
        self.0.post(bytes, Whose::Call(id))
    }

    /// Has something written that nobody waits for.
    pub(super) fn post(&self, bytes: Vec<u8>) -> Result<(), NotSent> {
        self.0.post(bytes, Whose::Nobody)
    }
}

impl Inner {
    fn post(&self, bytes: Vec<u8>, whose: Whose) -> Result<(), NotSent> {
        if bytes.len() > limits::MESSAGE_BYTES {
            let most = limits::MESSAGE_BYTES / 1024 / 1024;
            return Err(NotSent::Refused(format!(
                "a message to it may have {most} MiB, this one is larger"
            )));
        }
        let length = bytes.len();
        self.queued.enter(length)?;
        self.outbox.send(Outgoing { bytes, whose }).map_err(|_| {
            self.queued.leave(length);
            closed()
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Nobody is left to write to it: a writer that is stuck gives up.
        self.traffic.ended.set(Ending::Closed);
    }
}

fn closed() -> NotSent {
    NotSent::Refused("its input is closed".into())
}

/// What waits to be written.
#[derive(Default)]
struct Queued {
    bytes: AtomicUsize,
    messages: AtomicUsize,
}

impl Queued {
    fn enter(&self, bytes: usize) -> Result<(), NotSent> {
        let before_bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let before = self.messages.fetch_add(1, Ordering::Relaxed);
        if before_bytes + bytes > limits::QUEUED_BYTES || before >= limits::QUEUED_MESSAGES {
            self.leave(bytes);
            return Err(NotSent::Refused("it does not read what it is sent".into()));
        }
        Ok(())
    }

    fn leave(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.messages.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The task that writes.
struct Writing {
    writer: Box<dyn FrameWrite>,
    messages: mpsc::UnboundedReceiver<Outgoing>,
    queued: Arc<Queued>,
    traffic: Arc<Traffic>,
}

impl Writing {
    async fn run(mut self) {
        let traffic = self.traffic.clone();
        loop {
            let first = tokio::select! {
                biased;
                _ = traffic.ended.wait() => break,
                first = self.messages.recv() => first,
            };
            let Some(first) = first else { break };
            self.others().await;
            let (messages, whose) = self.gather(first);
            let lengths: Vec<usize> = messages.iter().map(Vec::len).collect();
            let written = tokio::select! {
                biased;
                written = self.writer.write(messages) => written,
                ending = traffic.ended.wait() => Err(match ending {
                    Ending::Closed => "it closed the connection".into(),
                    Ending::Fault(reason) => reason.to_string(),
                }),
            };
            let written = written.map_err(NotSent::Broken);
            for (length, whose) in lengths.into_iter().zip(whose) {
                self.queued.leave(length);
                self.tell(whose, &written);
            }
        }
        // What is left was not sent; whoever waits for it learns that by the sender's end.
        self.messages.close();
        while let Ok(left) = self.messages.try_recv() {
            self.queued.leave(left.bytes.len());
            self.tell(left.whose, &Err(closed()));
        }
        let _ = tokio::time::timeout(limits::LAST_WORDS, self.writer.close()).await;
    }

    /// Lets others come along where many calls are under way: a server that hears one at a time is woken for each.
    async fn others(&mut self) {
        if self.traffic.open_calls() < CROWD {
            return;
        }
        let since = Instant::now();
        while self.messages.len() + 1 < CROWD && since.elapsed() < TOGETHER {
            tokio::task::yield_now().await;
        }
    }

    /// What can be written in one piece with `first`.
    fn gather(&mut self, first: Outgoing) -> (Vec<Vec<u8>>, Vec<Whose>) {
        const MOST: usize = 64;
        const BYTES: usize = 64 * 1024;
        let mut bytes = first.bytes.len();
        let (mut messages, mut whose) = (vec![first.bytes], vec![first.whose]);
        while messages.len() < MOST
            && bytes < BYTES
            && let Ok(next) = self.messages.try_recv()
        {
            bytes += next.bytes.len();
            messages.push(next.bytes);
            whose.push(next.whose);
        }
        (messages, whose)
    }

    fn tell(&self, whose: Whose, written: &Result<(), NotSent>) {
        match (whose, written) {
            (Whose::Waiting(sender), _) => drop(sender.send(written.clone())),
            (Whose::Call(id), Err(why)) => self.traffic.unsent(id, why),
            (Whose::Call(_), Ok(())) | (Whose::Nobody, _) => {}
        }
    }
}

impl Transport<RoleClient> for Wire {
    type Error = NotSent;

    fn send(
        &mut self,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), NotSent>> + Send + 'static {
        let inner = self.0.clone();
        inner.traffic.outgoing(&message);
        async move {
            let bytes = serde_json::to_vec(&message)
                .map_err(|error| NotSent::Refused(format!("the message cannot be written: {error}")))?;
            let (sender, written) = oneshot::channel();
            inner.post(bytes, Whose::Waiting(sender))?;
            written.await.unwrap_or_else(|_| Err(closed()))
        }
    }

    async fn receive(&mut self) -> Option<ServerJsonRpcMessage> {
        let traffic = &self.0.traffic;
        let mut reader = self.0.reader.lock().await;
        loop {
            traffic.unhurried().await;
            let next = tokio::select! {
                biased;
                _ = traffic.ended.wait() => {
                    traffic.hang_up();
                    return None;
                }
                next = reader.next() => next,
            };
            match next {
                Ok(Some(text)) => {
                    if let Some(message) = traffic.incoming(&text) {
                        return Some(message);
                    }
                }
                Ok(None) => traffic.ended.set(Ending::Closed),
                Err(reason) => traffic.ended.set(Ending::Fault(reason.into())),
            }
        }
    }

    async fn close(&mut self) -> Result<(), NotSent> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that says nothing, and how many messages it was given at a time.
    struct Silent;
    struct Counts(mpsc::UnboundedSender<usize>);

    #[async_trait]
    impl FrameRead for Silent {
        async fn next(&mut self) -> Result<Option<Bytes>, String> {
            std::future::pending().await
        }
    }

    #[async_trait]
    impl FrameWrite for Counts {
        async fn write(&mut self, messages: Vec<Vec<u8>>) -> Result<(), String> {
            self.0.send(messages.len()).map_err(|error| error.to_string())
        }

        async fn close(&mut self) {}
    }

    /// So many calls, posted one after the other; time stands still as long as anything is to be done.
    async fn written(calls: usize) -> Vec<usize> {
        let (counts, mut counted) = mpsc::unbounded_channel();
        let traffic = Traffic::new("server".parse().unwrap(), Arc::default());
        let wire = Wire::new(Silent, Counts(counts), traffic.clone());
        let open: Vec<_> = (0..calls).map(|_| traffic.open_call(None)).collect();
        for (id, _) in &open {
            wire.post_call(*id, b"{}".to_vec()).unwrap();
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
        }
        let mut written = Vec::new();
        while written.iter().sum::<usize>() < calls {
            written.push(counted.recv().await.unwrap());
        }
        written
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_of_calls_goes_together_and_a_few_go_at_once() {
        assert_eq!(written(CROWD).await, [CROWD]);
        assert_eq!(written(CROWD - 1).await, [1; CROWD - 1]);
    }
}
