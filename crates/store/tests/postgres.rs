//! What only PostgreSQL has: the lease, following from another process, broken connections, and databases that cannot be
//! used. Run with `OUBLIETTE_TEST_STORE=postgres`; without it there is nothing to test.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::disallowed_types)]

mod common;

use std::{collections::BTreeSet, time::Duration};

use common::{delta, postgres, text_of};
use futures::StreamExt;
use oubliette_protocol::{ErrorCode, Scope, SessionId, TokenId};
use oubliette_store::{
    AuditEntry, AuditFilter, AuditPrincipal, DatabaseUrl, NewToken, OpenError, PageRequest,
    PostgresOpenError, Store, StoreLocation, StoreOptions,
};
use sqlx::PgConnection;

/// A new schema; none if the tests do not run on PostgreSQL.
async fn new_schema() -> Option<String> {
    match postgres::is_selected() {
        true => Some(postgres::new_schema().await),
        false => None,
    }
}

async fn open(schema: &str) -> Store {
    common::open(&StoreLocation::Postgres(postgres::url(schema))).await
}

async fn open_error(url: &str) -> PostgresOpenError {
    let url: DatabaseUrl = url.parse().unwrap();
    let opened = Store::open_at(&StoreLocation::Postgres(url), &StoreOptions::default()).await;
    match opened.expect_err("must not open") {
        OpenError::Postgres(error) => error,
        error => panic!("{error:?}"),
    }
}

/// Ends every other connection that uses this schema, as a restart of the database would.
async fn end_connections(db: &mut PgConnection, condition: &str) {
    let sql = format!(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory'
         AND objid = hashtext(current_schema())::bigint::bit(32)::bigint::oid AND pid <> pg_backend_pid() {condition}"
    );
    postgres::run(db, sql).await;
}

#[tokio::test]
async fn a_second_server_is_refused_and_told_who_has_the_database() {
    let Some(schema) = new_schema().await else { return };
    let store = open(&schema).await;
    let error = open_error(&postgres::url_text(&schema)).await;
    let PostgresOpenError::InUse { holder, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(holder.pid, i64::from(std::process::id()));
    assert!(
        error.to_string().contains(&format!("process {}", holder.pid)),
        "{error}"
    );
    assert!(OpenError::from(error).is_in_use());
    store.close().await;
    open(&schema).await.close().await;
}

#[tokio::test]
async fn a_server_that_lost_its_lease_writes_nothing_any_more() {
    let Some(schema) = new_schema().await else { return };
    let (store, session) = (open(&schema).await, SessionId::generate());
    store.events().append(&session, vec![delta("0")]).await.unwrap();
    // As by a server that took over while this one was frozen: its connection is still there.
    let mut other = postgres::connect(&schema).await;
    postgres::run(&mut other, "UPDATE server_lease SET epoch = epoch + 1").await;
    for _ in 0..3 {
        let error = store
            .events()
            .append(&session, vec![delta("late")])
            .await
            .unwrap_err();
        assert_eq!(error.code, ErrorCode::Unavailable);
        assert!(error.message.contains("taken over"), "{error}");
    }
    assert_eq!(store.healthy().await.unwrap_err().code, ErrorCode::Unavailable);
    assert_eq!(store.events().last_index(&session).await.unwrap(), 0);
    store.close().await;
}

#[tokio::test]
async fn a_server_whose_lease_was_taken_while_its_connection_was_broken_stays_out() {
    let Some(schema) = new_schema().await else { return };
    let (store, session) = (open(&schema).await, SessionId::generate());
    store.events().append(&session, vec![delta("0")]).await.unwrap();
    let mut other = postgres::connect(&schema).await;
    end_connections(&mut other, "").await;
    let second = open(&schema).await;
    second.events().append(&session, vec![delta("1")]).await.unwrap();
    second.close().await;
    let error = store
        .events()
        .append(&session, vec![delta("late")])
        .await
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    let error = store
        .events()
        .append(&session, vec![delta("late")])
        .await
        .unwrap_err();
    assert!(error.message.contains("taken over"), "{error}");
    assert_eq!(store.events().last_index(&session).await.unwrap(), 1);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_connections_lose_no_acknowledged_event_and_repeat_none() {
    let Some(schema) = new_schema().await else { return };
    let store = open(&schema).await;
    let writers: Vec<_> = (0..4)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                let (session, mut acknowledged) = (SessionId::generate(), Vec::new());
                for number in 0..150 {
                    let text = number.to_string();
                    if store.events().append(&session, vec![delta(&text)]).await.is_ok() {
                        acknowledged.push(text);
                    }
                }
                (session, acknowledged)
            })
        })
        .collect();
    let mut other = postgres::connect(&schema).await;
    while !writers.iter().all(tokio::task::JoinHandle::is_finished) {
        end_connections(&mut other, "").await;
        tokio::task::yield_now().await;
    }
    for writer in writers {
        let (session, acknowledged) = writer.await.unwrap();
        let events = store.events().read(&session, -1, 1000).await.unwrap();
        assert!(events.iter().zip(0..).all(|(event, index)| event.index == index));
        let texts: Vec<&str> = events.iter().map(|event| text_of(event)).collect();
        let unique: BTreeSet<&str> = texts.iter().copied().collect();
        assert_eq!(unique.len(), texts.len(), "an event was written twice");
        for text in &acknowledged {
            assert!(
                unique.contains(text.as_str()),
                "{text} was acknowledged and is gone"
            );
        }
        assert_eq!(
            texts.len(),
            acknowledged.len(),
            "an event was refused and is there"
        );
    }
    store.close().await;
}

#[tokio::test]
async fn another_process_follows_and_catches_up_with_what_it_did_not_hear() {
    let Some(schema) = new_schema().await else { return };
    let (store, session) = (open(&schema).await, SessionId::generate());
    store.events().append(&session, vec![delta("0")]).await.unwrap();
    let observer = Store::observe(&postgres::url(&schema)).await.unwrap();
    let mut live = observer.events().follow(&session, -1);
    assert_eq!(live.next().await.unwrap().unwrap().index, 0);
    store
        .events()
        .append(&session, vec![delta("1"), delta("2")])
        .await
        .unwrap();
    for index in 1..=2 {
        assert_eq!(live.next().await.unwrap().unwrap().index, index);
    }
    // The listener's connection ends, and an event is committed that nobody is told of.
    let mut other = postgres::connect(&schema).await;
    let listening = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE query LIKE 'LISTEN \"oubliette_%'";
    postgres::run(&mut other, listening).await;
    let silent = "INSERT INTO events SELECT log, idx + 1, ts, body FROM events ORDER BY idx DESC LIMIT 1";
    postgres::run(&mut other, silent).await;
    assert_eq!(live.next().await.unwrap().unwrap().index, 3);
    assert_eq!(
        observer
            .events()
            .append(&session, vec![delta("no")])
            .await
            .unwrap_err()
            .code,
        ErrorCode::Unavailable,
        "it only reads"
    );
    observer.close().await;
    assert!(live.next().await.is_none());
    store.close().await;
}

#[tokio::test]
async fn tokens_and_audit_survive_a_crash_of_the_database() {
    if !postgres::is_selected() {
        return;
    }
    let server = postgres::start();
    let url = || postgres::url_on(&server.socket_dir, "public");
    let store = common::open(&StoreLocation::Postgres(url())).await;
    let token = NewToken {
        token_id: TokenId::generate(),
        name: "t".into(),
        scope: Scope::Read,
        project_id: None,
        expires_at: None,
        hash: [7; 32],
        session_id: None,
    };
    store.token_insert(token).await.unwrap();
    let entry = AuditEntry {
        principal: AuditPrincipal::Owner,
        session_id: None,
        project_id: None,
        action: "test".into(),
        target: None,
        outcome: "ok".into(),
        detail: None,
    };
    store.audit_append(entry.clone()).await.unwrap();
    // PostgreSQL ends all its processes and forgets its memory when one of them is killed.
    let mut db = postgres::connect_to(&postgres::url_text_on(&server.socket_dir, "public")).await;
    let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()")
        .fetch_one(&mut db)
        .await
        .unwrap();
    std::process::Command::new("kill")
        .args(["-9", &pid.to_string()])
        .status()
        .unwrap();
    // The same store goes on once PostgreSQL has recovered.
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while store.audit_append(entry.clone()).await.is_err() {
        assert!(
            tokio::time::Instant::now() < deadline,
            "the store did not come back"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // The append may have been faster than the crash, which reads meet then.
    let found = loop {
        match store.token_by_hash(&[7; 32]).await {
            Ok(found) => break found,
            Err(error) => assert!(tokio::time::Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    assert!(found.is_some());
    let listed = store
        .audit_list(AuditFilter::default(), PageRequest::default())
        .await
        .unwrap();
    assert!(listed.items.len() >= 2, "{listed:?}");
    store.close().await;
}

#[tokio::test]
async fn a_database_that_cannot_be_used_is_refused_with_the_remedy() {
    let Some(schema) = new_schema().await else { return };
    let url = postgres::url_text(&schema);
    let dir = postgres::socket_dir().display();
    let mut db = postgres::connect(&schema).await;
    let said = async |url: String, expected: &str| {
        let error = open_error(&url).await.to_string();
        assert!(error.contains(expected), "{expected}: {error}");
        assert!(!error.contains("hunter2"), "{error}");
    };
    said("postgres://me:hunter2@127.0.0.1:1/db".into(), "cannot reach").await;
    said(
        format!("postgres://oubliette@localhost/nowhere?host={dir}"),
        "create it first",
    )
    .await;
    said(url.replace(&schema, "no_such_schema"), "CREATE SCHEMA").await;
    said(
        format!("{url}&options[default_transaction_read_only]=on"),
        "can only be read",
    )
    .await;

    let _ = sqlx::query("CREATE ROLE guarded LOGIN PASSWORD 'right'")
        .execute(&mut db)
        .await;
    let guarded = |password: &str| url.replace("oubliette@", &format!("guarded:{password}@"));
    said(guarded("hunter2"), "check user and password").await;
    said(guarded("right"), "has no schema").await;
    postgres::run(&mut db, format!("GRANT USAGE ON SCHEMA {schema} TO guarded")).await;
    said(guarded("right"), "GRANT CREATE").await;

    let latin = format!("latin_{}", std::process::id());
    let create = "ENCODING 'LATIN1' LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0";
    postgres::run(&mut db, format!("CREATE DATABASE {latin} {create}")).await;
    let other_encoding = format!("postgres://oubliette@localhost/{latin}?host={dir}");
    said(other_encoding, "ENCODING 'UTF8'").await;
    postgres::run(&mut db, format!("DROP DATABASE {latin}")).await;

    postgres::run(&mut db, "CREATE TABLE theirs (x BIGINT)").await;
    said(url.clone(), "another program (theirs)").await;
    postgres::run(&mut db, "DROP TABLE theirs").await;

    assert!(matches!(
        Store::observe(&postgres::url(&schema)).await,
        Err(OpenError::Postgres(PostgresOpenError::Empty(_)))
    ));
    open(&schema).await.close().await;
    let newer = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES (9000, 'of tomorrow', true, '', 0)";
    postgres::run(&mut db, newer).await;
    postgres::run(&mut db, "UPDATE schema_compatibility SET min_schema = 9000").await;
    said(url.clone(), "newer oubliette (schema 9000)").await;
    assert!(matches!(
        Store::observe(&postgres::url(&schema)).await,
        Err(OpenError::Postgres(PostgresOpenError::Newer { .. }))
    ));
}

#[tokio::test]
async fn both_databases_have_the_same_tables_and_columns() {
    let Some(schema) = new_schema().await else { return };
    open(&schema).await.close().await;
    let mut db = postgres::connect(&schema).await;
    let columns: BTreeSet<(String, String)> = sqlx::query_as(
        "SELECT table_name::text, column_name::text FROM information_schema.columns
         WHERE table_schema = current_schema() AND table_name NOT IN (
             'server_lease', 'servers', 'server_leases', 'session_owners', 'cluster_key',
             '_sqlx_migrations')",
    )
    .fetch_all(&mut db)
    .await
    .unwrap()
    .into_iter()
    .collect();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("oubliette.db");
    Store::open(&path).await.unwrap().close().await;
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&path);
    let mut file = sqlx::ConnectOptions::connect(&options).await.unwrap();
    let of_file: BTreeSet<(String, String)> = sqlx::query_as(
        "SELECT m.name, c.name FROM sqlite_master m JOIN pragma_table_info(m.name) c
         WHERE m.type = 'table' AND m.name <> '_sqlx_migrations'",
    )
    .fetch_all(&mut file)
    .await
    .unwrap()
    .into_iter()
    .collect();
    assert_eq!(columns, of_file);
    // Byte by byte, as SQLite compares: a column in the database's collation would be listed in another order.
    let uncollated: Vec<String> = sqlx::query_scalar(
        "SELECT c.relname || '.' || a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
         JOIN pg_collation l ON l.oid = a.attcollation
         WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r' AND l.collname <> 'C'
         AND c.relname NOT IN ('server_lease', 'servers', 'cluster_key', '_sqlx_migrations')",
    )
    .fetch_all(&mut db)
    .await
    .unwrap();
    assert_eq!(uncollated, [] as [String; 0]);
}
