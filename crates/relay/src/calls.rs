//! Our own requests that wait for an answer.

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use oubliette_protocol::relay::{ProgressCallback, ProgressReport};
use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::{CallError, CloseReason, RpcId};

/// Options of one call: a timeout, a cancellation token, a progress callback.
#[derive(Clone, Default)]
pub struct CallOptions {
    pub(crate) timeout: Option<Duration>,
    pub(crate) cancel: Option<CancellationToken>,
    pub(crate) on_progress: Option<ProgressCallback>,
}

impl fmt::Debug for CallOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallOptions")
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

impl CallOptions {
    /// Ends the call with [`CallError::Timeout`] after this long.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Ends the call with [`CallError::Cancelled`] when this token is cancelled.
    #[must_use]
    pub fn cancel(mut self, cancel: CancellationToken) -> Self {
        self.cancel = Some(cancel);
        self
    }

    /// Calls `report` with the call's progress. It must not block: it runs on the task that reads the connection.
    #[must_use]
    pub fn on_progress(mut self, report: impl Fn(ProgressReport) + Send + Sync + 'static) -> Self {
        self.on_progress = Some(Arc::new(report));
        self
    }
}

/// How a call ended. The result is still JSON text: parsing it is done by the caller's task, not the reader's.
pub(crate) type RawAnswer = Result<Box<RawValue>, CallError>;

/// Our own calls that wait for an answer, by id.
pub(crate) struct PendingCalls {
    limit: usize,
    table: Mutex<PendingTable>,
}

struct PendingTable {
    next_id: u64,
    pending: HashMap<u64, PendingCall>,
    closed: Option<CloseReason>,
}

struct PendingCall {
    answer: oneshot::Sender<RawAnswer>,
    on_progress: Option<ProgressCallback>,
}

impl PendingCalls {
    pub(crate) fn new(limit: usize) -> Self {
        let table = PendingTable {
            next_id: 1,
            pending: HashMap::new(),
            closed: None,
        };
        Self {
            limit,
            table: Mutex::new(table),
        }
    }

    /// Adds a call; returns its id and the channel its answer arrives on.
    pub(crate) fn register(
        &self,
        on_progress: Option<ProgressCallback>,
    ) -> Result<(u64, oneshot::Receiver<RawAnswer>), CallError> {
        let mut table = self.table.lock();
        if let Some(closed) = &table.closed {
            return Err(closed.clone().into());
        }
        if table.pending.len() >= self.limit {
            return Err(CallError::TooManyCalls(self.limit));
        }
        let id = table.next_id;
        table.next_id += 1;
        let (answer, receiver) = oneshot::channel();
        table.pending.insert(id, PendingCall { answer, on_progress });
        Ok((id, receiver))
    }

    /// Delivers an answer to its call. An answer to a call that was dropped or timed out is discarded.
    pub(crate) fn complete(&self, id: &RpcId, answer: RawAnswer) {
        let pending = own_call_id(id).and_then(|id| self.table.lock().pending.remove(&id));
        if let Some(pending) = pending {
            let _ = pending.answer.send(answer);
        }
    }

    /// Delivers a progress report; false when there is no such call or it has no callback.
    pub(crate) fn report_progress(&self, id: &RpcId, progress: &ProgressReport) -> bool {
        let table = self.table.lock();
        let pending = own_call_id(id).and_then(|id| table.pending.get(&id));
        let Some(report) = pending.and_then(|w| w.on_progress.clone()) else {
            return false;
        };
        drop(table);
        report(progress.clone());
        true
    }

    /// Removes a call; true when it was still without an answer.
    pub(crate) fn remove(&self, id: u64) -> bool {
        self.table.lock().pending.remove(&id).is_some()
    }

    /// Fails every pending call and every later one with this reason.
    pub(crate) fn close(&self, why: &CloseReason) {
        let pending = {
            let mut table = self.table.lock();
            table.closed.get_or_insert_with(|| why.clone());
            std::mem::take(&mut table.pending)
        };
        for (_, pending) in pending {
            let _ = pending.answer.send(Err(why.clone().into()));
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.table.lock().pending.len()
    }
}

fn own_call_id(id: &RpcId) -> Option<u64> {
    match id {
        RpcId::Number(number) => number.as_u64(),
        RpcId::Text(_) => None,
    }
}
