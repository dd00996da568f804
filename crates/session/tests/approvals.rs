//! Approvals: an agent's own permission requests, and what ends an approval that nobody decided.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::SessionFixture;
use oubliette_protocol::{
    approval::{ApprovalReach, ApprovalSource, ApprovalStatus},
    event::EventBody,
};
use oubliette_session::{ApprovalChoice, ApprovalQuery, ApprovalVerdict};
use oubliette_store::{ApprovalRow, PageRequest};
use serde_json::json;

/// The pending approvals, once there is one.
async fn pending(fixture: &SessionFixture) -> Vec<ApprovalRow> {
    loop {
        let query = ApprovalQuery {
            status: Some(ApprovalStatus::Pending),
            ..ApprovalQuery::default()
        };
        let principal = common::write_token();
        let page = fixture
            .sessions
            .approval_list(&principal, query, PageRequest::default());
        let rows = page.await.unwrap().items;
        if !rows.is_empty() {
            return rows;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_own_permission_requests_become_approvals() {
    let fixture = SessionFixture::new().await;
    fixture.agent("asks", "ok", json!({"permissions": "ask"})).await;
    for (choice, reach, said) in [
        (ApprovalChoice::Deny, None, "no"),
        (ApprovalChoice::Allow, Some(ApprovalReach::Session), "yes"),
    ] {
        let decide = async {
            let row = pending(&fixture).await.remove(0);
            assert_eq!(row.request.source, ApprovalSource::Agent);
            assert_eq!(row.request.arguments["options"][0]["optionId"], "yes");
            let verdict = ApprovalVerdict {
                choice,
                reason: None,
                reach,
            };
            let id = &row.request.approval_id;
            fixture
                .sessions
                .approval_decide(&common::write_token(), id, verdict)
                .await
                .unwrap();
        };
        let (turn, ()) = tokio::join!(fixture.start("asks", "permission"), decide);
        let turn = turn.unwrap();
        assert_eq!(turn.text.as_deref(), Some(said));
        if reach.is_some() {
            // Remembered for the session: the next request is not asked about.
            let again = fixture
                .send_and_wait(&turn.session_id, "permission")
                .await
                .unwrap();
            assert_eq!(again.text.as_deref(), Some("yes"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_turn_cancels_what_its_agent_asked() {
    let fixture = SessionFixture::new().await;
    fixture.agent("asks", "ok", json!({"permissions": "ask"})).await;
    let cancel = async {
        let row = pending(&fixture).await.remove(0);
        fixture
            .sessions
            .cancel(&common::write_token(), &row.session_id)
            .await
            .unwrap();
        row
    };
    let (turn, row) = tokio::join!(fixture.start("asks", "permission"), cancel);
    turn.unwrap();
    let log = fixture
        .store
        .events()
        .read(&row.session_id, -1, 1000)
        .await
        .unwrap();
    let ended = log.iter().find_map(|event| match &event.body {
        EventBody::ApprovalDecided(decision) => Some(decision.decision),
        _ => None,
    });
    assert_eq!(ended, Some(ApprovalStatus::Cancelled));
}
