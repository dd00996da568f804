//! Nothing of a sandbox is left when the server is killed, whenever that happens.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use common::{SandboxFixture, inside_program, pidfd, processes_with, unique_mark, wait_for_end};
use rustix::process::{Pid, Signal};

#[tokio::test]
async fn nothing_is_left_when_the_server_is_killed() {
    dies_with_the_server("hold-namespaces").await;
}

#[tokio::test]
async fn nothing_is_left_when_the_server_is_killed_without_namespaces() {
    dies_with_the_server("hold-landlock").await;
}

#[tokio::test]
async fn nothing_is_left_of_a_host_tool_when_the_server_is_killed() {
    dies_with_the_server("hold-host").await;
}

async fn dies_with_the_server(how: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mark = unique_mark(dir.path());
    let mut server = std::process::Command::new(inside_program())
        .args([how, dir.path().to_str().unwrap(), &mark])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 8];
    server.stdout.take().unwrap().read_exact(&mut said).unwrap();
    let tree: Vec<OwnedFd> = processes_with(&mark)
        .into_iter()
        .filter(|pid| *pid != server.id() as i32)
        .filter_map(pidfd)
        .collect();
    // The program and its daemon.
    assert_eq!(tree.len(), 2);
    server.kill().unwrap();
    server.wait().unwrap();
    for process in &tree {
        wait_for_end(process).await;
    }
    assert_eq!(processes_with(&mark), Vec::<i32>::new());
    // The next server on the same directory clears away its cgroups.
    SandboxFixture::on(dir).await.report().await;
}

/// The server is killed after it has started bubblewrap and before bubblewrap has started anything. It is made to
/// wait in that moment by a script in its place.
#[tokio::test]
async fn nothing_is_left_when_the_server_is_killed_while_bubblewrap_starts() {
    let dir = tempfile::tempdir().unwrap();
    let mark = unique_mark(dir.path());
    let script = dir.path().join("bwrap");
    let stopped = dir.path().join("stopped");
    // The first start that is not `--version` is the driver's test of the host.
    std::fs::write(
        &script,
        format!(
            "#!/bin/sh\n\
             if [ \"$1\" != --version ]; then\n\
                 if [ -e {tried} ]; then echo $$ > {stopped}.new; mv {stopped}.new {stopped}; kill -STOP $$; fi\n\
                 : > {tried}\n\
             fi\n\
             TEST_MARK={mark} exec /usr/bin/bwrap \"$@\"\n",
            tried = dir.path().join("tried").display(),
            stopped = stopped.display(),
        ),
    )
    .unwrap();
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
    let mut server = std::process::Command::new(inside_program())
        .args(["hold-namespaces", dir.path().to_str().unwrap(), &mark])
        .arg(&script)
        .spawn()
        .unwrap();
    let bwrap = until(|| {
        let pid: i32 = std::fs::read_to_string(&stopped).ok()?.trim().parse().ok()?;
        is_stopped(pid).then_some(pid)
    })
    .await;
    server.kill().unwrap();
    server.wait().unwrap();
    rustix::process::kill_process(Pid::from_raw(bwrap).unwrap(), Signal::CONT).unwrap();
    let variable = format!("TEST_MARK={mark}");
    until(|| (!is_stopped(bwrap) && environments_with(&variable) == 0).then_some(())).await;
}

/// Waits until there is an answer.
async fn until<T>(mut answer: impl FnMut() -> Option<T>) -> T {
    let waiting = async {
        loop {
            if let Some(found) = answer() {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), waiting)
        .await
        .expect("processes are left")
}

fn is_stopped(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_some_and(|(_, rest)| rest.trim().starts_with('T'))
}

/// How many processes have this variable in their environment.
fn environments_with(variable: &str) -> usize {
    let has = |dir: &Path| {
        let environment = std::fs::read(dir.join("environ")).unwrap_or_default();
        environment
            .split(|byte| *byte == 0)
            .any(|entry| entry == variable.as_bytes())
    };
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.filter(|entry| has(&entry.path())).count()
}
