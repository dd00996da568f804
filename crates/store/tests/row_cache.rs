//! Cached rows are never older than an acknowledged change.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use common::{StoreFixture, project, session};
use oubliette_protocol::{Scope, TokenId, event::SessionStatus};
use oubliette_store::{NewToken, PageRequest, ProjectFilter};

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
async fn a_cached_token_is_invalid_after_any_kind_of_revocation() {
    let fixture = StoreFixture::new().await;
    let store = &fixture.store;
    let (row, _) = project("p");
    store.project_insert(row.clone()).await.unwrap();
    let mut of = session(&row);
    of.status = SessionStatus::Ended;
    store.session_insert(of.clone()).await.unwrap();
    let mut tokens: Vec<_> = (1..=3).map(token).collect();
    tokens[1].project_id = Some(row.project_id.clone());
    tokens[2].session_id = Some(of.session_id.clone());
    for token in &tokens {
        // Looked up before it exists: the miss must not be cached either.
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
async fn no_reader_finds_a_token_after_its_revocation_was_acknowledged() {
    let fixture = StoreFixture::new().await;
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
                        "found after its revocation was acknowledged"
                    );
                    if before {
                        return;
                    }
                    // A cached row is returned without waiting, so this loop would never yield.
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
async fn the_project_list_shows_acknowledged_changes() {
    let fixture = StoreFixture::new().await;
    let store = &fixture.store;
    let names = async || {
        let page = store.project_list(ProjectFilter::default(), PageRequest::default());
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
