//! What the server runs between an agent and its client, on handed-off streams.
//!
//! Ordinary calls are taken out of what the agent writes and answered here. Everything else the agent writes is
//! forwarded to the client, and what the client writes is forwarded to the agent, line by line.

use std::{borrow::Cow, pin::Pin, sync::Arc, time::Duration};

use oubliette_os::{UntrustedReader, UntrustedWriter};
use oubliette_protocol::{
    ByteBudget, Error,
    relay::{MAX_LINE_BYTES, RpcError},
    tool::ToolSource,
};
use oubliette_relay::{CallError, ProgressCallback};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio_util::sync::CancellationToken;

use crate::{
    agent_output::AgentOutput,
    fast_path::{CallBackend, Dispatch, FastPath},
    handshake::{AGENT_CLOSED, HandedOff},
    line_filter::{LAST_CALLS_TIMEOUT, LineFilter, LineTaker},
    outcome::{CallAnswer, call_failed},
    progress::Heartbeat,
};

/// How much may wait to be written to an agent before no more is read from it, in bytes.
const BACKLOG: usize = 16 * 1024 * 1024;
/// How much is read at once, and what an idle buffer keeps, in bytes.
const CHUNK: usize = 8 * 1024;
/// How long the last answers may take to be written.
const LAST_WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// The result of a call that has been started: the source that answered, and its answer as JSON text.
pub type PendingResult = Pin<Box<dyn Future<Output = Result<(ToolSource, Box<RawValue>), Error>> + Send>>;

/// The tools that can be called in this process.
pub trait LocalTools: Send + Sync + 'static {
    /// Starts a call; none when the client is to handle it. `key` is the agent's API key, if it has one. When
    /// `cancel` fires nobody waits for the result any longer; the future is still polled until it ends, so that the
    /// call can end in order.
    fn call(
        &self,
        name: &str,
        arguments: &RawValue,
        key: Option<&str>,
        cancel: CancellationToken,
        progress: Option<ProgressCallback>,
    ) -> Option<PendingResult>;
}

/// Forwards between agent and client and answers ordinary calls, until either is gone or `stop` fires. What is kept for
/// the agent meanwhile is charged to `budget`.
pub async fn run(handed_off: HandedOff, tools: impl LocalTools, stop: CancellationToken, budget: ByteBudget) {
    let HandedOff {
        stdin,
        stdout,
        client,
        key,
    } = handed_off;
    let CloseOnDrop(output) = &CloseOnDrop(AgentOutput::start(stdout, BACKLOG, budget));
    let calls = LocalCalls {
        tools,
        key,
        heartbeat: Heartbeat::default(),
    };
    let fast_path = FastPath::new(calls, output.clone());
    let taker = InterceptedLines {
        fast_path: fast_path.clone(),
        handshake: HandshakeWatch::default(),
    };
    let (from_client, to_client) = client.into_split();
    let mut inward = std::pin::pin!(forward_to_client(
        LineFilter::with_chunk(stdin, taker, CHUNK),
        to_client
    ));
    let mut outward = std::pin::pin!(forward_to_agent(from_client, output));
    tokio::select! {
        () = stop.cancelled() => {}
        () = &mut inward => {}
        () = &mut outward => {}
    }
    fast_path.cancel_all();
    let _ = tokio::time::timeout(LAST_WRITE_TIMEOUT, output.written(output.end())).await;
    output.close();
}

/// Closes the agent's stdout also when [`run`] is dropped: the writing task would keep it open.
struct CloseOnDrop(Arc<AgentOutput>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Forwards what the agent writes and the fast path does not take. It returns when the client is gone, not when the
/// agent is: a client that learns of the agent's end may have answers left to write.
async fn forward_to_client<R: AsyncRead + Unpin, T: LineTaker + Unpin>(
    mut agent: LineFilter<R, T>,
    mut client: UntrustedWriter,
) {
    let mut bytes = vec![0; CHUNK / 4];
    let input_ended = agent.input_ended();
    let mut last_calls_over = std::pin::pin!(async move {
        input_ended.cancelled().await;
        tokio::time::sleep(LAST_CALLS_TIMEOUT).await;
    });
    loop {
        let read = tokio::select! {
            read = agent.read(&mut bytes) => read.unwrap_or(0),
            () = &mut last_calls_over => 0,
        };
        if read == 0 {
            break;
        }
        if client.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
    if client.write_all(&[AGENT_CLOSED]).await.is_ok() && client.shutdown().await.is_ok() {
        std::future::pending().await
    }
}

/// Forwards what the client writes, whole lines at a time.
async fn forward_to_agent(mut client: UntrustedReader, output: &AgentOutput) {
    let mut bytes = Vec::new();
    let mut charge = output.budget().empty_charge();
    loop {
        std::future::poll_fn(|context| output.poll_room(context)).await;
        bytes.reserve(CHUNK / 4);
        match client.read_buf(&mut bytes).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if let Some(end) = memchr::memrchr(b'\n', &bytes) {
            // Without room for its lines the client is disconnected, and then ends.
            let Ok(charge) = output.budget().charge(end + 1) else {
                return;
            };
            output.append_lines(&bytes[..=end], Some(charge));
            bytes.drain(..=end);
            bytes.shrink_to(CHUNK);
        }
        let unfinished = bytes.capacity();
        if charge
            .resize(if unfinished > 4 * CHUNK { unfinished } else { 0 })
            .is_err()
        {
            return;
        }
        if bytes.len() > 2 * MAX_LINE_BYTES {
            // Our client writes no line of this length.
            return;
        }
    }
}

/// Takes ordinary calls, once a handshake between agent and client has been seen.
struct InterceptedLines<T: LocalTools> {
    fast_path: Arc<FastPath<LocalCalls<T>>>,
    handshake: HandshakeWatch,
}

impl<T: LocalTools> LineTaker for InterceptedLines<T> {
    fn take(&mut self, line: &[u8]) -> Dispatch {
        if !self.fast_path.is_enabled() {
            if self.handshake.is_completed_by(line) {
                self.fast_path.enable();
            }
            return Dispatch::ViaLibrary;
        }
        self.fast_path.take(line)
    }

    fn output(&self) -> &AgentOutput {
        self.fast_path.output()
    }

    fn finished(&self) -> impl Future<Output = ()> + Send + 'static {
        self.fast_path.finished()
    }
}

/// Watches for the handshake that the agent and the client make. Only revisions before 2026-07-28 have one, so its end
/// is all the fast path needs.
#[derive(Default)]
struct HandshakeWatch {
    begun: bool,
}

impl HandshakeWatch {
    fn is_completed_by(&mut self, line: &[u8]) -> bool {
        match method(line).as_deref() {
            Some("initialize") => {
                self.begun = true;
                false
            }
            Some("notifications/initialized") => self.begun,
            _ => false,
        }
    }
}

fn method(line: &[u8]) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct AnyMessage<'a> {
        #[serde(borrow)]
        method: Cow<'a, str>,
    }
    let message: AnyMessage<'_> = serde_json::from_slice(line).ok()?;
    Some(message.method)
}

/// The calls of a fast path, made in this process.
struct LocalCalls<T> {
    tools: T,
    key: Option<String>,
    heartbeat: Heartbeat,
}

impl<T: LocalTools> CallBackend for LocalCalls<T> {
    /// Bounds what one agent can have open here. More calls go by the client over the relay socket, which has a limit
    /// of its own.
    const MAX_OPEN_CALLS: usize = 1023;

    fn call(
        &self,
        name: &str,
        arguments: &RawValue,
        cancel: CancellationToken,
        progress: Option<ProgressCallback>,
    ) -> Option<impl Future<Output = CallAnswer> + Send + 'static + use<T>> {
        let key = self.key.as_deref();
        let result = self.tools.call(name, arguments, key, cancel, progress)?;
        Some(async move {
            match result.await {
                Ok((source, raw)) => CallAnswer::Received(source, raw),
                Err(error) => CallAnswer::Failed(call_failed(CallError::Remote(RpcError::from(&error)))),
            }
        })
    }

    fn heartbeat(&self) -> &Heartbeat {
        &self.heartbeat
    }
}
