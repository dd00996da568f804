//! Definitions in the database: changed whole and from a known version, heard by others, copied with everything else.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::time::Duration;

use common::{StoreFixture, postgres};
use oubliette_protocol::library::{
    DefinitionFiles, DefinitionKey, DefinitionKind, LibraryChange, LibraryFile,
};
use oubliette_store::{LibraryChangeOutcome, Store, StoreLocation, StoreOptions, transfer};

fn key(id: &str) -> DefinitionKey {
    DefinitionKey::parse(DefinitionKind::Agent, id).unwrap()
}

fn agent(id: &str, files: &[(&str, u32, &[u8])]) -> DefinitionFiles {
    let file = |(path, mode, content): &(&str, u32, &[u8])| LibraryFile {
        path: (*path).into(),
        mode: *mode,
        content: content.to_vec(),
    };
    DefinitionFiles {
        key: key(id),
        files: files.iter().map(file).collect(),
    }
}

fn put(definition: DefinitionFiles) -> LibraryChange {
    LibraryChange {
        puts: vec![definition],
        deletes: vec![],
    }
}

async fn files_of(store: &Store, id: &str) -> Option<DefinitionFiles> {
    store
        .definition_files(&key(id))
        .await
        .unwrap()
        .map(|(_, files)| files)
}

#[tokio::test]
async fn a_definition_is_replaced_whole_and_read_back_byte_by_byte() {
    let fixture = StoreFixture::new().await;
    let store = &fixture.store;
    assert_eq!(store.library_version().await.unwrap(), 0);
    let first = agent(
        "a",
        &[
            ("agent.json", 0o644, b"{}"),
            ("home/x", 0o755, &[0, 0xff, b'\n']),
            ("old", 0o600, b""),
        ],
    );
    let stored = store.library_change(0, put(first.clone())).await.unwrap();
    assert_eq!(stored, LibraryChangeOutcome::Stored(1));
    assert_eq!(files_of(store, "a").await.unwrap(), first);
    let second = agent("a", &[("agent.json", 0o600, b"[]")]);
    assert_eq!(
        store.library_change(1, put(second.clone())).await.unwrap(),
        LibraryChangeOutcome::Stored(2)
    );
    assert_eq!(files_of(store, "a").await.unwrap(), second);
    let listed = store.definition_list().await.unwrap();
    assert_eq!((listed.len(), listed[0].version), (1, 2));
    let change = LibraryChange {
        puts: vec![],
        deletes: vec![key("a")],
    };
    store.library_change(2, change).await.unwrap();
    assert!(files_of(store, "a").await.is_none());
    assert_eq!(store.library_version().await.unwrap(), 3);
    assert_eq!(fixture.count("SELECT COUNT(*) FROM definition_files").await, 0);
}

#[tokio::test]
async fn a_change_made_from_an_older_version_is_not_stored() {
    let fixture = StoreFixture::new().await;
    let store = &fixture.store;
    let one = agent("a", &[("agent.json", 0o600, b"1"), ("one", 0o600, b"")]);
    let other = agent("a", &[("agent.json", 0o600, b"2"), ("other", 0o600, b"")]);
    // Both were made from the empty library; whichever comes second is refused as a whole.
    let (one_done, other_done) = tokio::join!(
        store.library_change(0, put(one.clone())),
        store.library_change(0, put(other.clone()))
    );
    let outcomes = [one_done.unwrap(), other_done.unwrap()];
    assert!(
        outcomes.contains(&LibraryChangeOutcome::Stale)
            && outcomes.contains(&LibraryChangeOutcome::Stored(1))
    );
    let now = files_of(store, "a").await.unwrap();
    assert!(now == one || now == other, "{now:?}");
    assert_eq!(
        store.library_version().await.unwrap(),
        1,
        "a refused change takes no number"
    );
}

#[tokio::test]
async fn what_leads_out_or_is_too_large_is_neither_stored_nor_read() {
    let fixture = StoreFixture::new().await;
    let store = &fixture.store;
    for files in [
        &[("agent.json", 0o600, &b"{}"[..]), ("../x", 0o600, b"")][..],
        &[("agent.json", 0o600, b"{}"), ("home/..", 0o600, b"")],
        &[("x", 0o600, b"")],
        &[("agent.json", 0o4755, b"{}")],
    ] {
        assert!(
            store.library_change(0, put(agent("a", files))).await.is_err(),
            "{files:?}"
        );
    }
    let good = agent("a", &[("agent.json", 0o600, b"{}")]);
    store.library_change(0, put(good)).await.unwrap();
    // As somebody else may write it into the database.
    let Some(schema) = &fixture.schema else { return };
    let mut db = postgres::connect(schema).await;
    postgres::run(&mut db, "UPDATE definition_files SET path = '../../agent.json'").await;
    let error = store.definition_files(&key("a")).await.unwrap_err();
    assert!(error.message.contains("../../agent.json"), "{error}");
    postgres::run(
        &mut db,
        "INSERT INTO definitions VALUES ('agent', '../x', 1, 0), ('other', 'x', 1, 0)",
    )
    .await;
    assert_eq!(store.definition_list().await.unwrap().len(), 1);
}

#[tokio::test]
async fn others_hear_of_a_change_with_its_commit() {
    let fixture = StoreFixture::new().await;
    let mut own = fixture.store.library_changes();
    let change = put(agent("a", &[("agent.json", 0o600, b"{}")]));
    let StoreLocation::Postgres(url) = fixture.location() else {
        fixture.store.library_change(0, change).await.unwrap();
        assert!(own.has_changed().unwrap());
        return;
    };
    let observer = Store::observe(&url).await.unwrap();
    let mut heard = observer.library_changes();
    // What it hears first is that it listens.
    tokio::time::timeout(Duration::from_secs(60), heard.changed())
        .await
        .unwrap()
        .unwrap();
    heard.mark_unchanged();
    fixture.store.library_change(0, change).await.unwrap();
    assert!(own.has_changed().unwrap());
    own.mark_unchanged();
    tokio::time::timeout(Duration::from_secs(60), heard.changed())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(observer.library_version().await.unwrap(), 1);
    assert!(files_of(&observer, "a").await.is_some());
    // A change that is refused is told to nobody.
    let stale = put(agent("b", &[("agent.json", 0o600, b"{}")]));
    assert_eq!(
        fixture.store.library_change(0, stale).await.unwrap(),
        LibraryChangeOutcome::Stale
    );
    let all = LibraryChange {
        puts: vec![],
        deletes: vec![key("a")],
    };
    fixture.store.library_change(1, all).await.unwrap();
    tokio::time::timeout(Duration::from_secs(60), heard.changed())
        .await
        .unwrap()
        .unwrap();
    assert!(files_of(&observer, "a").await.is_none());
    observer.close().await;
}

#[tokio::test]
async fn definitions_are_copied_and_can_be_cleared() {
    let fixture = StoreFixture::new().await;
    let definition = agent(
        "a",
        &[("agent.json", 0o640, b"{}"), ("home/b", 0o700, &[0xff; 1000])],
    );
    fixture
        .store
        .library_change(0, put(definition.clone()))
        .await
        .unwrap();
    fixture.store.close().await;
    let target = StoreLocation::File(fixture.dir.path().join("copy.db"));
    transfer::copy_store(&fixture.location(), &StoreOptions::default(), &target, |_, _| {})
        .await
        .unwrap();
    let copied = common::open(&target).await;
    assert_eq!(files_of(&copied, "a").await.unwrap(), definition);
    assert_eq!(copied.library_version().await.unwrap(), 1);
    copied.library_clear().await.unwrap();
    assert!(copied.definition_list().await.unwrap().is_empty());
    assert_eq!(copied.library_version().await.unwrap(), 0);
    copied.close().await;
}
