//! What is remembered between requests is never older than a change that somebody was told of.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use common::{Fixture, project, session};
use oubliette_protocol::{Scope, TokenId, debug::DebugBody, event::Status};
use oubliette_store::{AuditEntry, AuditFilter, DebugFilter, NewToken, Page, ProjectFilter};

fn token(hash: u8) -> NewToken {
    NewToken {
        token_id: TokenId::generate(),
        name: "t".into(),
        scope: Scope::Read,
        project_id: None,
        expires_at: None,
        hash: [hash; 32],
        session_id: None,
    }
}

#[tokio::test]
async fn a_token_that_was_used_is_dead_once_it_is_revoked_however_that_came() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let (row, _) = project("p");
    store.project_insert(row.clone()).await.unwrap();
    let mut of = session(&row);
    of.status = Status::Ended;
    store.session_insert(of.clone()).await.unwrap();
    let mut tokens: Vec<_> = (1..=3).map(token).collect();
    tokens[1].project_id = Some(row.project_id.clone());
    tokens[2].session_id = Some(of.session_id.clone());
    for token in &tokens {
        // Asked for before it is there: that it was not must not be remembered either.
        assert!(store.token_by_hash(&token.hash).await.unwrap().is_none());
        store.token_insert(token.clone()).await.unwrap();
        for _ in 0..2 {
            assert!(store.token_by_hash(&token.hash).await.unwrap().is_some());
        }
    }
    store.token_revoke(&tokens[0].token_id).await.unwrap();
    assert!(store.token_by_hash(&tokens[0].hash).await.unwrap().is_none());
    assert!(store.token_by_hash(&tokens[2].hash).await.unwrap().is_some());
    store.tokens_revoke_of_session(&of.session_id).await.unwrap();
    assert!(store.token_by_hash(&tokens[2].hash).await.unwrap().is_none());
    assert!(store.token_by_hash(&tokens[1].hash).await.unwrap().is_some());
    store.project_delete(&row.project_id).await.unwrap();
    assert!(store.token_by_hash(&tokens[1].hash).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nobody_finds_a_token_after_its_revocation_was_answered() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    for round in 0..50 {
        let token = token(round);
        store.token_insert(token.clone()).await.unwrap();
        let revoked = Arc::new(AtomicBool::new(false));
        let readers = (0..8).map(|_| {
            let (store, revoked) = (store.clone(), revoked.clone());
            tokio::spawn(async move {
                loop {
                    let before = revoked.load(Ordering::SeqCst);
                    let found = store.token_by_hash(&[round; 32]).await.unwrap();
                    assert!(
                        !before || found.is_none(),
                        "found after it was said to be revoked"
                    );
                    if before {
                        return;
                    }
                    // What is remembered is given without waiting.
                    tokio::task::yield_now().await;
                }
            })
        });
        let readers: Vec<_> = readers.collect();
        tokio::task::yield_now().await;
        store.token_revoke(&token.token_id).await.unwrap();
        revoked.store(true, Ordering::SeqCst);
        for reader in readers {
            reader.await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_list_of_projects_shows_what_was_just_done() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let names = async || {
        let page = store.project_list(ProjectFilter::default(), Page::default());
        let rows = page.await.unwrap().items;
        rows.into_iter().map(|row| row.name).collect::<Vec<_>>()
    };
    assert!(names().await.is_empty());
    let (mut row, _) = project("one");
    store.project_insert(row.clone()).await.unwrap();
    for _ in 0..2 {
        assert_eq!(names().await, ["one"]);
    }
    row.name = "two".into();
    store.project_update(row.clone()).await.unwrap();
    assert_eq!(names().await, ["two"]);
    store.project_delete(&row.project_id).await.unwrap();
    assert!(names().await.is_empty());
}

#[tokio::test]
async fn debugger_events_that_gather_are_written_when_somebody_asks() {
    let mut fixture = Fixture::new().await;
    for entries in 0..10 {
        let body = DebugBody::MemoryOpened { entries };
        fixture.store.debugger().record(None, None, body);
    }
    fixture.store.debugger().flush().await;
    let read = fixture
        .store
        .debugger()
        .read(&DebugFilter::default(), -1, 100)
        .await;
    assert_eq!(read.unwrap().len(), 10);
    fixture
        .store
        .debugger()
        .record(None, None, DebugBody::TeardownStarted {});
    // Closing waits for what gathers.
    fixture.reopen().await;
    let read = fixture
        .store
        .debugger()
        .read(&DebugFilter::default(), -1, 100)
        .await;
    assert_eq!(read.unwrap().len(), 11);
}

#[tokio::test]
async fn audit_entries_added_together_stand_in_order() {
    let fixture = Fixture::new().await;
    let entry = |n: usize| AuditEntry {
        token_id: None,
        session_id: None,
        project_id: None,
        action: format!("a{n}"),
        target: None,
        outcome: "ok".into(),
        detail: None,
    };
    let store = &fixture.store;
    assert_eq!(store.audit_append(entry(0)).await.unwrap(), 0);
    assert_eq!(
        store
            .audit_append_all((1..100).map(entry).collect())
            .await
            .unwrap(),
        1
    );
    let rows = store
        .audit_list(AuditFilter::default(), Page::first(1000))
        .await
        .unwrap()
        .items;
    let seen: Vec<_> = rows
        .iter()
        .rev()
        .map(|row| (row.index, row.entry.action.clone()))
        .collect();
    let wanted: Vec<_> = (0..100).map(|n| (n as i64, format!("a{n}"))).collect();
    assert_eq!(seen, wanted);
}
