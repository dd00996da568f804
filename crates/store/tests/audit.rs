//! The audit log: entries of frequent actions, and what happens when the disk fails.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::StoreFixture;
use oubliette_store::{AuditEntry, AuditFilter, AuditPrincipal, PageRequest, Store};

fn entry(action: impl Into<String>) -> AuditEntry {
    AuditEntry {
        principal: AuditPrincipal::Owner,
        session_id: None,
        project_id: None,
        action: action.into(),
        target: None,
        outcome: "ok".into(),
        detail: None,
    }
}

/// Indexes and actions of all entries, oldest first.
async fn entries(store: &Store) -> Vec<(i64, String)> {
    let page = store.audit_list(AuditFilter::default(), PageRequest::first(1000));
    let rows = page.await.unwrap().items.into_iter().rev();
    rows.map(|row| (row.index, row.entry.action)).collect()
}

#[tokio::test]
async fn entries_of_many_tasks_are_there_once_when_their_append_returns() {
    let mut fixture = StoreFixture::new().await;
    let tasks: Vec<_> = (0..200)
        .map(|n| {
            let store = fixture.store.clone();
            tokio::spawn(async move {
                let index = match n % 3 {
                    0 => store.audit_append(entry(n.to_string())).await.unwrap(),
                    _ => store.audit_append_soon(entry(n.to_string())).await.unwrap(),
                };
                assert!(entries(&store).await.contains(&(index, n.to_string())));
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let all = entries(&fixture.store).await;
    assert!(
        all.iter().map(|(index, _)| *index).eq(0..200),
        "each index is there once"
    );
    fixture.reopen().await;
    assert_eq!(entries(&fixture.store).await, all);
    assert_eq!(fixture.store.audit_append_soon(entry("next")).await.unwrap(), 200);
}

#[cfg(feature = "test-support")]
#[tokio::test]
async fn an_entry_that_cannot_be_written_is_an_error_and_takes_no_index() {
    let fixture = StoreFixture::new().await;
    let store = &fixture.store;
    assert_eq!(store.audit_append_soon(entry("before")).await.unwrap(), 0);
    store.set_write_fault(true);
    for _ in 0..3 {
        let error = store.audit_append_soon(entry("lost")).await.unwrap_err();
        assert_eq!(error.code, oubliette_protocol::ErrorCode::Unavailable);
    }
    store.set_write_fault(false);
    assert_eq!(store.audit_append_soon(entry("after")).await.unwrap(), 1);
    let expected = [(0, "before".to_owned()), (1, "after".to_owned())];
    assert_eq!(entries(store).await, expected);
}
