//! The times of debugger events: when they happened, not when they were written.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::SessionFixture;
use jiff::Timestamp;
use oubliette_protocol::{Principal, SessionId, debug::DebugBody, event::EventBody};
use oubliette_store::{DebugFilter, now};
use oubliette_tools::CallContext;

/// Waits until the clock shows another millisecond, the precision of event times; returns it.
async fn next_millisecond() -> Timestamp {
    let start = now();
    while now() <= start {
        tokio::task::yield_now().await;
    }
    now()
}

async fn call_tool(fixture: &SessionFixture, session: &SessionId) {
    let (owner, context) = (Principal::owner(), CallContext::default());
    let call = fixture
        .sessions
        .tool_call(&owner, session, "oubliette_x".into(), Default::default(), context);
    call.await.unwrap();
}

/// `started` and `ts` of each recorded tool call.
async fn call_times(fixture: &SessionFixture, session: &SessionId) -> Vec<(Timestamp, Timestamp)> {
    fixture.store.debugger().flush().await;
    let filter = DebugFilter {
        session: Some(session.clone()),
        ..Default::default()
    };
    let events = fixture.store.debugger().read(&filter, -1, 1000).await.unwrap();
    assert!(events.is_sorted_by_key(|event| event.ts), "{events:?}");
    let calls = events.iter().filter_map(|event| match &event.body {
        DebugBody::ToolCall { started, .. } => Some((started.unwrap(), event.ts)),
        _ => None,
    });
    calls.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_one_after_the_other_do_not_overlap_and_end_before_their_turn() {
    let fixture = SessionFixture::new().await;
    let session = fixture.start_without_waiting("ok", "wait").await;
    fixture
        .wait_for_event(&session, |body| matches!(body, EventBody::Delta { .. }))
        .await;
    let before = now();
    call_tool(&fixture, &session).await;
    let between = next_millisecond().await;
    call_tool(&fixture, &session).await;
    next_millisecond().await;
    fixture
        .sessions
        .cancel(&Principal::owner(), &session)
        .await
        .unwrap();
    let completed = fixture
        .wait_for_event(&session, |body| matches!(body, EventBody::TurnCompleted { .. }))
        .await;
    let calls = call_times(&fixture, &session).await;
    let [(first_started, first_ended), (second_started, second_ended)] = calls[..] else {
        panic!("{calls:?}")
    };
    assert!(
        before <= first_started && first_started <= first_ended,
        "{calls:?}"
    );
    assert!(
        first_ended < between && between <= second_started,
        "{between} {calls:?}"
    );
    assert!(second_started <= second_ended, "{calls:?}");
    assert!(second_ended < completed.ts, "{completed:?} {calls:?}");
}
