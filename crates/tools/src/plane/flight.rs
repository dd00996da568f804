//! What is under way at the gate.

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

/// How long a source has to notice that its call was cancelled before it is dropped.
const LAST_WORDS: Duration = Duration::from_millis(250);

/// Every call under way.
pub(super) struct Flights {
    next: AtomicU64,
    aloft: Mutex<HashMap<u64, Order>>,
    count: watch::Sender<usize>,
}

#[derive(Clone)]
struct Order {
    token: CancellationToken,
    /// Set before the token is cancelled, when it is the session that ends the call.
    reason: Arc<OnceLock<String>>,
}

impl Default for Flights {
    fn default() -> Self {
        Self {
            next: AtomicU64::new(0),
            aloft: Mutex::default(),
            count: watch::Sender::new(0),
        }
    }
}

impl Flights {
    /// Counts a call in. It ends when its own token is cancelled, too.
    pub(super) fn board(&self, cancel: &CancellationToken) -> Flight<'_> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let order = Order {
            token: cancel.child_token(),
            reason: Arc::default(),
        };
        let mut aloft = self.aloft.lock();
        aloft.insert(id, order.clone());
        self.count.send_replace(aloft.len());
        Flight {
            flights: self,
            id,
            order,
        }
    }

    pub(super) fn count(&self) -> usize {
        *self.count.borrow()
    }

    pub(super) async fn drained(&self) {
        // The sender lives as long as `self`, so waiting cannot fail.
        let _ = self.count.subscribe().wait_for(|count| *count == 0).await;
    }

    pub(super) fn cancel_all(&self, reason: &str) -> usize {
        let orders: Vec<Order> = self.aloft.lock().values().cloned().collect();
        for order in &orders {
            let _ = order.reason.set(reason.to_owned());
            order.token.cancel();
        }
        orders.len()
    }
}

/// One call under way; it is counted out when this is dropped.
pub(super) struct Flight<'a> {
    flights: &'a Flights,
    id: u64,
    order: Order,
}

impl Flight<'_> {
    /// What the source is to watch.
    pub(super) fn token(&self) -> CancellationToken {
        self.order.token.clone()
    }

    /// Runs the call until it ends or is cancelled. A cancelled source gets a moment to say goodbye to its
    /// server, then it is dropped.
    pub(super) async fn fly<T, F>(&self, mut call: Pin<&mut F>) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let ended = tokio::select! {
            biased;
            result = call.as_mut() => Some(result),
            () = self.order.token.cancelled() => tokio::time::timeout(LAST_WORDS, call).await.ok(),
        };
        match (ended, self.order.reason.get()) {
            // It was done before it heard.
            (Some(Ok(done)), _) => Ok(done),
            (_, Some(reason)) => Err(Error::unavailable(reason.clone())),
            (Some(Err(error)), None) => Err(error),
            (None, None) => Err(Error::unavailable("the call was cancelled")),
        }
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        // A source that still holds the token learns that nobody waits any more.
        self.order.token.cancel();
        let mut aloft = self.flights.aloft.lock();
        aloft.remove(&self.id);
        self.flights.count.send_replace(aloft.len());
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    #[tokio::test]
    async fn calls_are_counted_in_and_out() {
        let flights = Flights::default();
        let flight = flights.board(&CancellationToken::new());
        assert_eq!(flights.count(), 1);
        assert_eq!(flight.fly(pin!(async { Ok(1) })).await, Ok(1));
        drop(flight);
        flights.drained().await;
        assert_eq!(flights.count(), 0);
    }

    #[tokio::test]
    async fn a_source_that_hears_nothing_is_dropped_with_the_reason() {
        tokio::time::pause();
        let flights = Flights::default();
        let flight = flights.board(&CancellationToken::new());
        assert_eq!(flights.cancel_all("the agent is being switched"), 1);
        let error = flight
            .fly(pin!(std::future::pending::<Result<()>>()))
            .await
            .unwrap_err();
        assert_eq!(error.message, "the agent is being switched");
    }

    #[tokio::test]
    async fn whoever_asked_can_give_up() {
        let (flights, cancel) = (Flights::default(), CancellationToken::new());
        let flight = flights.board(&cancel);
        cancel.cancel();
        let token = flight.token();
        let polite = async move {
            token.cancelled().await;
            Err::<(), _>(Error::unavailable("cancelled on request"))
        };
        assert_eq!(
            flight.fly(pin!(polite)).await.unwrap_err().message,
            "cancelled on request"
        );
    }
}
