//! Failures of SQLite's file (those of PostgreSQL are in `postgres.rs`): a damaged, locked, newer or full database. Each error says what to do, and no acknowledged write is
//! lost.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::disallowed_types)]

mod common;

use std::path::Path;

use common::{StoreFixture, delta, text_of};
use futures::StreamExt;
use oubliette_protocol::{ErrorCode, SessionId};
use oubliette_store::{OpenError, PageRequest, ProjectFilter, Store, StoreOptions};
use sqlx::{ConnectOptions, Connection, SqliteConnection, sqlite::SqliteConnectOptions};

async fn open_error(path: &Path) -> OpenError {
    Store::open(path).await.expect_err("must not open")
}

async fn raw(path: &Path) -> SqliteConnection {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .connect()
        .await
        .unwrap()
}

async fn run(db: &mut SqliteConnection, sql: &'static str) {
    sqlx::query(sql).execute(db).await.unwrap();
}

#[tokio::test]
async fn a_file_that_is_no_database_is_reported_as_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("oubliette.db");
    std::fs::write(&path, "this is not a database at all, ".repeat(500)).unwrap();
    let error = open_error(&path).await;
    assert!(matches!(error, OpenError::Damaged { .. }), "{error:?}");
    assert!(error.to_string().contains("backup"), "{error}");
    assert!(
        std::fs::read_to_string(&path).unwrap().starts_with("this is not"),
        "it was not touched"
    );
}

#[tokio::test]
async fn a_corrupted_database_is_reported_when_opened_or_read() {
    let Some(fixture) = StoreFixture::of_file().await else {
        return;
    };
    let session = SessionId::generate();
    fixture
        .store
        .events()
        .append(&session, (0..500).map(|_| delta("x".repeat(500))).collect())
        .await
        .unwrap();
    fixture.store.close().await;
    let mut bytes = std::fs::read(fixture.path()).unwrap();
    for byte in &mut bytes[4096 * 2..] {
        *byte = 0xa5;
    }
    std::fs::write(fixture.path(), &bytes).unwrap();
    match Store::open(&fixture.path()).await {
        Err(error) => assert!(matches!(error, OpenError::Damaged { .. }), "{error:?}"),
        Ok(store) => {
            let error = store.events().read(&session, -1, 1000).await.unwrap_err();
            assert_eq!(error.code, ErrorCode::Unavailable);
            assert!(error.message.contains("damaged"), "{error}");
        }
    }
}

#[tokio::test]
async fn a_second_process_is_refused_until_the_first_has_closed() {
    let Some(fixture) = StoreFixture::of_file().await else {
        return;
    };
    let error = open_error(&fixture.path()).await;
    assert!(matches!(error, OpenError::InUse(_)), "{error:?}");
    assert!(error.to_string().contains("stop that one"), "{error}");
    fixture.store.close().await;
    Store::open(&fixture.path()).await.unwrap().close().await;
}

#[tokio::test]
async fn the_lock_of_a_process_that_is_gone_is_waited_for() {
    let Some(fixture) = StoreFixture::of_file().await else {
        return;
    };
    let path = fixture.path();
    fixture.store.close().await;
    let mut gone = std::process::Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    let lock = std::fs::OpenOptions::new()
        .write(true)
        .open(format!("{}.lock", path.display()))
        .unwrap();
    // As by a process that the killed one was just starting, and that has not come to its exec yet.
    lock.lock().unwrap();
    std::os::unix::fs::FileExt::write_all_at(&lock, format!("{:>10}\n", gone.id()).as_bytes(), 0).unwrap();
    let (opened, ()) = tokio::join!(Store::open(&path), async move { drop(lock) });
    let store = opened.unwrap();
    assert!(
        matches!(open_error(&path).await, OpenError::InUse(_)),
        "this one runs"
    );
    store.close().await;
}

#[tokio::test]
async fn a_database_locked_by_another_program_is_reported_as_locked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("oubliette.db");
    let mut other = raw(&path).await;
    run(&mut other, "CREATE TABLE theirs (x BIGINT)").await;
    run(&mut other, "BEGIN EXCLUSIVE").await;
    let error = open_error(&path).await;
    assert!(matches!(error, OpenError::Locked(_)), "{error:?}");
    run(&mut other, "ROLLBACK").await;
    Store::open(&path).await.unwrap();
}

#[tokio::test]
async fn a_lock_while_running_fails_writes_until_it_is_released() {
    let Some(fixture) = StoreFixture::of_file().await else {
        return;
    };
    let (log, session) = (fixture.store.events(), SessionId::generate());
    log.append(&session, vec![delta("0")]).await.unwrap();
    let mut other = raw(&fixture.path()).await;
    run(&mut other, "BEGIN IMMEDIATE").await;
    let error = log.append(&session, vec![delta("lost")]).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("another program"), "{error}");
    assert_eq!(
        log.read(&session, -1, 10).await.unwrap().len(),
        1,
        "readers go on"
    );
    assert_eq!(
        fixture.store.healthy().await.unwrap_err().code,
        ErrorCode::Unavailable
    );
    run(&mut other, "ROLLBACK").await;
    fixture.store.healthy().await.unwrap();
    assert_eq!(log.append(&session, vec![delta("1")]).await.unwrap()[0].index, 1);
}

#[tokio::test]
async fn a_newer_schema_is_refused() {
    let Some(fixture) = StoreFixture::of_file().await else {
        return;
    };
    fixture.store.close().await;
    let mut db = raw(&fixture.path()).await;
    run(
        &mut db,
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES (9000, 'of tomorrow', true, x'00', 0)",
    )
    .await;
    run(&mut db, "UPDATE schema_compatibility SET min_schema = 9000").await;
    db.close().await.unwrap();
    let error = open_error(&fixture.path()).await;
    assert!(
        matches!(error, OpenError::Newer { version: 9000, .. }),
        "{error:?}"
    );
    assert!(error.to_string().contains("newer oubliette"), "{error}");
}

#[tokio::test]
async fn open_errors_name_the_path() {
    let dir = tempfile::tempdir().unwrap();
    for path in [dir.path().join("no/such/oubliette.db"), dir.path().to_path_buf()] {
        let error = open_error(&path).await;
        assert!(error.to_string().contains(&*path.to_string_lossy()), "{error}");
    }
}

#[tokio::test]
async fn no_space_for_the_schema_is_reported_as_a_full_disk() {
    let dir = tempfile::tempdir().unwrap();
    let options = StoreOptions {
        max_bytes: Some(8192),
        ..StoreOptions::default()
    };
    let error = Store::open_with(&dir.path().join("oubliette.db"), &options)
        .await
        .expect_err("no room");
    assert!(matches!(error, OpenError::DiskFull(_)), "{error:?}");
}

#[tokio::test]
async fn a_write_that_does_not_fit_fails_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("oubliette.db");
    let store = Store::open_with(
        &path,
        &StoreOptions {
            max_bytes: Some(2 << 20),
            ..StoreOptions::default()
        },
    )
    .await
    .unwrap();
    let log = store.events();
    let (small, large) = (SessionId::generate(), SessionId::generate());
    // With one thread, all of these are queued before the writer takes the first, so they are one group.
    let (one, two, three, four) = tokio::join!(
        log.append(&small, vec![delta("0")]),
        log.append(&large, vec![delta("0"), delta("x".repeat(4 << 20))]),
        log.append(&small, vec![delta("1")]),
        store.debugger().record_durable(
            None,
            None,
            oubliette_protocol::debug::DebugBody::TeardownStarted {}
        ),
    );
    assert_eq!((one.unwrap()[0].index, three.unwrap()[0].index), (0, 1));
    four.unwrap();
    let error = two.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("free some space"), "{error}");
    // The writer continues, and no index was skipped.
    assert_eq!(log.last_index(&large).await.unwrap(), -1);
    assert_eq!(log.append(&large, vec![delta("fits")]).await.unwrap()[0].index, 0);
    store.healthy().await.unwrap();
}

#[tokio::test]
async fn a_disk_that_fills_up_loses_no_acknowledged_event() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("oubliette.db");
    let store = Store::open_with(
        &path,
        &StoreOptions {
            max_bytes: Some(1 << 20),
            ..StoreOptions::default()
        },
    )
    .await
    .unwrap();
    let session = SessionId::generate();
    let mut acknowledged = 0;
    let error = loop {
        match store
            .events()
            .append(&session, vec![delta("x".repeat(10_000))])
            .await
        {
            Ok(_) => acknowledged += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(acknowledged > 10);
    assert_eq!(
        store.events().last_index(&session).await.unwrap(),
        acknowledged - 1
    );
    store.close().await;
    // With free space again, writing continues.
    let store = Store::open(&path).await.unwrap();
    assert_eq!(
        store.events().read(&session, -1, 10_000).await.unwrap().len() as i64,
        acknowledged
    );
    assert_eq!(
        store.events().append(&session, vec![delta("on")]).await.unwrap()[0].index,
        acknowledged
    );
}

#[tokio::test]
async fn one_refused_write_does_not_fail_the_rest_of_its_group() {
    let fixture = StoreFixture::new().await;
    let (project, workspace) = common::project("p");
    let (other, _) = common::project("other");
    let store = &fixture.store;
    let (first, again, orphan, third) = tokio::join!(
        store.project_create(project.clone(), workspace.clone()),
        store.project_create(project.clone(), workspace),
        store.session_insert(common::session(&other)),
        store.project_insert(other.clone()),
    );
    first.unwrap();
    assert_eq!(again.unwrap_err().code, ErrorCode::Conflict);
    assert_eq!(orphan.unwrap_err().code, ErrorCode::NotFound);
    third.unwrap();
    let listed = store
        .project_list(ProjectFilter::default(), PageRequest::default())
        .await
        .unwrap();
    assert_eq!(listed.items.len(), 2);
}

#[tokio::test]
async fn events_nobody_waits_for_are_written_once_and_in_order_after_a_fault() {
    let Some(fixture) = StoreFixture::of_file().await else {
        return;
    };
    let (log, session) = (fixture.store.events(), SessionId::generate());
    log.append(&session, vec![delta("0")]).await.unwrap();
    let mut other = raw(&fixture.path()).await;
    run(&mut other, "BEGIN IMMEDIATE").await;
    for text in ["1", "2"] {
        log.append_soon(&session, delta(text)).await.unwrap();
    }
    let error = log.append(&session, vec![delta("refused")]).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(log.has_unwritten(&session));
    assert!(!log.has_unwritten(&SessionId::generate()));
    log.append_soon(&session, delta("3")).await.unwrap();
    let mut live = log.follow(&session, 0);
    run(&mut other, "ROLLBACK").await;
    // The kept events are written without any further append.
    while live.next().await.unwrap().unwrap().index < 3 {}
    log.append_soon(&session, delta("4")).await.unwrap();
    log.append(&session, vec![delta("5")]).await.unwrap();
    assert!(!log.has_unwritten(&session));
    let events = log.read(&session, -1, 100).await.unwrap();
    let texts: Vec<&str> = events.iter().map(|event| text_of(event)).collect();
    assert_eq!(texts, ["0", "1", "2", "3", "4", "5"]);
    assert!(events.iter().zip(0..).all(|(event, index)| event.index == index));
}
