//! Tools a caller lends, declared with a message and called at the session's gate.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::time::Duration;

use common::World;
use oubliette_protocol::{
    ErrorCode, Principal, Scope,
    caller::{Context, Declaration},
    event::{EventBody, Outcome},
};
use oubliette_session::{MessageRequest, Wait};
use oubliette_tools::{CallContext, Origin, Wanted};
use serde_json::json;

fn lend(caller: &str, tools: &[&str]) -> Declaration {
    let tools: Vec<_> = tools.iter().map(|name| json!({ "name": name })).collect();
    let context = json!({ "caller_id": caller, "caller_tools": tools });
    serde_json::from_value::<Context>(context)
        .unwrap()
        .check()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_does_not_fall_asleep_over_an_open_call() {
    let nap = Duration::from_secs(1);
    let world = World::with(|config| config.idle_sleep = nap).await;
    let caller = common::write_token();
    let request = MessageRequest {
        principal: caller.clone(),
        context: Some(lend("myapp", &["send"])),
        ..world.request("ok", "say hi")
    };
    let session = world.sessions.message(request).await.unwrap().session_id;
    let naps = async || {
        let seen = world.debugger(&session).await;
        seen.iter().filter(|kind| *kind == "teardown_finished").count()
    };
    let call = world.sessions.tool_call(
        &caller,
        &session,
        "myapp_send".into(),
        Default::default(),
        CallContext::default(),
    );
    let answer = async {
        let asked = world
            .until(&session, |b| matches!(b, EventBody::CallerToolRequest { .. }))
            .await;
        let before = naps().await;
        // A state that must not change: there is no event to wait for.
        tokio::time::sleep(nap * 2).await;
        assert_eq!(naps().await, before, "it fell asleep");
        let EventBody::CallerToolRequest { request_id, .. } = &asked.body else {
            panic!("{asked:?}")
        };
        world
            .sessions
            .caller_tool_response(&caller, &session, request_id.as_str(), Some(json!("sent")), None)
            .await
            .unwrap();
        before
    };
    let (value, before) = tokio::join!(call, answer);
    assert!(!value.unwrap().is_error);
    while naps().await == before {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lent_tool_is_listed_called_answered_and_withdrawn() {
    let world = World::new().await;
    let caller = common::write_token();
    let request = MessageRequest {
        principal: caller.clone(),
        context: Some(lend("myapp", &["send"])),
        ..world.request("ok", "say hi")
    };
    let session = world.sessions.message(request).await.unwrap().session_id;
    let names =
        |list: oubliette_protocol::tool::ToolList| list.tools.into_iter().map(|t| t.name).collect::<Vec<_>>();
    assert_eq!(
        names(world.sessions.tool_list(&caller, &session).await.unwrap()),
        ["myapp_send"]
    );

    let plane = world.sessions.plane(&session).await.unwrap();
    let inside = Origin::Inside { api_key: None };
    let wanted = Wanted::Caller {
        tool: "send".into(),
        caller_id: None,
    };
    let call = plane.call_raw(wanted, Default::default(), inside, CallContext::default());
    let answer = async {
        let asked = world
            .until(&session, |b| matches!(b, EventBody::CallerToolRequest { .. }))
            .await;
        let EventBody::CallerToolRequest { request_id, tool, .. } = &asked.body else {
            panic!("{asked:?}")
        };
        assert_eq!(tool, "send");
        let sessions = &world.sessions;
        let foreign = Principal {
            scope: Scope::Admin,
            ..common::write_token()
        };
        let refused = sessions
            .caller_tool_response(&foreign, &session, request_id.as_str(), Some(json!(1)), None)
            .await;
        assert_eq!(
            refused.unwrap_err().code,
            ErrorCode::PermissionDenied,
            "not even an admin answers for another"
        );
        sessions
            .caller_tool_response(&caller, &session, request_id.as_str(), Some(json!("sent")), None)
            .await
            .unwrap();
    };
    let (value, ()) = tokio::join!(call, answer);
    assert_eq!(value.unwrap().get(), r#""sent""#);
    world
        .until(&session, |b| {
            matches!(
                b,
                EventBody::CallerToolDone {
                    outcome: Outcome::Answered,
                    ..
                }
            )
        })
        .await;

    let stranger = common::write_token();
    let forbidden = world.sessions.tool_call(
        &stranger,
        &session,
        "myapp_send".into(),
        Default::default(),
        CallContext::default(),
    );
    assert_eq!(forbidden.await.unwrap_err().code, ErrorCode::PermissionDenied);

    let request = MessageRequest {
        principal: caller.clone(),
        session_id: Some(session.clone()),
        agent: None,
        context: Some(lend("myapp", &[])),
        ..world.request("ok", "say hi")
    };
    world.sessions.message(request).await.unwrap();
    assert!(names(world.sessions.tool_list(&caller, &session).await.unwrap()).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_declaration_starts_no_session() {
    let world = World::new().await;
    let request = MessageRequest {
        context: Some(lend("session", &["message"])),
        ..world.request("ok", "say hi")
    };
    assert_eq!(
        world.sessions.message(request).await.unwrap_err().code,
        ErrorCode::Conflict
    );
    let sessions = world
        .sessions
        .list(&Principal::owner(), Default::default())
        .await
        .unwrap()
        .sessions;
    assert!(sessions.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn ending_the_session_ends_open_calls_as_cancelled() {
    let world = World::new().await;
    let request = MessageRequest {
        context: Some(lend("myapp", &["send"])),
        wait: Wait::ForTurn,
        ..world.request("ok", "say hi")
    };
    let session = world.sessions.message(request).await.unwrap().session_id;
    let plane = world.sessions.plane(&session).await.unwrap();
    let wanted = Wanted::Caller {
        tool: "send".into(),
        caller_id: None,
    };
    let call = plane.call_raw(
        wanted,
        Default::default(),
        Origin::Inside { api_key: None },
        CallContext::default(),
    );
    let end = async {
        world
            .until(&session, |b| matches!(b, EventBody::CallerToolRequest { .. }))
            .await;
        world.sessions.end(&Principal::owner(), &session).await.unwrap();
    };
    let (value, ()) = tokio::join!(call, end);
    assert_eq!(value.unwrap_err().code, ErrorCode::Unavailable);
    let told = world.told(&session).await;
    assert_eq!(told[told.len() - 2..], ["caller_tool_done", "ended"]);
}
