//! The host driver: no isolation, but the process tree is ended as a whole.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{finish, inside_program, processes_with, unique_mark, wait_for_output};
use oubliette_sandbox::{HostDriver, IsolationLevel, SandboxDriver, SandboxError, SandboxSpec, spec};

fn spec_in(dir: &tempfile::TempDir, argv: &[&str]) -> SandboxSpec {
    let mut spec = SandboxSpec::new("tool", argv.iter().copied());
    spec.workspace = Some(dir.path().into());
    spec
}

#[tokio::test]
async fn runs_on_the_host_in_the_workspace() {
    let (host, dir) = (HostDriver::new(inside_program()), tempfile::tempdir().unwrap());
    std::fs::write(dir.path().join("file"), "found").unwrap();
    let mut spec = spec_in(&dir, &["sh", "-c", "pwd; cat $FILE; exit 5"]);
    spec.env = vec![("FILE".into(), "/workspace/file".into())];
    let running = host.spawn(spec).await.unwrap();
    assert_eq!(running.handle.level(), IsolationLevel::None);
    let outcome = finish(running).await;
    assert_eq!(outcome.out, format!("{}\nfound", dir.path().display()));
    assert_eq!(outcome.exit.code, Some(5));
}

#[tokio::test]
async fn inherits_only_harmless_variables_of_the_servers_environment() {
    let (host, dir) = (HostDriver::new(inside_program()), tempfile::tempdir().unwrap());
    let outcome = finish(host.spawn(spec_in(&dir, &[spec::CLIENT, "env"])).await.unwrap()).await;
    let harmless = ["PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "SHELL", "TZ"];
    for line in outcome.out.lines() {
        let name = line.split_once('=').unwrap().0;
        assert!(harmless.contains(&name), "{name}");
    }
    assert!(outcome.out.contains("PATH="));
}

#[tokio::test]
async fn daemons_are_killed_with_the_program() {
    let (host, dir) = (HostDriver::new(inside_program()), tempfile::tempdir().unwrap());
    let mark = unique_mark(dir.path());
    let mut running = host
        .spawn(spec_in(&dir, &[spec::CLIENT, "daemon", "and-stay", &mark]))
        .await
        .unwrap();
    wait_for_output(&mut running, "left behind").await;
    running.handle.kill();
    running.handle.wait().await;
    assert_eq!(processes_with(&mark), Vec::<i32>::new());
    let outcome = finish(
        host.spawn(spec_in(&dir, &[spec::CLIENT, "daemon", &mark]))
            .await
            .unwrap(),
    )
    .await;
    assert_eq!(outcome.out, "left behind\n");
    assert_eq!(processes_with(&mark), Vec::<i32>::new());
}

#[tokio::test]
async fn a_missing_program_is_named_in_the_error() {
    let (host, dir) = (HostDriver::new(inside_program()), tempfile::tempdir().unwrap());
    let error = host.spawn(spec_in(&dir, &["no-such-program"])).await.unwrap_err();
    assert!(matches!(error, SandboxError::Program { .. }), "{error:?}");
}
