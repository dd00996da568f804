//! Switching agents, step by step in the debugger, whatever arrives in the middle.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::time::Duration;

use common::World;
use oubliette_protocol::{
    ErrorCode, Principal,
    event::{EventBody, Status},
};
use oubliette_tools::CallContext;
use serde_json::json;

/// The home's owner.
fn owner() -> &'static Principal {
    static OWNER: std::sync::LazyLock<Principal> = std::sync::LazyLock::new(Principal::owner);
    &OWNER
}

const STEPS: [&str; 9] = [
    "switch_requested",
    "drain_started",
    "drain_finished",
    "teardown_started",
    "registry_cleared",
    "teardown_finished",
    "build_started",
    "memory_opened",
    "build_finished",
];

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_session_switches_step_by_step_and_back_to_its_memory() {
    let world = World::new().await;
    let session = world.start("ok", "remember one").await.unwrap().session_id;
    let switched = world
        .sessions
        .switch_agent(owner(), &session, &"other".parse().unwrap())
        .await
        .unwrap();
    assert!(switched.drained && switched.agent.as_str() == "other");
    let kinds = world.debugger(&session).await;
    assert_eq!(kinds[kinds.len() - STEPS.len()..], STEPS);
    assert_eq!(
        world
            .sessions
            .get(owner(), &session)
            .await
            .unwrap()
            .agent
            .as_str(),
        "other"
    );
    assert_eq!(
        world.say(&session, "name").await.unwrap().text.as_deref(),
        Some("other")
    );
    assert_eq!(
        world.say(&session, "remember two").await.unwrap().text.as_deref(),
        Some("two"),
        "its own memory alone"
    );
    world
        .sessions
        .switch_agent(owner(), &session, &"ok".parse().unwrap())
        .await
        .unwrap();
    assert_eq!(
        world
            .say(&session, "remember three")
            .await
            .unwrap()
            .text
            .as_deref(),
        Some("one,three")
    );
    assert!(
        world
            .say(&session, "loaded")
            .await
            .unwrap()
            .text
            .unwrap()
            .starts_with("conv-")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_does_not_end_is_cancelled_and_messages_meet_the_new_agent() {
    let world = World::with(|config| config.drain_timeout = Duration::from_millis(200)).await;
    let session = world.start_only("ok", "ignore").await;
    world
        .until(&session, |b| matches!(b, EventBody::Delta { .. }))
        .await;
    let agent = "other".parse().unwrap();
    let switch = world.sessions.switch_agent(owner(), &session, &agent);
    let talk = async {
        world.until_status(&session, Status::Switching).await;
        world.say(&session, "name").await.unwrap()
    };
    let (switched, reply) = tokio::join!(switch, talk);
    assert!(!switched.unwrap().drained);
    assert_eq!(reply.text.as_deref(), Some("other"));
    let kinds = world.debugger(&session).await;
    assert_eq!(
        kinds.iter().filter(|k| *k == "drain_timeout").count(),
        1,
        "{kinds:?}"
    );
    let at = |kind: &str| kinds.iter().position(|k| k == kind).unwrap();
    assert!(at("drain_started") < at("drain_timeout") && at("drain_timeout") < at("drain_finished"));
    assert!(
        world
            .told(&session)
            .await
            .contains(&"error unavailable".to_owned())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_ends_in_time_is_left_to_end() {
    // It ends when this test says so, and not before.
    let world = World::with(|config| config.drain_timeout = Duration::from_secs(600)).await;
    let session = world.start_only("ok", "wait").await;
    world
        .until(&session, |b| matches!(b, EventBody::Delta { .. }))
        .await;
    let agent = "other".parse().unwrap();
    let switch = world.sessions.switch_agent(owner(), &session, &agent);
    let cancel = async {
        world.until_status(&session, Status::Switching).await;
        let second = world
            .sessions
            .switch_agent(owner(), &session, &agent)
            .await
            .unwrap_err();
        assert_eq!(second.code, ErrorCode::Conflict, "one switch at a time");
        world.sessions.cancel(owner(), &session).await.unwrap();
    };
    let (switched, ()) = tokio::join!(switch, cancel);
    assert!(switched.unwrap().drained);
    assert!(
        world
            .told(&session)
            .await
            .contains(&"turn 1 cancelled".to_owned())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_target_is_refused_and_nothing_is_torn_down() {
    let world = World::new().await;
    let session = world.start("ok", "say hi").await.unwrap().session_id;
    let error = world
        .sessions
        .switch_agent(owner(), &session, &"nobody".parse().unwrap())
        .await
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::NotFound);
    assert!(
        !world
            .debugger(&session)
            .await
            .contains(&"teardown_started".to_owned())
    );
    assert!(
        world.say(&session, "loaded").await.unwrap().text.as_deref() == Some("new"),
        "the same process goes on"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_cannot_start_brings_the_old_agent_back() {
    let world = World::new().await;
    let session = world.start("ok", "remember one").await.unwrap().session_id;
    let error = world
        .sessions
        .switch_agent(owner(), &session, &"dies".parse().unwrap())
        .await
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(
        error.message.contains("oops, no licence") && error.message.contains("ok is back"),
        "{}",
        error.message
    );
    let view = world.sessions.get(owner(), &session).await.unwrap();
    assert_eq!((view.agent.as_str(), view.status), ("ok", Status::Idle));
    assert_eq!(
        world.say(&session, "remember two").await.unwrap().text.as_deref(),
        Some("one,two")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_in_the_middle_of_a_switch_wins() {
    let world = World::with(|config| config.initialize_timeout = Duration::from_secs(60)).await;
    let session = world.start("ok", "say hi").await.unwrap().session_id;
    let agent = "mute".parse().unwrap();
    let switch = world.sessions.switch_agent(owner(), &session, &agent);
    let end = async {
        world.until_status(&session, Status::Switching).await;
        world.sessions.end(owner(), &session).await.unwrap()
    };
    let (switched, ended) = tokio::join!(switch, end);
    assert_eq!(switched.unwrap_err().code, ErrorCode::Conflict);
    assert_eq!(ended.status, Status::Ended);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_from_outside_waits_for_the_new_agent() {
    let world = World::new().await;
    let policy =
        json!({"id":"reader","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":["."]}});
    world
        .library
        .tool_put("reader".parse().unwrap(), policy)
        .await
        .unwrap();
    world.agent("plain", "plain", json!({})).await;
    world
        .agent("reads", "reads", json!({"tools":{"use":["reader"]}}))
        .await;
    let session = world.start("plain", "say hi").await.unwrap().session_id;
    let agent = "reads".parse().unwrap();
    let switch = world.sessions.switch_agent(owner(), &session, &agent);
    let call = async {
        world.until_status(&session, Status::Switching).await;
        let arguments = json!({"path":"."}).as_object().unwrap().clone();
        world
            .sessions
            .tool_call(
                owner(),
                &session,
                "@reader/fs_read".into(),
                arguments,
                CallContext::default(),
            )
            .await
    };
    let (switched, called) = tokio::join!(switch, call);
    switched.unwrap();
    // The directory cannot be read as a file, but it was the new agent's tool that said so.
    let refused = called.err().map(|e| e.code);
    assert_ne!(refused, Some(ErrorCode::NotAllowed));
    assert_ne!(refused, Some(ErrorCode::Unavailable));
}
