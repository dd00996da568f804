//! Requests of the other side that are being worked on.

use std::{collections::HashMap, panic::AssertUnwindSafe, sync::Arc};

use futures::FutureExt;
use oubliette_protocol::relay::{RpcError, method};
use parking_lot::Mutex;
use serde_json::{json, value::RawValue};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    Handler, Id, Peer, Progress,
    error::{answer_too_long, too_many},
    message::{error_line, notification_line, result_line},
};

/// What a handler knows about the request it works on.
#[derive(Clone)]
pub struct RequestContext {
    /// The other side's name for the request.
    pub id: Id,
    /// Fires when the other side gives up on the request, and when the connection ends.
    pub cancel: CancellationToken,
    /// The connection it came by.
    pub peer: Peer,
}

impl RequestContext {
    /// Tells the other side how far the request has come. Reports are dropped, never queued, when the
    /// other side reads too slowly for them.
    pub fn progress(&self, progress: &Progress) {
        let mut params = json!({ "id": self.id, "progress": progress.progress });
        if let Some(total) = progress.total {
            params["total"] = json!(total);
        }
        if let Some(message) = &progress.message {
            params["message"] = json!(message);
        }
        if let Ok(line) = notification_line(method::PROGRESS, &params, self.peer.limits().line) {
            self.peer.queue().try_send(line);
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

/// The table of requests in flight.
pub(crate) struct Serving {
    limit: usize,
    slots: Arc<Semaphore>,
    open: Mutex<HashMap<Id, CancellationToken>>,
    tasks: TaskTracker,
}

/// Why a request was not accepted.
pub(crate) enum NotServed {
    TooMany(RpcError),
    Duplicate,
}

impl Serving {
    pub(crate) fn new(limit: usize) -> Self {
        let slots = Arc::new(Semaphore::new(limit.min(Semaphore::MAX_PERMITS)));
        Self {
            limit,
            slots,
            open: Mutex::new(HashMap::new()),
            tasks: TaskTracker::new(),
        }
    }

    /// Starts working on a request, in its own task.
    pub(crate) fn start(
        &self,
        peer: &Peer,
        handler: &Arc<dyn Handler>,
        id: Id,
        method: String,
        params: Option<&RawValue>,
    ) -> Result<(), NotServed> {
        // The id first: a repeated one is the clearer complaint.
        let mut open = self.open.lock();
        if open.contains_key(&id) {
            return Err(NotServed::Duplicate);
        }
        let Ok(slot) = self.slots.clone().try_acquire_owned() else {
            return Err(NotServed::TooMany(too_many(self.limit)));
        };
        let cancel = CancellationToken::new();
        open.insert(id.clone(), cancel.clone());
        drop(open);
        let context = RequestContext {
            id,
            cancel,
            peer: peer.clone(),
        };
        let (handler, params) = (handler.clone(), params.map(ToOwned::to_owned));
        self.tasks
            .spawn(async move { work(handler, method, params, context, slot).await });
        Ok(())
    }

    pub(crate) fn cancel(&self, id: &Id) {
        if let Some(cancel) = self.open.lock().get(id) {
            cancel.cancel();
        }
    }

    /// Tells every request that nobody waits for it any longer.
    pub(crate) fn close(&self) {
        self.tasks.close();
        let open: Vec<_> = self.open.lock().values().cloned().collect();
        open.iter().for_each(CancellationToken::cancel);
    }

    pub(crate) async fn drained(&self) {
        self.tasks.wait().await;
    }

    pub(crate) fn len(&self) -> usize {
        self.open.lock().len()
    }

    fn finished(&self, id: &Id) {
        self.open.lock().remove(id);
    }
}

async fn work(
    handler: Arc<dyn Handler>,
    method: String,
    params: Option<Box<RawValue>>,
    context: RequestContext,
    slot: OwnedSemaphorePermit,
) {
    let RequestContext { id, peer, .. } = context.clone();
    let limit = peer.limits().line;
    let working = AssertUnwindSafe(handler.request_raw(&method, params, context)).catch_unwind();
    let outcome = working.await.unwrap_or_else(|_| {
        tracing::error!(method, "a request handler panicked");
        Err((&oubliette_protocol::Error::internal("panic")).into())
    });
    let line = match outcome {
        Ok(result) => result_line(Some(&id), &*result, limit)
            .or_else(|_| error_line(Some(&id), &answer_too_long(limit), usize::MAX)),
        Err(error) => error_line(Some(&id), &error, limit)
            .or_else(|_| error_line(Some(&id), &answer_too_long(limit), usize::MAX)),
    };
    // The id is free again before its answer can be read: the other side may use it at once.
    peer.serving().finished(&id);
    if let Ok(line) = line {
        // An ended connection wants no answer.
        let _ = peer.queue().send(line, Some(slot)).await;
    }
}
