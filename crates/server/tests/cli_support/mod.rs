//! Runs the real `oubliette` program in a temporary home, with or without a server.

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
pub use siblings::build_sibling_programs;

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_oubliette");

/// Output and exit code of a command that has ended.
#[derive(Debug)]
pub struct CommandOutput {
    pub stdout: String,
    pub stderr: String,
    pub code: i32,
}

impl CommandOutput {
    /// Asserts exit code 0.
    #[track_caller]
    pub fn expect_success(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    /// Parses stdout as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// Asserts exit code 1 and returns the code of the error object on stdout.
    #[track_caller]
    pub fn expect_error_code(&self) -> String {
        assert_eq!(self.code, 1, "{self:?}");
        self.json()["error"]["code"]
            .as_str()
            .unwrap_or_else(|| panic!("{self:?}"))
            .to_owned()
    }
}

/// A temporary home, with or without a running server.
pub struct CliHome {
    dir: tempfile::TempDir,
    server: Option<Child>,
    pub url: String,
}

impl CliHome {
    pub fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            server: None,
            url: String::new(),
        }
    }

    /// A home with the samples of a first run, and its server on a free port.
    pub fn with_server() -> Self {
        build_sibling_programs();
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

    pub fn run(&self, args: &[&str]) -> CommandOutput {
        self.run_with_stdin(args, "")
    }

    /// Runs a command to its end, with `input` on stdin.
    pub fn run_with_stdin(&self, args: &[&str], input: &str) -> CommandOutput {
        run_to_end(self.command(args), input)
    }

    /// Runs a command with `--json`, asserts exit code 0 and returns its JSON.
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Value {
        let mut all = args.to_vec();
        all.push("--json");
        self.run(&all).expect_success().json()
    }

    /// Adds an agent that follows a script.
    pub fn put_scripted_agent(&self, slug: &str, turns: Value) {
        let folder = self.scratch().join(slug);
        std::fs::create_dir_all(&folder).unwrap();
        let agent = json!({ "name": slug, "prompt": "Follow the script.", "model": "script:turns.json" });
        std::fs::write(folder.join("agent.json"), agent.to_string()).unwrap();
        std::fs::write(folder.join("turns.json"), json!({ "turns": turns }).to_string()).unwrap();
        self.run(&["agent", "put", folder.to_str().unwrap()])
            .expect_success();
    }

    /// Starts a command without waiting for its end.
    pub fn start(&self, args: &[&str]) -> RunningCommand {
        RunningCommand::spawn(self.command(args))
    }
}

impl Drop for CliHome {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            signal(&server, Signal::TERM);
            let _ = server.wait();
        }
    }
}

/// A command that is still running.
pub struct RunningCommand {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
    err: BufReader<std::process::ChildStderr>,
}

impl RunningCommand {
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let err = BufReader::new(child.stderr.take().unwrap());
        Self { child, out, err }
    }

    /// Reads stdout until `wanted` was printed; returns all that was read.
    #[track_caller]
    pub fn wait_for_stdout(&mut self, wanted: &str) -> String {
        read_until(&mut self.out, wanted)
    }

    /// Reads stderr until `wanted` was printed; returns all that was read.
    #[track_caller]
    pub fn wait_for_stderr(&mut self, wanted: &str) -> String {
        read_until(&mut self.err, wanted)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its exit code once it has ended; -1 if a signal ended it.
    pub fn exit_code(&mut self) -> Option<i32> {
        let status = self.child.try_wait().unwrap()?;
        Some(status.code().unwrap_or(-1))
    }

    pub fn interrupt(&self) {
        signal(&self.child, Signal::INT);
    }

    pub fn finish(mut self) -> CommandOutput {
        let (mut out, mut err) = (String::new(), String::new());
        self.out.read_to_string(&mut out).unwrap();
        self.err.read_to_string(&mut err).unwrap();
        let code = self.child.wait().unwrap().code().unwrap_or(-1);
        CommandOutput {
            stdout: out,
            stderr: err,
            code,
        }
    }
}

#[track_caller]
fn read_until(from: &mut impl std::io::BufRead, wanted: &str) -> String {
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

pub fn run_to_end(mut command: Command, input: &str) -> CommandOutput {
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
    CommandOutput {
        stdout: String::from_utf8(done.stdout).unwrap(),
        stderr: String::from_utf8(done.stderr).unwrap(),
        code: done.status.code().unwrap_or(-1),
    }
}
