//! What passes between us and one server, looked at before the MCP client sees it.
//!
//! Three things are done here rather than in the client, because they are wanted of every transport:
//! results are taken as they stand on the wire (the client would fit them into its own types and lose what
//! it does not know) and read by whoever asked, progress is handed on in order, and what nobody asked for is
//! counted, so that a flood of it slows down the flooding server and nobody else.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
};

use bytes::Bytes;
use oubliette_protocol::CatalogId;
use parking_lot::Mutex;
use rmcp::model::{
    ClientJsonRpcMessage, ClientNotification, GetExtensions, GetMeta, NumberOrString, ServerJsonRpcMessage,
    ServerNotification, ServerResult,
};
use serde_json::{Value, value::RawValue};
use tokio::sync::{Notify, oneshot};

use super::{
    envelope::{Envelope, READ},
    latch::Latch,
    unasked::Unasked,
    wire::NotSent,
};
use crate::{Progress, Secrets, call::ProgressSink};

/// How a server's messages ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ending {
    /// It closed the connection.
    Closed,
    /// We did, for this reason.
    Fault(Arc<str>),
}

/// What goes with a request through the client's layers, never onto the wire.
#[derive(Clone)]
pub(super) struct Attached {
    /// Where the answer is put.
    pub(super) answer: Answer,
    /// Where progress goes.
    pub(super) progress: Option<ProgressSink>,
    /// Whether the client's HTTP transport has to read the result too, as it does tool lists: schemas there
    /// may name arguments that go into headers.
    pub(super) for_http: ForHttp,
}

/// See [`Attached::for_http`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ForHttp {
    /// It must not be troubled with it.
    Hidden,
    /// It reads it.
    Shown,
}

/// A request's result as it stood on the wire.
pub(super) type Answer = Arc<Mutex<Option<Bytes>>>;

/// What a call made past the client came to.
#[derive(Debug)]
pub(super) enum Reply {
    /// Its result, as it stood on the wire.
    Result(Bytes),
    /// The server's refusal.
    Refused(String),
    /// The request was not written, or not whole.
    NotSent(NotSent),
}

/// The first id of calls made past the client, which counts its own from nothing.
const FIRST_CALL: i64 = 1 << 30;

/// The traffic of one connection.
pub(super) struct Traffic {
    server: CatalogId,
    secrets: Arc<Secrets>,
    calls: Mutex<HashMap<i64, Open>>,
    next: AtomicI64,
    progress: Mutex<HashMap<i64, ProgressSink>>,
    unasked: Mutex<Unasked>,
    /// The server says that its tools have changed.
    pub(super) list_changed: Notify,
    /// Set when no more messages come.
    pub(super) ended: Latch<Ending>,
}

enum Open {
    /// The client's request: it is told that the answer came, which is put here.
    Client {
        answer: Answer,
        token: Option<i64>,
        for_http: ForHttp,
    },
    /// A call made past it. Its progress has its id.
    Call(oneshot::Sender<Reply>),
}

impl Traffic {
    /// Traffic with `server`.
    pub(super) fn new(server: CatalogId, secrets: Arc<Secrets>) -> Arc<Self> {
        Arc::new(Self {
            server,
            secrets,
            calls: Mutex::default(),
            next: AtomicI64::new(FIRST_CALL),
            progress: Mutex::default(),
            unasked: Mutex::new(Unasked::new()),
            list_changed: Notify::new(),
            ended: Latch::default(),
        })
    }

    /// Sees a message before it leaves, so that no answer can come before it is expected.
    pub(super) fn outgoing(&self, message: &ClientJsonRpcMessage) {
        match message {
            ClientJsonRpcMessage::Request(request) => {
                let Some(attached) = request.request.extensions().get::<Attached>() else {
                    return;
                };
                let NumberOrString::Number(id) = request.id else {
                    return;
                };
                let mut token = None;
                if let Some(sink) = &attached.progress
                    && let Some(NumberOrString::Number(number)) = request
                        .request
                        .get_meta()
                        .get_progress_token()
                        .map(|token| token.0)
                {
                    token = Some(number);
                    self.progress.lock().insert(number, sink.clone());
                }
                let open = Open::Client {
                    answer: attached.answer.clone(),
                    token,
                    for_http: attached.for_http,
                };
                self.calls.lock().insert(id, open);
            }
            ClientJsonRpcMessage::Notification(notification) => {
                if let ClientNotification::CancelledNotification(cancelled) = &notification.notification
                    && let Some(NumberOrString::Number(id)) = cancelled.params.request_id
                {
                    self.close(id);
                }
            }
            ClientJsonRpcMessage::Response(_) | ClientJsonRpcMessage::Error(_) => {}
        }
    }

    fn close(&self, id: i64) -> Option<Open> {
        let open = self.calls.lock().remove(&id)?;
        let token = match &open {
            Open::Client { token, .. } => *token,
            Open::Call(_) => Some(id),
        };
        if let Some(token) = token {
            self.progress.lock().remove(&token);
        }
        Some(open)
    }

    /// Opens a call that is made past the client: its id, and where its answer comes.
    pub(super) fn open_call(&self, progress: Option<ProgressSink>) -> (i64, oneshot::Receiver<Reply>) {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, reply) = oneshot::channel();
        if let Some(sink) = progress {
            self.progress.lock().insert(id, sink);
        }
        self.calls.lock().insert(id, Open::Call(sender));
        (id, reply)
    }

    /// How many calls are under way.
    pub(super) fn open_calls(&self) -> usize {
        self.calls.lock().len()
    }

    /// Closes a call nobody waits for any more; whether it was open.
    pub(super) fn give_up(&self, id: i64) -> bool {
        self.close(id).is_some()
    }

    /// Says that the request of a call was not written.
    pub(super) fn unsent(&self, id: i64, why: &NotSent) {
        if let Some(Open::Call(sender)) = self.close(id) {
            let _ = sender.send(Reply::NotSent(why.clone()));
        }
    }

    /// No answer comes any more: calls that wait for one need not.
    pub(super) fn hang_up(&self) {
        let mut calls = self.calls.lock();
        let left: Vec<i64> = calls
            .extract_if(|_, open| matches!(open, Open::Call(_)))
            .map(|(id, _)| id)
            .collect();
        drop(calls);
        let mut progress = self.progress.lock();
        for id in left {
            progress.remove(&id);
        }
    }

    /// Reads a message off the wire; `None` when the client has no business with it.
    pub(super) fn incoming(&self, text: &Bytes) -> Option<ServerJsonRpcMessage> {
        let unasked = || self.unasked.lock().count(text.len());
        let envelope = match serde_json::from_slice::<Envelope<'_>>(text) {
            Ok(envelope) => envelope,
            Err(error) => {
                unasked();
                if !text.is_empty() {
                    tracing::debug!(server = %self.server, %error, bytes = text.len(), "not a message");
                }
                return None;
            }
        };
        // Most of a flood is told by its method, without being read any further.
        match (envelope.method.as_deref(), envelope.id) {
            (None, _) => match self.settle(&envelope, text) {
                Settled::Here => return None,
                Settled::Client(id) => return Some(came(id)),
                Settled::No => {}
            },
            (Some(_), Some(_)) => {}
            (Some("notifications/tools/list_changed"), None) => {
                unasked();
                self.list_changed.notify_one();
                return None;
            }
            (Some("notifications/progress"), None) if self.progress.lock().is_empty() => {
                unasked();
                return None;
            }
            (Some(method), None) if !READ.contains(&method) => {
                unasked();
                return None;
            }
            (Some(_), None) => {}
        }
        match serde_json::from_slice::<ServerJsonRpcMessage>(text) {
            Ok(message) => self.sift(message, text.len()),
            Err(error) => {
                unasked();
                tracing::debug!(server = %self.server, %error, bytes = text.len(), "not a message of MCP");
                None
            }
        }
    }

    /// The answer to a request of ours over HTTP, if `text` is one and the client need not read it. The
    /// request stays open until the client's transport has passed on what came before it, progress above
    /// all; [`Traffic::sift`] sees the end of it.
    pub(super) fn answered(&self, text: &Bytes) -> Option<ServerJsonRpcMessage> {
        let envelope: Envelope<'_> = serde_json::from_slice(text).ok()?;
        let (id, result) = (envelope.answers()?, envelope.result?);
        match self.calls.lock().get(&id)? {
            Open::Client {
                answer,
                for_http: ForHttp::Hidden,
                ..
            } => {
                keep(answer, text, result);
                Some(came(id))
            }
            Open::Client { .. } | Open::Call(_) => None,
        }
    }

    /// The answer to a request of ours, if `text` is one.
    fn settle(&self, envelope: &Envelope<'_>, text: &Bytes) -> Settled {
        let Some(id) = envelope.answers() else {
            return Settled::No;
        };
        // An error to a request of the client's is the client's to read.
        if envelope.result.is_none() && id < FIRST_CALL {
            return Settled::No;
        }
        match (self.close(id), envelope.result) {
            (Some(Open::Call(sender)), result) => {
                let reply = match result {
                    Some(result) => Reply::Result(text.slice_ref(result.get().as_bytes())),
                    None => Reply::Refused(envelope.refusal()),
                };
                // Nobody may be waiting any more.
                let _ = sender.send(reply);
                Settled::Here
            }
            (Some(Open::Client { answer, .. }), Some(result)) => {
                keep(&answer, text, result);
                Settled::Client(id)
            }
            (Some(Open::Client { .. }) | None, _) => Settled::No,
        }
    }

    /// Takes out of the client's way what is dealt with here.
    pub(super) fn sift(&self, message: ServerJsonRpcMessage, bytes: usize) -> Option<ServerJsonRpcMessage> {
        match &message {
            ServerJsonRpcMessage::Response(response) => self.settled(&response.id),
            ServerJsonRpcMessage::Error(error) => match &error.id {
                Some(id) => self.settled(id),
                None => self.unasked.lock().count(bytes),
            },
            ServerJsonRpcMessage::Request(_) => self.unasked.lock().count(bytes),
            ServerJsonRpcMessage::Notification(notification) => {
                self.unasked.lock().count(bytes);
                match &notification.notification {
                    ServerNotification::ProgressNotification(progress) => {
                        let progress = &progress.params;
                        let sink = match &progress.progress_token.0 {
                            NumberOrString::Number(token) => self.progress.lock().get(token).cloned(),
                            NumberOrString::String(_) => None,
                        };
                        if let Some(sink) = sink {
                            sink(Progress {
                                progress: progress.progress,
                                total: progress.total,
                                message: progress.message.clone(),
                            });
                        }
                        return None;
                    }
                    #[allow(deprecated, reason = "on its way out of MCP, and still what servers say")]
                    ServerNotification::LoggingMessageNotification(log) => {
                        self.log(&log.params.level, &log.params.data);
                        return None;
                    }
                    ServerNotification::ToolListChangedNotification(_) => {
                        self.list_changed.notify_one();
                        return None;
                    }
                    ServerNotification::ResourceUpdatedNotification(_)
                    | ServerNotification::ResourceListChangedNotification(_)
                    | ServerNotification::PromptListChangedNotification(_)
                    | ServerNotification::TaskStatusNotification(_)
                    | ServerNotification::CustomNotification(_) => return None,
                    // The client's own: it follows subscriptions with these.
                    _ => {}
                }
            }
        }
        Some(message)
    }

    /// An answer to a call is expected. Any other is, or is not, the client's: they are counted, since a
    /// flood can be made of them, but may be large, as tool lists are.
    fn settled(&self, id: &NumberOrString) {
        if let NumberOrString::Number(id) = id
            && self.close(*id).is_none()
        {
            self.unasked.lock().count(0);
        }
    }

    fn log(&self, level: &impl std::fmt::Debug, data: &Value) {
        if tracing::enabled!(tracing::Level::DEBUG) {
            let text = match data {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let text = self.secrets.mask_text(super::fault::bounded(&text));
            tracing::debug!(server = %self.server, ?level, "{text}");
        }
    }

    /// Waits while the server has said more unasked than is read in a window.
    pub(super) async fn unhurried(&self) {
        let until = self.unasked.lock().pause();
        if let Some(until) = until {
            tokio::time::sleep_until(until).await;
        }
    }
}

/// Whose an answer was.
enum Settled {
    /// A call's; it has it.
    Here,
    /// The client's, with this id.
    Client(i64),
    /// No answer, or to nothing that is known here.
    No,
}

/// Keeps a result as it stands.
fn keep(answer: &Answer, text: &Bytes, result: &RawValue) {
    *answer.lock() = Some(text.slice_ref(result.get().as_bytes()));
}

/// All that the client learns of an answer that is kept.
fn came(id: i64) -> ServerJsonRpcMessage {
    ServerJsonRpcMessage::response(ServerResult::empty(()), NumberOrString::Number(id))
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::upstream::{envelope::read_result, limits};
    use rmcp::model::{CallToolRequest, CallToolRequestParams, ClientRequest};
    use serde_json::json;

    fn traffic() -> Arc<Traffic> {
        Traffic::new("t".parse().unwrap(), Arc::default())
    }

    fn call(traffic: &Traffic, id: i64) -> Answer {
        let answer = Answer::default();
        let mut request = CallToolRequest::new(CallToolRequestParams::new("x"));
        request.extensions.insert(Attached {
            answer: answer.clone(),
            progress: None,
            for_http: ForHttp::Hidden,
        });
        let request = ClientRequest::CallToolRequest(request);
        traffic.outgoing(&ClientJsonRpcMessage::request(
            request,
            NumberOrString::Number(id),
        ));
        answer
    }

    #[test]
    fn a_result_passes_untouched() {
        let traffic = traffic();
        let content = json!([
            {"type":"image","data":"aGk=","mimeType":"image/png","unknownField":[1]},
            {"type":"from_the_future","x":1},
        ]);
        for (id, sent) in [(7, json!(7)), (8, json!("8"))] {
            let answer = call(&traffic, id);
            let text = json!({"jsonrpc":"2.0","id":sent,"result":{
                "content":content,"structuredContent":{"z":1,"a":2},"isError":true,"_meta":{}}});
            let seen = traffic.incoming(&Bytes::from(text.to_string())).unwrap();
            assert!(matches!(seen, ServerJsonRpcMessage::Response(r) if r.id == NumberOrString::Number(id)));
            let result = read_result(&answer.lock().take().unwrap()).unwrap();
            assert_eq!(Value::from(result.content), content);
            assert_eq!(result.structured_content.unwrap().to_string(), r#"{"z":1,"a":2}"#);
            assert!(result.is_error);
        }
        assert!(traffic.calls.lock().is_empty());
    }

    #[test]
    fn an_answer_over_http_leaves_the_way_free_for_what_came_before_it() {
        let traffic = traffic();
        let answer = call(&traffic, 3);
        let text = Bytes::from_static(br#"{"jsonrpc":"2.0","id":3,"result":{"content":[]}}"#);
        let passed_on = traffic.answered(&text).unwrap();
        assert!(answer.lock().is_some() && traffic.calls.lock().contains_key(&3));
        traffic.sift(passed_on, 0).unwrap();
        assert!(traffic.calls.lock().is_empty());
        assert_eq!(traffic.unasked.lock().messages, 0);
    }

    #[test]
    fn a_cancelled_call_is_forgotten_with_its_late_answer() {
        let traffic = traffic();
        let answer = call(&traffic, 1);
        let cancelled = json!({"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}});
        traffic.outgoing(&serde_json::from_value(cancelled).unwrap());
        traffic.incoming(&Bytes::from_static(
            br#"{"jsonrpc":"2.0","id":1,"result":{"content":[]}}"#,
        ));
        assert!(answer.lock().is_none());
        assert_eq!(traffic.unasked.lock().messages, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_is_held_back_until_the_window_is_over() {
        let traffic = traffic();
        for _ in 0..=limits::UNASKED_MESSAGES {
            traffic.incoming(&Bytes::from_static(b"noise"));
        }
        let before = Instant::now();
        traffic.unhurried().await;
        assert!(before.elapsed() >= limits::UNASKED_WINDOW / 2);
        traffic.unhurried().await;
        traffic.incoming(&Bytes::from(vec![b'x'; limits::UNASKED_BYTES + 1]));
        assert!(traffic.unasked.lock().pause().is_some());
    }
}
