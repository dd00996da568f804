//! Switching agents: the steps as the debugger shows them, and messages, calls, cancels and ends that
//! arrive during a switch.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;
#[allow(dead_code, unreachable_pub, missing_docs)]
#[path = "../../tools/tests/upstream_support/raw.rs"]
mod raw;

use std::time::Duration;

use common::SessionFixture;
use oubliette_protocol::{
    ErrorCode, Principal,
    event::{EventBody, SessionStatus},
    tool::ToolAddress,
};
use oubliette_tools::{CallContext, CallOrigin};
use serde_json::json;
use tokio::sync::mpsc;

/// The principal that owns the home directory.
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
async fn an_idle_session_switches_in_order_and_each_agent_keeps_its_memory() {
    let fixture = SessionFixture::new().await;
    let session = fixture.start("ok", "remember one").await.unwrap().session_id;
    let switched = fixture
        .sessions
        .switch_agent(owner(), &session, &"other".parse().unwrap())
        .await
        .unwrap();
    assert!(switched.drained && switched.agent.as_str() == "other");
    let kinds = fixture.debugger(&session).await;
    assert_eq!(kinds[kinds.len() - STEPS.len()..], STEPS);
    assert_eq!(
        fixture
            .sessions
            .get(owner(), &session)
            .await
            .unwrap()
            .agent
            .as_str(),
        "other"
    );
    assert_eq!(
        fixture
            .send_and_wait(&session, "name")
            .await
            .unwrap()
            .text
            .as_deref(),
        Some("other")
    );
    assert_eq!(
        fixture
            .send_and_wait(&session, "remember two")
            .await
            .unwrap()
            .text
            .as_deref(),
        Some("two"),
        "its own memory alone"
    );
    fixture
        .sessions
        .switch_agent(owner(), &session, &"ok".parse().unwrap())
        .await
        .unwrap();
    assert_eq!(
        fixture
            .send_and_wait(&session, "remember three")
            .await
            .unwrap()
            .text
            .as_deref(),
        Some("one,three")
    );
    assert!(
        fixture
            .send_and_wait(&session, "loaded")
            .await
            .unwrap()
            .text
            .unwrap()
            .starts_with("conv-")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_past_the_drain_timeout_is_cancelled_and_queued_messages_reach_the_new_agent() {
    let fixture = SessionFixture::with(|config| config.drain_timeout = Duration::from_millis(200)).await;
    let session = fixture.start_without_waiting("ok", "ignore").await;
    fixture
        .wait_for_event(&session, |b| matches!(b, EventBody::Delta { .. }))
        .await;
    let agent = "other".parse().unwrap();
    let switch = fixture.sessions.switch_agent(owner(), &session, &agent);
    let talk = async {
        fixture.wait_for_status(&session, SessionStatus::Switching).await;
        fixture.send_and_wait(&session, "name").await.unwrap()
    };
    let (switched, reply) = tokio::join!(switch, talk);
    assert!(!switched.unwrap().drained);
    assert_eq!(reply.text.as_deref(), Some("other"));
    let kinds = fixture.debugger(&session).await;
    assert_eq!(
        kinds.iter().filter(|k| *k == "drain_timeout").count(),
        1,
        "{kinds:?}"
    );
    let at = |kind: &str| kinds.iter().position(|k| k == kind).unwrap();
    assert!(at("drain_started") < at("drain_timeout") && at("drain_timeout") < at("drain_finished"));
    assert!(
        fixture
            .log_summary(&session)
            .await
            .contains(&"error unavailable".to_owned())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_ends_within_the_drain_timeout_is_not_cancelled() {
    // Longer than the test: the turn ends because this test cancels it.
    let fixture = SessionFixture::with(|config| config.drain_timeout = Duration::from_secs(600)).await;
    let session = fixture.start_without_waiting("ok", "wait").await;
    fixture
        .wait_for_event(&session, |b| matches!(b, EventBody::Delta { .. }))
        .await;
    let agent = "other".parse().unwrap();
    let switch = fixture.sessions.switch_agent(owner(), &session, &agent);
    let cancel = async {
        fixture.wait_for_status(&session, SessionStatus::Switching).await;
        let second = fixture
            .sessions
            .switch_agent(owner(), &session, &agent)
            .await
            .unwrap_err();
        assert_eq!(second.code, ErrorCode::Conflict, "one switch at a time");
        fixture.sessions.cancel(owner(), &session).await.unwrap();
    };
    let (switched, ()) = tokio::join!(switch, cancel);
    assert!(switched.unwrap().drained);
    assert!(
        fixture
            .log_summary(&session)
            .await
            .contains(&"turn 1 cancelled".to_owned())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_target_is_refused_and_nothing_is_torn_down() {
    let fixture = SessionFixture::new().await;
    let session = fixture.start("ok", "say hi").await.unwrap().session_id;
    let error = fixture
        .sessions
        .switch_agent(owner(), &session, &"nobody".parse().unwrap())
        .await
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::NotFound);
    assert!(
        !fixture
            .debugger(&session)
            .await
            .contains(&"teardown_started".to_owned())
    );
    assert!(
        fixture
            .send_and_wait(&session, "loaded")
            .await
            .unwrap()
            .text
            .as_deref()
            == Some("new"),
        "the same process goes on"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_cannot_start_brings_the_old_agent_back() {
    let fixture = SessionFixture::new().await;
    let session = fixture.start("ok", "remember one").await.unwrap().session_id;
    let error = fixture
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
    let view = fixture.sessions.get(owner(), &session).await.unwrap();
    assert_eq!((view.agent.as_str(), view.status), ("ok", SessionStatus::Idle));
    assert_eq!(
        fixture
            .send_and_wait(&session, "remember two")
            .await
            .unwrap()
            .text
            .as_deref(),
        Some("one,two")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn ending_a_session_during_a_switch_aborts_the_switch() {
    let fixture = SessionFixture::with(|config| config.initialize_timeout = Duration::from_secs(60)).await;
    let session = fixture.start("ok", "say hi").await.unwrap().session_id;
    let agent = "mute".parse().unwrap();
    let switch = fixture.sessions.switch_agent(owner(), &session, &agent);
    let end = async {
        fixture.wait_for_status(&session, SessionStatus::Switching).await;
        fixture.sessions.end(owner(), &session).await.unwrap()
    };
    let (switched, ended) = tokio::join!(switch, end);
    assert_eq!(switched.unwrap_err().code, ErrorCode::Conflict);
    assert_eq!(ended.status, SessionStatus::Ended);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_from_outside_waits_for_the_new_agent() {
    let fixture = SessionFixture::new().await;
    let policy =
        json!({"id":"reader","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":["."]}});
    fixture
        .library
        .tool_put("reader".parse().unwrap(), policy)
        .await
        .unwrap();
    fixture.agent("plain", "plain", json!({})).await;
    fixture
        .agent("reads", "reads", json!({"tools":{"use":["reader"]}}))
        .await;
    let session = fixture.start("plain", "say hi").await.unwrap().session_id;
    let agent = "reads".parse().unwrap();
    let switch = fixture.sessions.switch_agent(owner(), &session, &agent);
    let call = async {
        fixture.wait_for_status(&session, SessionStatus::Switching).await;
        let arguments = json!({"path":"."}).as_object().unwrap().clone();
        fixture
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
    // A directory cannot be read as a file, so the call fails, but in the new agent's tool.
    let refused = called.err().map(|e| e.code);
    assert_ne!(refused, Some(ErrorCode::NotAllowed));
    assert_ne!(refused, Some(ErrorCode::Unavailable));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_from_inside_waits_for_the_new_agent_while_a_switch_builds_it() {
    let fixture = SessionFixture::new().await;
    let (connected, mut connections) = mpsc::unbounded_channel();
    let address = raw::listen(move |connection| {
        let connected = connected.clone();
        async move { drop(connected.send(connection)) }
    })
    .await;
    let entry = json!({"id":"held","kind":"mcp","transport":"tcp","endpoint":address.to_string(),
        "timeouts":{"startupMs":60000,"requestMs":60000}});
    fixture
        .library
        .tool_put("held".parse().unwrap(), entry)
        .await
        .unwrap();
    fixture
        .agent("holder", "ok", json!({"tools":{"use":["held"]}}))
        .await;
    let session = fixture.start("ok", "say hi").await.unwrap().session_id;
    let plane = fixture.sessions.plane(&session).await.unwrap();
    let agent = "holder".parse().unwrap();
    let switch = fixture.sessions.switch_agent(owner(), &session, &agent);
    let call = async {
        let mut connection: raw::RawServerConnection = connections.recv().await.unwrap();
        let initialize = connection.expect_method("initialize").await;
        assert!(plane.context().is_none(), "the old agent's tools are gone");
        let mut call = std::pin::pin!(plane.call_raw(
            ToolAddress::Catalog("held_echo".into()),
            Default::default(),
            CallOrigin::Inside { api_key: None },
            CallContext::default(),
        ));
        assert!(futures::poll!(call.as_mut()).is_pending(), "the call waits");
        let serve = async {
            connection.answer(&initialize, raw::initialize_result()).await;
            let list = connection.expect_method("tools/list").await;
            connection
                .answer(&list, json!({ "tools": raw::tools(&["echo"]) }))
                .await;
            let call = connection.expect_method("tools/call").await;
            connection
                .answer(&call, json!({"content":[],"isError":false}))
                .await;
        };
        tokio::join!(call, serve).0.unwrap().1
    };
    let (switched, answer) = tokio::join!(switch, call);
    switched.unwrap();
    assert_eq!(answer.get(), r#"{"content":[],"isError":false}"#);
}
