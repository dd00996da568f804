//! No walls: only the tree is ended as a whole.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{finish, heard, helper, mark, processes};
use oubliette_sandbox::{Host, Level, Sandbox, SandboxError, Spec, spec};

fn spec_in(dir: &tempfile::TempDir, argv: &[&str]) -> Spec {
    let mut spec = Spec::new("tool", argv.iter().copied());
    spec.workspace = Some(dir.path().into());
    spec
}

#[tokio::test]
async fn runs_on_the_host_in_the_workspace() {
    let (host, dir) = (Host::new(helper()), tempfile::tempdir().unwrap());
    std::fs::write(dir.path().join("file"), "found").unwrap();
    let mut spec = spec_in(&dir, &["sh", "-c", "pwd; cat $FILE; exit 5"]);
    spec.env = vec![("FILE".into(), "/workspace/file".into())];
    let running = host.spawn(spec).await.unwrap();
    assert_eq!(running.handle.level(), Level::None);
    let outcome = finish(running).await;
    assert_eq!(outcome.out, format!("{}\nfound", dir.path().display()));
    assert_eq!(outcome.exit.code, Some(5));
}

#[tokio::test]
async fn gets_nothing_of_the_servers_environment_but_the_harmless() {
    let (host, dir) = (Host::new(helper()), tempfile::tempdir().unwrap());
    let outcome = finish(host.spawn(spec_in(&dir, &[spec::CLIENT, "env"])).await.unwrap()).await;
    let harmless = ["PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "SHELL", "TZ"];
    for line in outcome.out.lines() {
        let name = line.split_once('=').unwrap().0;
        assert!(harmless.contains(&name), "{name}");
    }
    assert!(outcome.out.contains("PATH="));
}

#[tokio::test]
async fn kill_and_end_take_daemons_with_them() {
    let (host, dir) = (Host::new(helper()), tempfile::tempdir().unwrap());
    let mark = mark(dir.path());
    let mut running = host
        .spawn(spec_in(&dir, &[spec::CLIENT, "daemon", "and-stay", &mark]))
        .await
        .unwrap();
    heard(&mut running, "left behind").await;
    running.handle.kill();
    running.handle.wait().await;
    assert_eq!(processes(&mark), Vec::<i32>::new());
    let outcome = finish(
        host.spawn(spec_in(&dir, &[spec::CLIENT, "daemon", &mark]))
            .await
            .unwrap(),
    )
    .await;
    assert_eq!(outcome.out, "left behind\n");
    assert_eq!(processes(&mark), Vec::<i32>::new());
}

#[tokio::test]
async fn a_program_that_is_not_there_is_named() {
    let (host, dir) = (Host::new(helper()), tempfile::tempdir().unwrap());
    let error = host.spawn(spec_in(&dir, &["no-such-program"])).await.unwrap_err();
    assert!(matches!(error, SandboxError::Program { .. }), "{error:?}");
}
