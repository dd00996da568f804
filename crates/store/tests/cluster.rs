//! Several servers on one PostgreSQL database. Run with `OUBLIETTE_TEST_STORE=postgres`; without it there is nothing to test.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::disallowed_types)]

mod common;

use std::{future::Future, time::Duration};

use common::{delta, postgres, project, session, text_of};
use futures::{FutureExt, StreamExt, future::join_all};
use oubliette_protocol::{ErrorCode, Scope, SessionId, TokenId, debug::DebugBody};
use oubliette_store::{
    AuditEntry, AuditFilter, AuditPrincipal, ClusterOptions, MemberState, NewToken, OpenError, PageRequest,
    PostgresOpenError, QueuedMessage, SessionOwner, SessionRow, Store, StoreLocation, StoreOptions,
};
use serde_json::json;

/// How long something may take that another server does.
const DEADLINE: Duration = Duration::from_secs(30);

async fn new_schema() -> Option<String> {
    match postgres::is_selected() {
        true => Some(postgres::new_schema().await),
        false => None,
    }
}

async fn try_join(schema: &str, key: &str) -> Result<Store, OpenError> {
    let options = StoreOptions {
        cluster: Some(ClusterOptions {
            address: format!("http://127.0.0.1:1/{key}"),
            key_fingerprint: key.to_owned(),
        }),
        ..StoreOptions::default()
    };
    Store::open_at(&StoreLocation::Postgres(postgres::url(schema)), &options).await
}

async fn join(schema: &str) -> Store {
    try_join(schema, "key").await.unwrap()
}

async fn new_session(store: &Store) -> SessionRow {
    let (row, workspace) = project("p");
    store.project_create(row.clone(), workspace).await.unwrap();
    let session = session(&row);
    store
        .events()
        .append_first(session.clone(), vec![delta("0")], Some(1))
        .await
        .unwrap();
    session
}

async fn within<T>(answer: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, answer).await.expect("in time")
}

fn server_id(store: &Store) -> String {
    store.cluster().unwrap().server_id().to_string()
}

/// Makes a server look as if it had not been heard of for long, until another one has declared it dead.
async fn declare_dead(schema: &str, dead: &Store, by: &Store) -> Vec<SessionId> {
    let mut db = postgres::connect(schema).await;
    let forget = format!(
        "UPDATE servers SET last_seen = 0 WHERE server_id = '{}'",
        server_id(dead)
    );
    let forgetting = async {
        loop {
            postgres::run(&mut db, forget.clone()).await;
        }
    };
    tokio::select! {
        trees = within(by.cluster().unwrap().next_left_trees()) => trees.unwrap(),
        () = forgetting => Vec::new(),
    }
}

#[tokio::test]
async fn servers_with_and_without_a_cluster_do_not_share_a_database() {
    let Some(schema) = new_schema().await else { return };
    let location = StoreLocation::Postgres(postgres::url(&schema));
    let alone = common::open(&location).await;
    let error = try_join(&schema, "key").await.unwrap_err();
    assert!(
        error.is_in_use() && error.to_string().contains("has no [cluster] section"),
        "{error}"
    );
    alone.close().await;

    let (one, two) = (join(&schema).await, join(&schema).await);
    let error = Store::open_at(&location, &StoreOptions::default())
        .await
        .unwrap_err();
    assert!(
        error.is_in_use() && error.to_string().contains("shared by a cluster"),
        "{error}"
    );
    let error = try_join(&schema, "other").await.unwrap_err();
    assert!(
        matches!(
            &error,
            OpenError::Postgres(PostgresOpenError::OtherClusterKey { .. })
        ),
        "{error}"
    );
    let servers = one.cluster().unwrap().servers(None).await.unwrap();
    let ids: Vec<String> = servers
        .iter()
        .map(|server| server.server_id.to_string())
        .collect();
    assert_eq!(ids, [server_id(&one), server_id(&two)]);
    one.close().await;
    assert_eq!(two.cluster().unwrap().servers(None).await.unwrap().len(), 1);
    two.close().await;
    // With none left the key may change.
    try_join(&schema, "other").await.unwrap().close().await;
    common::open(&location).await.close().await;
}

#[tokio::test]
async fn one_server_appends_to_a_session_and_the_others_are_told_which() {
    let Some(schema) = new_schema().await else { return };
    let (one, two) = (join(&schema).await, join(&schema).await);
    let row = new_session(&one).await;
    let id = &row.session_id;
    assert_eq!(
        one.session_owner(id).await.unwrap(),
        Some(SessionOwner::ThisServer)
    );
    let Some(SessionOwner::Peer(peer)) = two.session_owner(id).await.unwrap() else {
        panic!("another server runs it")
    };
    assert_eq!(
        (peer.server_id.to_string(), peer.address),
        (server_id(&one), "http://127.0.0.1:1/key".into())
    );
    assert_eq!(two.session_owner(&SessionId::generate()).await.unwrap(), None);
    assert!(matches!(
        two.claim_session(id).await.unwrap(),
        SessionOwner::Peer(_)
    ));
    let error = two
        .events()
        .append(id, vec![delta("not mine")])
        .await
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("another server"), "{error}");

    // From one to the other and back: each goes on where the log is, not where it left it.
    let mut follow = one.events().follow(id, -1);
    for (number, (store, from)) in [(&two, &one), (&one, &two), (&two, &one)].into_iter().enumerate() {
        from.release_tree(id).await.unwrap();
        assert_eq!(
            store.session_owner(id).await.unwrap(),
            Some(SessionOwner::Unowned)
        );
        assert_eq!(store.claim_session(id).await.unwrap(), SessionOwner::ThisServer);
        let text = format!("{}", number + 1);
        store.events().append(id, vec![delta(text)]).await.unwrap();
        from.events().append(id, vec![delta("late")]).await.unwrap_err();
    }
    for index in 0..4 {
        let event = within(follow.next()).await.unwrap().unwrap();
        assert_eq!(
            (event.index, text_of(&event)),
            (index, index.to_string().as_str())
        );
    }
    let error = one
        .events()
        .append_first(session_of(&row), vec![delta("0")], Some(1))
        .await
        .unwrap_err();
    assert_eq!(
        error.code,
        ErrorCode::LimitExceeded,
        "one active session is there"
    );
    one.close().await;
    two.close().await;
}

/// Another session of the same project.
fn session_of(row: &SessionRow) -> SessionRow {
    let session_id = SessionId::generate();
    SessionRow {
        root_id: session_id.clone(),
        session_id,
        ..row.clone()
    }
}

#[tokio::test]
async fn a_server_that_is_declared_dead_writes_nothing_and_its_trees_are_taken() {
    let Some(schema) = new_schema().await else { return };
    let (one, two) = (join(&schema).await, join(&schema).await);
    let row = new_session(&one).await;
    let id = &row.session_id;
    assert_eq!(declare_dead(&schema, &one, &two).await, std::slice::from_ref(id));
    assert_eq!(
        two.session_owner(id).await.unwrap(),
        Some(SessionOwner::ThisServer)
    );
    two.events().append(id, vec![delta("1")]).await.unwrap();
    for _ in 0..2 {
        let error = one.events().append(id, vec![delta("late")]).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::Unavailable);
    }
    within(one.cluster().unwrap().wait_until_fenced()).await;
    assert_eq!(one.cluster().unwrap().state(), MemberState::Fenced);
    let error = one.token_get(&TokenId::generate()).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(one.healthy().await.is_err());
    assert_eq!(two.events().last_index(id).await.unwrap(), 1);
    one.close().await;
    two.close().await;
}

#[tokio::test]
async fn a_tree_is_not_taken_from_a_server_that_joined_while_the_claim_waited() {
    let Some(schema) = new_schema().await else { return };
    let one = join(&schema).await;
    let id = new_session(&one).await.session_id;
    let owned_by = |server: &str| format!("UPDATE session_owners SET server_id = '{server}'");
    let (mut db, mut look) = (postgres::connect(&schema).await, postgres::connect(&schema).await);
    postgres::run(&mut db, owned_by("srv_gone")).await;
    // Another server is about to claim the tree, whose own one is gone.
    postgres::run(&mut db, format!("BEGIN; {}", owned_by("srv_gone"))).await;
    let claiming = tokio::spawn({
        let (one, id) = (one.clone(), id.clone());
        async move { one.claim_session(&id).await }
    });
    let waits = format!(
        "SELECT COUNT(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'oubliette {}'",
        server_id(&one)
    );
    within(async { while postgres::number(&mut look, &waits).await == 0 {} }).await;
    let two = join(&schema).await;
    postgres::run(&mut db, format!("{}; COMMIT", owned_by(&server_id(&two)))).await;
    let SessionOwner::Peer(peer) = within(claiming).await.unwrap().unwrap() else {
        panic!("the tree was taken from a server that runs")
    };
    assert_eq!(peer.server_id.to_string(), server_id(&two));
    assert_eq!(
        two.session_owner(&id).await.unwrap(),
        Some(SessionOwner::ThisServer)
    );
    one.close().await;
    two.close().await;
}

#[tokio::test]
async fn a_server_whose_writer_notices_the_lost_lease_first_is_fenced_not_superseded() {
    let Some(schema) = new_schema().await else { return };
    let one = join(&schema).await;
    let id = new_session(&one).await.session_id;
    let mut db = postgres::connect(&schema).await;
    postgres::run(&mut db, "DELETE FROM server_leases").await;
    // The writer says that it is superseded after it has answered, and before it takes the second.
    for _ in 0..2 {
        let error = one.events().append(&id, vec![delta("late")]).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::Unavailable);
    }
    assert!(
        one.wait_until_superseded().now_or_never().is_none(),
        "a server of a cluster starts anew, where one alone on its database ends"
    );
    within(one.cluster().unwrap().wait_until_fenced()).await;
    assert!(one.wait_until_superseded().now_or_never().is_none());
    one.close().await;
}

#[tokio::test]
async fn a_server_that_stops_leaves_its_work_to_the_others_at_once() {
    let Some(schema) = new_schema().await else { return };
    let (one, two) = (join(&schema).await, join(&schema).await);
    let row = new_session(&one).await;
    let id = &row.session_id;
    let message = QueuedMessage {
        turn: 1,
        text: "hello".into(),
    };
    one.queue_push(id, message).await.unwrap();
    let (first, second) = match one.has_duty() {
        true => (&one, &two),
        false => (&two, &one),
    };
    within(first.wait_for_duty()).await;
    assert!(!second.has_duty());
    one.close().await;
    assert_eq!(
        within(two.cluster().unwrap().next_left_trees()).await.unwrap(),
        std::slice::from_ref(id)
    );
    assert_eq!(two.claim_session(id).await.unwrap(), SessionOwner::ThisServer);
    within(two.wait_for_duty()).await;
    two.close().await;
}

#[tokio::test]
async fn logs_that_all_servers_append_to_have_no_hole_and_no_repeat() {
    let Some(schema) = new_schema().await else { return };
    let stores = [join(&schema).await, join(&schema).await, join(&schema).await];
    const EACH: usize = 40;
    let followed: Vec<_> = stores
        .iter()
        .map(|store| store.debugger().follow(Default::default(), -1))
        .collect();
    let writing = stores.iter().map(|store| async move {
        for number in 0..EACH {
            let session = new_session(store).await.session_id;
            let entry = AuditEntry {
                principal: AuditPrincipal::Owner,
                session_id: None,
                project_id: None,
                action: "tool_call".into(),
                target: None,
                outcome: "ok".into(),
                detail: Some(json!({ "number": number })),
            };
            let body = DebugBody::RegistryCleared { tools: number };
            let debugged = store.debugger().record_durable(Some(session), None, body);
            let (debugged, audited) = tokio::join!(debugged, store.audit_append_soon(entry));
            debugged.unwrap();
            audited.unwrap();
        }
    });
    within(join_all(writing)).await;
    let total = stores.len() * EACH;
    for follow in followed {
        let seen: Vec<i64> = within(follow.take(total).map(|event| event.unwrap().index).collect()).await;
        assert_eq!(seen, (0..total as i64).collect::<Vec<_>>());
    }
    let filter = AuditFilter::default();
    let page = PageRequest {
        limit: Some(200),
        cursor: None,
    };
    let audit = stores[0].audit_list(filter, page).await.unwrap().items;
    let mut indexes: Vec<i64> = audit.iter().map(|row| row.index).collect();
    indexes.sort_unstable();
    assert_eq!(indexes, (0..total as i64).collect::<Vec<_>>());
    for store in stores {
        store.close().await;
    }
}

#[tokio::test]
async fn a_token_revoked_on_one_server_is_refused_by_the_others_at_once() {
    let Some(schema) = new_schema().await else { return };
    let (one, two) = (join(&schema).await, join(&schema).await);
    let token = NewToken {
        token_id: TokenId::generate(),
        name: "t".into(),
        scope: Scope::Read,
        project_id: None,
        session_id: None,
        expires_at: None,
        hash: [7; 32],
    };
    one.token_insert(token.clone()).await.unwrap();
    let mut revoked = two.revoked_tokens();
    // The listener may not listen yet; what it misses is found by asking.
    assert!(two.token_by_hash(&[7; 32]).await.unwrap().is_some());
    one.token_revoke(&token.token_id).await.unwrap();
    assert!(two.token_by_hash(&[7; 32]).await.unwrap().is_none());
    one.token_revoke(&token.token_id).await.unwrap();
    assert_eq!(within(revoked.recv()).await.unwrap(), token.token_id);
    one.close().await;
    two.close().await;
}
