//! A session whose log cannot be written: it says so, acknowledges nothing, and goes on where it was once the
//! database can be written again.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::SessionFixture;
use oubliette_protocol::{
    ErrorCode, Principal, SessionId,
    event::{EventBody, SessionStatus},
};
use oubliette_session::SessionView;
use oubliette_store::PageRequest;

async fn get(fixture: &SessionFixture, session: &SessionId) -> SessionView {
    fixture.sessions.get(&Principal::owner(), session).await.unwrap()
}

/// Starts a turn that runs until it is cancelled, and makes every write fail from then on.
async fn turn_without_database(fixture: &SessionFixture, prompt: &str) -> SessionId {
    let session = fixture.start_without_waiting("ok", prompt).await;
    fixture
        .wait_for_event(&session, |body| matches!(body, EventBody::Delta { .. }))
        .await;
    fixture.store.set_write_fault(true);
    session
}

/// Waits until `session_get` says that the log cannot be written.
async fn wait_until_reported(fixture: &SessionFixture, session: &SessionId) {
    let reported = async {
        while !get(fixture, session)
            .await
            .reason
            .is_some_and(|reason| reason.contains("the disk is full"))
        {
            tokio::task::yield_now().await;
        }
    };
    let limit = std::time::Duration::from_secs(60);
    tokio::time::timeout(limit, reported).await.expect("not reported");
}

async fn assert_no_hole_and_no_repeat(fixture: &SessionFixture, session: &SessionId) {
    let log = fixture.log(session).await;
    assert!(log.iter().zip(0..).all(|(event, index)| event.index == index));
    let deltas: String = log
        .iter()
        .filter_map(|event| match &event.body {
            EventBody::Delta { text } => Some(text.as_str()),
            _ => None,
        })
        .collect();
    let texts: String = log
        .iter()
        .filter_map(|event| match &event.body {
            EventBody::TurnCompleted { text, .. } => Some(text.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(deltas.len(), texts.len());
    assert_eq!(deltas, texts);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_ends_only_when_its_end_is_in_the_log() {
    let fixture = SessionFixture::new().await;
    let owner = Principal::owner();
    let session = turn_without_database(&fixture, "wait").await;
    fixture.sessions.cancel(&owner, &session).await.unwrap();
    wait_until_reported(&fixture, &session).await;
    assert_eq!(get(&fixture, &session).await.status, SessionStatus::Running);
    let refused = fixture.send_and_wait(&session, "say hi").await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unavailable, "{refused}");
    let other = "other".parse().unwrap();
    let refused = fixture.sessions.switch_agent(&owner, &session, &other).await;
    assert_eq!(refused.unwrap_err().code, ErrorCode::Unavailable);

    fixture.store.set_write_fault(false);
    fixture.wait_for_status(&session, SessionStatus::Idle).await;
    assert_eq!(get(&fixture, &session).await.reason, None);
    let reply = fixture.send_and_wait(&session, "say hi").await.unwrap();
    assert_eq!((reply.turn, reply.text.as_deref()), (2, Some("hi")));
    let told = fixture.log_summary(&session).await;
    let expected = [
        "starting",
        "running",
        "user: wait",
        "assistant: waiting",
        "turn 1 cancelled",
        "idle",
        "running",
        "user: say hi",
        "assistant: hi",
        "turn 2 end_turn",
        "idle",
    ];
    assert_eq!(told, expected);
    assert_no_hole_and_no_repeat(&fixture, &session).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_agent_says_meanwhile_is_logged_once_afterwards() {
    let fixture = SessionFixture::new().await;
    let owner = Principal::owner();
    let session = turn_without_database(&fixture, "chatter").await;
    wait_until_reported(&fixture, &session).await;
    // The agent can be cancelled all the same.
    assert!(fixture.sessions.cancel(&owner, &session).await.unwrap().cancelled);
    fixture.store.set_write_fault(false);
    fixture.wait_for_status(&session, SessionStatus::Idle).await;
    assert_no_hole_and_no_repeat(&fixture, &session).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_that_cannot_be_logged_is_not_acknowledged_and_follows_later() {
    let fixture = SessionFixture::new().await;
    let session = turn_without_database(&fixture, "wait").await;
    let refused = fixture.sessions.end(&Principal::owner(), &session).await;
    assert_eq!(refused.unwrap_err().code, ErrorCode::Unavailable);
    assert_eq!(get(&fixture, &session).await.status, SessionStatus::Running);
    fixture.store.set_write_fault(false);
    fixture.wait_for_status(&session, SessionStatus::Ended).await;
    let told = fixture.log_summary(&session).await;
    assert_eq!(told.iter().filter(|told| *told == "ended").count(), 1, "{told:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_switch_that_cannot_be_logged_changes_nothing() {
    let fixture = SessionFixture::new().await;
    let (owner, other) = (Principal::owner(), "other".parse().unwrap());
    let session = fixture.start("ok", "say hi").await.unwrap().session_id;
    fixture.store.set_write_fault(true);
    let refused = fixture.sessions.switch_agent(&owner, &session, &other).await;
    assert_eq!(refused.unwrap_err().code, ErrorCode::Unavailable);
    let view = get(&fixture, &session).await;
    assert_eq!((view.status, view.agent.as_str()), (SessionStatus::Idle, "ok"));
    fixture.store.set_write_fault(false);
    let switched = fixture
        .sessions
        .switch_agent(&owner, &session, &other)
        .await
        .unwrap();
    assert_eq!(switched.agent, other);
    assert_eq!(
        fixture
            .send_and_wait(&session, "name")
            .await
            .unwrap()
            .text
            .as_deref(),
        Some("other")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stops_without_its_database_finds_the_turn_interrupted() {
    let fixture = SessionFixture::new().await;
    let session = turn_without_database(&fixture, "wait").await;
    fixture
        .sessions
        .cancel(&Principal::owner(), &session)
        .await
        .unwrap();
    wait_until_reported(&fixture, &session).await;
    fixture.sessions.shutdown().await;
    let fixture = SessionFixture::reopen(fixture.into_leftover_home()).await;
    assert_eq!(get(&fixture, &session).await.status, SessionStatus::Idle);
    let told = fixture.log_summary(&session).await;
    assert_eq!(
        told,
        ["starting", "running", "user: wait", "error unavailable", "idle"]
    );
    let reply = fixture.send_and_wait(&session, "say hi").await.unwrap();
    assert_eq!((reply.turn, reply.text.as_deref()), (2, Some("hi")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_whose_start_cannot_be_logged_does_not_exist() {
    let fixture = SessionFixture::new().await;
    fixture.store.set_write_fault(true);
    let refused = fixture.start("ok", "say hi").await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unavailable, "{refused}");
    fixture.store.set_write_fault(false);
    let listed = fixture
        .store
        .session_list(Default::default(), PageRequest::first(10));
    assert_eq!(listed.await.unwrap().items, []);
    assert!(fixture.start("ok", "say hi").await.is_ok());
}
