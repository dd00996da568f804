//! Tools lent by a caller: declared with a message and called through the session's tool plane.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::time::Duration;

use common::SessionFixture;
use oubliette_protocol::{
    ErrorCode, Principal, Scope,
    caller::{CallerContext, CallerDeclaration},
    event::{CallerToolOutcome, EventBody},
    tool::ToolAddress,
};
use oubliette_session::{MessageRequest, WaitMode};
use oubliette_tools::{CallContext, CallOrigin};
use serde_json::json;

fn lend(caller: &str, tools: &[&str]) -> CallerDeclaration {
    let tools: Vec<_> = tools.iter().map(|name| json!({ "name": name })).collect();
    let context = json!({ "caller_id": caller, "caller_tools": tools });
    serde_json::from_value::<CallerContext>(context)
        .unwrap()
        .check()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_does_not_fall_asleep_over_an_open_call() {
    let idle_sleep = Duration::from_secs(1);
    let fixture = SessionFixture::with(|config| config.idle_sleep = idle_sleep).await;
    let caller = common::write_token();
    let request = MessageRequest {
        principal: caller.clone(),
        context: Some(lend("myapp", &["send"])),
        ..fixture.request("ok", "say hi")
    };
    let session = fixture.sessions.message(request).await.unwrap().session_id;
    let teardowns = async || {
        let seen = fixture.debugger(&session).await;
        seen.iter().filter(|kind| *kind == "teardown_finished").count()
    };
    let call = fixture.sessions.tool_call(
        &caller,
        &session,
        "myapp_send".into(),
        Default::default(),
        CallContext::default(),
    );
    let answer = async {
        let asked = fixture
            .wait_for_event(&session, |b| matches!(b, EventBody::CallerToolRequest { .. }))
            .await;
        let before = teardowns().await;
        // Nothing must happen, so there is no event to wait for.
        tokio::time::sleep(idle_sleep * 2).await;
        assert_eq!(teardowns().await, before, "it fell asleep");
        let EventBody::CallerToolRequest { request_id, .. } = &asked.body else {
            panic!("{asked:?}")
        };
        fixture
            .sessions
            .caller_tool_response(&caller, &session, request_id.as_str(), Some(json!("sent")), None)
            .await
            .unwrap();
        before
    };
    let (value, before) = tokio::join!(call, answer);
    assert!(!value.unwrap().is_error);
    while teardowns().await == before {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lent_tool_is_listed_called_answered_and_withdrawn() {
    let fixture = SessionFixture::new().await;
    let caller = common::write_token();
    let request = MessageRequest {
        principal: caller.clone(),
        context: Some(lend("myapp", &["send"])),
        ..fixture.request("ok", "say hi")
    };
    let session = fixture.sessions.message(request).await.unwrap().session_id;
    let names =
        |list: oubliette_protocol::tool::ToolList| list.tools.into_iter().map(|t| t.name).collect::<Vec<_>>();
    assert_eq!(
        names(fixture.sessions.tool_list(&caller, &session).await.unwrap()),
        ["myapp_send"]
    );

    let plane = fixture.sessions.plane(&session).await.unwrap();
    let inside = CallOrigin::Inside { api_key: None };
    let address = ToolAddress::Caller {
        tool: "send".into(),
        caller_id: None,
    };
    let call = plane.call_raw(address, Default::default(), inside, CallContext::default());
    let answer = async {
        let asked = fixture
            .wait_for_event(&session, |b| matches!(b, EventBody::CallerToolRequest { .. }))
            .await;
        let EventBody::CallerToolRequest { request_id, tool, .. } = &asked.body else {
            panic!("{asked:?}")
        };
        assert_eq!(tool, "send");
        let sessions = &fixture.sessions;
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
    assert_eq!(value.unwrap().1.get(), r#""sent""#);
    fixture
        .wait_for_event(&session, |b| {
            matches!(
                b,
                EventBody::CallerToolDone {
                    outcome: CallerToolOutcome::Answered,
                    ..
                }
            )
        })
        .await;

    let stranger = common::write_token();
    let forbidden = fixture.sessions.tool_call(
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
        ..fixture.request("ok", "say hi")
    };
    fixture.sessions.message(request).await.unwrap();
    assert!(names(fixture.sessions.tool_list(&caller, &session).await.unwrap()).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_declaration_starts_no_session() {
    let fixture = SessionFixture::new().await;
    let request = MessageRequest {
        context: Some(lend("session", &["message"])),
        ..fixture.request("ok", "say hi")
    };
    assert_eq!(
        fixture.sessions.message(request).await.unwrap_err().code,
        ErrorCode::Conflict
    );
    let sessions = fixture
        .sessions
        .list(&Principal::owner(), Default::default())
        .await
        .unwrap()
        .sessions;
    assert!(sessions.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn ending_the_session_ends_open_calls_as_cancelled() {
    let fixture = SessionFixture::new().await;
    let request = MessageRequest {
        context: Some(lend("myapp", &["send"])),
        wait: WaitMode::ForTurn,
        ..fixture.request("ok", "say hi")
    };
    let session = fixture.sessions.message(request).await.unwrap().session_id;
    let plane = fixture.sessions.plane(&session).await.unwrap();
    let address = ToolAddress::Caller {
        tool: "send".into(),
        caller_id: None,
    };
    let call = plane.call_raw(
        address,
        Default::default(),
        CallOrigin::Inside { api_key: None },
        CallContext::default(),
    );
    let end = async {
        fixture
            .wait_for_event(&session, |b| matches!(b, EventBody::CallerToolRequest { .. }))
            .await;
        fixture.sessions.end(&Principal::owner(), &session).await.unwrap();
    };
    let (value, ()) = tokio::join!(call, end);
    assert_eq!(
        oubliette_protocol::Error::from(value.unwrap_err()).code,
        ErrorCode::Unavailable
    );
    let summary = fixture.log_summary(&session).await;
    assert_eq!(summary[summary.len() - 2..], ["caller_tool_done", "ended"]);
}
