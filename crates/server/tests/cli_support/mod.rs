//! The real program, run as people and scripts run it.

#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used
)]

#[path = "../common/siblings.rs"]
mod siblings;

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
pub use siblings::siblings;

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_oubliette");

/// What a command said and how it ended.
#[derive(Debug)]
pub struct Said {
    pub out: String,
    pub err: String,
    pub code: i32,
}

impl Said {
    /// It went well.
    #[track_caller]
    pub fn good(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    /// Its JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The code of the error object on stdout; the exit code says that it failed.
    #[track_caller]
    pub fn refused(&self) -> String {
        assert_eq!(self.code, 1, "{self:?}");
        self.json()["error"]["code"]
            .as_str()
            .unwrap_or_else(|| panic!("{self:?}"))
            .to_owned()
    }
}

/// A home of its own, with or without a server.
pub struct Home {
    dir: tempfile::TempDir,
    server: Option<Child>,
    pub url: String,
}

impl Home {
    pub fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            server: None,
            url: String::new(),
        }
    }

    /// With a server on a free port and the samples of a first run.
    pub fn served() -> Self {
        siblings();
        let mut home = Self::new();
        let mut command = home.command(&["up", "--listen", "127.0.0.1:0", "--json"]);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut first)
            .unwrap();
        let up: Value = serde_json::from_str(&first).unwrap();
        home.url = up["url"].as_str().unwrap().trim_end_matches('/').to_owned();
        home.server = Some(child);
        home
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("home")
    }

    pub fn scratch(&self) -> &Path {
        self.dir.path()
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.arg("--home").arg(self.path()).args(args);
        command
            .env_remove("OUBLIETTE_HOME")
            .env_remove("NO_COLOR")
            .env("COLUMNS", "100");
        command
    }

    pub fn run(&self, args: &[&str]) -> Said {
        self.run_with(args, "")
    }

    /// With something on stdin.
    pub fn run_with(&self, args: &[&str], input: &str) -> Said {
        finish(self.command(args), input)
    }

    /// A command's JSON; it must go well.
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Value {
        let mut all = args.to_vec();
        all.push("--json");
        self.run(&all).good().json()
    }

    /// An agent that follows a script.
    pub fn script(&self, slug: &str, turns: Value) {
        let folder = self.scratch().join(slug);
        std::fs::create_dir_all(&folder).unwrap();
        let agent = json!({ "name": slug, "prompt": "Follow the script.", "model": "script:turns.json" });
        std::fs::write(folder.join("agent.json"), agent.to_string()).unwrap();
        std::fs::write(folder.join("turns.json"), json!({ "turns": turns }).to_string()).unwrap();
        self.run(&["agent", "put", folder.to_str().unwrap()]).good();
    }

    /// A command that goes on while the test does something.
    pub fn start(&self, args: &[&str]) -> Started {
        let mut command = self.command(args);
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Started::new(child)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            signal(&server, Signal::TERM);
            let _ = server.wait();
        }
    }
}

/// A command under way.
pub struct Started {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
    err: BufReader<std::process::ChildStderr>,
}

impl Started {
    fn new(mut child: Child) -> Self {
        let out = BufReader::new(child.stdout.take().unwrap());
        let err = BufReader::new(child.stderr.take().unwrap());
        Self { child, out, err }
    }

    /// Reads stdout until it has said this.
    #[track_caller]
    pub fn until_out(&mut self, wanted: &str) -> String {
        until(&mut self.out, wanted)
    }

    /// Reads stderr until it has said this.
    #[track_caller]
    pub fn until_err(&mut self, wanted: &str) -> String {
        until(&mut self.err, wanted)
    }

    pub fn interrupt(&self) {
        signal(&self.child, Signal::INT);
    }

    pub fn finish(mut self) -> Said {
        let (mut out, mut err) = (String::new(), String::new());
        self.out.read_to_string(&mut out).unwrap();
        self.err.read_to_string(&mut err).unwrap();
        let code = self.child.wait().unwrap().code().unwrap_or(-1);
        Said { out, err, code }
    }
}

#[track_caller]
fn until(from: &mut impl std::io::BufRead, wanted: &str) -> String {
    let mut said = Vec::new();
    while !String::from_utf8_lossy(&said).contains(wanted) {
        let mut byte = [0];
        assert_eq!(
            from.read(&mut byte).unwrap(),
            1,
            "ended before {wanted:?}: {}",
            String::from_utf8_lossy(&said)
        );
        said.push(byte[0]);
    }
    String::from_utf8_lossy(&said).into_owned()
}

fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    let _ = kill_process(pid, signal);
}

pub fn finish(mut command: Command, input: &str) -> Said {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    let writer = std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
    let done = child.wait_with_output().unwrap();
    writer.join().unwrap();
    Said {
        out: String::from_utf8(done.stdout).unwrap(),
        err: String::from_utf8(done.stderr).unwrap(),
        code: done.status.code().unwrap_or(-1),
    }
}
