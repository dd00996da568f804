//! Deleting sessions and expired records.
#![allow(clippy::unwrap_used, clippy::disallowed_types)]

mod common;

use common::{StoreFixture, delta, session};
use jiff::ToSpan as _;
use oubliette_protocol::{ErrorCode, event::SessionStatus};
use oubliette_store::{
    AuditEntry, AuditFilter, AuditPrincipal, PageRequest, SessionFilter, SessionPatch, SessionRow, now,
};

async fn append(fixture: &StoreFixture, session: &SessionRow) {
    let log = fixture.store.events();
    log.append(&session.session_id, vec![delta("a")]).await.unwrap();
}

async fn set_status(fixture: &StoreFixture, session: &SessionRow, status: SessionStatus) {
    let patch = SessionPatch::status(status, None);
    fixture
        .store
        .session_update(&session.session_id, patch)
        .await
        .unwrap();
}

#[tokio::test]
async fn deleted_sessions_take_their_logs_with_them_and_active_ones_are_refused() {
    let mut fixture = StoreFixture::new().await;
    let project = fixture.project("p").await;
    let (over, active) = (fixture.session(&project).await, fixture.session(&project).await);
    for session in [&over, &active] {
        append(&fixture, session).await;
    }
    set_status(&fixture, &over, SessionStatus::Ended).await;
    let both = [over.session_id.clone(), active.session_id.clone()];
    let refused = fixture.store.sessions_delete(&both).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Conflict);
    assert!(
        fixture
            .store
            .session_get(&over.session_id)
            .await
            .unwrap()
            .is_some()
    );
    // Cached, so that the deletion must drop it.
    assert!(
        fixture
            .store
            .session_project(&over.session_id)
            .await
            .unwrap()
            .is_some()
    );
    assert_eq!(fixture.store.sessions_delete(&both[..1]).await.unwrap(), 1);
    assert_eq!(fixture.store.sessions_delete(&both[..1]).await.unwrap(), 0);
    assert_eq!(
        fixture.store.session_project(&over.session_id).await.unwrap(),
        None
    );
    fixture.reopen().await;
    let listed = fixture
        .store
        .session_list(SessionFilter::default(), PageRequest::default())
        .await
        .unwrap();
    let ids: Vec<_> = listed.items.iter().map(|row| &row.session_id).collect();
    assert_eq!(ids, [&active.session_id]);
    assert_eq!(
        fixture.store.events().last_index(&over.session_id).await.unwrap(),
        -1
    );
    assert_eq!(
        fixture
            .store
            .events()
            .last_index(&active.session_id)
            .await
            .unwrap(),
        0
    );
}

#[tokio::test]
async fn sessions_expire_as_whole_trees() {
    let fixture = StoreFixture::new().await;
    let project = fixture.project("p").await;
    let alone = fixture.session(&project).await;
    let parent = fixture.session(&project).await;
    let mut child = session(&project);
    (child.parent_id, child.root_id) = (Some(parent.session_id.clone()), parent.session_id.clone());
    fixture.store.session_insert(child.clone()).await.unwrap();
    for row in [&alone, &parent] {
        set_status(&fixture, row, SessionStatus::Ended).await;
    }
    let later = now() + 1.hour();
    let expired = async || fixture.store.sessions_expired(later, 10).await.unwrap();
    // The child is active: it must not lose the session above it.
    assert_eq!(expired().await, std::slice::from_ref(&alone.session_id));
    set_status(&fixture, &child, SessionStatus::Failed).await;
    assert_eq!(expired().await.len(), 3);
    assert_eq!(fixture.store.sessions_expired(later, 2).await.unwrap().len(), 2);
    let earlier = now() - 1.hour();
    assert!(
        fixture
            .store
            .sessions_expired(earlier, 10)
            .await
            .unwrap()
            .is_empty()
    );
}

#[tokio::test]
async fn only_audit_entries_older_than_asked_are_deleted() {
    let fixture = StoreFixture::new().await;
    let entry = AuditEntry {
        principal: AuditPrincipal::Owner,
        session_id: None,
        project_id: None,
        action: "project_create".into(),
        target: None,
        outcome: "ok".into(),
        detail: None,
    };
    fixture.store.audit_append_all(vec![entry; 2500]).await.unwrap();
    let store = &fixture.store;
    assert_eq!(store.audit_delete_before(now() - 1.hour()).await.unwrap(), 0);
    assert_eq!(store.audit_delete_before(now() + 1.hour()).await.unwrap(), 2500);
    let left = store
        .audit_list(AuditFilter::default(), PageRequest::default())
        .await
        .unwrap();
    assert!(left.items.is_empty());
}
