//! The filter between one server's messages and the MCP library.
//!
//! Three things are done here rather than in the library, for every transport alike: results are kept as they
//! stand on the wire (the library would deserialise them into its own types and lose unknown fields), progress
//! is passed to its call in order, and unsolicited messages are counted, so that a flooding server is throttled
//! and no other.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
};

use bytes::Bytes;
use oubliette_protocol::{
    CatalogId,
    relay::{ProgressCallback, ProgressReport},
};
use parking_lot::Mutex;
use rmcp::model::{
    ClientJsonRpcMessage, ClientNotification, GetExtensions, GetMeta, NumberOrString, ServerJsonRpcMessage,
    ServerNotification, ServerResult,
};
use serde_json::{Value, value::RawValue};
use tokio::sync::{Notify, oneshot};

use super::{
    envelope::{HANDLED_NOTIFICATIONS, ServerEnvelope},
    latch::Latch,
    unsolicited::UnsolicitedCounter,
    wire::SendFailure,
};
use crate::Secrets;

/// How the stream of a server's messages ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ConnectionEnd {
    /// The server closed the connection.
    Closed,
    /// It was closed here, or broke, for this reason.
    Fault(Arc<str>),
}

/// Attached to a request's extensions: passes through the library's layers with it, never onto the wire.
#[derive(Clone)]
pub(super) struct RequestAttachment {
    /// Receives the result.
    pub(super) result_slot: ResultSlot,
    /// Receives progress notifications.
    pub(super) progress: Option<ProgressCallback>,
    /// Whether the library's HTTP transport gets the result too. It needs tool lists: their schemas may name
    /// arguments that go into HTTP headers.
    pub(super) http_visibility: HttpResultVisibility,
}

/// See [`RequestAttachment::http_visibility`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HttpResultVisibility {
    /// It gets an empty result instead.
    Hidden,
    /// It gets the result.
    Shown,
}

/// Holds a request's result, as it stood on the wire, once it came.
pub(super) type ResultSlot = Arc<Mutex<Option<Bytes>>>;

/// The outcome of a direct call.
#[derive(Debug)]
pub(super) enum CallReply {
    /// The result, as it stood on the wire.
    Result(Bytes),
    /// The server's error message.
    Refused(String),
    /// The request was not written, or not completely.
    SendFailed(SendFailure),
}

/// First request id of direct calls. The library numbers its own requests from 0, so the ranges stay apart.
const FIRST_DIRECT_CALL_ID: i64 = 1 << 30;

/// Pending requests, progress sinks and the flood counter of one connection.
pub(super) struct TrafficFilter {
    server: CatalogId,
    secrets: Arc<Secrets>,
    pending: Mutex<HashMap<i64, PendingRequest>>,
    next_call_id: AtomicI64,
    progress: Mutex<HashMap<i64, ProgressCallback>>,
    unsolicited: Mutex<UnsolicitedCounter>,
    /// Notified when the server reports that its tools have changed.
    pub(super) list_changed: Notify,
    /// Set when no more messages will come.
    pub(super) ended: Latch<ConnectionEnd>,
}

/// A request that has no response yet.
enum PendingRequest {
    /// Sent by the library: the result goes into the slot, and the library gets an empty response.
    Library {
        result_slot: ResultSlot,
        progress_token: Option<i64>,
        http_visibility: HttpResultVisibility,
    },
    /// A direct call. Its progress token is its request id.
    Direct(oneshot::Sender<CallReply>),
}

impl TrafficFilter {
    /// A filter for the messages of `server`.
    pub(super) fn new(server: CatalogId, secrets: Arc<Secrets>) -> Arc<Self> {
        Arc::new(Self {
            server,
            secrets,
            pending: Mutex::default(),
            next_call_id: AtomicI64::new(FIRST_DIRECT_CALL_ID),
            progress: Mutex::default(),
            unsolicited: Mutex::new(UnsolicitedCounter::new()),
            list_changed: Notify::new(),
            ended: Latch::default(),
        })
    }

    /// Registers the library's request as pending before it is written, so that no response can come before it
    /// is expected; a cancellation removes it.
    pub(super) fn register_outgoing(&self, message: &ClientJsonRpcMessage) {
        match message {
            ClientJsonRpcMessage::Request(request) => {
                let Some(attached) = request.request.extensions().get::<RequestAttachment>() else {
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
                let request = PendingRequest::Library {
                    result_slot: attached.result_slot.clone(),
                    progress_token: token,
                    http_visibility: attached.http_visibility,
                };
                self.pending.lock().insert(id, request);
            }
            ClientJsonRpcMessage::Notification(notification) => {
                if let ClientNotification::CancelledNotification(cancelled) = &notification.notification
                    && let Some(NumberOrString::Number(id)) = cancelled.params.request_id
                {
                    self.remove_pending(id);
                }
            }
            ClientJsonRpcMessage::Response(_) | ClientJsonRpcMessage::Error(_) => {}
        }
    }

    fn remove_pending(&self, id: i64) -> Option<PendingRequest> {
        let request = self.pending.lock().remove(&id)?;
        let token = match &request {
            PendingRequest::Library {
                progress_token: token,
                ..
            } => *token,
            PendingRequest::Direct(_) => Some(id),
        };
        if let Some(token) = token {
            self.progress.lock().remove(&token);
        }
        Some(request)
    }

    /// Registers a direct call; returns its request id and the receiver of its outcome.
    pub(super) fn register_call(
        &self,
        progress: Option<ProgressCallback>,
    ) -> (i64, oneshot::Receiver<CallReply>) {
        let id = self.next_call_id.fetch_add(1, Ordering::Relaxed);
        let (sender, reply) = oneshot::channel();
        if let Some(sink) = progress {
            self.progress.lock().insert(id, sink);
        }
        self.pending.lock().insert(id, PendingRequest::Direct(sender));
        (id, reply)
    }

    /// How many requests have no response yet.
    pub(super) fn pending_count(&self) -> usize {
        self.pending.lock().len()
    }

    /// Removes a call nobody waits for any more; returns whether it was pending.
    pub(super) fn forget_call(&self, id: i64) -> bool {
        self.remove_pending(id).is_some()
    }

    /// Completes a direct call whose request could not be written.
    pub(super) fn report_send_failure(&self, id: i64, why: &SendFailure) {
        if let Some(PendingRequest::Direct(sender)) = self.remove_pending(id) {
            let _ = sender.send(CallReply::SendFailed(why.clone()));
        }
    }

    /// Drops all direct calls, so that their receivers fail: no more responses will come.
    pub(super) fn drop_direct_calls(&self) {
        let mut pending = self.pending.lock();
        let left: Vec<i64> = pending
            .extract_if(|_, request| matches!(request, PendingRequest::Direct(_)))
            .map(|(id, _)| id)
            .collect();
        drop(pending);
        let mut progress = self.progress.lock();
        for id in left {
            progress.remove(&id);
        }
    }

    /// Handles a message from the wire; returns what the library must see of it, if anything.
    pub(super) fn handle_incoming(&self, text: &Bytes) -> Option<ServerJsonRpcMessage> {
        let count_unsolicited = || self.unsolicited.lock().count(text.len());
        let envelope = match serde_json::from_slice::<ServerEnvelope<'_>>(text) {
            Ok(envelope) => envelope,
            Err(error) => {
                count_unsolicited();
                if !text.is_empty() {
                    tracing::debug!(server = %self.server, %error, bytes = text.len(), "ignored: not a JSON-RPC message");
                }
                return None;
            }
        };
        // Most messages of a flood are recognised by their method and not deserialised any further.
        match (envelope.method.as_deref(), envelope.id) {
            (None, _) => match self.complete(&envelope, text) {
                ResponseOwner::DirectCall => return None,
                ResponseOwner::Library(id) => return Some(ack(id)),
                ResponseOwner::NotPending => {}
            },
            (Some(_), Some(_)) => {}
            (Some("notifications/tools/list_changed"), None) => {
                count_unsolicited();
                self.list_changed.notify_one();
                return None;
            }
            (Some("notifications/progress"), None) if self.progress.lock().is_empty() => {
                count_unsolicited();
                return None;
            }
            (Some(method), None) if !HANDLED_NOTIFICATIONS.contains(&method) => {
                count_unsolicited();
                return None;
            }
            (Some(_), None) => {}
        }
        match serde_json::from_slice::<ServerJsonRpcMessage>(text) {
            Ok(message) => self.filter(message, text.len()),
            Err(error) => {
                count_unsolicited();
                tracing::debug!(server = %self.server, %error, bytes = text.len(), "ignored: not an MCP message");
                None
            }
        }
    }

    /// If `text` is the response to a library request over HTTP whose result stays hidden, keeps the result and
    /// returns an empty response for the library. The request stays pending until the library's transport has
    /// delivered what came before it, progress above all; then [`TrafficFilter::filter`] removes it.
    pub(super) fn intercept_http_response(&self, text: &Bytes) -> Option<ServerJsonRpcMessage> {
        let envelope: ServerEnvelope<'_> = serde_json::from_slice(text).ok()?;
        let (id, result) = (envelope.response_id()?, envelope.result?);
        match self.pending.lock().get(&id)? {
            PendingRequest::Library {
                result_slot,
                http_visibility: HttpResultVisibility::Hidden,
                ..
            } => {
                store_result(result_slot, text, result);
                Some(ack(id))
            }
            PendingRequest::Library { .. } | PendingRequest::Direct(_) => None,
        }
    }

    /// Completes the pending request that `envelope` responds to, if any.
    fn complete(&self, envelope: &ServerEnvelope<'_>, text: &Bytes) -> ResponseOwner {
        let Some(id) = envelope.response_id() else {
            return ResponseOwner::NotPending;
        };
        // The library handles errors to its own requests.
        if envelope.result.is_none() && id < FIRST_DIRECT_CALL_ID {
            return ResponseOwner::NotPending;
        }
        match (self.remove_pending(id), envelope.result) {
            (Some(PendingRequest::Direct(sender)), result) => {
                let reply = match result {
                    Some(result) => CallReply::Result(text.slice_ref(result.get().as_bytes())),
                    None => CallReply::Refused(envelope.error_message()),
                };
                // The call may have been dropped meanwhile.
                let _ = sender.send(reply);
                ResponseOwner::DirectCall
            }
            (Some(PendingRequest::Library { result_slot, .. }), Some(result)) => {
                store_result(&result_slot, text, result);
                ResponseOwner::Library(id)
            }
            (Some(PendingRequest::Library { .. }) | None, _) => ResponseOwner::NotPending,
        }
    }

    /// Handles progress, logging and list changes, counts unsolicited messages, and returns what the library must
    /// see.
    pub(super) fn filter(&self, message: ServerJsonRpcMessage, bytes: usize) -> Option<ServerJsonRpcMessage> {
        match &message {
            ServerJsonRpcMessage::Response(response) => self.note_response(&response.id),
            ServerJsonRpcMessage::Error(error) => match &error.id {
                Some(id) => self.note_response(id),
                None => self.unsolicited.lock().count(bytes),
            },
            ServerJsonRpcMessage::Request(_) => self.unsolicited.lock().count(bytes),
            ServerJsonRpcMessage::Notification(notification) => {
                self.unsolicited.lock().count(bytes);
                match &notification.notification {
                    ServerNotification::ProgressNotification(progress) => {
                        let progress = &progress.params;
                        let sink = match &progress.progress_token.0 {
                            NumberOrString::Number(token) => self.progress.lock().get(token).cloned(),
                            NumberOrString::String(_) => None,
                        };
                        if let Some(sink) = sink {
                            sink(ProgressReport {
                                progress: progress.progress,
                                total: progress.total,
                                message: progress.message.clone(),
                            });
                        }
                        return None;
                    }
                    #[allow(deprecated, reason = "deprecated in MCP, but servers still send it")]
                    ServerNotification::LoggingMessageNotification(log) => {
                        self.log_server_message(&log.params.level, &log.params.data);
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
                    // The library tracks its subscriptions with these.
                    _ => {}
                }
            }
        }
        Some(message)
    }

    /// Removes the pending request. A response to an unregistered request may be to one of the library's own:
    /// its message is counted, since a flood can be made of such responses, its bytes are not, since tool lists
    /// are large.
    fn note_response(&self, id: &NumberOrString) {
        if let NumberOrString::Number(id) = id
            && self.remove_pending(*id).is_none()
        {
            self.unsolicited.lock().count(0);
        }
    }

    fn log_server_message(&self, level: &impl std::fmt::Debug, data: &Value) {
        if tracing::enabled!(tracing::Level::DEBUG) {
            let text = match data {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let text = self.secrets.mask_text(super::fault::truncate_error(&text));
            tracing::debug!(server = %self.server, ?level, "{text}");
        }
    }

    /// Waits until the end of the window if the server sent too many unsolicited messages in it.
    pub(super) async fn throttle(&self) {
        let until = self.unsolicited.lock().paused_until();
        if let Some(until) = until {
            tokio::time::sleep_until(until).await;
        }
    }
}

/// Which request a response completed.
enum ResponseOwner {
    /// A direct call, which has received it.
    DirectCall,
    /// The library's request with this id.
    Library(i64),
    /// None that is registered here, or the message is no response.
    NotPending,
}

/// Puts a result into its slot as it stands on the wire.
fn store_result(slot: &ResultSlot, text: &Bytes, result: &RawValue) {
    *slot.lock() = Some(text.slice_ref(result.get().as_bytes()));
}

/// The empty response the library gets in place of a result that is kept here.
fn ack(id: i64) -> ServerJsonRpcMessage {
    ServerJsonRpcMessage::response(ServerResult::empty(()), NumberOrString::Number(id))
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::upstream::{envelope::read_result, limits};
    use rmcp::model::{CallToolRequest, CallToolRequestParams, ClientRequest};
    use serde_json::json;

    fn traffic() -> Arc<TrafficFilter> {
        TrafficFilter::new("t".parse().unwrap(), Arc::default())
    }

    fn call(traffic: &TrafficFilter, id: i64) -> ResultSlot {
        let answer = ResultSlot::default();
        let mut request = CallToolRequest::new(CallToolRequestParams::new("x"));
        request.extensions.insert(RequestAttachment {
            result_slot: answer.clone(),
            progress: None,
            http_visibility: HttpResultVisibility::Hidden,
        });
        let request = ClientRequest::CallToolRequest(request);
        traffic.register_outgoing(&ClientJsonRpcMessage::request(
            request,
            NumberOrString::Number(id),
        ));
        answer
    }

    #[test]
    fn a_result_is_kept_byte_for_byte() {
        let traffic = traffic();
        let content = json!([
            {"type":"image","data":"aGk=","mimeType":"image/png","unknownField":[1]},
            {"type":"from_the_future","x":1},
        ]);
        for (id, sent) in [(7, json!(7)), (8, json!("8"))] {
            let answer = call(&traffic, id);
            let text = json!({"jsonrpc":"2.0","id":sent,"result":{
                "content":content,"structuredContent":{"z":1,"a":2},"isError":true,"_meta":{}}});
            let seen = traffic.handle_incoming(&Bytes::from(text.to_string())).unwrap();
            assert!(matches!(seen, ServerJsonRpcMessage::Response(r) if r.id == NumberOrString::Number(id)));
            let result = read_result(&answer.lock().take().unwrap()).unwrap();
            assert_eq!(Value::from(result.content), content);
            assert_eq!(result.structured_content.unwrap().to_string(), r#"{"z":1,"a":2}"#);
            assert!(result.is_error);
        }
        assert!(traffic.pending.lock().is_empty());
    }

    #[test]
    fn a_request_over_http_stays_pending_until_its_response_is_delivered() {
        let traffic = traffic();
        let answer = call(&traffic, 3);
        let text = Bytes::from_static(br#"{"jsonrpc":"2.0","id":3,"result":{"content":[]}}"#);
        let passed_on = traffic.intercept_http_response(&text).unwrap();
        assert!(answer.lock().is_some() && traffic.pending.lock().contains_key(&3));
        traffic.filter(passed_on, 0).unwrap();
        assert!(traffic.pending.lock().is_empty());
        assert_eq!(traffic.unsolicited.lock().messages, 0);
    }

    #[test]
    fn a_late_response_to_a_cancelled_call_is_dropped_and_counted() {
        let traffic = traffic();
        let answer = call(&traffic, 1);
        let cancelled = json!({"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}});
        traffic.register_outgoing(&serde_json::from_value(cancelled).unwrap());
        traffic.handle_incoming(&Bytes::from_static(
            br#"{"jsonrpc":"2.0","id":1,"result":{"content":[]}}"#,
        ));
        assert!(answer.lock().is_none());
        assert_eq!(traffic.unsolicited.lock().messages, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_is_throttled_until_the_window_is_over() {
        let traffic = traffic();
        for _ in 0..=limits::MAX_UNSOLICITED_MESSAGES {
            traffic.handle_incoming(&Bytes::from_static(b"noise"));
        }
        let before = Instant::now();
        traffic.throttle().await;
        assert!(before.elapsed() >= limits::UNSOLICITED_WINDOW / 2);
        traffic.throttle().await;
        traffic.handle_incoming(&Bytes::from(vec![b'x'; limits::MAX_UNSOLICITED_BYTES + 1]));
        assert!(traffic.unsolicited.lock().paused_until().is_some());
    }
}
