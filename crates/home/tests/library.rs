//! Agents and catalog as files: parsed strictly, written atomically, watched, and still usable after an invalid edit.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use oubliette_home::{DefinitionLibrary, HomeDir};
use oubliette_protocol::{CatalogId, ErrorCode, Slug};
use proptest::prelude::*;
use serde_json::{Value, json};

struct LibraryFixture {
    dir: tempfile::TempDir,
    library: Arc<DefinitionLibrary>,
}

impl LibraryFixture {
    fn new() -> Self {
        Self::with(|_| ())
    }

    /// A library of a home to which `lay` adds files before it is opened.
    fn with(lay: impl FnOnce(&HomeDir)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = HomeDir::at(dir.path()).unwrap();
        home.create().unwrap();
        lay(&home);
        let library = DefinitionLibrary::open(&home).unwrap();
        Self { dir, library }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Waits until the library, following edits on disk, satisfies `done`.
    async fn until(&self, what: &str, done: impl Fn(&DefinitionLibrary) -> bool) {
        let mut changes = self.library.changes();
        let wait = async {
            while !done(&self.library) {
                changes.changed().await.unwrap();
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wait)
            .await
            .unwrap_or_else(|_| panic!("never: {what}"));
    }

    async fn put(&self, name: &str, definition: Value) -> oubliette_protocol::Result<()> {
        self.library
            .agent_put(slug(name), definition, BTreeMap::new())
            .await
            .map(|_| ())
    }
}

fn slug(text: &str) -> Slug {
    text.parse().unwrap()
}

fn id(text: &str) -> CatalogId {
    text.parse().unwrap()
}

fn agent(prompt: &str) -> Value {
    json!({ "name": "A", "prompt": prompt })
}

fn reader(id: &str) -> Value {
    json!({ "id": id, "kind": "builtin", "builtinPolicy": { "name": "fs_read", "allowedPaths": ["notes/"] } })
}

fn prompt(library: &DefinitionLibrary, name: &str) -> Option<String> {
    library
        .agent(&slug(name))
        .ok()
        .map(|entry| entry.definition.prompt.clone())
}

#[tokio::test]
async fn a_written_agent_is_on_disk_private_and_loaded_again() {
    let fixture = LibraryFixture::new();
    let files = [("script.json".to_string(), r#"{"turns":[]}"#.to_string())]
        .into_iter()
        .collect();
    let definition = json!({ "name": "A", "prompt": "p", "model": "script:script.json" });
    let entry = fixture
        .library
        .agent_put(slug("a"), definition, files)
        .await
        .unwrap();
    assert_eq!(fixture.library.script(&entry).unwrap(), r#"{"turns":[]}"#);
    assert_eq!(fixture.library.agents().keys().collect::<Vec<_>>(), [&slug("a")]);
    for file in ["agents/a/agent.json", "agents/a/script.json"] {
        let mode = fs::metadata(fixture.path(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{file}");
    }
    fs::remove_file(fixture.path("agents/a/script.json")).unwrap();
    let error = fixture.library.script(&entry).unwrap_err();
    assert!(error.message.contains("agents/a/script.json"), "{error}");
    let again = DefinitionLibrary::open(&HomeDir::at(fixture.dir.path()).unwrap()).unwrap();
    assert_eq!(again.agent(&slug("a")).unwrap().definition, entry.definition);
    fixture.library.agent_delete(slug("a")).await.unwrap();
    assert!(!fixture.path("agents/a").exists());
    assert_eq!(
        fs::read_dir(fixture.path("agents")).unwrap().count(),
        0,
        "nothing is left over"
    );
    let error = fixture.library.agent_delete(slug("a")).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::NotFound);
}

#[tokio::test]
async fn an_error_names_file_field_and_reason_and_nothing_is_written() {
    let fixture = LibraryFixture::new();
    fixture.put("a", agent("good")).await.unwrap();
    let before = fs::read_to_string(fixture.path("agents/a/agent.json")).unwrap();
    let used = |ids: Value| json!({ "name": "A", "prompt": "p", "tools": { "use": ids } });
    for (definition, says) in [
        (json!({ "name": "A" }), "prompt"),
        (json!({ "name": "A", "prompt": 5 }), "prompt"),
        (json!({ "name": "A", "prompt": "p", "extra": 1 }), "extra"),
        (
            used(json!(["missing"])),
            "tools.use[0]: missing is not in the catalog",
        ),
        (json!([]), "agents/a/agent.json"),
        (
            json!({ "name": "A", "prompt": "p", "description": "x".repeat(2 << 20) }),
            "larger than",
        ),
    ] {
        let error = fixture.put("a", definition).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        assert!(
            error.message.contains("agents/a/agent.json") && error.message.contains(says),
            "{error}"
        );
    }
    assert_eq!(
        fs::read_to_string(fixture.path("agents/a/agent.json")).unwrap(),
        before
    );
    assert_eq!(prompt(&fixture.library, "a").as_deref(), Some("good"));
    let other = fixture.library.tool_put(id("b"), reader("c")).await.unwrap_err();
    assert!(other.message.contains("tools/b/tool.json: id"), "{other}");
}

#[tokio::test]
async fn files_have_plain_names_and_bounded_sizes() {
    let fixture = LibraryFixture::new();
    let large = "x".repeat((1 << 20) + 1);
    for (name, text) in [
        ("../out", "x"),
        ("a/b", "x"),
        (".hidden", "x"),
        ("", "x"),
        ("a\0b", "x"),
        ("nul\u{ff0f}slash", "x"),
        ("agent.json", "{}"),
        ("big.json", &large),
    ] {
        let files = [(name.to_string(), text.to_string())].into_iter().collect();
        let error = fixture
            .library
            .agent_put(slug("a"), agent("p"), files)
            .await
            .unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument, "{name}");
    }
    let many = (0..100).map(|i| (format!("f{i}"), String::new())).collect();
    let error = fixture
        .library
        .agent_put(slug("a"), agent("p"), many)
        .await
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument);
    assert!(!fixture.path("agents/a").exists(), "nothing is half-written");
}

#[tokio::test]
async fn a_tool_in_use_cannot_be_deleted() {
    let fixture = LibraryFixture::new();
    fixture
        .library
        .tool_put(id("files"), reader("files"))
        .await
        .unwrap();
    let uses = json!({ "name": "A", "prompt": "p", "tools": { "use": ["files"] } });
    fixture.put("a", uses.clone()).await.unwrap();
    let error = fixture.library.tool_delete(id("files")).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Conflict);
    assert!(error.message.contains("used by a"), "{error}");
    fixture.put("a", agent("p")).await.unwrap();
    // Used by an agent written to disk a moment before the watcher can see it.
    fixture.write("agents/b/agent.json", &uses.to_string());
    assert_eq!(
        fixture.library.tool_delete(id("files")).await.unwrap_err().code,
        ErrorCode::Conflict
    );
    fixture.library.agent_delete(slug("b")).await.unwrap();
    fixture.library.tool_delete(id("files")).await.unwrap();
    assert!(fixture.library.catalog().is_empty());
    assert_eq!(
        fixture.library.tool_delete(id("files")).await.unwrap_err().code,
        ErrorCode::NotFound
    );
}

#[tokio::test]
async fn edits_on_disk_are_followed_and_an_invalid_one_keeps_the_last_valid_definition() {
    let fixture = LibraryFixture::new();
    fixture.write("agents/a/agent.json", &agent("one").to_string());
    fixture
        .until("a new folder is seen", |l| {
            prompt(l, "a").as_deref() == Some("one")
        })
        .await;
    fixture.write("agents/a/agent.json", &agent("two").to_string());
    fixture
        .until("an edit is seen", |l| prompt(l, "a").as_deref() == Some("two"))
        .await;
    let version = fixture.library.agent(&slug("a")).unwrap().version;

    fixture.write("agents/a/agent.json", r#"{"name":"A","prompt":"three","oops":1}"#);
    let error = |l: &DefinitionLibrary| l.agent(&slug("a")).ok().and_then(|entry| entry.error.clone());
    fixture
        .until("a broken edit is told", |l| {
            error(l).is_some_and(|why| why.contains("oops"))
        })
        .await;
    let entry = fixture.library.agent(&slug("a")).unwrap();
    assert_eq!(
        (entry.definition.prompt.as_str(), entry.version),
        ("two", version)
    );
    let why = entry.error.clone().unwrap();
    assert!(why.contains("agents/a/agent.json: oops: unknown field"), "{why}");

    fixture.write("agents/a/agent.json", &agent("four").to_string());
    fixture
        .until("a mended file is used", |l| {
            prompt(l, "a").as_deref() == Some("four")
        })
        .await;
    assert_eq!(error(&fixture.library), None);
    oubliette_os::remove_tree_blocking(&fixture.path("agents/a")).unwrap();
    fixture
        .until("a removed folder is gone", |l| l.agents().is_empty())
        .await;
}

#[tokio::test]
async fn a_file_replaced_by_renaming_is_seen() {
    let fixture = LibraryFixture::with(|home| {
        fs::create_dir(home.tools_dir().join("files")).unwrap();
        fs::write(
            home.tools_dir().join("files/tool.json"),
            reader("files").to_string(),
        )
        .unwrap();
    });
    let since = fixture.library.version();
    assert!(fixture.library.changed_tools(since).is_empty());
    let mut new = reader("files");
    new["description"] = "new".into();
    fixture.write("tools/files/.tool.json.swp", &new.to_string());
    fs::rename(
        fixture.path("tools/files/.tool.json.swp"),
        fixture.path("tools/files/tool.json"),
    )
    .unwrap();
    fixture
        .until("the new file", |l| !l.changed_tools(since).is_empty())
        .await;
    assert_eq!(fixture.library.changed_tools(since)[0].id, id("files"));
}

#[tokio::test]
async fn an_agent_becomes_usable_with_its_tool_and_has_an_error_without_it() {
    let uses = json!({ "name": "A", "prompt": "p", "tools": { "use": ["files"] } });
    let fixture = LibraryFixture::with(|home| {
        fs::create_dir(home.agents_dir().join("a")).unwrap();
        fs::write(home.agents_dir().join("a/agent.json"), uses.to_string()).unwrap();
    });
    let error = fixture.library.agent(&slug("a")).unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("files is not in the catalog"), "{error}");
    assert!(fixture.library.broken_agents().contains_key(&slug("a")));
    fixture.write("tools/files/tool.json", &reader("files").to_string());
    fixture
        .until("the agent can be used", |l| {
            l.agent(&slug("a")).is_ok_and(|e| e.error.is_none())
        })
        .await;
    oubliette_os::remove_tree_blocking(&fixture.path("tools/files")).unwrap();
    fixture
        .until("the agent minds", |l| {
            l.agent(&slug("a")).is_ok_and(|e| e.error.is_some())
        })
        .await;
    let definition = fixture.library.agent(&slug("a")).unwrap().definition.clone();
    assert_eq!(
        fixture.library.check_agent(&definition).unwrap_err().code,
        ErrorCode::InvalidArgument
    );
}

#[test]
fn invalid_files_at_startup_do_not_affect_valid_ones() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    fs::write(secret.path(), agent("secret").to_string()).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    fs::write(
        elsewhere.path().join("agent.json"),
        agent("elsewhere").to_string(),
    )
    .unwrap();
    let fixture = LibraryFixture::with(|home| {
        let lay = |name: &str, text: &[u8]| {
            fs::create_dir(home.agents_dir().join(name)).unwrap();
            fs::write(home.agents_dir().join(name).join("agent.json"), text).unwrap();
        };
        lay("good", agent("good").to_string().as_bytes());
        lay("empty", b"");
        lay("half", br#"{"name":"A","pro"#);
        lay("bytes", &[0xff, 0xfe, 0x00]);
        lay("giant", &vec![b' '; (1 << 20) + 1]);
        lay("Not_A_Slug", agent("x").to_string().as_bytes());
        lay("project", agent("reserved").to_string().as_bytes());
        fs::create_dir_all(home.agents_dir().join("folder/agent.json")).unwrap();
        fs::create_dir(home.agents_dir().join("nothing")).unwrap();
        fs::write(home.agents_dir().join("plain"), "a file where a folder should be").unwrap();
        fs::create_dir(home.agents_dir().join("link")).unwrap();
        symlink(secret.path(), home.agents_dir().join("link/agent.json")).unwrap();
        symlink(elsewhere.path(), home.agents_dir().join("linked")).unwrap();
        symlink("agent.json", home.agents_dir().join("loop")).unwrap();
    });
    let library = &fixture.library;
    assert_eq!(
        library.agents().keys().map(Slug::as_str).collect::<Vec<_>>(),
        ["good"]
    );
    let broken = library.broken_agents();
    for name in ["empty", "half", "bytes", "giant", "folder", "link", "linked"] {
        let why = broken
            .get(&slug(name))
            .unwrap_or_else(|| panic!("{name} is not told of: {broken:?}"));
        assert!(why.starts_with(&format!("agents/{name}/agent.json: ")), "{why}");
        assert!(
            !why.contains("secret") && !why.contains(&*secret.path().to_string_lossy()),
            "{why}"
        );
    }
    let missing = library.agent(&slug("missing")).unwrap_err();
    assert_eq!(missing.code, ErrorCode::NotFound);
    assert!(missing.message.contains("there are: good"), "{missing}");
}

#[tokio::test]
async fn nothing_is_written_through_a_symbolic_link() {
    let elsewhere = tempfile::tempdir().unwrap();
    let fixture = LibraryFixture::new();
    symlink(elsewhere.path(), fixture.path("agents/a")).unwrap();
    let error = fixture.put("a", agent("p")).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Conflict);
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn listing_a_thousand_agents_copies_nothing() {
    let fixture = LibraryFixture::with(|home| {
        for i in 0..1000 {
            let dir = home.agents_dir().join(format!("a{i}"));
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("agent.json"), agent(&format!("p{i}")).to_string()).unwrap();
        }
    });
    assert_eq!(fixture.library.agents().len(), 1000);
    assert!(
        Arc::ptr_eq(&fixture.library.agents(), &fixture.library.agents()),
        "listing copies nothing"
    );
    fixture.put("a7", agent("new")).await.unwrap();
    assert_eq!(prompt(&fixture.library, "a7").as_deref(), Some("new"));
}

#[tokio::test]
async fn concurrent_writes_and_edits_on_disk_end_in_what_is_on_disk() {
    let fixture = LibraryFixture::new();
    let mut puts = Vec::new();
    for i in 0..20 {
        let library = fixture.library.clone();
        puts.push(tokio::spawn(async move {
            library
                .agent_put(slug("a"), agent(&format!("p{i}")), BTreeMap::new())
                .await
                .unwrap();
        }));
    }
    fixture.write("agents/b/agent.json", &agent("hand").to_string());
    for put in puts {
        put.await.unwrap();
    }
    fixture.until("the hand edit", |l| prompt(l, "b").is_some()).await;
    let on_disk: Value =
        serde_json::from_str(&fs::read_to_string(fixture.path("agents/a/agent.json")).unwrap()).unwrap();
    assert_eq!(
        prompt(&fixture.library, "a").as_deref(),
        on_disk["prompt"].as_str()
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn no_file_content_causes_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let fixture = LibraryFixture::with(|home| {
            for (folder, file) in [("agents/x", "agent.json"), ("tools/x", "tool.json")] {
                fs::create_dir(home.root().join(folder)).unwrap();
                fs::write(home.root().join(folder).join(file), &bytes).unwrap();
            }
        });
        prop_assert!(fixture.library.agents().is_empty());
        prop_assert_eq!(fixture.library.broken_tools().len(), 1);
    }
}
