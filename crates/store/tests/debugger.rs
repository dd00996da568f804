//! The debugger's log: ordered, server-wide, filtered the same way in replay and live.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::StoreFixture;
use futures::{FutureExt, StreamExt};
use oubliette_protocol::{SessionId, Slug, debug::DebugBody};
use oubliette_store::{DebugFilter, now};

const LONG: Duration = Duration::from_secs(60);

fn cleared(tools: usize) -> DebugBody {
    DebugBody::RegistryCleared { tools }
}

fn blocked(tool: &str) -> DebugBody {
    DebugBody::ToolBlocked {
        tool: tool.into(),
        canonical: None,
        reason: "not allowed".into(),
        started: None,
        turn: None,
    }
}

#[tokio::test]
async fn events_keep_their_order_and_indexes_across_restarts() {
    let mut fixture = StoreFixture::new().await;
    let log = fixture.store.debugger();
    assert_eq!(log.last_index().await.unwrap(), -1);
    for tools in 0..2000 {
        log.record(None, None, cleared(tools));
    }
    log.flush().await;
    let all = log.read(&DebugFilter::default(), -1, 5000).await.unwrap();
    assert_eq!(all.len(), 2000);
    for (i, event) in all.iter().enumerate() {
        assert_eq!((event.index, &event.body), (i as i64, &cleared(i)));
    }
    // Not flushed; closing writes it.
    log.record(None, None, cleared(1));
    fixture.reopen().await;
    let log = fixture.store.debugger();
    assert_eq!(log.last_index().await.unwrap(), 2000);
    log.record_durable(None, None, cleared(2)).await.unwrap();
    assert_eq!(log.last_index().await.unwrap(), 2001);
}

#[tokio::test]
async fn filters_agree_in_replay_and_live() {
    let fixture = StoreFixture::new().await;
    let (one, two) = (fixture.project("one").await, fixture.project("two").await);
    let (a, b) = (
        fixture.session(&one).await.session_id,
        fixture.session(&two).await.session_id,
    );
    let writer: Slug = "writer".parse().unwrap();
    let log = fixture.store.debugger();
    let filters = [
        DebugFilter::default(),
        DebugFilter {
            session: Some(a.clone()),
            ..Default::default()
        },
        DebugFilter {
            project: Some(two.project_id.clone()),
            ..Default::default()
        },
        DebugFilter {
            agent: Some(writer.clone()),
            ..Default::default()
        },
        DebugFilter {
            kinds: Some(vec!["tool_blocked".into()]),
            ..Default::default()
        },
        DebugFilter {
            kinds: Some(vec![]),
            ..Default::default()
        },
        DebugFilter {
            session: Some(SessionId::generate()),
            ..Default::default()
        },
    ];
    let mut follows: Vec<_> = filters
        .iter()
        .map(|filter| log.follow(filter.clone(), -1))
        .collect();
    for follow in &mut follows {
        assert!(follow.next().now_or_never().is_none());
    }
    for i in 0..300 {
        let session = [None, Some(a.clone()), Some(b.clone())][i % 3].clone();
        let agent = (i % 2 == 0).then(|| writer.clone());
        log.record(session, agent, if i % 5 == 0 { blocked("x") } else { cleared(i) });
        if i % 50 == 0 {
            log.flush().await;
        }
    }
    log.flush().await;
    for (filter, mut follow) in filters.iter().zip(follows) {
        let replayed = log.read(filter, -1, 1000).await.unwrap();
        for event in &replayed {
            assert_eq!(follow.next().await.unwrap().unwrap(), *event, "{filter:?}");
        }
        assert!(follow.next().now_or_never().is_none(), "{filter:?}");
        let again: Vec<_> = log
            .follow(filter.clone(), -1)
            .take(replayed.len())
            .map(Result::unwrap)
            .collect()
            .await;
        assert_eq!(again, replayed);
    }
    assert_eq!(log.read(&filters[0], -1, 1000).await.unwrap().len(), 300);
    assert_eq!(log.read(&filters[1], -1, 1000).await.unwrap().len(), 100);
    assert_eq!(log.read(&filters[4], -1, 1000).await.unwrap().len(), 60);
    assert_eq!(log.read(&filters[5], -1, 1000).await.unwrap().len(), 0);
}

#[tokio::test]
async fn a_poll_waits_for_an_event_that_passes_the_filter() {
    let fixture = StoreFixture::new().await;
    let log = fixture.store.debugger();
    let filter = DebugFilter {
        kinds: Some(vec!["tool_blocked".into()]),
        ..Default::default()
    };
    let record = async {
        log.record_durable(None, None, cleared(1)).await.unwrap();
        log.record_durable(None, None, blocked("x")).await.unwrap();
    };
    let (found, ()) = tokio::join!(log.poll(&filter, -1, 10, LONG), record);
    assert_eq!(found.unwrap()[0].index, 1);
    assert_eq!(log.wait_beyond(0, LONG).await.unwrap(), 1);
    assert!(
        log.poll(&filter, 1, 10, Duration::from_millis(1))
            .await
            .unwrap()
            .is_empty()
    );
}

#[tokio::test]
async fn after_closing_events_are_refused_and_nothing_hangs() {
    let fixture = StoreFixture::new().await;
    let log = fixture.store.debugger();
    let mut follow = log.follow(DebugFilter::default(), -1);
    log.record(None, None, cleared(1));
    fixture.store.close().await;
    assert!(log.record_durable(None, None, cleared(2)).await.is_err());
    log.record(None, None, cleared(3));
    log.flush().await;
    // The database is closed for reading too; the follower ends instead of waiting.
    while let Some(Ok(_)) = follow.next().await {}
}

#[tokio::test]
async fn old_events_are_deleted_and_their_indexes_are_not_reused() {
    let mut fixture = StoreFixture::new().await;
    let log = fixture.store.debugger();
    for tools in 0..2500 {
        log.record(None, None, cleared(tools));
    }
    log.flush().await;
    let first = log.read(&DebugFilter::default(), -1, 1).await.unwrap()[0].ts;
    assert_eq!(fixture.store.debugger_delete_before(first).await.unwrap(), 0);
    let later = first + Duration::from_secs(3600);
    assert_eq!(fixture.store.debugger_delete_before(later).await.unwrap(), 2500);
    fixture.reopen().await;
    let log = fixture.store.debugger();
    log.record_durable(None, None, cleared(1)).await.unwrap();
    let left = log.read(&DebugFilter::default(), -1, 10).await.unwrap();
    assert_eq!(left.iter().map(|e| e.index).collect::<Vec<_>>(), [2500]);
}

#[tokio::test]
async fn queued_events_are_written_on_flush_and_on_close() {
    let mut fixture = StoreFixture::new().await;
    for entries in 0..10 {
        let body = DebugBody::MemoryOpened { entries };
        fixture.store.debugger().record(None, None, body);
    }
    fixture.store.debugger().flush().await;
    let read = fixture
        .store
        .debugger()
        .read(&DebugFilter::default(), -1, 100)
        .await;
    assert_eq!(read.unwrap().len(), 10);
    fixture
        .store
        .debugger()
        .record(None, None, DebugBody::TeardownStarted {});
    // Closing writes queued events.
    fixture.reopen().await;
    let read = fixture
        .store
        .debugger()
        .read(&DebugFilter::default(), -1, 100)
        .await;
    assert_eq!(read.unwrap().len(), 11);
}

#[tokio::test]
async fn an_event_has_the_time_it_was_recorded_not_the_time_it_was_written() {
    let fixture = StoreFixture::new().await;
    let log = fixture.store.debugger();
    let before = now();
    log.record(None, None, cleared(1));
    log.record_json(
        None,
        None,
        "registry_cleared",
        serde_json::to_string(&cleared(2)).unwrap(),
    );
    let recorded = now();
    // Longer than the precision of stored times, so that a later time would be seen.
    while now() <= recorded {
        tokio::task::yield_now().await;
    }
    let live = log.follow(DebugFilter::default(), -1).take(2);
    log.flush().await;
    let stored = log.read(&DebugFilter::default(), -1, 10).await.unwrap();
    let live: Vec<_> = live.map(Result::unwrap).collect().await;
    assert_eq!(stored, live);
    assert_eq!(stored.len(), 2);
    for event in stored {
        assert!(
            before <= event.ts && event.ts <= recorded,
            "{before} {recorded} {event:?}"
        );
    }
}
