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
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    call::Answer,
    journal::{Journal, Note},
    out::Out,
    outcome::{as_it_stands, to_mcp},
    patience::{Beat, Reports, Tell, patiently},
};

/// Which way a line goes.
#[derive(Debug, PartialEq)]
pub(crate) enum Way {
    /// It has been taken.
    Lane,
    /// Through the MCP library.
    Long,
}

/// Where the calls of a lane lead.
pub(crate) trait Reach: Send + Sync + 'static {
    /// Starts a call; none when it is not one for the lane. Name and arguments are read at once.
    fn call(
        &self,
        name: &str,
        arguments: &RawValue,
        options: CallOptions,
    ) -> Option<Calling<impl Future<Output = Answer> + Send + 'static + use<Self>>>;

    /// The clock of those who wait.
    fn beat(&self) -> &Beat;
}

/// A call under way.
pub(crate) struct Calling<F> {
    pub(crate) answer: F,
    /// How it is given up; without it, by dropping the future.
    pub(crate) stop: Option<CancellationToken>,
}

/// The calls that go the short way.
pub(crate) struct Lane<C> {
    calls: Arc<C>,
    out: Arc<Out>,
    /// Whether the agent and the library have agreed on a revision whose calls and results are plain.
    agreed: AtomicBool,
    open: Mutex<HashMap<RequestId, Open>>,
    tasks: TaskTracker,
    /// Who only stands by hears whether a handshake has begun.
    overheard: Option<AtomicBool>,
    journal: Option<Arc<Journal>>,
}

/// An open call.
struct Open {
    task: AbortHandle,
    /// How it is given up; without it, by ending the task.
    stop: Option<CancellationToken>,
    note: Option<Note>,
}

impl Open {
    fn give_up(self) {
        match self.stop {
            Some(stop) => stop.cancel(),
            None => self.task.abort(),
        }
    }
}

impl<C: Reach> Lane<C> {
    pub(crate) fn new(calls: Arc<C>, out: Arc<Out>) -> Arc<Self> {
        Self::made(calls, out, None, None)
    }

    /// One between an agent and its client: it hears what they agree on, and its open calls are noted.
    pub(crate) fn between(calls: Arc<C>, out: Arc<Out>, journal: Arc<Journal>) -> Arc<Self> {
        Self::made(calls, out, Some(AtomicBool::new(false)), Some(journal))
    }

    fn made(
        calls: Arc<C>,
        out: Arc<Out>,
        overheard: Option<AtomicBool>,
        journal: Option<Arc<Journal>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            calls,
            out,
            agreed: AtomicBool::new(false),
            open: Mutex::default(),
            tasks: TaskTracker::new(),
            overheard,
            journal,
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

    /// A handshake that passes by opens the lane when it is done: only older revisions have one.
    fn overhear(&self, line: &[u8], begun: &AtomicBool) {
        match method(line).as_deref() {
            Some("initialize") => begun.store(true, Ordering::Relaxed),
            Some("notifications/initialized") if begun.load(Ordering::Relaxed) => {
                self.agreed.store(true, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    /// Takes a line that may go by the lane. This is the one place that decides.
    pub(crate) fn take(self: &Arc<Self>, line: &[u8]) -> Way {
        if !self.agreed.load(Ordering::Relaxed) {
            if let Some(overheard) = &self.overheard {
                self.overhear(line, overheard);
            }
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
        let note = match &self.journal {
            Some(journal) => match journal.note(&request.id) {
                Some(note) => Some(note),
                None => return Way::Long,
            },
            None => None,
        };
        let id = request.id.clone();
        let opened = match request.token.clone() {
            None => self.call(&request, CallOptions::default()).map(|calling| {
                let task = self.clone().answer(request.id, calling.answer);
                (self.tasks.spawn(task), calling.stop)
            }),
            Some(token) => {
                let reports = Arc::new(Reports::default());
                let calling = self.call(&request, reports.hear(CallOptions::default()));
                calling.map(|calling| {
                    let (out, beat) = (self.out.clone(), self.calls.beat().clone());
                    let answer =
                        async move { patiently(calling.answer, token, &reports, &beat, &*out).await };
                    let task = self.clone().answer(request.id, answer);
                    (self.tasks.spawn(task), calling.stop)
                })
            }
        };
        let Some((task, stop)) = opened else {
            self.strike(note);
            return Way::Long;
        };
        let task = task.abort_handle();
        open.insert(id, Open { task, stop, note });
        Way::Lane
    }

    /// Waits until every call has been answered and every answer written.
    pub(crate) async fn finished(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        // A stream that broke has had its answers.
        let _ = self.out.written(self.out.mark()).await;
    }

    /// The lines that were here have been taken.
    pub(crate) fn taken(&self) {
        if let Some(journal) = &self.journal {
            journal.save();
        }
    }

    /// Gives every call up. What was noted of them stays.
    pub(crate) fn give_up(&self) {
        let open = std::mem::take(&mut *self.open.lock());
        open.into_values().for_each(Open::give_up);
    }

    fn call(
        &self,
        request: &Request<'_>,
        options: CallOptions,
    ) -> Option<Calling<impl Future<Output = Answer> + Send + 'static + use<C>>> {
        self.calls.call(&request.name, request.arguments, options)
    }

    async fn answer(self: Arc<Self>, id: RequestId, calling: impl Future<Output = Answer>) {
        let answer = calling.await;
        // An agent that does not read has its answers wait where they are.
        std::future::poll_fn(|context| self.out.poll_room(context)).await;
        let Some(Open { note, .. }) = self.close(&id) else {
            return;
        };
        let appended = match answer {
            Answer::Given(source, raw) if as_it_stands(source, &raw) => respond(&self.out, note, &id, &*raw),
            // Revisions of the lane have no `resultType`.
            other => {
                let mut result = to_mcp(other.result(), None);
                result.result_type = None;
                respond(&self.out, note, &id, &result)
            }
        };
        if let Err(why) = appended {
            eprintln!("oubliette-client: an answer could not be written: {why}");
        }
    }

    /// Ends this task's call; none when it has been cancelled, and its id may be another's.
    fn close(&self, id: &RequestId) -> Option<Open> {
        let mut open = self.open.lock();
        let mine = open
            .get(id)
            .is_some_and(|call| Some(call.task.id()) == tokio::task::try_id());
        mine.then(|| open.remove(id)).flatten()
    }

    /// A cancelled call is given up, which tells the server, and never answered.
    fn hear(&self, line: &[u8]) {
        if self.open.lock().is_empty() {
            return;
        }
        let Some(id) = cancelled(line) else { return };
        let call = self.open.lock().remove(&id);
        if let Some(mut call) = call {
            self.strike(call.note.take());
            call.give_up();
        }
    }

    fn strike(&self, note: Option<Note>) {
        if let Some(journal) = &self.journal {
            journal.strike(note);
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

fn method(line: &[u8]) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct Message<'a> {
        #[serde(borrow)]
        method: Cow<'a, str>,
    }
    let message: Message<'_> = serde_json::from_slice(line).ok()?;
    Some(message.method)
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

/// Appends the answer to a request.
pub(crate) fn respond(
    out: &Out,
    note: Option<Note>,
    id: &RequestId,
    result: &(impl Serialize + ?Sized),
) -> io::Result<()> {
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
    out.append_noted(note, |bytes| line(bytes, &response)).map(drop)
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
