//! Requests of the other side that are in progress, each in its own task.

use std::{collections::HashMap, panic::AssertUnwindSafe, sync::Arc};

use futures::FutureExt;
use oubliette_protocol::{
    ByteCharge, Error,
    budget::{CALL_OVERHEAD, call_bytes, parsed_bytes},
    relay::{RpcError, method},
};
use parking_lot::Mutex;
use serde_json::{json, value::RawValue};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    PeerHandler, ProgressReport, RpcId, RpcPeer,
    error::{answer_too_long, too_many_in_flight},
    message::{error_line, notification_line, result_line},
};

/// The request a handler is serving: its id, its cancellation and its connection.
#[derive(Clone)]
pub struct RequestContext {
    /// The id the other side gave the request.
    pub id: RpcId,
    /// Cancelled when the other side cancels the request, and when the connection ends.
    pub cancel: CancellationToken,
    /// The connection it arrived on.
    pub peer: RpcPeer,
}

impl RequestContext {
    /// Sends a progress report to the other side. A report is dropped when the queue is full: it is not worth
    /// waiting for a side that reads too slowly.
    pub fn report_progress(&self, progress: &ProgressReport) {
        let mut params = json!({ "id": self.id, "progress": progress.progress });
        if let Some(total) = progress.total {
            params["total"] = json!(total);
        }
        if let Some(message) = &progress.message {
            params["message"] = json!(message);
        }
        if let Ok(line) = notification_line(method::PROGRESS, &params, self.peer.limits().max_line_bytes) {
            // One that does not fit into the budget is dropped too.
            if let Ok(charge) = self.peer.limits().budget.charge(line.len()) {
                self.peer.queue().try_send(line, charge);
            }
        }
    }
}

impl std::fmt::Debug for RequestContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequestContext")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// The requests in progress, by id.
pub(crate) struct InFlightRequests {
    limit: usize,
    slots: Arc<Semaphore>,
    cancel_tokens: Mutex<HashMap<RpcId, CancellationToken>>,
    tasks: TaskTracker,
}

/// Why a request was not started.
pub(crate) enum RequestRefusal {
    TooMany(RpcError),
    Duplicate,
}

impl InFlightRequests {
    pub(crate) fn new(limit: usize) -> Self {
        let slots = Arc::new(Semaphore::new(limit.min(Semaphore::MAX_PERMITS)));
        Self {
            limit,
            slots,
            cancel_tokens: Mutex::new(HashMap::new()),
            tasks: TaskTracker::new(),
        }
    }

    /// Starts a task that serves a request.
    pub(crate) fn start(
        &self,
        peer: &RpcPeer,
        handler: &Arc<dyn PeerHandler>,
        id: RpcId,
        method: String,
        params: Option<&RawValue>,
    ) -> Result<(), RequestRefusal> {
        // The id is checked before the number of requests: a repeated id is the clearer error.
        let mut tokens = self.cancel_tokens.lock();
        if tokens.contains_key(&id) {
            return Err(RequestRefusal::Duplicate);
        }
        let Ok(slot) = self.slots.clone().try_acquire_owned() else {
            return Err(RequestRefusal::TooMany(too_many_in_flight(self.limit)));
        };
        let bytes = call_bytes(params.map_or(0, |params| parsed_bytes(params.get().as_bytes())));
        let charge = peer.limits().budget.charge(bytes);
        let charge = charge.map_err(|over| RequestRefusal::TooMany((&Error::from(over)).into()))?;
        let cancel = CancellationToken::new();
        tokens.insert(id.clone(), cancel.clone());
        drop(tokens);
        let context = RequestContext {
            id,
            cancel,
            peer: peer.clone(),
        };
        let (handler, params) = (handler.clone(), params.map(ToOwned::to_owned));
        self.tasks
            .spawn(async move { serve_request(handler, method, params, context, slot, charge).await });
        Ok(())
    }

    pub(crate) fn cancel(&self, id: &RpcId) {
        if let Some(cancel) = self.cancel_tokens.lock().get(id) {
            cancel.cancel();
        }
    }

    /// Cancels every request: nobody will read their answers.
    pub(crate) fn close(&self) {
        self.tasks.close();
        let tokens: Vec<_> = self.cancel_tokens.lock().values().cloned().collect();
        tokens.iter().for_each(CancellationToken::cancel);
    }

    pub(crate) async fn wait_drained(&self) {
        self.tasks.wait().await;
    }

    pub(crate) fn len(&self) -> usize {
        self.cancel_tokens.lock().len()
    }

    fn remove(&self, id: &RpcId) {
        self.cancel_tokens.lock().remove(id);
    }
}

async fn serve_request(
    handler: Arc<dyn PeerHandler>,
    method: String,
    params: Option<Box<RawValue>>,
    context: RequestContext,
    slot: OwnedSemaphorePermit,
    mut charge: ByteCharge,
) {
    let RequestContext { id, peer, .. } = context.clone();
    let limit = peer.limits().max_line_bytes;
    let working = AssertUnwindSafe(handler.request_raw(&method, params, context)).catch_unwind();
    let outcome = working.await.unwrap_or_else(|_| {
        tracing::error!(method, "a request handler panicked");
        Err((&Error::internal("panic")).into())
    });
    let line = match outcome {
        Ok(result) => result_line(Some(&id), &*result, limit)
            .or_else(|_| error_line(Some(&id), &answer_too_long(limit), usize::MAX)),
        Err(error) => error_line(Some(&id), &error, limit)
            .or_else(|_| error_line(Some(&id), &answer_too_long(limit), usize::MAX)),
    };
    let line = line.and_then(|line| {
        let bytes = call_bytes(line.len());
        match bytes > CALL_OVERHEAD || charge.bytes() > CALL_OVERHEAD {
            true => match charge.resize(bytes) {
                Ok(()) => Ok(line),
                Err(over) => {
                    drop(line);
                    let _ = charge.resize(CALL_OVERHEAD);
                    error_line(Some(&id), &(&Error::from(over)).into(), usize::MAX)
                }
            },
            false => Ok(line),
        }
    });
    // The id is freed before the answer is queued: once the other side has read it, it may reuse the id.
    peer.serving().remove(&id);
    if let Ok(line) = line {
        // An error means that the connection has ended.
        let _ = peer.queue().send(line, Some(slot), Some(charge)).await;
    }
}
