//! The event log: no gaps in indexes, durable before visible, replay and live without a gap or a repeat.
#![allow(clippy::expect_used, clippy::unwrap_used)]

mod common;

use std::{sync::Arc, time::Duration};

use common::{StoreFixture, delta, session, text_of};
use futures::{FutureExt, StreamExt};
use oubliette_protocol::{
    ErrorCode, SessionId,
    event::{EventBody, SessionEvent, SessionStatus},
};
use oubliette_store::{SessionPatch, Store};
use proptest::prelude::*;

const LONG: Duration = Duration::from_secs(60);

fn indexes(events: &[Arc<SessionEvent>]) -> Vec<i64> {
    events.iter().map(|event| event.index).collect()
}

#[tokio::test]
async fn indexes_start_at_zero_and_have_no_gaps() {
    let mut fixture = StoreFixture::new().await;
    let (one, two) = (SessionId::generate(), SessionId::generate());
    let log = fixture.store.events();
    assert_eq!(log.last_index(&one).await.unwrap(), -1);
    assert_eq!(
        indexes(&log.append(&one, vec![delta("a"), delta("b")]).await.unwrap()),
        [0, 1]
    );
    assert_eq!(indexes(&log.append(&two, vec![delta("x")]).await.unwrap()), [0]);
    assert!(log.append(&one, vec![]).await.unwrap().is_empty());
    fixture.reopen().await;
    let log = fixture.store.events();
    assert_eq!(indexes(&log.append(&one, vec![delta("c")]).await.unwrap()), [2]);
    let read = log.read(&one, -1, 100).await.unwrap();
    assert_eq!(
        read.iter().map(|e| text_of(e)).collect::<Vec<_>>(),
        ["a", "b", "c"]
    );
    assert_eq!(indexes(&log.read(&one, 0, 1).await.unwrap()), [1]);
    assert_eq!(indexes(&log.read(&one, 2, 10).await.unwrap()), [] as [i64; 0]);
    assert_eq!(log.last_index(&one).await.unwrap(), 2);
}

#[tokio::test]
async fn events_are_read_back_as_they_were_appended() {
    let fixture = StoreFixture::new().await;
    let session = SessionId::generate();
    let bodies = vec![
        EventBody::Status {
            status: SessionStatus::Failed,
            reason: Some("\u{0}odd \u{1f980}".into()),
        },
        EventBody::Usage {
            usage: serde_json::json!({"tokens": 1.5, "n": 1})
                .as_object()
                .unwrap()
                .clone(),
        },
        EventBody::Plan {
            entries: serde_json::json!([{"b": 1, "a": [null]}]),
        },
        EventBody::ToolResult {
            tool_call_id: "1".into(),
            ok: true,
            result: serde_json::Value::Null,
        },
    ];
    let shown = fixture.store.events().append(&session, bodies).await.unwrap();
    assert_eq!(
        fixture.store.events().read(&session, -1, 10).await.unwrap(),
        shown
    );
}

#[tokio::test]
async fn append_soon_keeps_its_order_before_later_appends() {
    let fixture = StoreFixture::new().await;
    let (log, session) = (fixture.store.events(), SessionId::generate());
    for i in 0..50 {
        log.append_soon(&session, delta(i.to_string())).await.unwrap();
    }
    assert_eq!(
        log.append(&session, vec![delta("last")]).await.unwrap()[0].index,
        50
    );
    let read = log.read(&session, -1, 100).await.unwrap();
    assert!(
        read.iter()
            .take(50)
            .enumerate()
            .all(|(i, e)| text_of(e) == i.to_string())
    );
}

#[tokio::test]
async fn events_and_the_session_change_together_or_not_at_all() {
    let fixture = StoreFixture::new().await;
    let (log, project) = (fixture.store.events(), fixture.project("p").await);
    let known = fixture.session(&project).await.session_id;
    let status = || EventBody::Status {
        status: SessionStatus::Idle,
        reason: None,
    };
    let patch = || SessionPatch::status(SessionStatus::Idle, None);
    log.append_with_patch(&known, vec![status()], patch())
        .await
        .unwrap();
    assert_eq!(
        fixture.store.session_get(&known).await.unwrap().unwrap().status,
        SessionStatus::Idle
    );
    let unknown = SessionId::generate();
    let (refused, stands) = tokio::join!(
        log.append_with_patch(&unknown, vec![status()], patch()),
        log.append(&known, vec![delta("x")])
    );
    assert_eq!(refused.unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(indexes(&stands.unwrap()), [1]);
    assert_eq!(log.last_index(&unknown).await.unwrap(), -1);
}

#[tokio::test]
async fn a_follower_replays_and_continues_live() {
    let fixture = StoreFixture::new().await;
    let (log, session) = (fixture.store.events(), SessionId::generate());
    log.append(&session, (0..1000).map(|i| delta(i.to_string())).collect())
        .await
        .unwrap();
    let mut follow = log.follow(&session, 99);
    for i in 100..1000 {
        assert_eq!(follow.next().await.unwrap().unwrap().index, i);
    }
    assert!(follow.next().now_or_never().is_none(), "nothing more yet");
    log.append(&session, vec![delta("live")]).await.unwrap();
    let live = follow.next().await.unwrap().unwrap();
    assert_eq!((live.index, text_of(&live)), (1000, "live"));
    // Starting beyond the end waits for later events.
    let mut ahead = log.follow(&session, 1001);
    assert!(ahead.next().now_or_never().is_none());
    log.append(&session, vec![delta("1001"), delta("1002")])
        .await
        .unwrap();
    assert_eq!(ahead.next().await.unwrap().unwrap().index, 1002);
}

#[tokio::test]
async fn a_slow_follower_loses_nothing_and_delays_nobody() {
    let fixture = StoreFixture::new().await;
    let (log, session) = (fixture.store.events(), SessionId::generate());
    let mut slow = log.follow(&session, -1);
    let mut quick = log.follow(&session, -1);
    assert!(slow.next().now_or_never().is_none());
    // Far more than any ring holds.
    for round in 0..50 {
        log.append(&session, (0..100).map(|_| delta("x".repeat(100))).collect())
            .await
            .unwrap();
        for i in 0..100 {
            assert_eq!(quick.next().await.unwrap().unwrap().index, round * 100 + i);
        }
    }
    for i in 0..5000 {
        assert_eq!(slow.next().await.unwrap().unwrap().index, i);
    }
}

#[tokio::test]
async fn followers_that_are_never_polled_again_hold_no_connection() {
    let fixture = StoreFixture::new().await;
    let (log, session) = (fixture.store.events(), SessionId::generate());
    log.append(&session, (0..1000).map(|_| delta("x")).collect())
        .await
        .unwrap();
    let mut dead: Vec<_> = (0..50).map(|_| log.follow(&session, -1)).collect();
    for _ in 0..3 {
        for follow in &mut dead {
            let _ = follow.next().now_or_never();
        }
        assert_eq!(log.read(&session, -1, 2000).await.unwrap().len(), 1000);
    }
}

#[tokio::test]
async fn large_events_are_read_in_bounded_batches() {
    let fixture = StoreFixture::new().await;
    let (log, session) = (fixture.store.events(), SessionId::generate());
    for i in 0..20 {
        log.append(&session, vec![delta(format!("{i:04}{}", "y".repeat(1 << 20)))])
            .await
            .unwrap();
    }
    let some = log.read(&session, -1, 1000).await.unwrap();
    assert!((1..20).contains(&some.len()), "bounded by bytes: {}", some.len());
    let all: Vec<_> = log
        .follow(&session, -1)
        .take(20)
        .map(|e| e.unwrap().index)
        .collect()
        .await;
    assert_eq!(all, (0..20).collect::<Vec<i64>>());
    let huge = log
        .append(&session, vec![delta("z".repeat(33 << 20))])
        .await
        .unwrap_err();
    assert_eq!(huge.code, ErrorCode::LimitExceeded);
    assert_eq!(
        log.append(&session, vec![delta("next")]).await.unwrap()[0].index,
        20
    );
}

#[tokio::test]
async fn waiting_ends_with_the_first_event_or_the_timeout() {
    let fixture = StoreFixture::new().await;
    let (log, session) = (fixture.store.events(), SessionId::generate());
    let append = async {
        tokio::task::yield_now().await;
        log.append(&session, vec![delta("0"), delta("1")]).await.unwrap()
    };
    let (last, _) = tokio::join!(log.wait_beyond(&session, -1, LONG), append);
    assert_eq!(last.unwrap(), 1);
    assert_eq!(log.wait_beyond(&session, 0, LONG).await.unwrap(), 1);
    assert_eq!(log.wait_beyond(&session, 1, Duration::ZERO).await.unwrap(), 1);
    assert_eq!(indexes(&log.poll(&session, -1, 1, LONG).await.unwrap()), [0]);
    assert!(
        log.poll(&session, 1, 10, Duration::from_millis(1))
            .await
            .unwrap()
            .is_empty()
    );
    let (polled, _) = tokio::join!(
        log.poll(&session, 1, 10, LONG),
        log.append(&session, vec![delta("2")])
    );
    assert_eq!(indexes(&polled.unwrap()), [2]);
}

#[tokio::test]
async fn followers_end_with_the_store_and_with_the_session() {
    let fixture = StoreFixture::new().await;
    let project = fixture.project("p").await;
    let mut row = session(&project);
    row.status = SessionStatus::Ended;
    fixture.store.session_insert(row.clone()).await.unwrap();
    let (log, other) = (fixture.store.events(), SessionId::generate());
    log.append(&row.session_id, vec![delta("0")]).await.unwrap();
    log.append(&other, vec![delta("0")]).await.unwrap();
    let (mut deleted, mut closed) = (log.follow(&row.session_id, -1), log.follow(&other, -1));
    assert_eq!(deleted.next().await.unwrap().unwrap().index, 0);
    assert_eq!(closed.next().await.unwrap().unwrap().index, 0);
    assert!(fixture.store.project_delete(&project.project_id).await.unwrap());
    assert!(deleted.next().await.is_none());
    assert!(closed.next().now_or_never().is_none());
    fixture.store.close().await;
    assert!(closed.next().await.is_none());
    let error = log.append(&other, vec![delta("x")]).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
}

/// Appenders and followers of one session at once; every follower sees every index past its start
/// exactly once and in order, whenever it joins.
async fn race(store: &Store, batches: Vec<Vec<usize>>, followers: Vec<(usize, i64)>) {
    let session = SessionId::generate();
    let total: usize = batches.iter().flatten().sum();
    let mut tasks = Vec::new();
    for (wait, since) in followers {
        let (log, session) = (store.events().clone(), session.clone());
        tasks.push(tokio::spawn(async move {
            // Joins once the log has reached this index, somewhere in the middle of the writing.
            log.wait_beyond(&session, (wait % total.max(1)) as i64 - 1, LONG)
                .await
                .unwrap();
            let first = since.min(total as i64 - 1);
            let mut follow = log.follow(&session, first);
            for expected in first + 1..total as i64 {
                let event = follow.next().await.unwrap().unwrap();
                assert_eq!(event.index, expected);
            }
            assert!(follow.next().now_or_never().is_none());
        }));
    }
    for sizes in batches {
        let (log, session) = (store.events().clone(), session.clone());
        tasks.push(tokio::spawn(async move {
            for size in sizes {
                if size == 1 {
                    log.append_soon(&session, delta("soon")).await.unwrap();
                } else {
                    let bodies = (0..size).map(|i| delta("x".repeat(i))).collect();
                    let written = log.append(&session, bodies).await.unwrap();
                    assert!(written.windows(2).all(|pair| pair[1].index == pair[0].index + 1));
                }
            }
        }));
    }
    for task in tasks {
        tokio::time::timeout(LONG, task)
            .await
            .expect("nobody waits for ever")
            .unwrap();
    }
}

#[test]
fn replay_and_live_meet_without_gap_or_repeat_in_any_interleaving() {
    for workers in [1, 4] {
        let runtime = if workers == 1 {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
        } else {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(workers)
                .enable_all()
                .build()
                .unwrap()
        };
        let fixture = runtime.block_on(StoreFixture::new());
        let config = ProptestConfig {
            cases: 40,
            ..ProptestConfig::default()
        };
        let batches = prop::collection::vec(prop::collection::vec(1usize..40, 1..12), 1..5);
        let followers = prop::collection::vec((0usize..500, -1i64..300), 1..8);
        proptest!(config, |(batches in batches, followers in followers)| {
            runtime.block_on(race(&fixture.store, batches, followers));
        });
        runtime.block_on(fixture.store.close());
    }
}
