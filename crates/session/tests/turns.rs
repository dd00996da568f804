//! Turns of a real agent process over ACP, well-behaved and not.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::time::Duration;

use common::SessionFixture;
use oubliette_protocol::{
    ErrorCode, Principal,
    event::{EventBody, SessionStatus},
};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_is_logged_in_order() {
    let fixture = SessionFixture::new().await;
    let reply = fixture.start("ok", "say hello there friend").await.unwrap();
    assert_eq!(
        (reply.turn, reply.status, reply.text.as_deref()),
        (1, SessionStatus::Idle, Some("hello there friend"))
    );
    let summary = fixture.log_summary(&reply.session_id).await;
    assert_eq!(
        summary,
        [
            "starting",
            "running",
            "user: say hello there friend",
            "assistant: hello there friend",
            "turn 1 end_turn",
            "idle"
        ]
    );
    let log = fixture.log(&reply.session_id).await;
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
async fn tool_calls_split_messages_and_the_reply_has_all_text() {
    let fixture = SessionFixture::new().await;
    let reply = fixture.start("ok", "tool").await.unwrap();
    let summary = fixture.log_summary(&reply.session_id).await;
    assert_eq!(
        summary[3..],
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
    let fixture = SessionFixture::new().await;
    let owner = Principal::owner();
    let session = fixture.start_without_waiting("ok", "wait").await;
    fixture
        .wait_for_event(&session, |b| matches!(b, EventBody::Delta { .. }))
        .await;
    let second = fixture.send(&session, "say two").await;
    assert_eq!((second.turn, second.status), (2, SessionStatus::Running));
    let third = fixture.send_and_wait(&session, "say three");
    let cancel = fixture.sessions.cancel(&owner, &session);
    let (third, cancelled) = tokio::join!(third, cancel);
    let (third, cancelled) = (third.unwrap(), cancelled.unwrap());
    assert!(cancelled.cancelled && cancelled.turn == 1);
    assert_eq!((third.turn, third.text.as_deref()), (3, Some("three")));
    let summary = fixture.log_summary(&session).await;
    let turns: Vec<_> = summary.iter().filter(|t| t.starts_with("turn")).collect();
    assert_eq!(turns, ["turn 1 cancelled", "turn 2 end_turn", "turn 3 end_turn"]);
    assert!(
        !fixture
            .sessions
            .cancel(&Principal::owner(), &session)
            .await
            .unwrap()
            .cancelled
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_ignores_cancel_is_killed_and_started_again() {
    let fixture = SessionFixture::new().await;
    let session = fixture.start_without_waiting("ok", "ignore").await;
    fixture
        .wait_for_event(&session, |b| matches!(b, EventBody::Delta { .. }))
        .await;
    assert!(
        fixture
            .sessions
            .cancel(&Principal::owner(), &session)
            .await
            .unwrap()
            .cancelled
    );
    fixture.wait_for_status(&session, SessionStatus::Idle).await;
    assert!(
        fixture
            .log_summary(&session)
            .await
            .contains(&"turn 1 cancelled".to_owned())
    );
    let again = fixture.send_and_wait(&session, "loaded").await.unwrap();
    assert!(
        again.text.unwrap().starts_with("conv-"),
        "the conversation is loaded, not begun anew"
    );
    assert!(
        !fixture
            .log_summary(&session)
            .await
            .iter()
            .any(|t| t.contains("old")),
        "replayed history is not logged again"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_cannot_start_fails_the_session_with_its_last_words() {
    let hasty = SessionFixture::with(|config| config.initialize_timeout = Duration::from_secs(2)).await;
    let fixture = SessionFixture::new().await;
    for (fixture, how, words) in [
        (&fixture, "dies", "oops, no licence"),
        (
            &hasty,
            "mute",
            "did not answer initialize within 2 s, the limit that start_timeout of [session]",
        ),
        (&fixture, "rubbish", "not ACP"),
        (&fixture, "flood", "line longer"),
    ] {
        let error = fixture.start(how, "say hi").await.unwrap_err();
        assert!(
            matches!(error.code, ErrorCode::Unavailable | ErrorCode::Timeout),
            "{how}: {error:?}"
        );
        assert!(error.message.contains(words), "{how}: {}", error.message);
        let sessions = fixture
            .sessions
            .list(&Principal::owner(), Default::default())
            .await
            .unwrap()
            .sessions;
        assert_eq!(sessions[0].status, SessionStatus::Failed);
        assert!(sessions[0].reason.as_ref().unwrap().contains(words));
        let summary = fixture.log_summary(&sessions[0].session_id).await;
        assert_eq!(summary[0], "starting");
        assert!(
            summary[summary.len() - 2].starts_with("error") && summary[summary.len() - 1] == "failed",
            "{summary:?}"
        );
    }
    assert_eq!(
        fixture.start("ok", "say fine").await.unwrap().text.as_deref(),
        Some("fine")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_breaks_mid_turn_fails_it_and_the_next_message_resumes() {
    let fixture = SessionFixture::with(|config| {
        config.agent_output.turn_text_bytes = 200_000;
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
        let session = fixture.start("ok", "say hi").await.unwrap().session_id;
        let error = fixture.send_and_wait(&session, how).await.unwrap_err();
        assert!(error.message.contains(words), "{how}: {}", error.message);
        let summary = fixture.log_summary(&session).await;
        assert_eq!(summary.last().unwrap(), "failed", "{how}: {summary:?}");
        let again = fixture.send_and_wait(&session, "say back").await.unwrap();
        assert_eq!((again.turn, again.text.as_deref()), (3, Some("back")), "{how}");
        fixture.sessions.end(&Principal::owner(), &session).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_of_ten_megabytes_is_logged_from_its_beginning() {
    let fixture = SessionFixture::new().await;
    let session = fixture.start("ok", "result 10000000").await.unwrap().session_id;
    let log = fixture.store.events();
    let events = log.read(&session, -1, 100).await.unwrap();
    let result = events.iter().find_map(|event| match &event.body {
        EventBody::ToolResult { ok, result, .. } => Some((*ok, result)),
        _ => None,
    });
    let (ok, result) = result.unwrap();
    assert!(ok && result["truncated"] == true, "{}", result["bytes"]);
    assert_eq!(result["bytes"], 10_000_011);
    let again = fixture.send_and_wait(&session, "say on").await.unwrap();
    assert_eq!(again.text.as_deref(), Some("on"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_turn_times_out() {
    let fixture = SessionFixture::with(|config| config.turn_timeout = Duration::from_millis(300)).await;
    let error = fixture.start("ok", "ignore").await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Timeout);
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_requests_are_answered_by_policy_memory_and_environment() {
    let fixture = SessionFixture::new().await;
    fixture
        .agent("strict", "ok", json!({"permissions": "deny"}))
        .await;
    let session = fixture.start("ok", "permission").await.unwrap();
    assert_eq!(session.text.as_deref(), Some("yes"));
    assert_eq!(
        fixture
            .start("strict", "permission")
            .await
            .unwrap()
            .text
            .as_deref(),
        Some("no")
    );
    let id = session.session_id;
    assert_eq!(
        fixture.send_and_wait(&id, "fs").await.unwrap().text.as_deref(),
        Some("-32601"),
        "no file system is offered"
    );
    assert_eq!(
        fixture
            .send_and_wait(&id, "remember one")
            .await
            .unwrap()
            .text
            .as_deref(),
        Some("one")
    );
    assert_eq!(
        fixture
            .send_and_wait(&id, "remember two")
            .await
            .unwrap()
            .text
            .as_deref(),
        Some("one,two")
    );
    assert_eq!(
        fixture
            .send_and_wait(&id, "env FROM_PROJECT")
            .await
            .unwrap()
            .text
            .as_deref(),
        Some("yes")
    );
    assert_eq!(
        fixture
            .send_and_wait(&id, "env FROM_WORKSPACE")
            .await
            .unwrap()
            .text
            .as_deref(),
        Some("yes")
    );
    let client = fixture.send_and_wait(&id, "client").await.unwrap().text.unwrap();
    assert!(
        client.contains("OUBLIETTE_SOCKET") && client.contains("relay.sock"),
        "{client}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn ending_a_session_kills_its_agent_and_removes_its_files() {
    let fixture = SessionFixture::new().await;
    let session = fixture.start_without_waiting("ok", "ignore").await;
    fixture
        .wait_for_event(&session, |b| matches!(b, EventBody::Delta { .. }))
        .await;
    let socket = fixture
        .sessions
        .get(&Principal::owner(), &session)
        .await
        .unwrap()
        .relay_socket
        .unwrap();
    assert!(socket.exists());
    let ended = fixture.sessions.end(&Principal::owner(), &session).await.unwrap();
    assert_eq!(ended.status, SessionStatus::Ended);
    assert!(!socket.exists());
    assert_eq!(fixture.log_summary(&session).await.last().unwrap(), "ended");
    assert_eq!(
        fixture.send_and_wait(&session, "say x").await.unwrap_err().code,
        ErrorCode::Conflict
    );
    assert_eq!(
        fixture
            .sessions
            .end(&Principal::owner(), &session)
            .await
            .unwrap()
            .status,
        SessionStatus::Ended
    );
    fixture.sessions.shutdown().await;
    assert!(!fixture.home.session_dir(&session).exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_session_stops_its_agent_and_restarts_it_on_the_next_message() {
    let fixture = SessionFixture::with(|config| config.idle_sleep = Duration::from_millis(50)).await;
    let session = fixture.start("ok", "say hi").await.unwrap().session_id;
    while !fixture
        .debugger(&session)
        .await
        .contains(&"teardown_finished".to_owned())
    {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        fixture
            .sessions
            .get(&Principal::owner(), &session)
            .await
            .unwrap()
            .status,
        SessionStatus::Idle
    );
    let again = fixture.send_and_wait(&session, "loaded").await.unwrap();
    assert!(again.text.unwrap().starts_with("conv-"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_that_grows_too_large_cancels_the_turn() {
    let fixture = SessionFixture::with(|config| config.limits.workspace_mb = Some(8)).await;
    let error = fixture.start("ok", "fill 20").await.unwrap_err();
    assert_eq!(error.code, ErrorCode::LimitExceeded);
    let session = fixture
        .sessions
        .list(&Principal::owner(), Default::default())
        .await
        .unwrap()
        .sessions[0]
        .clone();
    let summary = fixture.log_summary(&session.session_id).await;
    assert!(
        summary.contains(&"error limit_exceeded".to_owned())
            && summary.contains(&"turn 1 cancelled".to_owned()),
        "{summary:?}"
    );
    assert_eq!(session.status, SessionStatus::Idle);
}

#[tokio::test(flavor = "multi_thread")]
async fn active_sessions_of_a_project_are_limited() {
    let fixture = SessionFixture::new().await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(fixture.start("ok", "say hi").await.unwrap().session_id);
    }
    assert_eq!(
        fixture.start("ok", "say hi").await.unwrap_err().code,
        ErrorCode::LimitExceeded
    );
    fixture.sessions.end(&Principal::owner(), &ids[0]).await.unwrap();
    fixture.start("ok", "say hi").await.unwrap();
}

#[test]
fn after_a_kill_the_log_is_complete_and_the_session_resumes() {
    // Dropping a runtime stops every task where it is, as a kill of the server does.
    let first = tokio::runtime::Runtime::new().unwrap();
    let (leftover, session, before) = first.block_on(async {
        let fixture = SessionFixture::new().await;
        let session = fixture.start_without_waiting("ok", "ignore").await;
        fixture
            .wait_for_event(&session, |b| matches!(b, EventBody::Delta { .. }))
            .await;
        let before = fixture.log(&session).await;
        (fixture.into_leftover_home(), session, before)
    });
    drop(first);
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let fixture = SessionFixture::reopen(leftover).await;
        let log = fixture.log(&session).await;
        assert_eq!(log[..before.len()], before[..]);
        let summary = fixture.log_summary(&session).await;
        assert_eq!(summary[summary.len() - 2..], ["error unavailable", "idle"]);
        let EventBody::Status {
            reason: Some(reason), ..
        } = &log.last().unwrap().body
        else {
            panic!("{log:?}")
        };
        assert!(reason.contains("restarted during turn 1"), "{reason}");
        let again = fixture.send_and_wait(&session, "loaded").await.unwrap();
        assert_eq!(again.turn, 2);
        assert!(again.text.unwrap().starts_with("conv-"));
        fixture.sessions.shutdown().await;
    });
}
