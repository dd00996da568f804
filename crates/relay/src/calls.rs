//! Our own requests that wait for an answer.

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::{CallError, Closed, Id};

/// How far a request has come, as the side that works on it says.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Progress {
    /// Grows with every report.
    pub progress: f64,
    /// Where it will end, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<f64>,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Called, on the reader's task, with each report on a call.
pub type OnProgress = Arc<dyn Fn(Progress) + Send + Sync>;

/// How a call is made.
#[derive(Clone, Default)]
pub struct CallOptions {
    pub(crate) timeout: Option<Duration>,
    pub(crate) cancel: Option<CancellationToken>,
    pub(crate) on_progress: Option<OnProgress>,
}

impl fmt::Debug for CallOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallOptions")
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

impl CallOptions {
    /// Gives up after this long.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Gives up when this fires.
    #[must_use]
    pub fn cancel(mut self, cancel: CancellationToken) -> Self {
        self.cancel = Some(cancel);
        self
    }

    /// Hears of the call's progress. Must not block: it runs where the connection is read.
    #[must_use]
    pub fn on_progress(mut self, report: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.on_progress = Some(Arc::new(report));
        self
    }

    /// Who hears of the call's progress.
    pub fn hearer(&self) -> Option<OnProgress> {
        self.on_progress.clone()
    }
}

/// A result is handed over as the text it came as: reading it is the caller's work, not the reader's.
pub(crate) type Answer = Result<Box<RawValue>, CallError>;

/// The table of calls that wait.
pub(crate) struct Calls {
    limit: usize,
    table: Mutex<Table>,
}

struct Table {
    next: u64,
    waiting: HashMap<u64, Waiting>,
    closed: Option<Closed>,
}

struct Waiting {
    answer: oneshot::Sender<Answer>,
    on_progress: Option<OnProgress>,
}

impl Calls {
    pub(crate) fn new(limit: usize) -> Self {
        let table = Table {
            next: 1,
            waiting: HashMap::new(),
            closed: None,
        };
        Self {
            limit,
            table: Mutex::new(table),
        }
    }

    /// A new call's id and where its answer will come.
    pub(crate) fn open(
        &self,
        on_progress: Option<OnProgress>,
    ) -> Result<(u64, oneshot::Receiver<Answer>), CallError> {
        let mut table = self.table.lock();
        if let Some(closed) = &table.closed {
            return Err(closed.clone().into());
        }
        if table.waiting.len() >= self.limit {
            return Err(CallError::TooMany(self.limit));
        }
        let id = table.next;
        table.next += 1;
        let (answer, receiver) = oneshot::channel();
        table.waiting.insert(id, Waiting { answer, on_progress });
        Ok((id, receiver))
    }

    /// Hands an answer to its call. An answer to a call nobody waits for (it was given up) is dropped.
    pub(crate) fn answered(&self, id: &Id, answer: Answer) {
        let waiting = as_ours(id).and_then(|id| self.table.lock().waiting.remove(&id));
        if let Some(waiting) = waiting {
            let _ = waiting.answer.send(answer);
        }
    }

    /// Hands a report to its call; false when there is no such call or it does not listen.
    pub(crate) fn reported(&self, id: &Id, progress: &Progress) -> bool {
        let table = self.table.lock();
        let waiting = as_ours(id).and_then(|id| table.waiting.get(&id));
        let Some(report) = waiting.and_then(|w| w.on_progress.clone()) else {
            return false;
        };
        drop(table);
        report(progress.clone());
        true
    }

    /// Forgets a call; true when it still waited.
    pub(crate) fn forget(&self, id: u64) -> bool {
        self.table.lock().waiting.remove(&id).is_some()
    }

    /// Fails every call that waits and every later one.
    pub(crate) fn close(&self, why: &Closed) {
        let waiting = {
            let mut table = self.table.lock();
            table.closed.get_or_insert_with(|| why.clone());
            std::mem::take(&mut table.waiting)
        };
        for (_, waiting) in waiting {
            let _ = waiting.answer.send(Err(why.clone().into()));
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.table.lock().waiting.len()
    }
}

fn as_ours(id: &Id) -> Option<u64> {
    match id {
        Id::Number(number) => number.as_u64(),
        Id::Text(_) => None,
    }
}
