//! The short way of an ordinary tool call: from the agent's line to the server's, and back, past the MCP
//! library. Agents make thousands of these, and the library's care costs more than all the rest.
//!
//! What is not ordinary goes the long way: see [`Lane::take`] for who decides. The two ways look the same
//! to an agent.

use std::{
    borrow::Cow,
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use oubliette_relay::CallOptions;
use parking_lot::Mutex;
use rmcp::model::{ProgressNotificationParam, ProgressToken, ProtocolVersion, RequestId};
use serde::{Deserialize, Serialize, de::IgnoredAny};
use serde_json::value::RawValue;
use tokio::task::AbortHandle;
use tokio_util::task::TaskTracker;

use crate::{
    call::{Answer, Calls},
    out::Out,
    outcome::{as_it_stands, to_mcp},
    patience::{Reports, Tell, patiently},
};

/// Which way a line goes.
#[derive(Debug, PartialEq)]
pub(crate) enum Way {
    /// It has been taken.
    Lane,
    /// Through the MCP library.
    Long,
}

/// The calls that go the short way.
pub(crate) struct Lane {
    calls: Arc<Calls>,
    out: Arc<Out>,
    /// Whether the agent and the library have agreed on a revision whose calls and results are plain.
    agreed: AtomicBool,
    open: Mutex<HashMap<RequestId, AbortHandle>>,
    tasks: TaskTracker,
}

impl Lane {
    pub(crate) fn new(calls: Arc<Calls>, out: Arc<Out>) -> Arc<Self> {
        Arc::new(Self {
            calls,
            out,
            agreed: AtomicBool::new(false),
            open: Mutex::default(),
            tasks: TaskTracker::new(),
        })
    }

    pub(crate) fn out(&self) -> &Out {
        &self.out
    }

    /// A handshake agreed on this revision; from 2026-07-28 on there is none, and each call says its own.
    pub(crate) fn open_for(&self, version: Option<&ProtocolVersion>) {
        let older = version.is_some_and(|v| v.as_str() < ProtocolVersion::V_2026_07_28.as_str());
        self.agreed.store(older, Ordering::Relaxed);
    }

    /// Takes a line that may go by the lane. This is the one place that decides.
    pub(crate) fn take(self: &Arc<Self>, line: &[u8]) -> Way {
        if !self.agreed.load(Ordering::Relaxed) {
            return Way::Long;
        }
        let Some(request) = Request::read(line) else {
            self.hear(line);
            return Way::Long;
        };
        // Held until the call is in the table: it may end at once.
        let mut open = self.open.lock();
        if open.contains_key(&request.id) {
            return Way::Long;
        }
        let id = request.id.clone();
        let task = match request.token.clone() {
            None => {
                let calling = self.start(&request, CallOptions::default());
                self.tasks.spawn(self.clone().answer(request.id, calling))
            }
            Some(token) => {
                let reports = Arc::new(Reports::default());
                let calling = self.start(&request, reports.hear(CallOptions::default()));
                let (out, beat) = (self.out.clone(), self.calls.beat.clone());
                let calling = async move { patiently(calling, token, &reports, &beat, &*out).await };
                self.tasks.spawn(self.clone().answer(request.id, calling))
            }
        };
        open.insert(id, task.abort_handle());
        Way::Lane
    }

    /// Waits until every call has been answered and every answer written.
    pub(crate) async fn finished(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        // A stream that broke has had its answers.
        let _ = self.out.written(self.out.mark()).await;
    }

    fn start(&self, request: &Request<'_>, options: CallOptions) -> impl Future<Output = Answer> + use<> {
        self.calls.start(&request.name, request.arguments, options)
    }

    async fn answer(self: Arc<Self>, id: RequestId, calling: impl Future<Output = Answer>) {
        let answer = calling.await;
        if !self.close(&id) {
            return;
        }
        let appended = match answer {
            Answer::Given(route, raw) if as_it_stands(&route, &raw) => respond(&self.out, &id, &*raw),
            // Revisions of the lane have no `resultType`.
            other => {
                let mut result = to_mcp(other.result(), None);
                result.result_type = None;
                respond(&self.out, &id, &result)
            }
        };
        if let Err(why) = appended {
            eprintln!("oubliette-client: an answer could not be written: {why}");
        }
    }

    /// Ends this task's call; false when it has been cancelled, and its id may be another's.
    fn close(&self, id: &RequestId) -> bool {
        let mut open = self.open.lock();
        let mine = open
            .get(id)
            .is_some_and(|task| Some(task.id()) == tokio::task::try_id());
        mine && open.remove(id).is_some()
    }

    /// A cancelled call is dropped, which tells the server, and never answered.
    fn hear(&self, line: &[u8]) {
        if self.open.lock().is_empty() {
            return;
        }
        let Some(id) = cancelled(line) else { return };
        if let Some(task) = self.open.lock().remove(&id) {
            task.abort();
        }
    }
}

/// An ordinary call.
struct Request<'a> {
    id: RequestId,
    name: Cow<'a, str>,
    arguments: &'a RawValue,
    token: Option<ProgressToken>,
}

/// The line as it must be; a field more, and it is not ordinary.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line<'a> {
    jsonrpc: &'a str,
    #[serde(borrow)]
    id: &'a RawValue,
    method: &'a str,
    #[serde(borrow)]
    params: Params<'a>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    arguments: Option<&'a RawValue>,
    #[serde(default, rename = "_meta")]
    meta: Option<Meta>,
}

#[derive(Deserialize)]
struct Meta {
    #[serde(default, rename = "progressToken")]
    token: Option<ProgressToken>,
    /// A call that says its own revision is of the stateless lifecycle.
    #[serde(default, rename = "io.modelcontextprotocol/protocolVersion")]
    version: Option<IgnoredAny>,
}

impl<'a> Request<'a> {
    fn read(line: &'a [u8]) -> Option<Self> {
        let line: Line<'a> = serde_json::from_slice(line).ok()?;
        if line.jsonrpc != "2.0" || line.method != "tools/call" {
            return None;
        }
        let Params {
            name,
            arguments,
            meta,
        } = line.params;
        let token = match meta {
            Some(Meta { version: Some(_), .. }) => return None,
            Some(Meta { token, .. }) => token,
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
            id: request_id(line.id.get())?,
            name,
            arguments,
            token,
        })
    }
}

/// A string or a plain whole number; the library knows what to make of others.
fn request_id(raw: &str) -> Option<RequestId> {
    match raw.starts_with('"') {
        true => serde_json::from_str(raw).ok(),
        false if raw == "-0" => None,
        false => raw.parse().ok().map(RequestId::Number),
    }
}

/// The request a line cancels, if that is what it does.
fn cancelled(line: &[u8]) -> Option<RequestId> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Notice<'a> {
        jsonrpc: &'a str,
        method: &'a str,
        #[serde(borrow)]
        params: &'a RawValue,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct About {
        request_id: RequestId,
    }
    let notice: Notice<'_> = serde_json::from_slice(line).ok()?;
    if notice.jsonrpc != "2.0" || notice.method != "notifications/cancelled" {
        return None;
    }
    let about: About = serde_json::from_str(notice.params.get()).ok()?;
    Some(about.request_id)
}

fn respond(out: &Out, id: &RequestId, result: &(impl Serialize + ?Sized)) -> io::Result<()> {
    #[derive(Serialize)]
    struct Response<'a, R: ?Sized> {
        jsonrpc: &'static str,
        id: &'a RequestId,
        result: &'a R,
    }
    let response = Response {
        jsonrpc: "2.0",
        id,
        result,
    };
    out.append(|bytes| line(bytes, &response)).map(drop)
}

impl Tell for Out {
    /// Waits until the report is written: an agent that does not read makes no reports pile up.
    async fn tell(&self, params: ProgressNotificationParam) {
        #[derive(Serialize)]
        struct Notice {
            jsonrpc: &'static str,
            method: &'static str,
            params: ProgressNotificationParam,
        }
        let notice = Notice {
            jsonrpc: "2.0",
            method: "notifications/progress",
            params,
        };
        if let Ok(mark) = self.append(|bytes| line(bytes, &notice)) {
            // An agent that is gone is noticed where its stdin is read.
            let _ = self.written(mark).await;
        }
    }
}

fn line(bytes: &mut Vec<u8>, message: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *bytes, message)?;
    bytes.push(b'\n');
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
