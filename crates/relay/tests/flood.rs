//! Two real peers at full load: no call is lost, answers go to their own calls, nothing deadlocks.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use futures::{StreamExt, stream::FuturesUnordered};
use oubliette_relay::{CallError, CloseReason, PeerHandler, PeerLimits, RequestContext, RpcError, RpcPeer};
use serde_json::{Value, json};
use tokio::sync::Notify;

/// Echoes its params after some yields, so answers come out of order; `hold` waits for cancellation or release.
#[derive(Default)]
struct HoldingHandler {
    holding: AtomicUsize,
    cancelled: AtomicUsize,
    changed: Notify,
    release: tokio_util::sync::CancellationToken,
}

impl HoldingHandler {
    async fn until(&self, reached: impl Fn(&Self) -> bool) {
        loop {
            let changed = self.changed.notified();
            if reached(self) {
                return;
            }
            changed.await;
        }
    }

    fn bump(&self, counter: &AtomicUsize) {
        counter.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_waiters();
    }
}

#[async_trait]
impl PeerHandler for HoldingHandler {
    async fn request(&self, method: &str, params: Value, context: RequestContext) -> Result<Value, RpcError> {
        if method == "hold" {
            self.bump(&self.holding);
            tokio::select! {
                () = self.release.cancelled() => {}
                () = context.cancel.cancelled() => self.bump(&self.cancelled),
            }
            return Ok(params);
        }
        for _ in 0..params["yields"].as_u64().unwrap_or(0) {
            tokio::task::yield_now().await;
        }
        Ok(params)
    }
}

fn pair(pipe: usize, limits: PeerLimits) -> (RpcPeer, RpcPeer, Arc<HoldingHandler>, Arc<HoldingHandler>) {
    let (a, b) = tokio::io::duplex(pipe);
    let (left, right) = (
        Arc::new(HoldingHandler::default()),
        Arc::new(HoldingHandler::default()),
    );
    let (near, _) = RpcPeer::spawn(a, left.clone(), limits.clone());
    let (far, _) = RpcPeer::spawn(b, right.clone(), limits);
    (near, far, left, right)
}

async fn flood(peer: RpcPeer, calls: u64, payload: usize) {
    let answers: FuturesUnordered<_> = (0..calls)
        .map(|n| {
            let peer = &peer;
            async move {
                let params = json!({"n": n, "yields": n % 7, "pad": "x".repeat(payload)});
                let answer = peer.call("echo", params.clone()).await.unwrap();
                assert_eq!(answer, params, "every call gets its own answer");
            }
        })
        .collect();
    assert_eq!(answers.count().await as u64, calls);
}

#[tokio::test]
async fn two_floods_through_a_pipe_of_64_bytes_do_not_stop_each_other() {
    let limits = PeerLimits {
        max_queue_bytes: 2_000,
        ..PeerLimits::default()
    };
    let (near, far, ..) = pair(64, limits);
    tokio::join!(flood(near.clone(), 2_000, 300), flood(far.clone(), 2_000, 300));
    assert_eq!(
        (
            near.pending_calls(),
            near.in_flight(),
            far.pending_calls(),
            far.in_flight()
        ),
        (0, 0, 0, 0)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_floods_of_long_lines_over_a_socket_do_not_stop_each_other() {
    let (a, b) = tokio::net::UnixStream::pair().unwrap();
    let limits = PeerLimits {
        max_queue_bytes: 64 * 1024,
        ..PeerLimits::default()
    };
    let (near, _) = RpcPeer::spawn(a, Arc::new(HoldingHandler::default()), limits.clone());
    let (far, _) = RpcPeer::spawn(b, Arc::new(HoldingHandler::default()), limits);
    let left = tokio::spawn(flood(near, 200, 200_000));
    let right = tokio::spawn(flood(far, 200, 200_000));
    left.await.unwrap();
    right.await.unwrap();
}

#[tokio::test]
async fn notifications_keep_their_order_under_load() {
    struct OrderChecker(std::sync::Mutex<u64>, tokio_util::sync::CancellationToken);
    impl PeerHandler for OrderChecker {
        fn notification(&self, _: &str, params: Value, _: &RpcPeer) {
            let mut next = self.0.lock().unwrap();
            assert_eq!(params, json!([*next]));
            *next += 1;
            if *next == 5_000 {
                self.1.cancel();
            }
        }
    }
    let (a, b) = tokio::io::duplex(100);
    let done = tokio_util::sync::CancellationToken::new();
    let (near, _) = RpcPeer::spawn(
        a,
        Arc::new(HoldingHandler::default()),
        PeerLimits {
            max_queue_bytes: 500,
            ..PeerLimits::default()
        },
    );
    let (_far, _) = RpcPeer::spawn(
        b,
        Arc::new(OrderChecker(0.into(), done.clone())),
        PeerLimits::default(),
    );
    for n in 0..5_000 {
        near.notify("n", json!([n])).await.unwrap();
    }
    done.cancelled().await;
}

#[tokio::test]
async fn ten_thousand_calls_wait_at_once_and_each_gets_its_answer() {
    let (near, far, _, right) = pair(64 * 1024, PeerLimits::default());
    let calls: Vec<_> = (0..10_000)
        .map(|n| {
            let near = near.clone();
            tokio::spawn(async move { near.call("hold", json!(n)).await })
        })
        .collect();
    right.until(|r| r.holding.load(Ordering::SeqCst) == 10_000).await;
    assert_eq!((near.pending_calls(), far.in_flight()), (10_000, 10_000));
    assert_eq!(
        near.call("echo", json!("meanwhile")).await,
        Ok(json!("meanwhile"))
    );
    right.release.cancel();
    for (n, call) in calls.into_iter().enumerate() {
        assert_eq!(call.await.unwrap(), Ok(json!(n)));
    }
}

#[tokio::test]
async fn every_dropped_call_is_cancelled_at_the_other_side() {
    let (near, far, _, right) = pair(
        64,
        PeerLimits {
            max_queue_bytes: 500,
            ..PeerLimits::default()
        },
    );
    let calls: Vec<_> = (0..1_000)
        .map(|n| {
            let near = near.clone();
            tokio::spawn(async move { near.call("hold", json!(n)).await })
        })
        .collect();
    right.until(|r| r.holding.load(Ordering::SeqCst) == 1_000).await;
    calls.iter().for_each(tokio::task::JoinHandle::abort);
    right.until(|r| r.cancelled.load(Ordering::SeqCst) == 1_000).await;
    assert_eq!(near.pending_calls(), 0);
    assert_eq!(near.call("echo", json!(1)).await, Ok(json!(1)));
    assert_eq!(far.in_flight(), 0);
}

#[tokio::test]
async fn refused_past_the_limit_and_served_again_later() {
    let (near, _far, _, right) = pair(
        64,
        PeerLimits {
            max_in_flight: 10,
            ..PeerLimits::default()
        },
    );
    let calls: Vec<_> = (0..100)
        .map(|n| {
            let near = near.clone();
            tokio::spawn(async move { near.call("hold", json!(n)).await })
        })
        .collect();
    right.until(|r| r.holding.load(Ordering::SeqCst) == 10).await;
    let mut outcomes: HashMap<&str, usize> = HashMap::new();
    // Ninety are refused while ten are held; only then are the ten released.
    while near.pending_calls() > 10 {
        tokio::task::yield_now().await;
    }
    right.release.cancel();
    for call in calls {
        let outcome = match call.await.unwrap() {
            Ok(_) => "served",
            Err(CallError::Remote(e)) if e.data == Some(json!({"code":"limit_exceeded"})) => "refused",
            Err(other) => panic!("{other}"),
        };
        *outcomes.entry(outcome).or_default() += 1;
    }
    assert_eq!(outcomes, HashMap::from([("served", 10), ("refused", 90)]));
    flood(near, 10, 10).await;
}

#[tokio::test]
async fn an_abrupt_end_in_the_middle_of_a_flood_fails_every_call_once() {
    let (near, far, ..) = pair(
        64,
        PeerLimits {
            max_queue_bytes: 500,
            ..PeerLimits::default()
        },
    );
    let calls: Vec<_> = (0..500)
        .map(|n| {
            let near = near.clone();
            tokio::spawn(async move { near.call("echo", json!({"n": n, "yields": 3})).await })
        })
        .collect();
    near.call("echo", Value::Null).await.unwrap();
    far.close();
    for call in calls {
        match call.await.unwrap() {
            Ok(_) | Err(CallError::Closed(CloseReason::ByPeer)) => {}
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(near.pending_calls(), 0);
    assert_eq!(near.wait_closed().await, CloseReason::ByPeer);
}

#[tokio::test]
async fn nothing_is_left_after_thirty_thousand_calls() {
    let (near, far, ..) = pair(64 * 1024, PeerLimits::default());
    for _ in 0..3 {
        flood(near.clone(), 10_000, 0).await;
    }
    assert_eq!((near.pending_calls(), far.in_flight()), (0, 0));
}
