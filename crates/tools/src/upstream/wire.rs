//! A connection that carries whole messages both ways, as the MCP client wants one.
//!
//! Reading is done by the client's own loop, a message at a time. Writing never makes anyone wait for a
//! server that does not read: what cannot be written yet is held up to a limit, and past it refused.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use async_trait::async_trait;
use bytes::Bytes;
use rmcp::{
    RoleClient,
    model::{ClientJsonRpcMessage, ServerJsonRpcMessage},
    transport::Transport,
};
use tokio::sync::Mutex;

use super::{
    limits,
    traffic::{Ending, Traffic},
};

/// The reading half of a transport.
#[async_trait]
pub(super) trait FrameRead: Send {
    /// The next message; `None` when the server has closed. May be given up and asked again.
    async fn next(&mut self) -> Result<Option<Bytes>, String>;
}

/// The writing half of a transport.
#[async_trait]
pub(super) trait FrameWrite: Send {
    /// Writes one message.
    async fn write(&mut self, message: Vec<u8>) -> Result<(), String>;

    /// Says that nothing more comes.
    async fn close(&mut self);
}

/// Both halves. Clones are the same connection, so that a second handshake can follow a failed first one;
/// the client's own closing does not close it, [`Wire::close`] does.
#[derive(Clone)]
pub(super) struct Wire(Arc<Inner>);

struct Inner {
    reader: Mutex<Box<dyn FrameRead>>,
    /// Taken when it is closed.
    writer: Mutex<Option<Box<dyn FrameWrite>>>,
    queued_bytes: AtomicUsize,
    queued_messages: AtomicUsize,
    traffic: Arc<Traffic>,
}

/// A message that was not sent.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotSent {
    /// None of it was.
    #[error("{0}")]
    Refused(String),
    /// Some of it may have been.
    #[error("{0}")]
    Broken(String),
}

impl Wire {
    /// A wire over both halves of a transport.
    pub(super) fn new(
        reader: impl FrameRead + 'static,
        writer: impl FrameWrite + 'static,
        traffic: Arc<Traffic>,
    ) -> Self {
        Self(Arc::new(Inner {
            reader: Mutex::new(Box::new(reader)),
            writer: Mutex::new(Some(Box::new(writer))),
            queued_bytes: AtomicUsize::new(0),
            queued_messages: AtomicUsize::new(0),
            traffic,
        }))
    }

    /// Closes it for this reason: what waits to be written is given up, the server sees its input end.
    pub(super) async fn close(&self, reason: &str) {
        self.0.traffic.ended.set(Ending::Fault(reason.into()));
        let writer = self.0.writer.lock().await.take();
        if let Some(mut writer) = writer {
            let _ = tokio::time::timeout(limits::LAST_WORDS, writer.close()).await;
        }
    }
}

impl Inner {
    async fn write(&self, message: Vec<u8>) -> Result<(), NotSent> {
        if message.len() > limits::MESSAGE_BYTES {
            let most = limits::MESSAGE_BYTES / 1024 / 1024;
            return Err(NotSent::Refused(format!(
                "a message to it may have {most} MiB, this one is larger"
            )));
        }
        let _queued = Queued::enter(self, message.len())?;
        let write = async {
            match &mut *self.writer.lock().await {
                Some(writer) => writer.write(message).await.map_err(NotSent::Broken),
                None => Err(NotSent::Refused("its input is closed".into())),
            }
        };
        tokio::select! {
            biased;
            written = write => written,
            ending = self.traffic.ended.wait() => Err(NotSent::Broken(match ending {
                Ending::Closed => "it closed the connection".into(),
                Ending::Fault(reason) => reason.to_string(),
            })),
        }
    }
}

/// A message's place among those that wait to be written.
struct Queued<'a> {
    inner: &'a Inner,
    bytes: usize,
}

impl<'a> Queued<'a> {
    fn enter(inner: &'a Inner, bytes: usize) -> Result<Self, NotSent> {
        let before_bytes = inner.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        let before = inner.queued_messages.fetch_add(1, Ordering::Relaxed);
        let place = Self { inner, bytes };
        match before_bytes + bytes > limits::QUEUED_BYTES || before >= limits::QUEUED_MESSAGES {
            true => Err(NotSent::Refused("it does not read what it is sent".into())),
            false => Ok(place),
        }
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.inner.queued_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.inner.queued_messages.fetch_sub(1, Ordering::Relaxed);
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
            inner.write(bytes).await
        }
    }

    async fn receive(&mut self) -> Option<ServerJsonRpcMessage> {
        let traffic = &self.0.traffic;
        let mut reader = self.0.reader.lock().await;
        loop {
            traffic.unhurried().await;
            let next = tokio::select! {
                biased;
                _ = traffic.ended.wait() => return None,
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
