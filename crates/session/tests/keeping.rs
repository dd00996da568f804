//! What was promised is kept: accepted messages over a kill, instructions, edits while a session runs.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Remains, World};
use oubliette_protocol::{
    ErrorCode, Principal, SessionId,
    event::{EventBody, Status},
};
use oubliette_tools::CallContext;
use serde_json::{Value, json};

/// Runs until what it gives back is all that is left: dropping a runtime drops every task where it
/// stands, as a kill does.
fn killed<T>(life: impl Future<Output = (World, T)>) -> (Remains, T) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let (world, left) = life.await;
        (world.remains(), left)
    })
}

fn alive<T>(life: impl Future<Output = T>) -> T {
    tokio::runtime::Runtime::new().unwrap().block_on(life)
}

async fn until_turn(world: &World, session: &SessionId, wanted: u64) {
    world
        .until(
            session,
            |b| matches!(b, EventBody::TurnCompleted { turn, .. } if *turn == wanted),
        )
        .await;
}

#[test]
fn accepted_messages_outlive_a_kill_and_run_in_order() {
    let (remains, session) = killed(async {
        let world = World::new().await;
        let session = world.start_only("ok", "ignore").await;
        world
            .until(&session, |b| matches!(b, EventBody::Delta { .. }))
            .await;
        for (turn, text) in [(2, "say two"), (3, "say three")] {
            assert_eq!(world.send(&session, text).await.turn, turn);
        }
        (world, session)
    });
    alive(async {
        let world = World::again(remains).await;
        until_turn(&world, &session, 3).await;
        let told = world.told(&session).await;
        let spoken: Vec<&str> = told
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
        assert_eq!(world.say(&session, "say four").await.unwrap().turn, 4);
        assert!(world.store.queue_sessions().await.unwrap().is_empty());
        world.sessions.shutdown().await;
    });
}

#[test]
fn a_first_message_that_was_accepted_is_not_lost_while_its_agent_starts() {
    let (remains, session) = killed(async {
        let world = World::new().await;
        // An agent that never answers: the session is starting for as long as it lives.
        let session = world.start_only("mute", "say one").await;
        (world, session)
    });
    alive(async {
        let world = World::again(remains).await;
        let told = world.told(&session).await;
        assert!(!told.iter().any(|t| t.starts_with("error")), "{told:?}");
        world
            .sessions
            .switch_agent(&Principal::owner(), &session, &"ok".parse().unwrap())
            .await
            .unwrap();
        let log = world.log(&session).await;
        let said = |b: &EventBody| matches!(b, EventBody::Message { text, .. } if text == "say one");
        assert_eq!(log.iter().filter(|e| said(&e.body)).count(), 1);
        world.sessions.shutdown().await;
    });
}

#[test]
fn a_stop_tells_who_waits_and_keeps_what_the_others_sent() {
    let (remains, session) = killed(async {
        let world = World::new().await;
        let session = world.start_only("ok", "ignore").await;
        world
            .until(&session, |b| matches!(b, EventBody::Delta { .. }))
            .await;
        world.send(&session, "say two").await;
        let waiting = world.say(&session, "say three");
        let stop = async {
            while world.store.queue_of(&session).await.unwrap().len() < 2 {
                tokio::task::yield_now().await;
            }
            world.sessions.shutdown().await;
        };
        let (refused, ()) = tokio::join!(waiting, stop);
        assert_eq!(refused.unwrap_err().code, ErrorCode::Unavailable);
        let dropped = |b: &EventBody| matches!(b, EventBody::Error { message, .. } if message.starts_with("turn 3 was not begun"));
        assert!(world.log(&session).await.iter().any(|e| dropped(&e.body)));
        (world, session)
    });
    alive(async {
        let world = World::again(remains).await;
        until_turn(&world, &session, 2).await;
        let told = world.told(&session).await;
        assert!(!told.contains(&"user: say three".to_owned()), "{told:?}");
        world.sessions.shutdown().await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_session_names_the_turns_it_drops() {
    let world = World::new().await;
    let session = world.start_only("ok", "ignore").await;
    world
        .until(&session, |b| matches!(b, EventBody::Delta { .. }))
        .await;
    world.send(&session, "say two").await;
    world.sessions.end(&Principal::owner(), &session).await.unwrap();
    let log = world.log(&session).await;
    let named = log.iter().any(
        |e| matches!(&e.body, EventBody::Error { message, .. } if message.starts_with("turn 2 was not begun")),
    );
    assert!(named, "{log:?}");
    assert!(world.store.queue_of(&session).await.unwrap().is_empty());
}

#[test]
fn an_agents_instructions_go_once_before_its_first_message() {
    let (remains, session) = killed(async {
        let world = World::new().await;
        let prompt = json!({"prompt": "be kind"});
        world.agent("kind", "ok", prompt.clone()).await;
        world.agent("later", "other", prompt).await;
        let first = world.start("kind", "/blocks").await.unwrap();
        let session = first.session_id;
        assert_eq!(
            first.text.as_deref(),
            Some("/blocks"),
            "an agent's own command comes first"
        );
        let text = |reply: oubliette_session::MessageReply| reply.text.unwrap();
        assert_eq!(
            text(world.say(&session, "blocks").await.unwrap()),
            "be kind|blocks"
        );
        assert_eq!(text(world.say(&session, "blocks").await.unwrap()), "blocks");
        let shown = world.told(&session).await;
        assert!(
            !shown
                .iter()
                .any(|t| t.starts_with("user") && t.contains("be kind")),
            "{shown:?}"
        );
        // This one is started and never told anything before the kill.
        world
            .sessions
            .switch_agent(&Principal::owner(), &session, &"later".parse().unwrap())
            .await
            .unwrap();
        (world, session)
    });
    alive(async {
        let world = World::again(remains).await;
        let text = |reply: oubliette_session::MessageReply| reply.text.unwrap();
        assert_eq!(
            text(world.say(&session, "blocks").await.unwrap()),
            "be kind|blocks"
        );
        world
            .sessions
            .switch_agent(&Principal::owner(), &session, &"kind".parse().unwrap())
            .await
            .unwrap();
        assert_eq!(
            text(world.say(&session, "blocks").await.unwrap()),
            "blocks",
            "a conversation that is loaded has its instructions"
        );
        world.sessions.shutdown().await;
    });
}

async fn read(world: &World, session: &SessionId, tool: &str) -> Result<String, ErrorCode> {
    let arguments = json!({"path": "f"}).as_object().unwrap().clone();
    let (sessions, owner) = (&world.sessions, Principal::owner());
    let called = sessions.tool_call(&owner, session, tool.into(), arguments, CallContext::default());
    called.await.map(|r| r.joined_text()).map_err(|e| e.code)
}

/// Waits until a call ends as it should; each change of the plane is a new try.
async fn comes_to(world: &World, session: &SessionId, tool: &str, wanted: Result<&str, ErrorCode>) {
    let plane = world.sessions.plane(session).await.unwrap();
    let mut changes = plane.changes();
    loop {
        changes.mark_unchanged();
        let got = read(world, session, tool).await;
        if got.as_deref().map_err(|code| *code) == wanted {
            return;
        }
        let changed = tokio::time::timeout(std::time::Duration::from_secs(60), changes.changed()).await;
        assert!(changed.is_ok(), "{tool}: {got:?}, not {wanted:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn edits_reach_a_running_session() {
    let world = World::new().await;
    let reader = |path: &str| -> Value {
        json!({"id":"a","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":[path]}})
    };
    for id in ["a", "b"] {
        let mut entry = reader(".");
        entry["id"] = json!(id);
        world.library.tool_put(id.parse().unwrap(), entry).await.unwrap();
    }
    world
        .agent("edited", "ok", json!({"tools": {"use": ["a"]}}))
        .await;
    let session = world.start("edited", "say hi").await.unwrap().session_id;
    let row = world.store.session_get(&session).await.unwrap().unwrap();
    let workspace = world.home.workspace_dir(&row.project_id, &row.workspace_id);
    std::fs::write(workspace.join("f"), "text").unwrap();
    comes_to(&world, &session, "@a/fs_read", Ok("text")).await;
    comes_to(&world, &session, "@b/fs_read", Err(ErrorCode::NotAllowed)).await;

    // By agent_put, while a turn runs.
    world.send(&session, "wait").await;
    world
        .until(
            &session,
            |b| matches!(b, EventBody::Delta { text } if text == "waiting"),
        )
        .await;
    let tools = json!({"use": ["a", "b"], "denied": ["@a/*"], "aliases": {"see": "@b/fs_read"}});
    world
        .agent("edited", "ok", json!({"tools": tools, "prompt": "new"}))
        .await;
    comes_to(&world, &session, "see", Ok("text")).await;
    comes_to(&world, &session, "@a/fs_read", Err(ErrorCode::NotAllowed)).await;
    world
        .sessions
        .cancel(&Principal::owner(), &session)
        .await
        .unwrap();
    until_turn(&world, &session, 2).await;

    // By hand.
    let file = world.home.agents_dir().join("edited/agent.json");
    let mut definition: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    definition["tools"] = json!({"use": ["a"]});
    std::fs::write(&file, definition.to_string()).unwrap();
    comes_to(&world, &session, "@b/fs_read", Err(ErrorCode::NotAllowed)).await;
    comes_to(&world, &session, "@a/fs_read", Ok("text")).await;

    // A catalog entry of its own accord.
    world
        .library
        .tool_put("a".parse().unwrap(), reader("elsewhere"))
        .await
        .unwrap();
    while read(&world, &session, "@a/fs_read").await.is_ok() {
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
}
