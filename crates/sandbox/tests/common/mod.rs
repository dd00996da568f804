//! Shared by the tests: a local driver on a temporary directory, and ways to run a program in its sandboxes.
#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used
)]

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use oubliette_sandbox::{
    IsolationLevel, LocalDriver, LocalDriverConfig, RunningSandbox, SandboxDriver, SandboxError, SandboxExit,
    SandboxReport, SandboxSpec, spec,
};
use rustix::process::{Pid, PidfdFlags};
use tokio::io::AsyncReadExt;

pub struct SandboxFixture {
    pub dir: tempfile::TempDir,
    pub local: LocalDriver,
}

#[derive(Debug)]
pub struct RunOutcome {
    pub exit: SandboxExit,
    pub out: String,
    pub err: String,
}

/// The example program `inside`, which `cargo test` builds beside the tests.
pub fn inside_program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().unwrap().parent().unwrap().join("examples/inside");
    assert!(
        program.exists(),
        "{} is missing: cargo build -p oubliette-sandbox --examples",
        program.display()
    );
    program
}

impl SandboxFixture {
    pub async fn new() -> Self {
        Self::with(IsolationLevel::Namespaces, None).await
    }

    /// A host without bubblewrap, whose operator accepts Landlock alone.
    pub async fn landlock() -> Self {
        Self::with(IsolationLevel::Landlock, Some("/nonexistent/bwrap".into())).await
    }

    pub async fn with(minimum: IsolationLevel, bwrap: Option<PathBuf>) -> Self {
        Self::build(tempfile::tempdir().unwrap(), "run", minimum, bwrap).await
    }

    /// A driver that uses this directory as its run directory.
    pub async fn on(dir: tempfile::TempDir) -> Self {
        Self::build(dir, "", IsolationLevel::Namespaces, None).await
    }

    async fn build(
        dir: tempfile::TempDir,
        run: &str,
        minimum: IsolationLevel,
        bwrap: Option<PathBuf>,
    ) -> Self {
        for name in ["run", "workspace", "home", "other"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let run_dir = if run.is_empty() {
            dir.path().into()
        } else {
            dir.path().join(run)
        };
        let config = LocalDriverConfig {
            client: inside_program(),
            minimum,
            bwrap,
            run_dir,
        };
        Self {
            local: LocalDriver::new(config).await.unwrap(),
            dir,
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub async fn report(&self) -> SandboxReport {
        self.local.probe().await
    }

    /// A spec of the program `inside` with a workspace and a home.
    pub fn spec<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> SandboxSpec {
        self.command([spec::CLIENT].into_iter().chain(args))
    }

    /// A spec of any program with a workspace and a home.
    pub fn command<'a>(&self, argv: impl IntoIterator<Item = &'a str>) -> SandboxSpec {
        let mut spec = SandboxSpec::new("test", argv);
        spec.workspace = Some(self.path("workspace"));
        spec.home = Some(self.path("home"));
        spec
    }

    pub async fn try_start(&self, spec: SandboxSpec) -> Result<RunningSandbox, SandboxError> {
        self.local.spawn(spec).await
    }

    pub async fn start(&self, spec: SandboxSpec) -> RunningSandbox {
        self.try_start(spec).await.expect("a sandbox")
    }

    /// Runs a spec to its end, with nothing on stdin.
    pub async fn run(&self, spec: SandboxSpec) -> RunOutcome {
        finish(self.start(spec).await).await
    }

    /// Runs the program `inside` and returns the lines it printed.
    pub async fn lines<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Vec<String> {
        let outcome = self.run(self.spec(args)).await;
        assert!(outcome.exit.success(), "{outcome:?}");
        outcome.out.lines().map(str::to_owned).collect()
    }

    /// Runs a shell script to its end.
    pub async fn shell(&self, script: &str) -> RunOutcome {
        self.run(self.command(["sh", "-c", script])).await
    }
}

/// Closes stdin, and collects the output until the end.
pub async fn finish(running: RunningSandbox) -> RunOutcome {
    let RunningSandbox {
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
    RunOutcome {
        exit: handle.wait().await,
        out,
        err,
    }
}

/// Waits until the program has printed `word`.
pub async fn wait_for_output(running: &mut RunningSandbox, word: &str) {
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

/// Asserts that each line `name: result` ends in one of these results (`ok` or an errno's name).
#[track_caller]
pub fn assert_results(lines: &[String], expected: &[&str]) {
    assert!(!lines.is_empty(), "nothing was tried");
    for line in lines {
        let result = line.rsplit_once(": ").map_or("", |(_, result)| result);
        assert!(
            expected.contains(&result),
            "{line}, but expected {expected:?}; all: {lines:#?}"
        );
    }
}

/// Pids of the host's processes that have `mark` among their arguments.
pub fn processes_with(mark: &str) -> Vec<i32> {
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

/// A text that no other process has among its arguments.
pub fn unique_mark(dir: &Path) -> String {
    dir.file_name().unwrap().to_string_lossy().into_owned()
}

pub fn pidfd(pid: i32) -> Option<OwnedFd> {
    rustix::process::pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()
}

pub async fn wait_for_end(process: &OwnedFd) {
    let process = process.try_clone().unwrap();
    let waiting = tokio::task::spawn_blocking(move || {
        let mut fds = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
        let patience = rustix::event::Timespec {
            tv_sec: 20,
            tv_nsec: 0,
        };
        rustix::event::poll(&mut fds, Some(&patience)).unwrap()
    });
    assert_eq!(waiting.await.unwrap(), 1, "still there");
}
