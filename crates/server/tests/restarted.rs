//! A server that a server of a cluster has started anew in its own process, which `OUBLIETTE_RESTARTED` tells it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cli_support;

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use cli_support::{CliHome, PROGRAM, RunningCommand};
use rustix::process::{Pid, Signal, kill_process};

/// How long something may take that a process does.
const DEADLINE: Duration = Duration::from_secs(30);

fn send_signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), signal).unwrap();
}

/// The state of a process and its parent's id, of one that exists.
fn state_and_parent(pid: u32) -> Option<(String, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split_whitespace();
    Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
}

fn children_of(parent: u32) -> Vec<u32> {
    let pids = fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| state_and_parent(*pid).is_some_and(|(_, of)| of == parent))
        .collect()
}

#[track_caller]
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + DEADLINE;
    while !is_so() {
        assert!(Instant::now() < give_up, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_restarted_server_that_waits_for_its_database_stops_when_it_is_told_to() {
    let home = CliHome::new();
    fs::create_dir_all(home.path()).unwrap();
    fs::write(
        home.path().join("oubliette.toml"),
        "[cluster]\nadvertise = \"http://127.0.0.1:1\"\nkey_env = \"TEST_CLUSTER_KEY\"\n",
    )
    .unwrap();
    for signal in [Signal::TERM, Signal::INT] {
        let mut command = home.command(&["serve", "--listen", "127.0.0.1:0"]);
        command
            .env("OUBLIETTE_RESTARTED", "1")
            .env("OUBLIETTE_STORE_URL", "postgres://nobody@127.0.0.1:1/none")
            .env("TEST_CLUSTER_KEY", "a-key-of-the-tests-that-no-log-has");
        let mut server = RunningCommand::spawn(command);
        server.wait_for_stderr("starting anew failed; trying again");
        send_signal(server.pid(), signal);
        let mut code = None;
        wait_until("its end", || {
            code = server.exit_code();
            code.is_some()
        });
        assert_eq!(code, Some(0));
    }
}

#[test]
fn a_restarted_server_leaves_no_zombie_of_the_program_before() {
    let home = CliHome::new();
    let mut command = Command::new("sh");
    // The shell becomes the server, which has its children then.
    command
        .args([
            "-c",
            "true & sleep 1000 & echo $!; exec \"$@\"",
            "sh",
            PROGRAM,
            "--home",
        ])
        .arg(home.path())
        .args(["serve", "--listen", "127.0.0.1:0"])
        .env("OUBLIETTE_RESTARTED", "1");
    let mut server = RunningCommand::spawn(command);
    let said = server.wait_for_stdout("is serving");
    let sleeping: u32 = said.lines().next().unwrap().parse().unwrap();
    // One that runs is not this program's to end; one that has ended is waited for.
    wait_until("the first child to be waited for", || {
        children_of(server.pid()) == [sleeping]
    });
    send_signal(sleeping, Signal::KILL);
    wait_until("the second child to be waited for", || {
        state_and_parent(sleeping).is_none_or(|(_, parent)| parent != server.pid())
    });
    send_signal(server.pid(), Signal::TERM);
    assert_eq!(server.finish().code, 0);
}
