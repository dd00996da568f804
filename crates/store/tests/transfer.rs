//! Rows out of a database and into an empty one: copies, backups' rows, and what is refused. With
//! `OUBLIETTE_TEST_STORE=postgres` the source is PostgreSQL, and so is the target of a copy back.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::path::{Path, PathBuf};

use common::{StoreFixture, delta, postgres, text_of};
use oubliette_protocol::{ErrorCode, Scope, SessionId, TokenId};
use oubliette_store::{
    AuditEntry, AuditFilter, AuditPrincipal, NewToken, PageRequest, RowChunk, Store, StoreLoader,
    StoreLocation, StoreOptions, StoreSnapshot, TableDigest, transfer,
};
use tokio::sync::mpsc;

const ODD_TEXT: &str = "nul \0, U+FFFE \u{fffe}, quote \" ' \\, newline \n, 𝔸";

struct Filled {
    session: SessionId,
    events: usize,
}

async fn fill(fixture: &StoreFixture) -> Filled {
    let project = fixture.project(ODD_TEXT).await;
    let session = fixture.session(&project).await.session_id;
    let events = 1000;
    for batch in 0..10 {
        let bodies = (0..events / 10).map(|n| delta(format!("{ODD_TEXT} {batch} {n}")));
        let appended = fixture.store.events().append(&session, bodies.collect()).await;
        appended.unwrap();
    }
    let token = NewToken {
        token_id: TokenId::generate(),
        name: "t".into(),
        scope: Scope::Admin,
        project_id: None,
        expires_at: None,
        hash: [7; 32],
        session_id: None,
    };
    fixture.store.token_insert(token).await.unwrap();
    let entry = AuditEntry {
        principal: AuditPrincipal::Owner,
        session_id: None,
        project_id: None,
        action: "something".into(),
        target: None,
        outcome: "ok".into(),
        detail: None,
    };
    fixture.store.audit_append(entry).await.unwrap();
    Filled { session, events }
}

async fn check(location: &StoreLocation, filled: &Filled) {
    let store = common::open(location).await;
    let projects = store
        .project_list(Default::default(), PageRequest::first(10))
        .await
        .unwrap();
    assert_eq!(projects.items[0].name, ODD_TEXT);
    let last = store.events().last_index(&filled.session).await.unwrap();
    assert_eq!(last, filled.events as i64 - 1);
    let events = store.events().read(&filled.session, -1, 1000).await.unwrap();
    assert_eq!(text_of(&events[123]), format!("{ODD_TEXT} 1 23"));
    assert!(store.token_by_hash(&[7; 32]).await.unwrap().is_some());
    let audit = store
        .audit_list(AuditFilter::default(), PageRequest::first(10))
        .await
        .unwrap();
    assert_eq!(audit.items[0].entry.action, "something");
    // What is written next follows what was copied.
    let next = store.events().append(&filled.session, vec![delta("next")]).await;
    assert_eq!(next.unwrap()[0].index, filled.events as i64);
    store.close().await;
}

fn file(dir: &Path, name: &str) -> StoreLocation {
    StoreLocation::File(dir.join(name))
}

async fn copy(from: &StoreLocation, to: &StoreLocation) -> oubliette_protocol::Result<Vec<TableDigest>> {
    transfer::copy_store(from, &StoreOptions::default(), to, |_, _| {}).await
}

/// All rows of a database, and their digests.
async fn read(location: &StoreLocation) -> (Vec<RowChunk>, Vec<TableDigest>) {
    let mut snapshot = StoreSnapshot::open(location).await.unwrap();
    read_snapshot(&mut snapshot).await
}

async fn read_snapshot(snapshot: &mut StoreSnapshot) -> (Vec<RowChunk>, Vec<TableDigest>) {
    let (chunks, mut arriving) = mpsc::channel(1000);
    let digests = snapshot.read_all(&chunks).await.unwrap();
    drop(chunks);
    let mut read = Vec::new();
    while let Some(chunk) = arriving.recv().await {
        read.push(chunk);
    }
    (read, digests)
}

#[tokio::test]
async fn a_copy_has_every_row_in_either_database() {
    let fixture = StoreFixture::new().await;
    let filled = fill(&fixture).await;
    fixture.store.close().await;
    let copied = file(fixture.dir.path(), "copy.db");
    let digests = copy(&fixture.location(), &copied).await.unwrap();
    assert_eq!(digests, read(&copied).await.1);
    let rows = |table: &str| {
        digests
            .iter()
            .find(|digest| digest.table.name == table)
            .unwrap()
            .rows
    };
    assert_eq!(
        (rows("events"), rows("projects"), rows("audit_expiry")),
        (1000, 1, 0)
    );
    if postgres::is_selected() {
        // And back: the hashes are those of the first.
        let schema = postgres::new_schema().await;
        let back = StoreLocation::Postgres(postgres::url(&schema));
        assert_eq!(copy(&copied, &back).await.unwrap(), digests);
        check(&back, &filled).await;
    }
    check(&copied, &filled).await;
}

#[tokio::test]
async fn a_target_that_has_rows_is_refused_and_unchanged() {
    let fixture = StoreFixture::new().await;
    fill(&fixture).await;
    fixture.store.close().await;
    let target = file(fixture.dir.path(), "copy.db");
    copy(&fixture.location(), &target).await.unwrap();
    let before = read(&target).await.1;
    let error = copy(&fixture.location(), &target).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Conflict);
    assert!(error.message.contains("not empty"), "{error}");
    assert_eq!(read(&target).await.1, before);
    if postgres::is_selected() {
        // Into itself: it is in use.
        let error = copy(&fixture.location(), &fixture.location()).await.unwrap_err();
        assert!(error.message.contains("in use"), "{error}");
    }
    // One on which a server has only been started is empty.
    let started = file(fixture.dir.path(), "started.db");
    common::open(&started).await.close().await;
    copy(&fixture.location(), &started).await.unwrap();
}

#[tokio::test]
async fn a_copy_that_is_cut_leaves_an_empty_target_and_can_be_made_again() {
    let fixture = StoreFixture::new().await;
    let filled = fill(&fixture).await;
    fixture.store.close().await;
    let (chunks, _) = read(&fixture.location()).await;
    let schema = match postgres::is_selected() {
        true => Some(postgres::new_schema().await),
        false => None,
    };
    let target = match &schema {
        Some(schema) => StoreLocation::Postgres(postgres::url(schema)),
        None => file(fixture.dir.path(), "copy.db"),
    };
    let mut loader = StoreLoader::create(&target, transfer::newest_schema())
        .await
        .unwrap();
    for chunk in &chunks {
        loader.insert(&chunk.table, &chunk.lines).await.unwrap();
    }
    drop(loader);
    match &target {
        StoreLocation::File(path) => {
            let names: Vec<_> = std::fs::read_dir(fixture.dir.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .filter(|name| name.starts_with("copy"))
                .collect();
            assert!(names.is_empty(), "{path:?}: {names:?}");
        }
        StoreLocation::Postgres(_) => {
            let digests = read(&target).await.1;
            assert!(digests.iter().all(|digest| digest.rows == 0), "{digests:?}");
        }
    }
    copy(&fixture.location(), &target).await.unwrap();
    check(&target, &filled).await;
}

#[tokio::test]
async fn a_snapshot_is_of_one_moment_and_holds_up_no_commit() {
    let fixture = StoreFixture::new().await;
    let filled = fill(&fixture).await;
    let mut snapshot = StoreSnapshot::open(&fixture.location()).await.unwrap();
    let later = fixture
        .store
        .events()
        .append(&filled.session, vec![delta("later")])
        .await;
    assert_eq!(later.unwrap()[0].index, 1000);
    fixture.project("later").await;
    let (chunks, digests) = read_snapshot(&mut snapshot).await;
    let rows = |table: &str| {
        digests
            .iter()
            .find(|digest| digest.table.name == table)
            .unwrap()
            .rows
    };
    assert_eq!((rows("events"), rows("projects")), (1000, 1));
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk.rows > 0 && chunk.lines.ends_with(b"]\n"))
    );
    fixture.store.close().await;
}

#[tokio::test]
async fn rows_that_differ_from_what_was_said_are_not_kept() {
    let fixture = StoreFixture::new().await;
    fill(&fixture).await;
    fixture.store.close().await;
    let (chunks, mut digests) = read(&fixture.location()).await;
    let target = file(fixture.dir.path(), "copy.db");
    let mut loader = StoreLoader::create(&target, transfer::newest_schema())
        .await
        .unwrap();
    for chunk in chunks.iter().filter(|chunk| chunk.table != "tokens") {
        loader.insert(&chunk.table, &chunk.lines).await.unwrap();
    }
    let error = loader.compare(&digests).await.unwrap_err();
    assert!(error.for_log().contains("table tokens has 0 rows"), "{error}");
    digests.remove(0);
    assert!(loader.compare(&digests).await.is_err());
    drop(loader);
    assert!(!fixture.dir.path().join("copy.db").exists());
}

#[tokio::test]
async fn rows_that_are_not_of_the_schema_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let target = file(dir.path(), "new.db");
    for schema in [0, 9, transfer::newest_schema() + 1] {
        let error = StoreLoader::create(&target, schema).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument, "{schema}");
    }
    let mut loader = StoreLoader::create(&target, transfer::newest_schema())
        .await
        .unwrap();
    for (table, line) in [
        ("no_such_table", "[]"),
        ("_sqlx_migrations", "[1]"),
        ("counters\" --", "[1]"),
        ("counters", "[\"a\"]"),
        ("counters", "[\"a\",1,2]"),
        ("counters", "[\"a\",\"1\"]"),
        ("counters", "[\"a\",1.5]"),
        ("counters", "[1,1]"),
        ("counters", "{\"name\":\"a\"}"),
        ("counters", "no json"),
        ("counters", "[\"a\",null]"),
        ("workspaces", "[\"w\",\"no such project\",\"n\",\"{}\",null,1]"),
    ] {
        assert!(
            loader.insert(table, line.as_bytes()).await.is_err(),
            "{table} {line}"
        );
    }
    loader
        .insert("counters", b"[\"a\",1]\n[\"b\",2]\n")
        .await
        .unwrap();
}

/// A database of an older schema is migrated after its rows are in.
#[tokio::test]
async fn rows_of_an_older_schema_are_migrated() {
    let dir = tempfile::tempdir().unwrap();
    let path: PathBuf = dir.path().join("new.db");
    let mut loader = StoreLoader::create(&StoreLocation::File(path.clone()), 8)
        .await
        .unwrap();
    let (project, _) = common::project("old");
    let id = project.project_id.as_str();
    let workspace = project.default_workspace.as_str();
    let line =
        format!("[\"{id}\",\"old\",\"old\",\"\",null,\"{{}}\",null,\"{{}}\",\"{{}}\",\"{workspace}\",1,1]\n");
    loader.insert("projects", line.as_bytes()).await.unwrap();
    loader.publish().await.unwrap();
    let store = Store::open(&path).await.unwrap();
    let found = store.project_get(&project.project_id).await.unwrap().unwrap();
    assert_eq!(found.name, "old");
    assert_eq!(found.workspaces, oubliette_protocol::WorkspacePolicy::Shared);
    store.close().await;
}
