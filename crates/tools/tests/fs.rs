//! `fs_read` and `fs_write` through the plane: what they do, and that no path leads out of what is allowed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod plane_support;

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use oubliette_protocol::{Error, ErrorCode, tool::CallResult};
use plane_support::PlaneFixture;
use serde_json::{Value, json};

const SECRET: &str = "the secret outside";

async fn reader(paths: &[&str]) -> PlaneFixture {
    let fixture = PlaneFixture::new();
    fixture.file("notes/a.txt", "hello");
    fs::write(fixture.dir.path().join("secret"), SECRET).unwrap();
    fixture.file("private/secret", SECRET);
    fixture
        .install_builtin(json!({"name":"fs_read","allowedPaths":paths}))
        .await;
    fixture
}

async fn writer(paths: &[&str]) -> PlaneFixture {
    let fixture = PlaneFixture::new();
    fs::write(fixture.dir.path().join("secret"), SECRET).unwrap();
    fixture.file("private/secret", SECRET);
    fixture
        .install_builtin(json!({"name":"fs_write","allowedPaths":paths}))
        .await;
    fixture
}

fn data(result: &CallResult) -> &Value {
    result.structured_content.as_ref().unwrap()
}

fn code(result: Result<CallResult, Error>) -> ErrorCode {
    let error = result.expect_err("it must be refused");
    assert!(
        !error.message.contains("the secret") && !error.message.contains("/tmp"),
        "{}",
        error.message
    );
    error.code
}

#[tokio::test]
async fn fs_read_tool_registered() {
    let fixture = reader(&["notes/"]).await;
    assert_eq!(
        fixture
            .call_builtin(json!({"path":"notes/a.txt"}))
            .await
            .unwrap()
            .joined_text(),
        "hello"
    );
    assert_eq!(
        fixture
            .call_builtin(json!({"path":"/workspace/notes/a.txt"}))
            .await
            .unwrap()
            .joined_text(),
        "hello"
    );
    assert_eq!(
        code(fixture.call_builtin(json!({"path":"private/secret"})).await),
        ErrorCode::NotAllowed
    );
    assert_eq!(
        code(fixture.call_builtin(json!({"path":"notes/none"})).await),
        ErrorCode::NotFound
    );
    assert_eq!(
        code(fixture.call_builtin(json!({"path":"notes"})).await),
        ErrorCode::InvalidArgument
    );
    assert_eq!(
        code(fixture.call_builtin(json!({"path":"notes/a.txt/b"})).await),
        ErrorCode::NotFound
    );
    assert_eq!(
        code(fixture.call_builtin(json!({"path":"notes/a.txt","what":1})).await),
        ErrorCode::InvalidArgument
    );
    let row = fixture.row("it");
    assert_eq!(
        (row.canonical.as_str(), row.available, row.allowed),
        ("@b/fs_read", true, true)
    );
    assert!(row.description.contains("notes/") && row.input_schema["required"] == json!(["path"]));
}

#[tokio::test]
async fn text_binary_and_ranges() {
    let fixture = reader(&["."]).await;
    fixture.file("t", "häßlich".as_bytes());
    fixture.file("b", [0xff, 0, 1, 2]);
    let range = |path: &str, offset: u64, limit: u64| json!({"path":path,"offset":offset,"limit":limit});

    let part = fixture.call_builtin(range("t", 0, 2)).await.unwrap();
    assert_eq!(
        (&data(&part)["content"], &data(&part)["next_offset"]),
        (&json!("h"), &json!(1)),
        "no half character"
    );
    let rest = fixture.call_builtin(range("t", 1, 100)).await.unwrap();
    assert_eq!(rest.joined_text(), "äßlich");
    assert_eq!(data(&rest)["truncated"], false);

    let binary = fixture.call_builtin(json!({"path":"b"})).await.unwrap();
    assert_eq!(data(&binary)["encoding"], "base64");
    assert_eq!(
        BASE64.decode(data(&binary)["content"].as_str().unwrap()).unwrap(),
        [0xff, 0, 1, 2]
    );
    assert_eq!(
        data(&fixture.call_builtin(range("b", 1, 2)).await.unwrap())["content"],
        json!("\u{0}\u{1}")
    );
    assert_eq!(
        data(&fixture.call_builtin(range("b", 100, 2)).await.unwrap())["length"],
        0
    );
    assert_eq!(
        data(&fixture.call_builtin(range("b", u64::MAX, 2)).await.unwrap())["length"],
        0
    );
    assert_eq!(
        code(fixture.call_builtin(json!({"path":"b","offset":-1})).await),
        ErrorCode::InvalidArgument
    );
}

#[tokio::test]
async fn a_huge_file_is_read_in_pieces() {
    let fixture = reader(&["."]).await;
    let huge = fs::File::create(fixture.workspace().join("huge")).unwrap();
    huge.set_len(1 << 40).unwrap();
    let all = fixture
        .call_builtin(json!({"path":"huge","limit":u64::MAX}))
        .await
        .unwrap();
    assert_eq!(data(&all)["length"], 1 << 20);
    assert_eq!(data(&all)["truncated"], true);
    let end = fixture
        .call_builtin(json!({"path":"huge","offset":(1u64 << 40) - 3}))
        .await
        .unwrap();
    assert_eq!(
        (&data(&end)["length"], &data(&end)["truncated"]),
        (&json!(3), &json!(false))
    );
}

#[tokio::test]
async fn no_path_leads_out() {
    let fixture = reader(&["notes/"]).await;
    let (root, ws) = (fixture.dir.path().to_path_buf(), fixture.workspace());
    symlink("../private/secret", ws.join("notes/up")).unwrap();
    symlink(root.join("secret"), ws.join("notes/absolute")).unwrap();
    symlink("/workspace/private/secret", ws.join("notes/as-inside")).unwrap();
    symlink("../private", ws.join("notes/dir")).unwrap();
    symlink("/proc/self/root", ws.join("notes/proc")).unwrap();
    symlink("loop", ws.join("notes/loop")).unwrap();
    symlink("a.txt", ws.join("notes/fine")).unwrap();
    for path in [
        "../secret",
        "notes/../private/secret",
        "notes/../../secret",
        "/etc/passwd",
        "/workspace/../secret",
        "notes/up",
        "notes/absolute",
        "notes/as-inside",
        "notes/dir/secret",
        "notes/proc/etc/passwd",
        "notes/loop",
        "/proc/self/environ",
        "//etc/passwd",
        "notesx",
        "private/secret",
        ".",
        "/",
        "~/.ssh/id",
        "file:///etc/passwd",
    ] {
        let refused = code(fixture.call_builtin(json!({"path":path})).await);
        assert!(matches!(refused, ErrorCode::NotAllowed), "{path}: {refused}");
    }
    for path in ["", "notes/\0", &"a/".repeat(4_000)] {
        assert_eq!(
            code(fixture.call_builtin(json!({"path":path})).await),
            ErrorCode::InvalidArgument,
            "{path}"
        );
    }
    assert_eq!(
        code(
            fixture
                .call_builtin(json!({"path":format!("notes/{}", "n".repeat(300))}))
                .await
        ),
        ErrorCode::InvalidArgument
    );
    assert_eq!(
        fixture
            .call_builtin(json!({"path":"notes/fine"}))
            .await
            .unwrap()
            .joined_text(),
        "hello",
        "a link that stays inside"
    );
}

#[tokio::test]
async fn a_link_in_the_place_of_an_allowed_directory_opens_nothing() {
    let fixture = reader(&["notes/", "more/deep"]).await;
    fs::rename(fixture.workspace().join("notes"), fixture.workspace().join("old")).unwrap();
    symlink("private", fixture.workspace().join("notes")).unwrap();
    symlink(".", fixture.workspace().join("more")).unwrap();
    symlink("private", fixture.workspace().join("deep")).unwrap();
    assert_eq!(
        code(fixture.call_builtin(json!({"path":"notes/secret"})).await),
        ErrorCode::NotAllowed
    );
    assert_eq!(
        code(fixture.call_builtin(json!({"path":"more/deep/secret"})).await),
        ErrorCode::NotAllowed
    );
}

#[tokio::test]
async fn an_allowed_path_may_be_one_file() {
    let fixture = reader(&["README.md"]).await;
    fixture.file("README.md", "read me");
    assert_eq!(
        fixture
            .call_builtin(json!({"path":"README.md"}))
            .await
            .unwrap()
            .joined_text(),
        "read me"
    );
    fs::remove_file(fixture.workspace().join("README.md")).unwrap();
    symlink("private/secret", fixture.workspace().join("README.md")).unwrap();
    assert_eq!(
        code(fixture.call_builtin(json!({"path":"README.md"})).await),
        ErrorCode::NotAllowed
    );
}

#[tokio::test]
async fn hard_links_and_special_files_are_refused() {
    let fixture = reader(&["notes/"]).await;
    let notes = fixture.workspace().join("notes");
    fs::hard_link(fixture.dir.path().join("secret"), notes.join("hard")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        notes.join("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(notes.join("socket")).unwrap();
    for path in ["notes/hard", "notes/fifo", "notes/socket"] {
        assert_eq!(
            code(fixture.call_builtin(json!({"path":path})).await),
            ErrorCode::NotAllowed,
            "{path}"
        );
    }
    // Only root can make a device.
    let device = rustix::fs::mknodat(
        rustix::fs::CWD,
        notes.join("zero"),
        rustix::fs::FileType::CharacterDevice,
        rustix::fs::Mode::from_raw_mode(0o666),
        rustix::fs::makedev(1, 5),
    );
    if device.is_ok() {
        assert_eq!(
            code(fixture.call_builtin(json!({"path":"notes/zero"})).await),
            ErrorCode::NotAllowed
        );
    }
}

/// A thread that repeats an operation as fast as it can until it is dropped, to race with calls.
struct RaceThread(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl RaceThread {
    fn start(mut swap: impl FnMut() + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let thread = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                swap();
            }
        });
        Self(stop, Some(thread))
    }
}

impl Drop for RaceThread {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.take().unwrap().join().unwrap();
    }
}

#[tokio::test]
async fn races_with_symlinks_never_read_outside() {
    let fixture = reader(&["notes/"]).await;
    let (ws, outside) = (fixture.workspace(), fixture.dir.path().to_path_buf());
    fixture.file("notes/d/f", "inside");
    fs::create_dir(outside.join("d")).unwrap();
    fs::write(outside.join("d/f"), SECRET).unwrap();
    symlink(outside.join("d"), ws.join("notes/link")).unwrap();
    let d = ws.join("notes/d");
    let (link, spare) = (ws.join("notes/link"), ws.join("notes/spare"));
    let swapper = RaceThread::start(move || {
        // d is a directory, then a link out, then a directory again.
        let _ = fs::rename(&d, &spare);
        let _ = fs::rename(&link, &d);
        let _ = fs::rename(&d, &link);
        let _ = fs::rename(&spare, &d);
    });
    let mut seen = std::collections::HashMap::<String, usize>::new();
    let both = |seen: &std::collections::HashMap<String, usize>| {
        seen.contains_key("inside") && seen.contains_key("not_allowed")
    };
    let mut tries = 0;
    while tries < 1_000 || (tries < 100_000 && !both(&seen)) {
        tries += 1;
        let outcome = match fixture.call_builtin(json!({"path":"notes/d/f"})).await {
            Ok(result) => result.joined_text(),
            Err(error) => error.code.to_string(),
        };
        assert_ne!(outcome, SECRET);
        *seen.entry(outcome).or_default() += 1;
    }
    drop(swapper);
    assert!(both(&seen), "both were met: {seen:?}");
}

#[tokio::test]
async fn races_with_hard_links_never_read_outside() {
    let fixture = reader(&["notes/"]).await;
    let (from, to) = (
        fixture.dir.path().join("secret"),
        fixture.workspace().join("notes/f"),
    );
    let swapper = RaceThread::start(move || {
        let _ = fs::hard_link(&from, &to);
        let _ = fs::remove_file(&to);
    });
    for _ in 0..1_000 {
        let result = fixture.call_builtin(json!({"path":"notes/f"})).await;
        assert!(result.is_err(), "{result:?}");
    }
    drop(swapper);
}

#[tokio::test]
async fn fs_write_tool_registered() {
    let fixture = writer(&["out/"]).await;
    let file = fixture.workspace().join("out/deep/er/f.txt");
    let made = fixture
        .call_builtin(json!({"path":"out/deep/er/f.txt","content":"one"}))
        .await
        .unwrap();
    assert_eq!(data(&made)["created"], true);
    assert_eq!(fs::read(&file).unwrap(), b"one");

    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    let again = fixture
        .call_builtin(json!({"path":"/workspace/out/deep/er/f.txt","content":"two"}))
        .await
        .unwrap();
    assert_eq!(data(&again)["created"], false);
    assert_eq!(fs::read(&file).unwrap(), b"two");
    assert_eq!(
        fs::metadata(&file).unwrap().permissions().mode() & 0o777,
        0o755,
        "it stays executable"
    );

    fixture
        .call_builtin(json!({"path":"out/deep/er/f.txt","content":"!","mode":"append"}))
        .await
        .unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"two!");
    fixture
        .call_builtin(json!({"path":"out/new","content":"x","mode":"append"}))
        .await
        .unwrap();
    assert_eq!(fs::read(fixture.workspace().join("out/new")).unwrap(), b"x");

    assert_eq!(
        code(
            fixture
                .call_builtin(json!({"path":"out/new","content":"y","mode":"create"}))
                .await
        ),
        ErrorCode::Conflict
    );
    assert_eq!(fs::read(fixture.workspace().join("out/new")).unwrap(), b"x");
    fixture
        .call_builtin(json!({"path":"out/newer","content":"/wA=","encoding":"base64","mode":"create"}))
        .await
        .unwrap();
    assert_eq!(
        fs::read(fixture.workspace().join("out/newer")).unwrap(),
        [0xff, 0]
    );

    for bad in [
        json!({"path":"out/x","content":"?","encoding":"base64"}),
        json!({"path":"out/x","content":"","encoding":"latin1"}),
        json!({"path":"out/x","content":"","mode":"chmod"}),
        json!({"path":"out","content":""}),
        json!({"path":"/workspace","content":""}),
        json!({"path":"out/x"}),
    ] {
        let refused = code(fixture.call_builtin(bad.clone()).await);
        assert!(matches!(refused, ErrorCode::InvalidArgument), "{bad}: {refused}");
    }
    let huge = "x".repeat(8 * 1024 * 1024 + 1);
    assert_eq!(
        code(fixture.call_builtin(json!({"path":"out/x","content":huge})).await),
        ErrorCode::LimitExceeded
    );
    let left: Vec<_> = fs::read_dir(fixture.workspace().join("out"))
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 3, "nothing half-written is left: {left:?}");
}

#[tokio::test]
async fn writes_outside_allowed_directories_are_prevented() {
    let fixture = writer(&["out/"]).await;
    let (ws, secret) = (fixture.workspace(), fixture.dir.path().join("secret"));
    fs::create_dir(ws.join("out")).unwrap();
    symlink("../private", ws.join("out/dir")).unwrap();
    symlink("../private/secret", ws.join("out/link")).unwrap();
    symlink(&secret, ws.join("out/absolute")).unwrap();
    symlink(fixture.dir.path().join("fresh"), ws.join("out/dangling")).unwrap();
    fs::hard_link(&secret, ws.join("out/hard")).unwrap();
    for mode in ["replace", "append", "create"] {
        for path in [
            "out/dir/secret",
            "out/dir/new",
            "out/link",
            "out/absolute",
            "out/dangling",
            "out/hard",
            "private/secret",
            "../secret",
            "out/../private/secret",
            "/etc/oubliette-test",
            "outx/f",
            "out/dangling/f",
            "out/link/f",
        ] {
            let refused = code(
                fixture
                    .call_builtin(json!({"path":path,"content":"owned","mode":mode}))
                    .await,
            );
            let there = matches!(refused, ErrorCode::NotFound | ErrorCode::Conflict);
            assert!(
                there || refused == ErrorCode::NotAllowed,
                "{path} {mode}: {refused}"
            );
        }
    }
    assert_eq!(fs::read_to_string(&secret).unwrap(), SECRET);
    assert_eq!(fs::read_to_string(ws.join("private/secret")).unwrap(), SECRET);
    assert_eq!(fs::read_dir(ws.join("private")).unwrap().count(), 1);
    assert!(!fixture.dir.path().join("fresh").exists() && !ws.join("outx").exists());
}

#[tokio::test]
async fn races_with_symlinks_never_write_outside() {
    let fixture = writer(&["out/"]).await;
    let (ws, outside) = (fixture.workspace(), fixture.dir.path().join("d"));
    fs::create_dir_all(ws.join("out/d")).unwrap();
    fs::create_dir(&outside).unwrap();
    symlink(&outside, ws.join("out/link")).unwrap();
    let (d, link, spare) = (ws.join("out/d"), ws.join("out/link"), ws.join("out/spare"));
    let swapper = RaceThread::start(move || {
        let _ = fs::rename(&d, &spare);
        let _ = fs::rename(&link, &d);
        let _ = fs::rename(&d, &link);
        let _ = fs::rename(&spare, &d);
    });
    let (mut tries, mut done) = (0, 0);
    while tries < 500 || (tries < 100_000 && done == 0) {
        let n = tries;
        tries += 1;
        let mode = ["replace", "append", "create"][n % 3];
        done += usize::from(
            fixture
                .call_builtin(json!({"path":format!("out/d/{n}"),"content":"x","mode":mode}))
                .await
                .is_ok(),
        );
    }
    drop(swapper);
    assert!(done > 0);
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
}

#[tokio::test]
async fn a_reader_never_sees_half_a_file() {
    let fixture = writer(&["out/"]).await;
    let content = |n: usize| n.to_string().repeat(100_000);
    fixture
        .call_builtin(json!({"path":"out/f","content":content(0)}))
        .await
        .unwrap();
    let file = fixture.workspace().join("out/f");
    let seen = Arc::new(AtomicBool::new(true));
    let whole = seen.clone();
    let reader = RaceThread::start(move || {
        let text = fs::read_to_string(&file).unwrap();
        let same = text.len() == 100_000 && text.bytes().all(|b| b == text.as_bytes()[0]);
        whole.fetch_and(same, Ordering::Relaxed);
    });
    for n in 0..200 {
        fixture
            .call_builtin(json!({"path":"out/f","content":content(n % 10)}))
            .await
            .unwrap();
    }
    drop(reader);
    assert!(seen.load(Ordering::Relaxed));
}

#[tokio::test]
async fn fs_write_does_not_fill_a_workspace_past_its_limit() {
    let fixture = writer(&["."]).await;
    let large = "x".repeat(7 << 20);
    let write = |name: String| fixture.call_builtin(json!({"path": name, "content": large}));
    for n in 0..4 {
        write(format!("f{n}")).await.unwrap();
    }
    assert_eq!(code(write("f4".into()).await), ErrorCode::LimitExceeded);
    assert!(!fixture.workspace().join("f4").exists());
    fixture
        .call_builtin(json!({"path": "small", "content": "fits"}))
        .await
        .unwrap();
    fs::remove_file(fixture.workspace().join("f0")).unwrap();
    write("f4".into()).await.unwrap();
}
