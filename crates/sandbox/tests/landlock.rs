//! Landlock and seccomp alone: a host that gives no namespaces, and an operator who accepts that.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Rig, heard, mark, processes, refused};
use oubliette_sandbox::{Level, Network, Sandbox, Socket};

#[tokio::test]
async fn says_its_level_and_shows_host_paths() {
    let rig = Rig::landlock().await;
    let report = rig.report().await;
    assert!(report.ok);
    assert_eq!(report.level, Level::Landlock);
    let running = rig.start(rig.spec(["cwd"])).await;
    assert_eq!(running.handle.level(), Level::Landlock);
    assert_eq!(running.paths.see("/workspace/a"), rig.path("workspace/a"));
    assert_eq!(
        rig.local.paths(&rig.spec([])).see("/home/agent"),
        rig.path("home")
    );
    assert_eq!(
        common::finish(running).await.out.trim(),
        rig.path("workspace").to_str().unwrap()
    );
}

#[tokio::test]
async fn inside_paths_in_arguments_and_environment_are_what_the_program_sees() {
    let rig = Rig::landlock().await;
    let mut spec = rig.command(["sh", "-c", "echo $1 $SOCKET $HOME", "sh", "/workspace/x"]);
    spec.sockets = vec![Socket::new(rig.path("own.sock"), "/mcp/relay.sock")];
    let _listener = std::os::unix::net::UnixListener::bind(rig.path("own.sock")).unwrap();
    spec.env = vec![("SOCKET".into(), "/mcp/relay.sock".into())];
    let expected = [rig.path("workspace/x"), rig.path("own.sock"), rig.path("home")];
    let expected = expected.map(|path| path.to_str().unwrap().to_owned()).join(" ");
    assert_eq!(rig.run(spec).await.out.trim(), expected);
}

#[tokio::test]
async fn cannot_read_the_hosts_home_or_another_workspace() {
    let rig = Rig::landlock().await;
    std::fs::write(rig.path("other/secret"), "x").unwrap();
    std::os::unix::fs::symlink(rig.path("other/secret"), rig.path("workspace/link")).unwrap();
    let (secret, link) = (rig.path("other/secret"), rig.path("workspace/link"));
    let dots = rig.path("workspace/../other/secret");
    let paths = [
        "read",
        secret.to_str().unwrap(),
        link.to_str().unwrap(),
        dots.to_str().unwrap(),
        "/etc/shadow",
    ];
    refused(&rig.lines(paths).await, &["EACCES"]);
    let home = std::env::var("HOME").unwrap_or("/root".into());
    refused(
        &rig.lines(["list", &home, "/", "/tmp", "/var", "/sys"]).await,
        &["EACCES", "ENOENT"],
    );
}

#[tokio::test]
async fn writes_its_own_places_and_no_other() {
    let rig = Rig::landlock().await;
    let outcome = rig
        .shell("echo a > file && echo b > ~/file && echo c > $TMPDIR/file && cat file ~/file $TMPDIR/file")
        .await;
    assert_eq!(outcome.out, "a\nb\nc\n", "{outcome:?}");
    let lines = rig
        .lines([
            "create",
            "/tmp/oubliette-x",
            "/var/tmp/x",
            "/dev/shm/x",
            "/usr/x",
            "/etc/x",
        ])
        .await;
    refused(&lines, &["EACCES"]);
    let lines = rig
        .lines([
            "open-to-write",
            "/proc/sys/kernel/core_pattern",
            "/proc/self/oom_score_adj",
        ])
        .await;
    refused(&lines, &["EACCES"]);
}

#[tokio::test]
async fn cannot_make_inet_sockets() {
    let rig = Rig::landlock().await;
    let lines = rig.lines(["sockets"]).await;
    refused(&lines[..1], &["ok"]);
    refused(&lines[1..], &["EPERM"]);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    refused(&rig.lines(["connect", &address]).await, &["EPERM"]);
    let mut spec = rig.spec(["connect", &address]);
    spec.network = Network::Host;
    assert_eq!(rig.run(spec).await.out, format!("{address}: ok\n"));
}

#[tokio::test]
async fn cannot_mount_trace_or_make_namespaces() {
    let rig = Rig::landlock().await;
    refused(&rig.lines(["mounts"]).await, &["EPERM"]);
    refused(&rig.lines(["namespaces"]).await, &["EPERM", "ENOSYS"]);
    refused(&rig.lines(["processes"]).await, &["EPERM", "EACCES"]);
}

#[tokio::test]
async fn cannot_signal_others_not_even_its_inner_stage() {
    let rig = Rig::landlock().await;
    let checks = rig.report().await.checks;
    if checks
        .iter()
        .any(|check| check.name == "landlock" && check.detail.as_str() < "version 6")
    {
        eprintln!("skipped: this kernel's Landlock knows no signals");
        return;
    }
    refused(
        &rig.lines(["signal", &std::process::id().to_string()]).await,
        &["EPERM"],
    );
    // Not its inner stage either, though that is its parent.
    let out = rig.shell("kill -9 $PPID 2>&1 || echo refused").await.out;
    assert!(out.ends_with("refused\n"), "{out}");
}

#[tokio::test]
async fn has_no_capability_even_when_root_runs_the_server() {
    let rig = Rig::landlock().await;
    let out = rig
        .shell("grep -E '^(Cap(Prm|Eff)|NoNewPrivs|Seccomp):' /proc/self/status")
        .await
        .out;
    let none = "CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n";
    assert_eq!(out, none);
}

#[tokio::test]
async fn kill_finds_a_daemon_too() {
    let rig = Rig::landlock().await;
    let mark = mark(rig.dir.path());
    let mut running = rig.start(rig.spec(["daemon", "and-stay", &mark])).await;
    heard(&mut running, "left behind").await;
    assert_eq!(processes(&mark).len(), 2);
    running.handle.kill();
    running.handle.wait().await;
    assert_eq!(processes(&mark), Vec::<i32>::new());
    let scratch = std::fs::read_dir(rig.path("run")).unwrap().flatten();
    let left: Vec<_> = scratch
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("sandbox-"))
        .map(|entry| entry.file_name())
        .collect();
    assert_eq!(left, ["sandbox-etc"], "the scratch directory is gone");
}
