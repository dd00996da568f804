//! One connection: its reading and writing tasks, and the [`RpcPeer`] handle that users of the crate hold.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use oubliette_os::UntrustedStream;
use oubliette_protocol::{
    Error, ErrorCode,
    relay::{INVALID_REQUEST, RpcError, method},
};
use serde::{Deserialize, Serialize};
use serde_json::{
    Value,
    value::{RawValue, to_raw_value},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use crate::{
    CallError, CallOptions, CloseReason, PeerLimits, ProgressReport, RejectedLine, RequestContext, RpcId,
    calls::PendingCalls,
    error::{method_not_found, rpc_error},
    lines::LineSplitter,
    message::{
        AnswerError, IncomingMessage, encode_line, error_line, notification_line, params_value,
        parse_envelope, request_line, unless_null,
    },
    prepared_call::{CallGuard, PreparedCall},
    queue::{LineQueue, QueueWriter, queue},
    serving::{InFlightRequests, RequestRefusal},
};

/// Serves the other side's requests and notifications.
#[async_trait]
pub trait PeerHandler: Send + Sync + 'static {
    /// Runs before the first line is read: what is sent here reaches the other side before any answer.
    /// Keep it short; nothing is read from the connection until it returns.
    async fn connected(&self, peer: &RpcPeer) {
        let _ = peer;
    }

    /// Serves a request whose params and result are JSON text. The default parses the params and calls
    /// [`PeerHandler::request`]; implement one of the two. Many run at once, each in its own task. When
    /// `context.cancel` is cancelled nobody waits for the answer any longer: clean up and return soon. The future
    /// itself is never dropped before it is done.
    async fn request_raw(
        &self,
        method: &str,
        params: Option<Box<RawValue>>,
        context: RequestContext,
    ) -> Result<Box<RawValue>, RpcError> {
        let params = params_value(params.as_deref()).map_err(|refused| *refused)?;
        let answer = self.request(method, params, context).await?;
        to_raw_value(&answer).map_err(|why| RpcError::from(&Error::internal(why)))
    }

    /// Serves a request with parsed params.
    async fn request(&self, method: &str, params: Value, context: RequestContext) -> Result<Value, RpcError> {
        let _ = (params, context);
        Err(method_not_found(method))
    }

    /// Takes a notification. Runs on the reader's task, in the order of the lines and before any answer that
    /// follows it is delivered; so it must not block. Spawn what takes time.
    fn notification(&self, method: &str, params: Value, peer: &RpcPeer) {
        let _ = (method, params, peer);
    }
}

/// One end of a connection. Cheap to clone; the connection lives until either side closes it.
#[derive(Clone)]
pub struct RpcPeer(Arc<PeerShared>);

struct PeerShared {
    limits: PeerLimits,
    queue: LineQueue,
    calls: PendingCalls,
    serving: InFlightRequests,
    closed: OnceLock<CloseReason>,
    stop: CancellationToken,
}

impl std::fmt::Debug for RpcPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RpcPeer")
            .field("pending_calls", &self.pending_calls())
            .field("in_flight", &self.in_flight())
            .field("closed", &self.0.closed.get())
            .finish()
    }
}

impl RpcPeer {
    /// Starts a connection's tasks. The join handle completes when the connection has ended and every request
    /// that arrived on it is done; its value says why the connection ended. Dropping it changes nothing.
    pub fn spawn<S>(
        io: S,
        handler: Arc<dyn PeerHandler>,
        limits: PeerLimits,
    ) -> (RpcPeer, JoinHandle<CloseReason>)
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let (read, write) = tokio::io::split(io);
        Self::spawn_halves(read, write, handler, limits)
    }

    /// Like [`RpcPeer::spawn`], over a Unix stream whose halves need no lock.
    pub fn spawn_unix(
        stream: UntrustedStream,
        handler: Arc<dyn PeerHandler>,
        limits: PeerLimits,
    ) -> (RpcPeer, JoinHandle<CloseReason>) {
        let (read, write) = stream.into_split();
        Self::spawn_halves(read, write, handler, limits)
    }

    /// Starts a connection over two streams, one for each direction.
    fn spawn_halves<R, W>(
        read: R,
        write: W,
        handler: Arc<dyn PeerHandler>,
        limits: PeerLimits,
    ) -> (RpcPeer, JoinHandle<CloseReason>)
    where
        R: AsyncRead + Send + 'static,
        W: AsyncWrite + Send + 'static,
    {
        let (queue, queue_writer) = queue(limits.max_queue_bytes);
        let peer = RpcPeer(Arc::new(PeerShared {
            queue,
            calls: PendingCalls::new(limits.max_pending_calls),
            serving: InFlightRequests::new(limits.max_in_flight),
            limits,
            closed: OnceLock::new(),
            stop: CancellationToken::new(),
        }));
        let handle = tokio::spawn(peer.clone().run(read, write, handler, queue_writer));
        (peer, handle)
    }

    /// Calls the other side. Dropping the future cancels the call on both sides.
    pub async fn call(&self, method: &str, params: Value) -> Result<Value, CallError> {
        self.call_with(method, params, CallOptions::default()).await
    }

    /// Calls the other side with a timeout, a cancellation token or a progress callback.
    pub async fn call_with(
        &self,
        method: &str,
        params: Value,
        options: CallOptions,
    ) -> Result<Value, CallError> {
        let prepared = self.prepare_request(method, unless_null(&params), options)?;
        drop(params);
        let raw = prepared.send_and_wait().await?;
        serde_json::from_str(raw.get()).map_err(|why| CallError::BadAnswer(why.to_string()))
    }

    /// Encodes a call without sending it, so that the params need not live until the answer comes.
    /// [`PreparedCall::send_and_wait`] then returns the result as JSON text.
    pub fn prepare_call<P>(
        &self,
        method: &str,
        params: &P,
        options: CallOptions,
    ) -> Result<PreparedCall, CallError>
    where
        P: Serialize + ?Sized,
    {
        self.prepare_request(method, Some(params), options)
    }

    fn prepare_request<P: Serialize + ?Sized>(
        &self,
        method: &str,
        params: Option<&P>,
        options: CallOptions,
    ) -> Result<PreparedCall, CallError> {
        let CallOptions {
            timeout,
            cancel,
            on_progress,
        } = options;
        let (id, answer) = self.0.calls.register(on_progress)?;
        let guard = CallGuard {
            peer: self.clone(),
            id,
            sent: false,
        };
        let line = request_line(&id.into(), method, params, self.0.limits.max_line_bytes)?;
        let charge = self.0.limits.budget.charge(line.len())?;
        Ok(PreparedCall {
            guard,
            line,
            charge,
            answer,
            timeout,
            cancel,
        })
    }

    /// Sends a notification once there is space in the queue.
    pub async fn notify(&self, method: &str, params: Value) -> Result<(), CallError> {
        let line = notification_line(method, &params, self.0.limits.max_line_bytes)?;
        self.queue_notification(line).await
    }

    /// Sends a complete message as it is, once there is space in the queue.
    pub async fn send_raw(&self, message: &Value) -> Result<(), CallError> {
        let line = encode_line(message, self.0.limits.max_line_bytes)?;
        self.queue_notification(line).await
    }

    /// Queues a notification. One that does not fit into the budget ends the connection: the other side would never
    /// learn that it missed something.
    async fn queue_notification(&self, line: Vec<u8>) -> Result<(), CallError> {
        let charge = self.0.limits.budget.charge(line.len());
        let charge = charge.inspect_err(|over| self.shut_down((*over).into()))?;
        let queued = self.0.queue.send(line, None, Some(charge)).await;
        queued.map_err(|_| self.close_reason().into())
    }

    /// Ends the connection: queued lines are still written, pending calls fail.
    pub fn close(&self) {
        self.shut_down(CloseReason::ByUs);
    }

    /// Waits until the connection has ended; returns why.
    pub async fn wait_closed(&self) -> CloseReason {
        self.0.stop.cancelled().await;
        self.close_reason()
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.0.stop.is_cancelled()
    }

    /// How many of our calls wait for an answer.
    pub fn pending_calls(&self) -> usize {
        self.0.calls.len()
    }

    /// How many of the other side's requests are in progress.
    pub fn in_flight(&self) -> usize {
        self.0.serving.len()
    }

    /// Whether any request or call is open besides the one whose line is about to be written.
    pub(crate) fn has_other_work(&self) -> bool {
        self.0.serving.len() > 0 || self.0.calls.len() > 1
    }

    pub(crate) fn stop(&self) -> &CancellationToken {
        &self.0.stop
    }

    pub(crate) fn limits(&self) -> &PeerLimits {
        &self.0.limits
    }

    pub(crate) fn queue(&self) -> &LineQueue {
        &self.0.queue
    }

    pub(crate) fn calls(&self) -> &PendingCalls {
        &self.0.calls
    }

    pub(crate) fn serving(&self) -> &InFlightRequests {
        &self.0.serving
    }

    pub(crate) fn close_reason(&self) -> CloseReason {
        self.0.closed.get().cloned().unwrap_or(CloseReason::ByUs)
    }

    /// Ends the connection; the first reason given is kept. It is set before anything is cancelled, because
    /// the tasks woken by that read it.
    fn shut_down(&self, why: CloseReason) {
        let _ = self.0.closed.set(why);
        self.0.stop.cancel();
        self.0.queue.close();
        self.0.calls.close(&self.close_reason());
        self.0.serving.close();
    }

    async fn run<R, W>(
        self,
        read: R,
        write: W,
        handler: Arc<dyn PeerHandler>,
        queue_writer: QueueWriter,
    ) -> CloseReason
    where
        R: AsyncRead + Send + 'static,
        W: AsyncWrite + Send + 'static,
    {
        let writer = tokio::spawn({
            let peer = self.clone();
            async move {
                let write = std::pin::pin!(write);
                if let Some(why) = queue_writer.run(write, &peer).await {
                    peer.shut_down(why);
                }
            }
        });
        let why = tokio::select! {
            why = self.read_lines(read, &handler) => why,
            () = self.0.stop.cancelled() => self.close_reason(),
        };
        self.shut_down(why);
        // Wait for the cancelled requests, then for the writer to send the last lines.
        self.0.serving.wait_drained().await;
        let _ = writer.await;
        self.close_reason()
    }

    async fn read_lines<R: AsyncRead>(&self, read: R, handler: &Arc<dyn PeerHandler>) -> CloseReason {
        let read = std::pin::pin!(read);
        handler.connected(self).await;
        let limits = &self.0.limits;
        let mut lines = LineSplitter::new(read, limits.max_line_bytes, &limits.budget);
        loop {
            let line = match lines.next().await {
                Ok(line) => line,
                Err(why) => {
                    if let CloseReason::OverBudget(over) = &why {
                        // Whether it can be queued or not, the connection ends.
                        let _ = self.refuse(None, &(&Error::from(*over)).into());
                    }
                    return why;
                }
            };
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            if let Err(why) = self.handle_line(line, handler) {
                return why;
            }
        }
    }

    /// Handles one line without waiting for anything.
    fn handle_line(&self, line: &[u8], handler: &Arc<dyn PeerHandler>) -> Result<(), CloseReason> {
        match parse_envelope(line) {
            Ok(IncomingMessage::Request { id, method, params }) => {
                match self.0.serving.start(self, handler, id.clone(), method, params) {
                    Ok(()) => Ok(()),
                    Err(RequestRefusal::TooMany(error)) => self.refuse(Some(&id), &error),
                    // Answered without the id: with it, the error would be taken for the first request's answer.
                    Err(RequestRefusal::Duplicate) => {
                        let text = format!("a request with id {id} is already in flight");
                        self.refuse(
                            None,
                            &rpc_error(INVALID_REQUEST, ErrorCode::InvalidArgument, text),
                        )
                    }
                }
            }
            Ok(IncomingMessage::Notification { method, params }) => {
                self.handle_notification(&method, params, handler);
                Ok(())
            }
            Ok(IncomingMessage::Response {
                id: Some(id),
                outcome,
            }) => {
                let answer = outcome.map(ToOwned::to_owned).map_err(|error| match error {
                    AnswerError::Remote(error) => CallError::Remote(error),
                    AnswerError::Malformed(why) => CallError::BadAnswer(why),
                });
                self.0.calls.complete(&id, answer);
                Ok(())
            }
            Ok(IncomingMessage::Response { id: None, outcome }) => {
                tracing::debug!(
                    ?outcome,
                    "received a response without an id: the other side could not parse a line of ours"
                );
                Ok(())
            }
            Err(RejectedLine { id, error }) => self.refuse(id.as_ref(), &error),
        }
    }

    fn handle_notification(&self, method: &str, params: Value, handler: &Arc<dyn PeerHandler>) {
        #[derive(Deserialize)]
        struct IdParams {
            id: RpcId,
        }
        match method {
            method::CANCEL => {
                if let Ok(target) = IdParams::deserialize(&params) {
                    self.0.serving.cancel(&target.id);
                }
            }
            method::PROGRESS => {
                let target = IdParams::deserialize(&params);
                let delivered = match (target, ProgressReport::deserialize(&params)) {
                    (Ok(target), Ok(progress)) => self.0.calls.report_progress(&target.id, &progress),
                    _ => false,
                };
                if !delivered {
                    handler.notification(method, params, self);
                }
            }
            _ => handler.notification(method, params, self),
        }
    }

    fn refuse(&self, id: Option<&RpcId>, error: &RpcError) -> Result<(), CloseReason> {
        let Ok(line) = error_line(id, error, usize::MAX) else {
            return Ok(());
        };
        let Ok(charge) = self.0.limits.budget.charge(line.len()) else {
            return Err(CloseReason::NotReading);
        };
        match self.0.queue.send_now(line, Some(charge)) > self.0.limits.max_refusal_bytes {
            true => Err(CloseReason::NotReading),
            false => Ok(()),
        }
    }
}
