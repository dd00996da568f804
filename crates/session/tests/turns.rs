//! Turns of a real process over real ACP, however it behaves.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::time::Duration;

use common::World;
use oubliette_protocol::{
    ErrorCode, Principal,
    event::{EventBody, Status},
};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_is_told_in_order() {
    let world = World::new().await;
    let reply = world.start("ok", "say hello there friend").await.unwrap();
    assert_eq!(
        (reply.turn, reply.status, reply.text.as_deref()),
        (1, Status::Idle, Some("hello there friend"))
    );
    let told = world.told(&reply.session_id).await;
    assert_eq!(
        told,
        [
            "starting",
            "running",
            "user: say hello there friend",
            "assistant: hello there friend",
            "turn 1 end_turn",
            "idle"
        ]
    );
    let log = world.log(&reply.session_id).await;
    assert!(log.iter().enumerate().all(|(i, e)| e.index == i as i64));
    let deltas: String = log
        .iter()
        .filter_map(|e| {
            if let EventBody::Delta { text } = &e.body {
                Some(text.as_str())
            } else {
                None
            }
        })
        .collect();
    assert_eq!(deltas, "hello there friend");
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_split_messages_and_the_text_is_all_of_it() {
    let world = World::new().await;
    let reply = world.start("ok", "tool").await.unwrap();
    let told = world.told(&reply.session_id).await;
    assert_eq!(
        told[3..],
        [
            "assistant: before",
            "tool_call",
            "tool_result",
            "assistant: after",
            "turn 1 end_turn",
            "idle"
        ]
    );
    assert_eq!(reply.text.as_deref(), Some("before\nafter"));
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_to_a_busy_session_queue_in_order() {
    let world = World::new().await;
    let owner = Principal::owner();
    let session = world.start_only("ok", "wait").await;
    world
        .until(&session, |b| matches!(b, EventBody::Delta { .. }))
        .await;
    let second = world.send(&session, "say two").await;
    assert_eq!((second.turn, second.status), (2, Status::Running));
    let third = world.say(&session, "say three");
    let cancel = world.sessions.cancel(&owner, &session);
    let (third, cancelled) = tokio::join!(third, cancel);
    let (third, cancelled) = (third.unwrap(), cancelled.unwrap());
    assert!(cancelled.cancelled && cancelled.turn == 1);
    assert_eq!((third.turn, third.text.as_deref()), (3, Some("three")));
    let told = world.told(&session).await;
    let turns: Vec<_> = told.iter().filter(|t| t.starts_with("turn")).collect();
    assert_eq!(turns, ["turn 1 cancelled", "turn 2 end_turn", "turn 3 end_turn"]);
    assert!(
        !world
            .sessions
            .cancel(&Principal::owner(), &session)
            .await
            .unwrap()
            .cancelled
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_ignores_cancel_is_killed_and_started_again() {
    let world = World::new().await;
    let session = world.start_only("ok", "ignore").await;
    world
        .until(&session, |b| matches!(b, EventBody::Delta { .. }))
        .await;
    assert!(
        world
            .sessions
            .cancel(&Principal::owner(), &session)
            .await
            .unwrap()
            .cancelled
    );
    world.until_status(&session, Status::Idle).await;
    assert!(
        world
            .told(&session)
            .await
            .contains(&"turn 1 cancelled".to_owned())
    );
    let again = world.say(&session, "loaded").await.unwrap();
    assert!(
        again.text.unwrap().starts_with("conv-"),
        "the conversation is loaded, not begun anew"
    );
    assert!(
        !world.told(&session).await.iter().any(|t| t.contains("old")),
        "replayed history is not logged again"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_cannot_start_fails_the_session_with_its_last_words() {
    let hasty = World::with(|config| config.initialize_timeout = Duration::from_secs(2)).await;
    let world = World::new().await;
    for (world, how, words) in [
        (&world, "dies", "oops, no licence"),
        (&hasty, "mute", "did not answer initialize"),
        (&world, "rubbish", "not ACP"),
        (&world, "flood", "line longer"),
    ] {
        let error = world.start(how, "say hi").await.unwrap_err();
        assert!(
            matches!(error.code, ErrorCode::Unavailable | ErrorCode::Timeout),
            "{how}: {error:?}"
        );
        assert!(error.message.contains(words), "{how}: {}", error.message);
        let sessions = world
            .sessions
            .list(&Principal::owner(), Default::default())
            .await
            .unwrap()
            .sessions;
        assert_eq!(sessions[0].status, Status::Failed);
        assert!(sessions[0].reason.as_ref().unwrap().contains(words));
        let told = world.told(&sessions[0].session_id).await;
        assert_eq!(told[0], "starting");
        assert!(
            told[told.len() - 2].starts_with("error") && told[told.len() - 1] == "failed",
            "{told:?}"
        );
    }
    assert_eq!(
        world.start("ok", "say fine").await.unwrap().text.as_deref(),
        Some("fine")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_breaks_mid_turn_fails_it_and_the_next_message_resumes() {
    let world = World::with(|config| {
        config.voice.turn_text = 200_000;
        config.turn_timeout = Duration::from_secs(60);
    })
    .await;
    for (how, words) in [
        ("die", "segmentation fault, of course"),
        ("rubbish", "not ACP"),
        ("chatter", "more than 200000 bytes"),
        ("fail", "no model: configure one"),
        ("result 17000000", "line longer than 16777216 bytes"),
    ] {
        let session = world.start("ok", "say hi").await.unwrap().session_id;
        let error = world.say(&session, how).await.unwrap_err();
        assert!(error.message.contains(words), "{how}: {}", error.message);
        let told = world.told(&session).await;
        assert_eq!(told.last().unwrap(), "failed", "{how}: {told:?}");
        let again = world.say(&session, "say back").await.unwrap();
        assert_eq!((again.turn, again.text.as_deref()), (3, Some("back")), "{how}");
        world.sessions.end(&Principal::owner(), &session).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_of_ten_megabytes_is_logged_from_its_beginning() {
    let world = World::new().await;
    let session = world.start("ok", "result 10000000").await.unwrap().session_id;
    let log = world.store.events();
    let events = log.read(&session, -1, 100).await.unwrap();
    let result = events.iter().find_map(|event| match &event.body {
        EventBody::ToolResult { ok, result, .. } => Some((*ok, result)),
        _ => None,
    });
    let (ok, result) = result.unwrap();
    assert!(ok && result["truncated"] == true, "{}", result["bytes"]);
    assert_eq!(result["bytes"], 10_000_011);
    let again = world.say(&session, "say on").await.unwrap();
    assert_eq!(again.text.as_deref(), Some("on"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_turn_times_out() {
    let world = World::with(|config| config.turn_timeout = Duration::from_millis(300)).await;
    let error = world.start("ok", "ignore").await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Timeout);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_agent_asks_is_answered_by_its_policy() {
    let world = World::new().await;
    world.agent("strict", "ok", json!({"permissions": "deny"})).await;
    let session = world.start("ok", "permission").await.unwrap();
    assert_eq!(session.text.as_deref(), Some("yes"));
    assert_eq!(
        world.start("strict", "permission").await.unwrap().text.as_deref(),
        Some("no")
    );
    let id = session.session_id;
    assert_eq!(
        world.say(&id, "fs").await.unwrap().text.as_deref(),
        Some("-32601"),
        "no file system is offered"
    );
    assert_eq!(
        world.say(&id, "remember one").await.unwrap().text.as_deref(),
        Some("one")
    );
    assert_eq!(
        world.say(&id, "remember two").await.unwrap().text.as_deref(),
        Some("one,two")
    );
    assert_eq!(
        world.say(&id, "env FROM_PROJECT").await.unwrap().text.as_deref(),
        Some("yes")
    );
    assert_eq!(
        world
            .say(&id, "env FROM_WORKSPACE")
            .await
            .unwrap()
            .text
            .as_deref(),
        Some("yes")
    );
    let client = world.say(&id, "client").await.unwrap().text.unwrap();
    assert!(
        client.contains("OUBLIETTE_SOCKET") && client.contains("relay.sock"),
        "{client}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn end_kills_at_once_and_frees_everything() {
    let world = World::new().await;
    let session = world.start_only("ok", "ignore").await;
    world
        .until(&session, |b| matches!(b, EventBody::Delta { .. }))
        .await;
    let socket = world
        .sessions
        .get(&Principal::owner(), &session)
        .await
        .unwrap()
        .relay_socket
        .unwrap();
    assert!(socket.exists());
    let ended = world.sessions.end(&Principal::owner(), &session).await.unwrap();
    assert_eq!(ended.status, Status::Ended);
    assert!(!socket.exists());
    assert_eq!(world.told(&session).await.last().unwrap(), "ended");
    assert_eq!(
        world.say(&session, "say x").await.unwrap_err().code,
        ErrorCode::Conflict
    );
    assert_eq!(
        world
            .sessions
            .end(&Principal::owner(), &session)
            .await
            .unwrap()
            .status,
        Status::Ended
    );
    world.sessions.shutdown().await;
    assert!(!world.home.session_dir(&session).exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_session_sleeps_and_wakes() {
    let world = World::with(|config| config.idle_sleep = Duration::from_millis(50)).await;
    let session = world.start("ok", "say hi").await.unwrap().session_id;
    while !world
        .debugger(&session)
        .await
        .contains(&"teardown_finished".to_owned())
    {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        world
            .sessions
            .get(&Principal::owner(), &session)
            .await
            .unwrap()
            .status,
        Status::Idle
    );
    let again = world.say(&session, "loaded").await.unwrap();
    assert!(again.text.unwrap().starts_with("conv-"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_that_grows_too_large_cancels_the_turn() {
    let world = World::with(|config| config.limits.workspace_mb = Some(8)).await;
    let error = world.start("ok", "fill 20").await.unwrap_err();
    assert_eq!(error.code, ErrorCode::LimitExceeded);
    let session = world
        .sessions
        .list(&Principal::owner(), Default::default())
        .await
        .unwrap()
        .sessions[0]
        .clone();
    let told = world.told(&session.session_id).await;
    assert!(
        told.contains(&"error limit_exceeded".to_owned()) && told.contains(&"turn 1 cancelled".to_owned()),
        "{told:?}"
    );
    assert_eq!(session.status, Status::Idle);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_project_has_only_so_many_active_sessions() {
    let world = World::new().await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(world.start("ok", "say hi").await.unwrap().session_id);
    }
    assert_eq!(
        world.start("ok", "say hi").await.unwrap_err().code,
        ErrorCode::LimitExceeded
    );
    world.sessions.end(&Principal::owner(), &ids[0]).await.unwrap();
    world.start("ok", "say hi").await.unwrap();
}

#[test]
fn after_a_kill_the_log_is_whole_and_the_session_resumes() {
    // Dropping a runtime drops every task where it stands, as a kill does.
    let first = tokio::runtime::Runtime::new().unwrap();
    let (remains, session, before) = first.block_on(async {
        let world = World::new().await;
        let session = world.start_only("ok", "ignore").await;
        world
            .until(&session, |b| matches!(b, EventBody::Delta { .. }))
            .await;
        let before = world.log(&session).await;
        (world.remains(), session, before)
    });
    drop(first);
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let world = World::again(remains).await;
        let log = world.log(&session).await;
        assert_eq!(log[..before.len()], before[..]);
        let told = world.told(&session).await;
        assert_eq!(told[told.len() - 2..], ["error unavailable", "idle"]);
        let EventBody::Status {
            reason: Some(reason), ..
        } = &log.last().unwrap().body
        else {
            panic!("{log:?}")
        };
        assert!(reason.contains("restarted during turn 1"), "{reason}");
        let again = world.say(&session, "loaded").await.unwrap();
        assert_eq!(again.turn, 2);
        assert!(again.text.unwrap().starts_with("conv-"));
        world.sessions.shutdown().await;
    });
}
