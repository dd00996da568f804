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
    ByteBudget, ByteCharge, CatalogId, OverBudget,
    budget::UNCHARGED,
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
    dropped_message::DroppedMessage,
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

/// A result, as it stood on the wire, with what it is charged.
#[derive(Debug)]
pub(super) struct ReceivedResult {
    pub(super) text: Bytes,
    pub(super) charge: Option<ByteCharge>,
}

/// Holds a request's result once it came, or why it could not be kept.
pub(super) type ResultSlot = Arc<Mutex<Option<Result<ReceivedResult, OverBudget>>>>;

/// The outcome of a direct call.
#[derive(Debug)]
pub(super) enum CallReply {
    /// The result, or why it could not be kept.
    Result(Result<ReceivedResult, OverBudget>),
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
    /// What messages in both directions are charged to.
    pub(super) buffers: ByteBudget,
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
    pub(super) fn new(server: CatalogId, secrets: Arc<Secrets>, buffers: ByteBudget) -> Arc<Self> {
        Arc::new(Self {
            server,
            secrets,
            pending: Mutex::default(),
            next_call_id: AtomicI64::new(FIRST_DIRECT_CALL_ID),
            progress: Mutex::default(),
            unsolicited: Mutex::new(UnsolicitedCounter::new()),
            buffers,
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
                *result_slot.lock() = Some(self.receive_result(text, result));
                Some(ack(id))
            }
            PendingRequest::Library { .. } | PendingRequest::Direct(_) => None,
        }
    }

    /// Fails a library request over HTTP whose response there was no room for; returns an empty response for the library.
    /// None if nobody waits for the result here.
    pub(super) fn fail_http_request(
        &self,
        id: &NumberOrString,
        why: OverBudget,
    ) -> Option<ServerJsonRpcMessage> {
        let NumberOrString::Number(id) = id else {
            return None;
        };
        match self.pending.lock().get(id)? {
            PendingRequest::Library { result_slot, .. } => {
                *result_slot.lock() = Some(Err(why));
                Some(ack(*id))
            }
            PendingRequest::Direct(_) => None,
        }
    }

    /// Charges a result that has arrived.
    fn receive_result(&self, text: &Bytes, result: &RawValue) -> Result<ReceivedResult, OverBudget> {
        let text = text.slice_ref(result.get().as_bytes());
        let charge = match text.len() > UNCHARGED {
            true => Some(self.buffers.charge(text.len())?),
            false => None,
        };
        Ok(ReceivedResult { text, charge })
    }

    /// Fails the direct call that a message answers which there was no room for; false if it is not found.
    pub(super) fn fail_dropped(&self, dropped: &DroppedMessage) -> bool {
        let direct = |id: &i64| *id >= FIRST_DIRECT_CALL_ID;
        let request = dropped
            .ids()
            .filter(direct)
            .find_map(|id| self.remove_pending(id));
        match request {
            Some(PendingRequest::Direct(sender)) => {
                let _ = sender.send(CallReply::Result(Err(dropped.why())));
                true
            }
            Some(PendingRequest::Library { .. }) | None => false,
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
                    Some(result) => CallReply::Result(self.receive_result(text, result)),
                    None => CallReply::Refused(envelope.error_message()),
                };
                // The call may have been dropped meanwhile.
                let _ = sender.send(reply);
                ResponseOwner::DirectCall
            }
            (Some(PendingRequest::Library { result_slot, .. }), Some(result)) => {
                *result_slot.lock() = Some(self.receive_result(text, result));
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
                                message: progress.message.as_deref().map(truncate_progress),
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

/// The beginning of a progress message: many may wait for a reader that is slow.
fn truncate_progress(message: &str) -> String {
    const MAX_CHARS: usize = 256;
    message.chars().take(MAX_CHARS).collect()
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

/// The empty response the library gets in place of a result that is kept here.
fn ack(id: i64) -> ServerJsonRpcMessage {
    ServerJsonRpcMessage::response(ServerResult::empty(()), NumberOrString::Number(id))
}

#[cfg(test)]
mod tests;
