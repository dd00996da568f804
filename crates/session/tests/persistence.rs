//! What must persist: accepted messages and instructions across a kill of the server, and edits of
//! agents and catalog while a session runs.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{LeftoverHome, SessionFixture};
use oubliette_protocol::{
    ErrorCode, Principal, SessionId,
    event::{EventBody, SessionStatus},
};
use oubliette_tools::CallContext;
use serde_json::{Value, json};

/// Runs `life` on a runtime of its own and drops the runtime: every task stops where it is, as when the
/// server is killed. Returns the home directory that is left.
fn run_then_kill<T>(life: impl Future<Output = (SessionFixture, T)>) -> (LeftoverHome, T) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let (fixture, left) = life.await;
        (fixture.into_leftover_home(), left)
    })
}

fn run<T>(life: impl Future<Output = T>) -> T {
    tokio::runtime::Runtime::new().unwrap().block_on(life)
}

async fn wait_for_turn(fixture: &SessionFixture, session: &SessionId, wanted: u64) {
    fixture
        .wait_for_event(
            session,
            |b| matches!(b, EventBody::TurnCompleted { turn, .. } if *turn == wanted),
        )
        .await;
}

#[test]
fn accepted_messages_survive_a_kill_and_run_in_order() {
    let (leftover, session) = run_then_kill(async {
        let fixture = SessionFixture::new().await;
        let session = fixture.start_without_waiting("ok", "ignore").await;
        fixture
            .wait_for_event(&session, |b| matches!(b, EventBody::Delta { .. }))
            .await;
        for (turn, text) in [(2, "say two"), (3, "say three")] {
            assert_eq!(fixture.send(&session, text).await.turn, turn);
        }
        (fixture, session)
    });
    run(async {
        let fixture = SessionFixture::reopen(leftover).await;
        wait_for_turn(&fixture, &session, 3).await;
        let summary = fixture.log_summary(&session).await;
        let spoken: Vec<&str> = summary
            .iter()
            .map(String::as_str)
            .filter(|t| t.starts_with("user") || t.starts_with("turn") || t.starts_with("error"))
            .collect();
        assert_eq!(
            spoken,
            [
                "user: ignore",
                "error unavailable",
                "user: say two",
                "turn 2 end_turn",
                "user: say three",
                "turn 3 end_turn"
            ]
        );
        assert_eq!(fixture.send_and_wait(&session, "say four").await.unwrap().turn, 4);
        assert!(fixture.store.queue_sessions().await.unwrap().is_empty());
        fixture.sessions.shutdown().await;
    });
}

#[test]
fn a_first_message_that_was_accepted_is_not_lost_while_its_agent_starts() {
    let (leftover, session) = run_then_kill(async {
        let fixture = SessionFixture::new().await;
        // An agent that never answers `initialize`: the session stays in `starting`.
        let session = fixture.start_without_waiting("mute", "say one").await;
        (fixture, session)
    });
    run(async {
        let fixture = SessionFixture::reopen(leftover).await;
        let summary = fixture.log_summary(&session).await;
        assert!(!summary.iter().any(|t| t.starts_with("error")), "{summary:?}");
        fixture
            .sessions
            .switch_agent(&Principal::owner(), &session, &"ok".parse().unwrap())
            .await
            .unwrap();
        let log = fixture.log(&session).await;
        let said = |b: &EventBody| matches!(b, EventBody::Message { text, .. } if text == "say one");
        assert_eq!(log.iter().filter(|e| said(&e.body)).count(), 1);
        fixture.sessions.shutdown().await;
    });
}

#[test]
fn a_stop_refuses_awaited_messages_and_keeps_the_others() {
    let (leftover, session) = run_then_kill(async {
        let fixture = SessionFixture::new().await;
        let session = fixture.start_without_waiting("ok", "ignore").await;
        fixture
            .wait_for_event(&session, |b| matches!(b, EventBody::Delta { .. }))
            .await;
        fixture.send(&session, "say two").await;
        let waiting = fixture.send_and_wait(&session, "say three");
        let stop = async {
            while fixture.store.queue_list(&session).await.unwrap().len() < 2 {
                tokio::task::yield_now().await;
            }
            fixture.sessions.shutdown().await;
        };
        let (refused, ()) = tokio::join!(waiting, stop);
        assert_eq!(refused.unwrap_err().code, ErrorCode::Unavailable);
        let dropped = |b: &EventBody| matches!(b, EventBody::Error { message, .. } if message.starts_with("turn 3 was not begun"));
        assert!(fixture.log(&session).await.iter().any(|e| dropped(&e.body)));
        (fixture, session)
    });
    run(async {
        let fixture = SessionFixture::reopen(leftover).await;
        wait_for_turn(&fixture, &session, 2).await;
        let summary = fixture.log_summary(&session).await;
        assert!(!summary.contains(&"user: say three".to_owned()), "{summary:?}");
        fixture.sessions.shutdown().await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn ending_a_session_logs_each_dropped_turn() {
    let fixture = SessionFixture::new().await;
    let session = fixture.start_without_waiting("ok", "ignore").await;
    fixture
        .wait_for_event(&session, |b| matches!(b, EventBody::Delta { .. }))
        .await;
    fixture.send(&session, "say two").await;
    fixture.sessions.end(&Principal::owner(), &session).await.unwrap();
    let log = fixture.log(&session).await;
    let named = log.iter().any(
        |e| matches!(&e.body, EventBody::Error { message, .. } if message.starts_with("turn 2 was not begun")),
    );
    assert!(named, "{log:?}");
    assert!(fixture.store.queue_list(&session).await.unwrap().is_empty());
}

#[test]
fn an_agents_instructions_are_sent_once_with_its_first_message() {
    let (leftover, session) = run_then_kill(async {
        let fixture = SessionFixture::new().await;
        let prompt = json!({"prompt": "be kind"});
        fixture.agent("kind", "ok", prompt.clone()).await;
        fixture.agent("later", "other", prompt).await;
        let first = fixture.start("kind", "/blocks").await.unwrap();
        let session = first.session_id;
        assert_eq!(
            first.text.as_deref(),
            Some("/blocks"),
            "an agent's own command comes first"
        );
        let text = |reply: oubliette_session::MessageReply| reply.text.unwrap();
        assert_eq!(
            text(fixture.send_and_wait(&session, "blocks").await.unwrap()),
            "be kind|blocks"
        );
        assert_eq!(
            text(fixture.send_and_wait(&session, "blocks").await.unwrap()),
            "blocks"
        );
        let shown = fixture.log_summary(&session).await;
        assert!(
            !shown
                .iter()
                .any(|t| t.starts_with("user") && t.contains("be kind")),
            "{shown:?}"
        );
        // This agent is started but gets no message before the kill.
        fixture
            .sessions
            .switch_agent(&Principal::owner(), &session, &"later".parse().unwrap())
            .await
            .unwrap();
        (fixture, session)
    });
    run(async {
        let fixture = SessionFixture::reopen(leftover).await;
        let text = |reply: oubliette_session::MessageReply| reply.text.unwrap();
        assert_eq!(
            text(fixture.send_and_wait(&session, "blocks").await.unwrap()),
            "be kind|blocks"
        );
        fixture
            .sessions
            .switch_agent(&Principal::owner(), &session, &"kind".parse().unwrap())
            .await
            .unwrap();
        assert_eq!(
            text(fixture.send_and_wait(&session, "blocks").await.unwrap()),
            "blocks",
            "a conversation that is loaded has its instructions"
        );
        fixture.sessions.shutdown().await;
    });
}

async fn call_fs_read(
    fixture: &SessionFixture,
    session: &SessionId,
    tool: &str,
) -> Result<String, ErrorCode> {
    let arguments = json!({"path": "f"}).as_object().unwrap().clone();
    let (sessions, owner) = (&fixture.sessions, Principal::owner());
    let called = sessions.tool_call(&owner, session, tool.into(), arguments, CallContext::default());
    called.await.map(|r| r.joined_text()).map_err(|e| e.code)
}

/// Repeats a call after each change of the tool plane until it ends as wanted.
async fn wait_for_call_result(
    fixture: &SessionFixture,
    session: &SessionId,
    tool: &str,
    wanted: Result<&str, ErrorCode>,
) {
    let plane = fixture.sessions.plane(session).await.unwrap();
    let mut changes = plane.changes();
    loop {
        changes.mark_unchanged();
        let got = call_fs_read(fixture, session, tool).await;
        if got.as_deref().map_err(|code| *code) == wanted {
            return;
        }
        let changed = tokio::time::timeout(std::time::Duration::from_secs(60), changes.changed()).await;
        assert!(changed.is_ok(), "{tool}: {got:?}, not {wanted:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn edits_reach_a_running_session() {
    let fixture = SessionFixture::new().await;
    let reader = |path: &str| -> Value {
        json!({"id":"a","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":[path]}})
    };
    for id in ["a", "b"] {
        let mut entry = reader(".");
        entry["id"] = json!(id);
        fixture
            .library
            .tool_put(id.parse().unwrap(), entry)
            .await
            .unwrap();
    }
    fixture
        .agent("edited", "ok", json!({"tools": {"use": ["a"]}}))
        .await;
    let session = fixture.start("edited", "say hi").await.unwrap().session_id;
    let row = fixture.store.session_get(&session).await.unwrap().unwrap();
    let workspace = fixture.home.workspace_dir(&row.project_id, &row.workspace_id);
    std::fs::write(workspace.join("f"), "text").unwrap();
    wait_for_call_result(&fixture, &session, "@a/fs_read", Ok("text")).await;
    wait_for_call_result(&fixture, &session, "@b/fs_read", Err(ErrorCode::NotAllowed)).await;

    // An edit through `agent_put`, while a turn runs.
    fixture.send(&session, "wait").await;
    fixture
        .wait_for_event(
            &session,
            |b| matches!(b, EventBody::Delta { text } if text == "waiting"),
        )
        .await;
    let tools = json!({"use": ["a", "b"], "denied": ["@a/*"], "aliases": {"see": "@b/fs_read"}});
    fixture
        .agent("edited", "ok", json!({"tools": tools, "prompt": "new"}))
        .await;
    wait_for_call_result(&fixture, &session, "see", Ok("text")).await;
    wait_for_call_result(&fixture, &session, "@a/fs_read", Err(ErrorCode::NotAllowed)).await;
    fixture
        .sessions
        .cancel(&Principal::owner(), &session)
        .await
        .unwrap();
    wait_for_turn(&fixture, &session, 2).await;

    // An edit of the file itself.
    let file = fixture.home.agents_dir().join("edited/agent.json");
    let mut definition: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    definition["tools"] = json!({"use": ["a"]});
    std::fs::write(&file, definition.to_string()).unwrap();
    wait_for_call_result(&fixture, &session, "@b/fs_read", Err(ErrorCode::NotAllowed)).await;
    wait_for_call_result(&fixture, &session, "@a/fs_read", Ok("text")).await;

    // An edit of a catalog entry that the agent uses.
    fixture
        .library
        .tool_put("a".parse().unwrap(), reader("elsewhere"))
        .await
        .unwrap();
    while call_fs_read(&fixture, &session, "@a/fs_read").await.is_ok() {
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
}
