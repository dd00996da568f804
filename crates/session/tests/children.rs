//! Sessions that sessions start.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::time::Duration;

use common::World;
use oubliette_protocol::{
    ErrorCode, Principal, Result, SessionId,
    event::{EventBody, Status},
};
use oubliette_session::{Asker, Children, EventsQuery, MessageReply, MessageRequest};
use serde_json::json;

async fn child(world: &World, parent: &SessionId, agent: Option<&str>, text: &str) -> Result<MessageReply> {
    let request = MessageRequest {
        asker: Asker::Base(parent.clone()),
        agent: agent.map(|agent| agent.parse().unwrap()),
        ..world.request("ok", text)
    };
    world.sessions.message(request).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_runs_the_same_agent_or_one_that_is_named_and_ends_with_its_parent() {
    let world = World::new().await;
    world.agent("boss", "boss", json!({"children": ["other"]})).await;
    let parent = world.start("boss", "say hi").await.unwrap().session_id;
    let same = child(&world, &parent, None, "name").await.unwrap();
    assert_eq!(same.text.as_deref(), Some("boss"));
    let named = child(&world, &parent, Some("other"), "name").await.unwrap();
    assert_eq!(named.text.as_deref(), Some("other"));
    assert_eq!(
        child(&world, &parent, Some("ok"), "name").await.unwrap_err().code,
        ErrorCode::NotAllowed
    );

    let view = world
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
        children: Children::Included,
    };
    let children = world
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

    // However much they say, one answer holds only so much, and all of them are in it.
    let delta = |n: usize| EventBody::Delta { text: n.to_string() };
    for id in &ids {
        let log = world.store.events();
        log.append(id, (0..900).map(delta).collect()).await.unwrap();
    }
    let query = EventsQuery {
        session_id: parent.clone(),
        since_index: -1,
        max_events: 1000,
        wait: Duration::ZERO,
        children: Children::Included,
    };
    let reply = world.sessions.events(&Principal::owner(), query).await.unwrap();
    let counts: Vec<usize> = reply.children.unwrap().iter().map(|c| c.events.len()).collect();
    assert!(
        counts.len() == 2 && counts.iter().sum::<usize>() == 1000,
        "{counts:?}"
    );

    world.sessions.end(&Principal::owner(), &parent).await.unwrap();
    for id in ids {
        assert_eq!(
            world.sessions.get(&Principal::owner(), &id).await.unwrap().status,
            Status::Ended
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn depth_is_limited_and_nobody_waits_for_themselves() {
    let world = World::with(|config| config.max_depth = 2).await;
    let mut at = world.start("ok", "say hi").await.unwrap().session_id;
    let root = at.clone();
    for depth in 1..=2 {
        at = child(&world, &at, None, "say hi").await.unwrap().session_id;
        assert_eq!(
            world.sessions.get(&Principal::owner(), &at).await.unwrap().depth,
            depth
        );
    }
    assert_eq!(
        child(&world, &at, None, "say hi").await.unwrap_err().code,
        ErrorCode::LimitExceeded
    );
    let up = MessageRequest {
        asker: Asker::Base(at.clone()),
        session_id: Some(root),
        agent: None,
        ..world.request("ok", "say hi")
    };
    assert_eq!(
        world.sessions.message(up).await.unwrap_err().code,
        ErrorCode::InvalidArgument
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_of_another_project_sees_nothing() {
    let world = World::new().await;
    let session = world.start("ok", "say hi").await.unwrap().session_id;
    let bound = Principal {
        project: Some(oubliette_protocol::ProjectId::generate()),
        ..common::write_token()
    };
    let sessions = &world.sessions;
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
        ..world.request("ok", "hi")
    };
    assert_eq!(
        sessions.message(request).await.unwrap_err().code,
        ErrorCode::NotFound
    );
}
