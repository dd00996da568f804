//! One connection: its two tasks, and what users of the crate hold.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use async_trait::async_trait;
use oubliette_protocol::{
    ErrorCode,
    relay::{INVALID_REQUEST, RpcError, method},
};
use serde::{Deserialize, Serialize};
use serde_json::{
    Value, json,
    value::{RawValue, to_raw_value},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::oneshot,
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use crate::{
    CallError, CallOptions, Closed, Id, Limits, Progress, Refused, RequestContext,
    calls::{Answer, Calls},
    error::{method_not_found, rpc_error},
    lines::Lines,
    message::{
        AnswerError, Incoming, error_line, line, notification_line, params_value, read_line, request_line,
        unless_null,
    },
    queue::{Outbox, Queue, queue},
    quiet,
    serving::{NotServed, Serving},
};

/// What this side does for the other.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// Runs before the first line is read: what is sent here reaches the other side before any answer.
    /// Keep it short; the other side is not heard meanwhile.
    async fn connected(&self, peer: &Peer) {
        let _ = peer;
    }

    /// A request as the text it came as, answered with the text to send. One who wants values leaves this
    /// alone and has [`Handler::request`]. Many run at once, each in its own task. When `context.cancel` fires
    /// nobody waits for the answer any longer: end soon, but in order; the future itself is never dropped
    /// half-way.
    async fn request_raw(
        &self,
        method: &str,
        params: Option<Box<RawValue>>,
        context: RequestContext,
    ) -> Result<Box<RawValue>, RpcError> {
        let params = params_value(params.as_deref()).map_err(|refused| *refused)?;
        let answer = self.request(method, params, context).await?;
        to_raw_value(&answer).map_err(|why| RpcError::from(&oubliette_protocol::Error::internal(why)))
    }

    /// A request whose params are read.
    async fn request(&self, method: &str, params: Value, context: RequestContext) -> Result<Value, RpcError> {
        let _ = (params, context);
        Err(method_not_found(method))
    }

    /// A notification. Runs on the reader, in the order the lines came and before any answer that
    /// follows it is delivered; so it must not block. Spawn what takes time.
    fn notification(&self, method: &str, params: Value, peer: &Peer) {
        let _ = (method, params, peer);
    }
}

/// One end of a connection. Cheap to clone; the connection lives until either side closes it.
#[derive(Clone)]
pub struct Peer(Arc<Shared>);

struct Shared {
    limits: Limits,
    queue: Queue,
    calls: Calls,
    serving: Serving,
    closed: OnceLock<Closed>,
    stop: CancellationToken,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer")
            .field("waiting", &self.waiting())
            .field("in_flight", &self.in_flight())
            .field("closed", &self.0.closed.get())
            .finish()
    }
}

impl Peer {
    /// Starts a connection's tasks. The handle ends when the connection has and every request it brought
    /// has been worked off; it says why the connection ended. Dropping it changes nothing.
    pub fn spawn<S>(io: S, handler: Arc<dyn Handler>, limits: Limits) -> (Peer, JoinHandle<Closed>)
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let (read, write) = tokio::io::split(io);
        Self::spawn_halves(read, write, handler, limits)
    }

    /// The same over a Unix stream, which costs fewer wake-ups so.
    pub fn spawn_unix(
        stream: tokio::net::UnixStream,
        handler: Arc<dyn Handler>,
        limits: Limits,
    ) -> std::io::Result<(Peer, JoinHandle<Closed>)> {
        let (read, write) = quiet::halves(stream)?;
        Ok(Self::spawn_halves(read, write, handler, limits))
    }

    /// The same over two streams, one a direction.
    fn spawn_halves<R, W>(
        read: R,
        write: W,
        handler: Arc<dyn Handler>,
        limits: Limits,
    ) -> (Peer, JoinHandle<Closed>)
    where
        R: AsyncRead + Send + 'static,
        W: AsyncWrite + Send + 'static,
    {
        let (queue, outbox) = queue(limits.queue);
        let peer = Peer(Arc::new(Shared {
            limits,
            queue,
            calls: Calls::new(limits.waiting),
            serving: Serving::new(limits.in_flight),
            closed: OnceLock::new(),
            stop: CancellationToken::new(),
        }));
        let handle = tokio::spawn(peer.clone().run(read, write, handler, outbox));
        (peer, handle)
    }

    /// Calls the other side. Dropping the future gives up on the call and tells the other side.
    pub async fn call(&self, method: &str, params: Value) -> Result<Value, CallError> {
        self.call_with(method, params, CallOptions::default()).await
    }

    /// The same with a timeout, a way to cancel, or an ear for progress.
    pub async fn call_with(
        &self,
        method: &str,
        params: Value,
        options: CallOptions,
    ) -> Result<Value, CallError> {
        let asked = self.open(method, unless_null(&params), options)?;
        drop(params);
        let raw = asked.answer().await?;
        serde_json::from_str(raw.get()).map_err(|why| CallError::BadAnswer(why.to_string()))
    }

    /// The first half of a call with params of any kind, and the result as the text it came as: the params are
    /// written down, and not needed afterwards.
    pub fn ask<P>(&self, method: &str, params: &P, options: CallOptions) -> Result<Asked, CallError>
    where
        P: Serialize + ?Sized,
    {
        self.open(method, Some(params), options)
    }

    fn open<P: Serialize + ?Sized>(
        &self,
        method: &str,
        params: Option<&P>,
        options: CallOptions,
    ) -> Result<Asked, CallError> {
        let CallOptions {
            timeout,
            cancel,
            on_progress,
        } = options;
        let (id, answer) = self.0.calls.open(on_progress)?;
        let open = Open {
            peer: self.clone(),
            id,
            sent: false,
        };
        let line = request_line(&id.into(), method, params, self.0.limits.line)?;
        Ok(Asked {
            open,
            line,
            answer,
            timeout,
            cancel,
        })
    }

    /// Tells the other side something, once there is room.
    pub async fn notify(&self, method: &str, params: Value) -> Result<(), CallError> {
        let line = notification_line(method, &params, self.0.limits.line)?;
        self.0
            .queue
            .send(line, None)
            .await
            .map_err(|_| self.why_closed().into())
    }

    /// Sends a whole message as it is, once there is room.
    pub async fn notify_raw(&self, message: &Value) -> Result<(), CallError> {
        let line = line(message, self.0.limits.line)?;
        self.0
            .queue
            .send(line, None)
            .await
            .map_err(|_| self.why_closed().into())
    }

    /// Ends the connection: what is queued is still written, calls that wait fail.
    pub fn close(&self) {
        self.end(Closed::ByUs);
    }

    /// Waits for the connection to end, and says why it did.
    pub async fn closed(&self) -> Closed {
        self.0.stop.cancelled().await;
        self.why_closed()
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.0.stop.is_cancelled()
    }

    /// How many of our calls wait for an answer.
    pub fn waiting(&self) -> usize {
        self.0.calls.len()
    }

    /// How many of the other side's requests are being worked on.
    pub fn in_flight(&self) -> usize {
        self.0.serving.len()
    }

    /// Whether others than the one that is about to be written are under way.
    pub(crate) fn crowded(&self) -> bool {
        self.0.serving.len() > 0 || self.0.calls.len() > 1
    }

    pub(crate) fn stop(&self) -> &CancellationToken {
        &self.0.stop
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.0.limits
    }

    pub(crate) fn queue(&self) -> &Queue {
        &self.0.queue
    }

    pub(crate) fn serving(&self) -> &Serving {
        &self.0.serving
    }

    fn why_closed(&self) -> Closed {
        self.0.closed.get().cloned().unwrap_or(Closed::ByUs)
    }

    /// The first reason stays. The order matters: the reason is set before anyone is woken to read it.
    fn end(&self, why: Closed) {
        let _ = self.0.closed.set(why);
        self.0.stop.cancel();
        self.0.queue.close();
        self.0.calls.close(&self.why_closed());
        self.0.serving.close();
    }

    async fn run<R, W>(self, read: R, write: W, handler: Arc<dyn Handler>, outbox: Outbox) -> Closed
    where
        R: AsyncRead + Send + 'static,
        W: AsyncWrite + Send + 'static,
    {
        let writer = tokio::spawn({
            let peer = self.clone();
            async move {
                let write = std::pin::pin!(write);
                if let Some(why) = outbox.run(write, &peer).await {
                    peer.end(why);
                }
            }
        });
        let why = tokio::select! {
            why = self.read(read, &handler) => why,
            () = self.0.stop.cancelled() => self.why_closed(),
        };
        self.end(why);
        // What is left: requests ending in order, then the last lines.
        self.0.serving.drained().await;
        let _ = writer.await;
        self.why_closed()
    }

    async fn read<R: AsyncRead>(&self, read: R, handler: &Arc<dyn Handler>) -> Closed {
        let read = std::pin::pin!(read);
        handler.connected(self).await;
        let mut lines = Lines::new(read, self.0.limits.line);
        loop {
            let line = match lines.next().await {
                Ok(line) => line,
                Err(why) => return why,
            };
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            if let Err(why) = self.take(line, handler) {
                return why;
            }
        }
    }

    /// Acts on one line without ever waiting.
    fn take(&self, line: &[u8], handler: &Arc<dyn Handler>) -> Result<(), Closed> {
        match read_line(line) {
            Ok(Incoming::Request { id, method, params }) => {
                match self.0.serving.start(self, handler, id.clone(), method, params) {
                    Ok(()) => Ok(()),
                    Err(NotServed::TooMany(error)) => self.refuse(Some(&id), &error),
                    // Answered without the id: with it, the answer would be taken for the first request's.
                    Err(NotServed::Duplicate) => {
                        let text = format!("a request with id {id} is already in flight");
                        self.refuse(
                            None,
                            &rpc_error(INVALID_REQUEST, ErrorCode::InvalidArgument, text),
                        )
                    }
                }
            }
            Ok(Incoming::Notification { method, params }) => {
                self.notified(&method, params, handler);
                Ok(())
            }
            Ok(Incoming::Response {
                id: Some(id),
                outcome,
            }) => {
                let answer = outcome.map(ToOwned::to_owned).map_err(|error| match error {
                    AnswerError::Remote(error) => CallError::Remote(error),
                    AnswerError::Malformed(why) => CallError::BadAnswer(why),
                });
                self.0.calls.answered(&id, answer);
                Ok(())
            }
            Ok(Incoming::Response { id: None, outcome }) => {
                tracing::debug!(?outcome, "the other side could not read a line of ours");
                Ok(())
            }
            Err(Refused { id, error }) => self.refuse(id.as_ref(), &error),
        }
    }

    fn notified(&self, method: &str, params: Value, handler: &Arc<dyn Handler>) {
        #[derive(Deserialize)]
        struct About {
            id: Id,
        }
        match method {
            method::CANCEL => {
                if let Ok(about) = About::deserialize(&params) {
                    self.0.serving.cancel(&about.id);
                }
            }
            method::PROGRESS => {
                let about = About::deserialize(&params);
                let taken = match (about, Progress::deserialize(&params)) {
                    (Ok(about), Ok(progress)) => self.0.calls.reported(&about.id, &progress),
                    _ => false,
                };
                if !taken {
                    handler.notification(method, params, self);
                }
            }
            _ => handler.notification(method, params, self),
        }
    }

    fn refuse(&self, id: Option<&Id>, error: &RpcError) -> Result<(), Closed> {
        let Ok(line) = error_line(id, error, usize::MAX) else {
            return Ok(());
        };
        match self.0.queue.send_now(line) > self.0.limits.refusals {
            true => Err(Closed::NotReading),
            false => Ok(()),
        }
    }
}

/// A call that is written down. Dropping it gives the call up.
pub struct Asked {
    open: Open,
    line: Vec<u8>,
    answer: oneshot::Receiver<Answer>,
    timeout: Option<Duration>,
    cancel: Option<CancellationToken>,
}

impl std::fmt::Debug for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asked")
            .field("id", &self.open.id)
            .finish_non_exhaustive()
    }
}

impl Asked {
    /// Sends it and waits. Dropping the future gives up on the call and tells the other side.
    pub async fn answer(self) -> Result<Box<RawValue>, CallError> {
        let Self {
            mut open,
            line,
            answer,
            timeout,
            cancel,
        } = self;
        let answered = async {
            let sent = open.peer.0.queue.send(line, None).await;
            sent.map_err(|_| open.peer.why_closed())?;
            open.sent = true;
            answer
                .await
                .unwrap_or_else(|_| Err(open.peer.why_closed().into()))
        };
        let cancelled = async {
            match &cancel {
                Some(token) => token.cancelled().await,
                None => std::future::pending().await,
            }
        };
        let expired = async {
            match timeout {
                Some(timeout) => tokio::time::sleep(timeout).await,
                None => std::future::pending().await,
            }
        };
        // Biased: an answer that is there wins over a limit reached in the same instant.
        tokio::select! {
            biased;
            answer = answered => answer,
            () = cancelled => Err(CallError::Cancelled),
            () = expired => Err(CallError::Timeout),
        }
    }
}

/// A call that is open; giving it up tells the other side.
struct Open {
    peer: Peer,
    id: u64,
    sent: bool,
}

impl Drop for Open {
    fn drop(&mut self) {
        if self.peer.0.calls.forget(self.id) && self.sent {
            let params = json!({ "id": self.id });
            if let Ok(line) = notification_line(method::CANCEL, &params, usize::MAX) {
                self.peer.0.queue.send_now(line);
            }
        }
    }
}
