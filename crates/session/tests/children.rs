//! Sessions started by the agents of other sessions.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::time::Duration;

use common::SessionFixture;
use oubliette_protocol::{
    ErrorCode, Principal, Result, SessionId,
    event::{EventBody, SessionStatus},
};
use oubliette_session::{EventsQuery, IncludeChildren, MessageReply, MessageRequest, RequestOrigin};
use serde_json::json;

async fn child(
    fixture: &SessionFixture,
    parent: &SessionId,
    agent: Option<&str>,
    text: &str,
) -> Result<MessageReply> {
    let request = MessageRequest {
        origin: RequestOrigin::BaseTool(parent.clone()),
        agent: agent.map(|agent| agent.parse().unwrap()),
        ..fixture.request("ok", text)
    };
    fixture.sessions.message(request).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_runs_its_parents_agent_or_a_listed_one_and_ends_with_its_parent() {
    let fixture = SessionFixture::new().await;
    fixture
        .agent("boss", "boss", json!({"children": ["other"]}))
        .await;
    let parent = fixture.start("boss", "say hi").await.unwrap().session_id;
    let same = child(&fixture, &parent, None, "name").await.unwrap();
    assert_eq!(same.text.as_deref(), Some("boss"));
    let named = child(&fixture, &parent, Some("other"), "name").await.unwrap();
    assert_eq!(named.text.as_deref(), Some("other"));
    assert_eq!(
        child(&fixture, &parent, Some("ok"), "name")
            .await
            .unwrap_err()
            .code,
        ErrorCode::NotAllowed
    );

    let view = fixture
        .sessions
        .get(&Principal::owner(), &named.session_id)
        .await
        .unwrap();
    assert_eq!(
        (view.depth, view.parent_id.as_ref(), &view.root_id),
        (1, Some(&parent), &parent)
    );
    let query = EventsQuery {
        session_id: parent.clone(),
        since_index: -1,
        max_events: 100,
        wait: Duration::ZERO,
        children: IncludeChildren::Yes,
    };
    let children = fixture
        .sessions
        .events(&Principal::owner(), query)
        .await
        .unwrap()
        .children
        .unwrap();
    let ids: Vec<_> = children.iter().map(|c| c.session_id.clone()).collect();
    assert_eq!(ids, [same.session_id.clone(), named.session_id.clone()]);
    assert!(
        children
            .iter()
            .all(|c| !c.events.is_empty() && c.last_index == c.events.last().unwrap().index)
    );

    // The number of events in one reply is bounded, and every child is in it.
    let delta = |n: usize| EventBody::Delta { text: n.to_string() };
    for id in &ids {
        let log = fixture.store.events();
        log.append(id, (0..900).map(delta).collect()).await.unwrap();
    }
    let query = EventsQuery {
        session_id: parent.clone(),
        since_index: -1,
        max_events: 1000,
        wait: Duration::ZERO,
        children: IncludeChildren::Yes,
    };
    let reply = fixture.sessions.events(&Principal::owner(), query).await.unwrap();
    let counts: Vec<usize> = reply.children.unwrap().iter().map(|c| c.events.len()).collect();
    assert!(
        counts.len() == 2 && counts.iter().sum::<usize>() == 1000,
        "{counts:?}"
    );

    fixture.sessions.end(&Principal::owner(), &parent).await.unwrap();
    for id in ids {
        assert_eq!(
            fixture
                .sessions
                .get(&Principal::owner(), &id)
                .await
                .unwrap()
                .status,
            SessionStatus::Ended
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn depth_is_limited_and_a_session_cannot_wait_for_its_ancestor() {
    let fixture = SessionFixture::with(|config| config.max_depth = 2).await;
    let mut at = fixture.start("ok", "say hi").await.unwrap().session_id;
    let root = at.clone();
    for depth in 1..=2 {
        at = child(&fixture, &at, None, "say hi").await.unwrap().session_id;
        assert_eq!(
            fixture
                .sessions
                .get(&Principal::owner(), &at)
                .await
                .unwrap()
                .depth,
            depth
        );
    }
    assert_eq!(
        child(&fixture, &at, None, "say hi").await.unwrap_err().code,
        ErrorCode::LimitExceeded
    );
    let up = MessageRequest {
        origin: RequestOrigin::BaseTool(at.clone()),
        session_id: Some(root),
        agent: None,
        ..fixture.request("ok", "say hi")
    };
    assert_eq!(
        fixture.sessions.message(up).await.unwrap_err().code,
        ErrorCode::InvalidArgument
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_of_another_project_sees_no_session() {
    let fixture = SessionFixture::new().await;
    let session = fixture.start("ok", "say hi").await.unwrap().session_id;
    let bound = Principal {
        project: Some(oubliette_protocol::ProjectId::generate()),
        ..common::write_token()
    };
    let sessions = &fixture.sessions;
    assert_eq!(
        sessions.get(&bound, &session).await.unwrap_err().code,
        ErrorCode::NotFound
    );
    assert_eq!(
        sessions.end(&bound, &session).await.unwrap_err().code,
        ErrorCode::NotFound
    );
    assert_eq!(
        sessions.cancel(&bound, &session).await.unwrap_err().code,
        ErrorCode::NotFound
    );
    assert_eq!(
        sessions.tool_list(&bound, &session).await.unwrap_err().code,
        ErrorCode::NotFound
    );
    assert!(
        sessions
            .list(&bound, Default::default())
            .await
            .unwrap()
            .sessions
            .is_empty()
    );
    let request = MessageRequest {
        principal: bound,
        session_id: Some(session),
        agent: None,
        ..fixture.request("ok", "hi")
    };
    assert_eq!(
        sessions.message(request).await.unwrap_err().code,
        ErrorCode::NotFound
    );
}
