//! Directories of definitions: read strictly, replaced whole, changed together.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::{
    fs,
    os::unix::{
        fs::{PermissionsExt, symlink},
        net::UnixListener,
    },
    path::Path,
    sync::Arc,
};

use oubliette_home::{DefinitionLibrary, HomeDir, LibraryDir};
use oubliette_protocol::{
    ErrorCode,
    library::{DefinitionFiles, DefinitionKey, DefinitionKind, LibraryChange, LibraryFile},
};

const AGENT: &str = r#"{"name":"A","prompt":"p"}"#;
const TOOL: &str = r#"{"id":"t","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":["."]}}"#;

fn write(root: &Path, path: &str, content: impl AsRef<[u8]>) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn agent_key(id: &str) -> DefinitionKey {
    DefinitionKey::parse(DefinitionKind::Agent, id).unwrap()
}

fn tool_key(id: &str) -> DefinitionKey {
    DefinitionKey::parse(DefinitionKind::Tool, id).unwrap()
}

fn definition(key: DefinitionKey, text: &str) -> DefinitionFiles {
    let file = LibraryFile {
        path: key.kind.main_file().into(),
        mode: 0o600,
        content: text.into(),
    };
    DefinitionFiles {
        key,
        files: vec![file],
    }
}

/// Reads everything; the first error.
fn read_all(dir: &Path) -> Result<Vec<DefinitionFiles>, String> {
    let dir = LibraryDir::at(dir);
    let keys = dir.keys().map_err(|error| error.message)?;
    keys.iter()
        .map(|key| dir.read(key).map_err(|error| error.message))
        .collect()
}

#[test]
fn what_was_read_is_written_with_every_byte_and_mode() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let root = from.path();
    write(root, "agents/a/agent.json", AGENT);
    write(root, "agents/a/home/.config/deep/bin", [0, 0xff, 7]);
    write(root, "agents/a/.swap", "left out");
    write(root, "agents/.git/x", "left out");
    write(root, "tools/t/tool.json", TOOL);
    fs::set_permissions(
        root.join("agents/a/home/.config/deep/bin"),
        fs::Permissions::from_mode(0o751),
    )
    .unwrap();
    let read = read_all(root).unwrap();
    assert_eq!(read.len(), 2);
    let target = LibraryDir::at(to.path());
    for definition in &read {
        target.stage(definition).unwrap().publish().unwrap();
        // Once more, over what is there.
        target.stage(definition).unwrap().publish().unwrap();
    }
    assert_eq!(read_all(to.path()).unwrap(), read);
    let mode = fs::metadata(to.path().join("agents/a/home/.config/deep/bin"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o7777, 0o751);
    let names = fs::read_dir(to.path().join("agents")).unwrap().count();
    assert_eq!(names, 1, "nothing temporary is left");
}

#[test]
fn a_replaced_definition_has_no_file_of_the_one_before() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "agents/a/agent.json", AGENT);
    write(dir.path(), "agents/a/old", "x");
    let library = LibraryDir::at(dir.path());
    drop(library.stage(&definition(agent_key("a"), AGENT)).unwrap());
    assert!(dir.path().join("agents/a/old").exists(), "it was not published");
    library
        .stage(&definition(agent_key("a"), AGENT))
        .unwrap()
        .publish()
        .unwrap();
    assert!(!dir.path().join("agents/a/old").exists());
    library.remove(&agent_key("a")).unwrap();
    library.remove(&agent_key("a")).unwrap();
    assert_eq!(fs::read_dir(dir.path().join("agents")).unwrap().count(), 0);
}

#[test]
fn hostile_and_odd_trees_are_refused_with_the_path() {
    let refused = |lay: &dyn Fn(&Path), said: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "agents/a/agent.json", AGENT);
        lay(dir.path());
        let error = read_all(dir.path()).unwrap_err();
        assert!(said.iter().all(|part| error.contains(part)), "{error}");
    };
    refused(
        &|root| symlink("/etc/passwd", root.join("agents/a/script.json")).unwrap(),
        &["agents/a/script.json", "link"],
    );
    refused(
        &|root| {
            fs::create_dir(root.join("agents/a/home")).unwrap();
            symlink("/etc", root.join("agents/a/home/etc")).unwrap();
        },
        &["agents/a/home/etc", "link"],
    );
    refused(
        &|root| symlink("/etc", root.join("agents/b")).unwrap(),
        &["agents/b", "not a folder"],
    );
    refused(
        &|root| symlink("/etc", root.join("tools")).unwrap(),
        &["tools", "not a folder"],
    );
    refused(
        &|root| drop(UnixListener::bind(root.join("agents/a/s")).unwrap()),
        &["agents/a/s", "plain file"],
    );
    refused(
        &|root| write(root, "agents/Bad_Name/agent.json", AGENT),
        &["agents/Bad_Name", "a-z"],
    );
    refused(
        &|root| write(root, "agents/loose.json", AGENT),
        &["agents/loose.json"],
    );
    refused(
        &|root| write(root, "agents/a/sub/x", "x"),
        &["agents/a/sub", "home/"],
    );
    refused(
        &|root| write(root, "tools/t/x", "x"),
        &["tools/t/tool.json", "missing"],
    );
    refused(
        &|root| write(root, "agents/a/home/\u{1b}[2J", "x"),
        &["agents/a/home/", "control"],
    );
    refused(
        &|root| {
            write(root, "agents/a/home/big", "");
            let big = fs::OpenOptions::new()
                .write(true)
                .open(root.join("agents/a/home/big"))
                .unwrap();
            big.set_len(1 << 40).unwrap();
        },
        &["agents/a/home/big", "too large"],
    );
    refused(
        &|root| write(root, "agents/a/large.json", vec![b' '; (1 << 20) + 1]),
        &["agents/a/large.json", "1024 KiB"],
    );
    refused(
        &|root| (0..1001).for_each(|n| write(root, &format!("agents/a/home/{n}"), "")),
        &["agents/a", "1000"],
    );
    refused(
        &|root| write(root, &format!("agents/a/home/{}x", "d/".repeat(20)), ""),
        &["agents/a/home/d"],
    );
    let pipe = |root: &Path| {
        let (mode, kind) = (rustix::fs::Mode::RUSR, rustix::fs::FileType::Fifo);
        rustix::fs::mknodat(rustix::fs::CWD, root.join("agents/a/pipe"), kind, mode, 0).unwrap();
    };
    refused(&pipe, &["agents/a/pipe", "plain file"]);
}

#[test]
fn nothing_is_written_through_a_link() {
    let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::create_dir(dir.path().join("agents")).unwrap();
    symlink(outside.path(), dir.path().join("agents/a")).unwrap();
    let library = LibraryDir::at(dir.path());
    let error = library.stage(&definition(agent_key("a"), AGENT)).unwrap_err();
    assert_eq!(error.code, ErrorCode::Conflict);
    let mut hostile = definition(agent_key("b"), AGENT);
    hostile.files.push(LibraryFile {
        path: "home/../../../escaped".into(),
        mode: 0o600,
        content: vec![],
    });
    assert!(library.stage(&hostile).is_err());
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
}

fn open(dir: &tempfile::TempDir) -> (HomeDir, Arc<DefinitionLibrary>) {
    let home = HomeDir::at(dir.path()).unwrap();
    home.create().unwrap();
    let library = DefinitionLibrary::open_copy(&home).unwrap();
    (home, library)
}

fn using(tool: &str) -> String {
    format!(r#"{{"name":"A","prompt":"p","tools":{{"use":["{tool}"]}}}}"#)
}

#[test]
fn a_change_is_checked_against_what_the_library_will_be() {
    let dir = tempfile::tempdir().unwrap();
    let (_, library) = open(&dir);
    let put = |puts: Vec<DefinitionFiles>, deletes: Vec<DefinitionKey>| LibraryChange { puts, deletes };
    let agent = || definition(agent_key("a"), &using("t"));
    let tool = || definition(tool_key("t"), TOOL);
    let error = library.write_change(&put(vec![agent()], vec![])).unwrap_err();
    assert!(
        error.message.contains("agents/a/agent.json: tools.use[0]"),
        "{error}"
    );
    let broken = definition(tool_key("t"), r#"{"id":"t","kind":"builtin","oops":1}"#);
    let error = library
        .write_change(&put(vec![definition(agent_key("b"), AGENT), broken], vec![]))
        .unwrap_err();
    assert!(
        error.message.contains("tools/t/tool.json") && error.message.contains("oops"),
        "{error}"
    );
    assert!(library.keys().is_empty(), "nothing of a change that is refused");
    // The agent comes before the tool it uses.
    library.write_change(&put(vec![agent(), tool()], vec![])).unwrap();
    assert_eq!(library.agents().len() + library.catalog().len(), 2);
    let error = library
        .write_change(&put(vec![], vec![tool_key("t")]))
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::Conflict);
    // Together they can go, and the agent can stop using it with its deletion.
    let without = definition(agent_key("a"), AGENT);
    library
        .write_change(&put(vec![without], vec![tool_key("t")]))
        .unwrap();
    assert!(library.catalog().is_empty() && library.agents().len() == 1);
    let twice = put(vec![agent()], vec![agent_key("a")]);
    assert!(
        library
            .check_change(&twice)
            .unwrap_err()
            .message
            .contains("twice")
    );
    let absent = put(vec![], vec![agent_key("none")]);
    assert_eq!(
        library.check_change(&absent).unwrap_err().code,
        ErrorCode::NotFound
    );
}

#[test]
fn the_copy_of_a_database_is_not_the_files_of_the_home() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "agents/by-hand/agent.json", AGENT);
    write(dir.path(), "library/agents/old/agent.json", AGENT);
    write(dir.path(), "library/agents/.writing-1/it/agent.json", AGENT);
    let (home, library) = open(&dir);
    assert_eq!(library.keys(), [agent_key("old")]);
    library.dir().remove_all_but(&[agent_key("new")].into()).unwrap();
    let staged = library.dir().stage(&definition(agent_key("new"), AGENT)).unwrap();
    write(dir.path(), "library/agents/planted/agent.json", AGENT);
    library.replace(vec![staged], &[agent_key("old")]).unwrap();
    assert_eq!(
        library.keys(),
        [agent_key("new")],
        "what nobody replaced is not looked at"
    );
    assert_eq!(
        library.agent(&"new".parse().unwrap()).unwrap().dir,
        home.library_copy().root().join("agents/new")
    );
    assert!(home.agents_dir().join("by-hand").exists());
}
