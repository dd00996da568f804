//! Approvals: decided once, together with the session's log, and listed page by page.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use oubliette_protocol::{
    ApprovalId, ErrorCode, ProjectId, SessionId,
    approval::{ApprovalDecision, ApprovalReach, ApprovalRequest, ApprovalSource, ApprovalStatus},
    event::EventBody,
};
use oubliette_store::{ApprovalChange, ApprovalFilter, ApprovalRow, PageRequest, Store};
use serde_json::json;

fn row(session: &SessionId, project: &ProjectId) -> ApprovalRow {
    let now = oubliette_store::now();
    ApprovalRow {
        session_id: session.clone(),
        project_id: project.clone(),
        agent: "writer".parse().unwrap(),
        request: ApprovalRequest {
            approval_id: ApprovalId::generate(),
            tool: "files_write".into(),
            canonical: "@files/write".into(),
            source: ApprovalSource::Catalog,
            arguments: json!({"path":"a"}),
            rule: json!({"tool":"@files/*","when":{"required":["path"]}}),
            expires_at: now,
        },
        status: ApprovalStatus::Pending,
        requested_at: now,
        decided_at: None,
        decided_by: None,
        reason: None,
    }
}

async fn request(store: &Store, row: &ApprovalRow) {
    let events = vec![EventBody::ApprovalRequested(row.request.clone())];
    let change = ApprovalChange::Request(Box::new(row.clone()));
    let log = store.events();
    log.append_with_approval(&row.session_id, events, change)
        .await
        .unwrap();
}

fn decision(row: &ApprovalRow, status: ApprovalStatus) -> ApprovalDecision {
    ApprovalDecision {
        approval_id: row.request.approval_id.clone(),
        decision: status,
        by: Some("owner".into()),
        reason: Some("because".into()),
    }
}

async fn decide(
    store: &Store,
    row: &ApprovalRow,
    status: ApprovalStatus,
    reach: Option<ApprovalReach>,
) -> oubliette_protocol::Result<()> {
    let decision = decision(row, status);
    let events = vec![EventBody::ApprovalDecided(decision.clone())];
    let change = ApprovalChange::Decide(decision, reach);
    let appended = store
        .events()
        .append_with_approval(&row.session_id, events, change)
        .await;
    appended.map(drop)
}

#[tokio::test]
async fn an_approval_is_decided_once_and_only_the_winner_is_logged() {
    let fixture = common::StoreFixture::new().await;
    let store = &fixture.store;
    let (session, project) = (SessionId::generate(), ProjectId::generate());
    let row = row(&session, &project);
    request(store, &row).await;
    assert_eq!(
        store.approval_get(&row.request.approval_id).await.unwrap(),
        Some(row.clone())
    );
    let pending = store.approvals_pending(&session, 10).await.unwrap();
    assert_eq!(pending, std::slice::from_ref(&row.request.approval_id));
    let deciders = (0..8).map(|i| {
        let status = if i % 2 == 0 {
            ApprovalStatus::Allowed
        } else {
            ApprovalStatus::Denied
        };
        decide(store, &row, status, Some(ApprovalReach::Session))
    });
    let outcomes = futures::future::join_all(deciders).await;
    let lost = outcomes.iter().filter_map(|o| o.as_ref().err());
    assert_eq!(lost.map(|e| e.code).collect::<Vec<_>>(), [ErrorCode::Conflict; 7]);
    let events = store.events().read(&session, -1, 100).await.unwrap();
    assert_eq!(events.len(), 2, "the losers append nothing");
    let decided = store
        .approval_get(&row.request.approval_id)
        .await
        .unwrap()
        .unwrap();
    assert!(decided.decided_at.is_some() && decided.decided_by.as_deref() == Some("owner"));
    assert_eq!(
        store.approvals_remembered(&session).await.unwrap(),
        [(row.agent.clone(), row.request.rule.clone())]
    );
    assert!(store.approvals_pending(&session, 10).await.unwrap().is_empty());
    assert!(store.approvals_pending_sessions().await.unwrap().is_empty());
}

#[tokio::test]
async fn ten_thousand_pending_approvals_are_listed_by_pages_from_an_index() {
    let fixture = common::StoreFixture::new().await;
    let store = &fixture.store;
    let (mine, other) = (ProjectId::generate(), ProjectId::generate());
    let session = SessionId::generate();
    let rows: Vec<ApprovalRow> = (0..10_000).map(|_| row(&session, &mine)).collect();
    futures::future::join_all(rows.iter().map(|row| request(store, row))).await;
    request(store, &row(&SessionId::generate(), &other)).await;
    let filter = ApprovalFilter {
        project: Some(mine.clone()),
        status: Some(ApprovalStatus::Pending),
        session: None,
    };
    let (mut seen, mut cursor) = (Vec::new(), None);
    loop {
        let page = PageRequest {
            limit: Some(1000),
            cursor,
        };
        let page = store.approval_list(filter.clone(), page).await.unwrap();
        seen.extend(page.items.into_iter().map(|row| row.request.approval_id));
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    let mut expected: Vec<ApprovalId> = rows.iter().map(|row| row.request.approval_id.clone()).collect();
    expected.sort();
    expected.reverse();
    assert_eq!(seen, expected, "newest first, each once, of this project alone");
    let upto = expected[5_000].clone();
    let change = ApprovalChange::CancelPending {
        upto,
        reason: "restarted".into(),
    };
    store
        .events()
        .append_with_approval(&session, Vec::new(), change)
        .await
        .unwrap();
    assert_eq!(
        store.approvals_pending(&session, 10_000).await.unwrap().len(),
        5_000
    );
}
