//! What every test here needs: a driver on a directory of its own, and a way to run one thing in it.
#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used
)]

use std::path::{Path, PathBuf};

use oubliette_sandbox::{
    Exit, Level, Local, LocalConfig, Report, Running, Sandbox, SandboxError, Spec, spec,
};
use tokio::io::AsyncReadExt;

pub struct Rig {
    pub dir: tempfile::TempDir,
    pub local: Local,
}

#[derive(Debug)]
pub struct Outcome {
    pub exit: Exit,
    pub out: String,
    pub err: String,
}

/// The example `inside`, which `cargo test` builds beside the tests.
pub fn helper() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let helper = test.parent().unwrap().parent().unwrap().join("examples/inside");
    assert!(
        helper.exists(),
        "{} is missing: cargo build -p oubliette-sandbox --examples",
        helper.display()
    );
    helper
}

impl Rig {
    pub async fn new() -> Self {
        Self::with(Level::Namespaces, None).await
    }

    /// A host without bubblewrap, whose operator accepts Landlock alone.
    pub async fn landlock() -> Self {
        Self::with(Level::Landlock, Some("/nonexistent/bwrap".into())).await
    }

    pub async fn with(minimum: Level, bwrap: Option<PathBuf>) -> Self {
        Self::build(tempfile::tempdir().unwrap(), "run", minimum, bwrap).await
    }

    /// A driver whose run directory is this one.
    pub async fn on(dir: tempfile::TempDir) -> Self {
        Self::build(dir, "", Level::Namespaces, None).await
    }

    async fn build(dir: tempfile::TempDir, run: &str, minimum: Level, bwrap: Option<PathBuf>) -> Self {
        for name in ["run", "workspace", "home", "other"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let run_dir = if run.is_empty() {
            dir.path().into()
        } else {
            dir.path().join(run)
        };
        let config = LocalConfig {
            client: helper(),
            minimum,
            bwrap,
            run_dir,
        };
        Self {
            local: Local::new(config).await.unwrap(),
            dir,
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub async fn report(&self) -> Report {
        self.local.probe().await
    }

    /// The helper in a sandbox with a workspace and a home.
    pub fn spec<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Spec {
        self.command([spec::CLIENT].into_iter().chain(args))
    }

    /// Any program, likewise.
    pub fn command<'a>(&self, argv: impl IntoIterator<Item = &'a str>) -> Spec {
        let mut spec = Spec::new("test", argv);
        spec.workspace = Some(self.path("workspace"));
        spec.home = Some(self.path("home"));
        spec
    }

    pub async fn try_start(&self, spec: Spec) -> Result<Running, SandboxError> {
        self.local.spawn(spec).await
    }

    pub async fn start(&self, spec: Spec) -> Running {
        self.try_start(spec).await.expect("a sandbox")
    }

    /// Runs it to its end, with nothing on stdin.
    pub async fn run(&self, spec: Spec) -> Outcome {
        finish(self.start(spec).await).await
    }

    /// Runs the helper; its lines.
    pub async fn lines<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Vec<String> {
        let outcome = self.run(self.spec(args)).await;
        assert!(outcome.exit.success(), "{outcome:?}");
        outcome.out.lines().map(str::to_owned).collect()
    }

    /// Runs a shell script; what it printed.
    pub async fn shell(&self, script: &str) -> Outcome {
        self.run(self.command(["sh", "-c", script])).await
    }
}

pub async fn finish(running: Running) -> Outcome {
    let Running {
        stdin,
        mut stdout,
        mut stderr,
        handle,
        ..
    } = running;
    drop(stdin);
    let (mut out, mut err) = (String::new(), String::new());
    let (a, b) = tokio::join!(stdout.read_to_string(&mut out), stderr.read_to_string(&mut err));
    a.and(b).unwrap();
    Outcome {
        exit: handle.wait().await,
        out,
        err,
    }
}

/// Waits until it has said `word`.
pub async fn heard(running: &mut Running, word: &str) {
    let mut said = Vec::new();
    while !String::from_utf8_lossy(&said).contains(word) {
        let mut byte = [0];
        assert_eq!(
            running.stdout.read(&mut byte).await.unwrap(),
            1,
            "it ended, having said {said:?}"
        );
        said.push(byte[0]);
    }
}

/// Asserts that each attempt was refused, in one of these ways.
#[track_caller]
pub fn refused(lines: &[String], ways: &[&str]) {
    assert!(!lines.is_empty(), "nothing was tried");
    for line in lines {
        let way = line.rsplit_once(": ").map_or("", |(_, way)| way);
        assert!(
            ways.contains(&way),
            "{line}, but was to be refused with {ways:?}; all: {lines:#?}"
        );
    }
}

/// Living processes of the host that have `mark` among their arguments.
pub fn processes(mark: &str) -> Vec<i32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let words = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if words.split(|byte| *byte == 0).any(|word| word == mark.as_bytes()) {
            found.push(pid);
        }
    }
    found
}

/// Something no other process has among its arguments.
pub fn mark(dir: &Path) -> String {
    dir.file_name().unwrap().to_string_lossy().into_owned()
}
