//! The fast path of an ordinary `tools/call`: from the agent's line to a backend and back, without the MCP library.
//! Agents make thousands of these calls, and parsing and dispatching them in the library costs more than all the rest.
//!
//! Every other line goes via the library; [`FastPath::take`] decides. An agent sees no difference.

use std::{
    borrow::Cow,
    collections::HashMap,
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use oubliette_protocol::{
    ByteCharge, Error,
    budget::{CALL_OVERHEAD, call_bytes, parsed_bytes},
    tool::CallResult,
};
use oubliette_relay::ProgressCallback;
use parking_lot::Mutex;
use rmcp::model::{ProgressNotificationParam, ProgressToken, ProtocolVersion, RequestId};
use serde::{Deserialize, Serialize, de::IgnoredAny};
use serde_json::value::RawValue;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    agent_output::AgentOutput,
    line_filter::LineTaker,
    outcome::{CallAnswer, is_forwardable, to_mcp},
    progress::{Heartbeat, ProgressNotifier, ProgressReports, with_progress},
};

/// Maximum length of a request id as JSON, in bytes; a call with a longer one goes via the library. Open calls are
/// kept by their id.
const MAX_ID_BYTES: usize = 63;

/// Which way a line goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dispatch {
    /// The fast path has taken it.
    FastPath,
    /// The MCP library reads it.
    ViaLibrary,
}

/// Makes the calls of a fast path: over the relay socket in the client, directly in the server.
pub trait CallBackend: Send + Sync + 'static {
    /// How many calls may be open at once; more go via the library.
    const MAX_OPEN_CALLS: usize;

    /// Starts a call; none when the call is to go via the library. Name and arguments are read before it returns.
    /// When `cancel` fires the future ends soon, and its result is dropped.
    fn call(
        &self,
        name: &str,
        arguments: &RawValue,
        cancel: CancellationToken,
        progress: Option<ProgressCallback>,
    ) -> Option<impl Future<Output = CallAnswer> + Send + 'static + use<Self>>;

    /// The timer of calls whose agent asked for progress.
    fn heartbeat(&self) -> &Heartbeat;
}

/// The open calls of one agent that go without the MCP library.
pub struct FastPath<B> {
    backend: B,
    output: Arc<AgentOutput>,
    /// Whether a handshake agreed on a revision whose calls and results are plain: one before 2026-07-28.
    enabled: AtomicBool,
    open: Mutex<HashMap<RequestId, FastPathCall>>,
    tasks: TaskTracker,
}

impl<B> fmt::Debug for FastPath<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FastPath")
            .field("enabled", &self.enabled)
            .finish_non_exhaustive()
    }
}

/// An open call.
struct FastPathCall {
    /// Tells it from a later call with the same id.
    task: tokio::task::Id,
    cancel: CancellationToken,
}

impl<B: CallBackend> FastPath<B> {
    /// A fast path that takes nothing until it is enabled.
    pub fn new(backend: B, output: Arc<AgentOutput>) -> Arc<Self> {
        Arc::new(Self {
            backend,
            output,
            enabled: AtomicBool::new(false),
            open: Mutex::default(),
            tasks: TaskTracker::new(),
        })
    }

    /// Makes the calls.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Enables it if a handshake agreed on a revision before 2026-07-28. From that revision on there is no handshake,
    /// and each call carries its own revision.
    pub fn enable_for(&self, version: Option<&ProtocolVersion>) {
        let older = version.is_some_and(|v| v.as_str() < ProtocolVersion::V_2026_07_28.as_str());
        self.enabled.store(older, Ordering::Relaxed);
    }

    pub(crate) fn enable(&self) {
        self.enabled.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled.load(Ordering::Relaxed)
    }

    /// Takes a line if it is an ordinary call. This is the only place that decides.
    pub fn take(self: &Arc<Self>, line: &[u8]) -> Dispatch {
        if !self.is_enabled() {
            return Dispatch::ViaLibrary;
        }
        let Some(request) = CallRequest::parse(line) else {
            self.cancel_if_asked(line);
            return Dispatch::ViaLibrary;
        };
        // Held until the call is in the table: its task may end at once.
        let mut open = self.open.lock();
        if open.contains_key(&request.id) || open.len() >= B::MAX_OPEN_CALLS {
            return Dispatch::ViaLibrary;
        }
        let cancel = CancellationToken::new();
        let bytes = call_bytes(parsed_bytes(request.arguments.get().as_bytes()));
        let charge = match self.output.budget().charge(bytes) {
            Ok(charge) => charge,
            Err(over) => {
                let refused = CallAnswer::Failed(CallResult::error(&Error::from(over)));
                let charge = self.output.budget().empty_charge();
                let answer = std::future::ready(refused);
                let task = self
                    .tasks
                    .spawn(self.clone().respond(request.id.clone(), answer, charge));
                let task = task.id();
                open.insert(request.id, FastPathCall { task, cancel });
                return Dispatch::FastPath;
            }
        };
        let start = |progress| {
            self.backend
                .call(&request.name, request.arguments, cancel.clone(), progress)
        };
        let id = request.id.clone();
        let task = match request.token.clone() {
            None => start(None).map(|call| self.tasks.spawn(self.clone().respond(id, call, charge))),
            Some(token) => {
                let reports = Arc::new(ProgressReports::default());
                start(Some(reports.queueing())).map(|call| {
                    let (output, heartbeat) = (self.output.clone(), self.backend.heartbeat().clone());
                    let call =
                        async move { with_progress(call, token, &reports, &heartbeat, &*output).await };
                    self.tasks.spawn(self.clone().respond(id, call, charge))
                })
            }
        };
        let Some(task) = task else {
            return Dispatch::ViaLibrary;
        };
        let task = task.id();
        open.insert(request.id, FastPathCall { task, cancel });
        Dispatch::FastPath
    }

    /// Waits until every call has been answered and every answer written.
    async fn finished(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        // On a broken stream no answer can be written.
        let _ = self.output.written(self.output.end()).await;
    }

    /// Cancels every open call; none of them is answered.
    pub(crate) fn cancel_all(&self) {
        let open = std::mem::take(&mut *self.open.lock());
        open.into_values().for_each(|call| call.cancel.cancel());
    }

    /// Waits for a call and appends its answer. `charge` is what the call is charged, and then its answer.
    async fn respond(
        self: Arc<Self>,
        id: RequestId,
        call: impl Future<Output = CallAnswer>,
        mut charge: ByteCharge,
    ) {
        let mut answer = call.await;
        let bytes = call_bytes(answer.result_bytes());
        if (bytes > CALL_OVERHEAD || charge.bytes() > CALL_OVERHEAD)
            && let Err(over) = charge.resize(bytes)
        {
            answer = CallAnswer::Failed(CallResult::error(&Error::from(over)));
            let _ = charge.resize(CALL_OVERHEAD);
        }
        // While the agent does not read, the answer stays in this task.
        std::future::poll_fn(|context| self.output.poll_room(context)).await;
        if !self.remove_own_call(&id) {
            return;
        }
        let appended = match answer {
            CallAnswer::Received(source, raw) if is_forwardable(source, &raw) => {
                append_response(&self.output, &id, &*raw, charge)
            }
            other => {
                let mut result = to_mcp(other.into_result(), None);
                // Revisions of the fast path have no `resultType`.
                result.result_type = None;
                append_response(&self.output, &id, &result, charge)
            }
        };
        if let Err(why) = appended {
            eprintln!("oubliette: the response to a tools/call could not be serialized: {why}");
        }
    }

    /// Removes the call of the current task; false when it has been cancelled, and its id may be another call's.
    fn remove_own_call(&self, id: &RequestId) -> bool {
        let mut open = self.open.lock();
        let own = open
            .get(id)
            .is_some_and(|call| Some(call.task) == tokio::task::try_id());
        own && open.remove(id).is_some()
    }

    /// Cancels the call that a `notifications/cancelled` names; a cancelled call is not answered.
    fn cancel_if_asked(&self, line: &[u8]) {
        if self.open.lock().is_empty() {
            return;
        }
        let Some(id) = cancelled_request(line) else { return };
        let call = self.open.lock().remove(&id);
        if let Some(call) = call {
            call.cancel.cancel();
        }
    }
}

impl<B: CallBackend> LineTaker for Arc<FastPath<B>> {
    fn take(&mut self, line: &[u8]) -> Dispatch {
        FastPath::take(self, line)
    }

    fn output(&self) -> &AgentOutput {
        &self.output
    }

    fn finished(&self) -> impl Future<Output = ()> + Send + 'static {
        let fast_path = self.clone();
        async move { FastPath::finished(&fast_path).await }
    }
}

/// An ordinary call.
struct CallRequest<'a> {
    id: RequestId,
    name: Cow<'a, str>,
    arguments: &'a RawValue,
    token: Option<ProgressToken>,
}

/// The line of an ordinary call. One with any other field is not ordinary.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CallLine<'a> {
    jsonrpc: &'a str,
    #[serde(borrow)]
    id: &'a RawValue,
    method: &'a str,
    #[serde(borrow)]
    params: CallLineParams<'a>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CallLineParams<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    arguments: Option<&'a RawValue>,
    #[serde(default, rename = "_meta")]
    meta: Option<CallLineMeta>,
}

#[derive(Deserialize)]
struct CallLineMeta {
    #[serde(default, rename = "progressToken")]
    token: Option<ProgressToken>,
    /// A call that carries its own revision is of the stateless lifecycle.
    #[serde(default, rename = "io.modelcontextprotocol/protocolVersion")]
    version: Option<IgnoredAny>,
}

impl<'a> CallRequest<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let line: CallLine<'a> = serde_json::from_slice(line).ok()?;
        if line.jsonrpc != "2.0" || line.method != "tools/call" {
            return None;
        }
        let CallLineParams {
            name,
            arguments,
            meta,
        } = line.params;
        let token = match meta {
            Some(CallLineMeta { version: Some(_), .. }) => return None,
            Some(CallLineMeta { token, .. }) => token,
            None => None,
        };
        let arguments = match arguments {
            Some(arguments) => arguments,
            None => serde_json::from_str("{}").ok()?,
        };
        if !arguments.get().starts_with('{') {
            return None;
        }
        Some(Self {
            id: parse_id(line.id.get())?,
            name,
            arguments,
            token,
        })
    }
}

/// A short string or a plain whole number; any other id is left to the library.
fn parse_id(raw: &str) -> Option<RequestId> {
    match raw.starts_with('"') {
        _ if raw.len() > MAX_ID_BYTES => None,
        true => serde_json::from_str(raw).ok(),
        false if raw == "-0" => None,
        false => raw.parse().ok().map(RequestId::Number),
    }
}

/// The id of the request that a `notifications/cancelled` names; none for any other line.
fn cancelled_request(line: &[u8]) -> Option<RequestId> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct CancelledLine<'a> {
        jsonrpc: &'a str,
        method: &'a str,
        #[serde(borrow)]
        params: &'a RawValue,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct CancelledParams {
        request_id: RequestId,
    }
    let line: CancelledLine<'_> = serde_json::from_slice(line).ok()?;
    if line.jsonrpc != "2.0" || line.method != "notifications/cancelled" {
        return None;
    }
    let params: CancelledParams = serde_json::from_str(line.params.get()).ok()?;
    Some(params.request_id)
}

/// Appends the response to a request.
fn append_response(
    output: &AgentOutput,
    id: &RequestId,
    result: &(impl Serialize + ?Sized),
    charge: ByteCharge,
) -> io::Result<()> {
    #[derive(Serialize)]
    struct ResponseLine<'a, R: ?Sized> {
        jsonrpc: &'static str,
        id: &'a RequestId,
        result: &'a R,
    }
    let response = ResponseLine {
        jsonrpc: "2.0",
        id,
        result,
    };
    output
        .append(Some(charge), |bytes| write_line(bytes, &response))
        .map(drop)
}

impl ProgressNotifier for AgentOutput {
    /// Waits until the notification is written, so that none pile up for an agent that does not read.
    async fn notify(&self, params: ProgressNotificationParam) {
        #[derive(Serialize)]
        struct ProgressNotificationLine {
            jsonrpc: &'static str,
            method: &'static str,
            params: ProgressNotificationParam,
        }
        let notification = ProgressNotificationLine {
            jsonrpc: "2.0",
            method: "notifications/progress",
            params,
        };
        if let Ok(end) = self.append(None, |bytes| write_line(bytes, &notification)) {
            let _ = self.written(end).await;
        }
    }
}

fn write_line(bytes: &mut Vec<u8>, message: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *bytes, message)?;
    bytes.push(b'\n');
    Ok(())
}

/// Feeds arbitrary bytes through the fast path's parser; for the fuzzer. Panics if a line that is taken means another
/// call to the MCP library.
#[doc(hidden)]
pub fn fuzz_line(line: &[u8]) {
    use rmcp::model::{ClientJsonRpcMessage, ClientRequest};
    let _ = cancelled_request(line);
    let Some(taken) = CallRequest::parse(line) else {
        return;
    };
    // Escapes that are no characters are not looked at in what is passed on as text or left out. The backend parses the
    // arguments, and answers the call with an error where they are none.
    if serde_json::from_slice::<serde_json::Value>(line).is_err() {
        return;
    }
    let arguments: serde_json::Map<_, _> = serde_json::from_str(taken.arguments.get()).unwrap_or_default();
    let message = serde_json::from_slice::<ClientJsonRpcMessage>(line);
    let Ok(ClientJsonRpcMessage::Request(message)) = message else {
        panic!("a call to the fast path only: {message:?}");
    };
    assert_eq!(message.id, taken.id);
    let ClientRequest::CallToolRequest(call) = message.request else {
        panic!("another request to the library: {:?}", message.request);
    };
    assert_eq!(call.params.name, taken.name);
    // A key that stands twice counts once, with its last value, for both.
    assert_eq!(call.params.arguments.unwrap_or_default(), arguments);
}

#[cfg(test)]
pub(crate) mod tests;
