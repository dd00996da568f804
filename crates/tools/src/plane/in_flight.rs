//! The calls in progress of one session: counting, waiting for and cancelling them.

use std::{
    collections::HashMap,
    future::Future,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use oubliette_protocol::{Error, Result};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How long a cancelled source may take to end its call before the call is dropped.
const CANCEL_GRACE: Duration = Duration::from_millis(250);

/// Every call in progress.
pub(super) struct InFlightCalls {
    next: AtomicU64,
    in_flight: Mutex<HashMap<u64, CallCancellation>>,
    count: watch::Sender<usize>,
}

#[derive(Clone)]
struct CallCancellation {
    token: CancellationToken,
    /// Set before the token is cancelled when the session ends the call, and not the requester.
    reason: Arc<OnceLock<String>>,
}

impl Default for InFlightCalls {
    fn default() -> Self {
        Self {
            next: AtomicU64::new(0),
            in_flight: Mutex::default(),
            count: watch::Sender::new(0),
        }
    }
}

impl InFlightCalls {
    /// Adds a call. Cancelling `cancel` ends it too.
    pub(super) fn register(&self, cancel: &CancellationToken) -> InFlightCall<'_> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let cancellation = CallCancellation {
            token: cancel.child_token(),
            reason: Arc::default(),
        };
        let mut in_flight = self.in_flight.lock();
        in_flight.insert(id, cancellation.clone());
        self.count.send_replace(in_flight.len());
        InFlightCall {
            calls: self,
            id,
            cancellation,
        }
    }

    pub(super) fn count(&self) -> usize {
        *self.count.borrow()
    }

    pub(super) async fn wait_drained(&self) {
        // The sender lives as long as `self`, so waiting cannot fail.
        let _ = self.count.subscribe().wait_for(|count| *count == 0).await;
    }

    pub(super) fn cancel_all(&self, reason: &str) -> usize {
        let cancellations: Vec<CallCancellation> = self.in_flight.lock().values().cloned().collect();
        for cancellation in &cancellations {
            let _ = cancellation.reason.set(reason.to_owned());
            cancellation.token.cancel();
        }
        cancellations.len()
    }
}

/// One call in progress; dropping this removes it.
pub(super) struct InFlightCall<'a> {
    calls: &'a InFlightCalls,
    id: u64,
    cancellation: CallCancellation,
}

impl InFlightCall<'_> {
    /// The token that the source watches for cancellation.
    pub(super) fn token(&self) -> CancellationToken {
        self.cancellation.token.clone()
    }

    /// Runs the call until it ends or is cancelled. A cancelled source has [`CANCEL_GRACE`] to tell its server,
    /// then it is dropped.
    pub(super) async fn run<T, F>(&self, mut call: Pin<&mut F>) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let ended = tokio::select! {
            biased;
            result = call.as_mut() => Some(result),
            () = self.cancellation.token.cancelled() => tokio::time::timeout(CANCEL_GRACE, call).await.ok(),
        };
        match (ended, self.cancellation.reason.get()) {
            // The call succeeded before the source noticed the cancellation.
            (Some(Ok(done)), _) => Ok(done),
            (_, Some(reason)) => Err(Error::unavailable(reason.clone())),
            (Some(Err(error)), None) => Err(error),
            (None, None) => Err(Error::unavailable("the call was cancelled")),
        }
    }
}

impl Drop for InFlightCall<'_> {
    fn drop(&mut self) {
        // Anything that still holds the token learns that the result is no longer wanted.
        self.cancellation.token.cancel();
        let mut in_flight = self.calls.in_flight.lock();
        in_flight.remove(&self.id);
        self.calls.count.send_replace(in_flight.len());
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    #[tokio::test]
    async fn calls_are_counted_in_and_out() {
        let calls = InFlightCalls::default();
        let call = calls.register(&CancellationToken::new());
        assert_eq!(calls.count(), 1);
        assert_eq!(call.run(pin!(async { Ok(1) })).await, Ok(1));
        drop(call);
        calls.wait_drained().await;
        assert_eq!(calls.count(), 0);
    }

    #[tokio::test]
    async fn a_source_that_ignores_cancellation_is_dropped_with_the_reason() {
        tokio::time::pause();
        let calls = InFlightCalls::default();
        let call = calls.register(&CancellationToken::new());
        assert_eq!(calls.cancel_all("the agent is being switched"), 1);
        let error = call
            .run(pin!(std::future::pending::<Result<()>>()))
            .await
            .unwrap_err();
        assert_eq!(error.message, "the agent is being switched");
    }

    #[tokio::test]
    async fn cancelling_the_request_ends_the_call() {
        let (calls, cancel) = (InFlightCalls::default(), CancellationToken::new());
        let call = calls.register(&cancel);
        cancel.cancel();
        let token = call.token();
        let polite = async move {
            token.cancelled().await;
            Err::<(), _>(Error::unavailable("cancelled on request"))
        };
        assert_eq!(
            call.run(pin!(polite)).await.unwrap_err().message,
            "cancelled on request"
        );
    }
}
