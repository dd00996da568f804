//! Landlock and seccomp alone, as on a host without namespaces whose operator accepts that.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{SandboxFixture, assert_results, processes_with, unique_mark, wait_for_output};
use oubliette_sandbox::{IsolationLevel, SandboxDriver, SandboxNetwork, SocketMount};

#[tokio::test]
async fn reports_its_level_and_host_paths() {
    let fixture = SandboxFixture::landlock().await;
    let report = fixture.report().await;
    assert!(report.ok);
    assert_eq!(report.level, IsolationLevel::Landlock);
    let running = fixture.start(fixture.spec(["cwd"])).await;
    assert_eq!(running.handle.level(), IsolationLevel::Landlock);
    assert_eq!(running.paths.resolve("/workspace/a"), fixture.path("workspace/a"));
    assert_eq!(
        fixture.local.paths(&fixture.spec([])).resolve("/home/agent"),
        fixture.path("home")
    );
    assert_eq!(
        common::finish(running).await.out.trim(),
        fixture.path("workspace").to_str().unwrap()
    );
}

#[tokio::test]
async fn inside_paths_in_arguments_and_environment_are_rewritten() {
    let fixture = SandboxFixture::landlock().await;
    let mut spec = fixture.command(["sh", "-c", "echo $1 $SOCKET $HOME", "sh", "/workspace/x"]);
    spec.sockets = vec![SocketMount::new(fixture.path("own.sock"), "/mcp/relay.sock")];
    let _listener = std::os::unix::net::UnixListener::bind(fixture.path("own.sock")).unwrap();
    spec.env = vec![("SOCKET".into(), "/mcp/relay.sock".into())];
    let expected = [
        fixture.path("workspace/x"),
        fixture.path("own.sock"),
        fixture.path("home"),
    ];
    let expected = expected.map(|path| path.to_str().unwrap().to_owned()).join(" ");
    assert_eq!(fixture.run(spec).await.out.trim(), expected);
}

#[tokio::test]
async fn cannot_read_the_hosts_home_or_another_workspace() {
    let fixture = SandboxFixture::landlock().await;
    std::fs::write(fixture.path("other/secret"), "x").unwrap();
    std::os::unix::fs::symlink(fixture.path("other/secret"), fixture.path("workspace/link")).unwrap();
    let (secret, link) = (fixture.path("other/secret"), fixture.path("workspace/link"));
    let dots = fixture.path("workspace/../other/secret");
    let paths = [
        "read",
        secret.to_str().unwrap(),
        link.to_str().unwrap(),
        dots.to_str().unwrap(),
        "/etc/shadow",
    ];
    assert_results(&fixture.lines(paths).await, &["EACCES"]);
    let home = std::env::var("HOME").unwrap_or("/root".into());
    assert_results(
        &fixture.lines(["list", &home, "/", "/tmp", "/var", "/sys"]).await,
        &["EACCES", "ENOENT"],
    );
}

#[tokio::test]
async fn writes_only_to_its_own_directories() {
    let fixture = SandboxFixture::landlock().await;
    let outcome = fixture
        .shell("echo a > file && echo b > ~/file && echo c > $TMPDIR/file && cat file ~/file $TMPDIR/file")
        .await;
    assert_eq!(outcome.out, "a\nb\nc\n", "{outcome:?}");
    let lines = fixture
        .lines([
            "create",
            "/tmp/oubliette-x",
            "/var/tmp/x",
            "/dev/shm/x",
            "/usr/x",
            "/etc/x",
        ])
        .await;
    assert_results(&lines, &["EACCES"]);
    let lines = fixture
        .lines([
            "open-to-write",
            "/proc/sys/kernel/core_pattern",
            "/proc/self/oom_score_adj",
        ])
        .await;
    assert_results(&lines, &["EACCES"]);
}

#[tokio::test]
async fn cannot_make_inet_sockets() {
    let fixture = SandboxFixture::landlock().await;
    let lines = fixture.lines(["sockets"]).await;
    assert_results(&lines[..1], &["ok"]);
    assert_results(&lines[1..], &["EPERM"]);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    assert_results(&fixture.lines(["connect", &address]).await, &["EPERM"]);
    let mut spec = fixture.spec(["connect", &address]);
    spec.network = SandboxNetwork::Host;
    assert_eq!(fixture.run(spec).await.out, format!("{address}: ok\n"));
}

#[tokio::test]
async fn cannot_mount_trace_or_make_namespaces() {
    let fixture = SandboxFixture::landlock().await;
    assert_results(&fixture.lines(["mounts"]).await, &["EPERM"]);
    assert_results(&fixture.lines(["namespaces"]).await, &["EPERM", "ENOSYS"]);
    assert_results(&fixture.lines(["processes"]).await, &["EPERM", "EACCES"]);
}

#[tokio::test]
async fn cannot_reach_into_the_kernel() {
    let fixture = SandboxFixture::landlock().await;
    let lines = fixture.lines(["kernel"]).await;
    let (asking, trying): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.starts_with("ask "));
    assert_results(&asking, &["ok"]);
    assert_results(&trying, &["EPERM", "ENOSYS"]);
}

#[tokio::test]
async fn cannot_use_shared_memory_and_queues_of_the_host() {
    let fixture = SandboxFixture::landlock().await;
    assert_results(&fixture.lines(["ipc"]).await, &["EPERM"]);
}

#[tokio::test]
async fn cannot_change_limits_or_priorities_of_other_processes() {
    let fixture = SandboxFixture::landlock().await;
    let mut victim = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let lines = fixture.lines(["other-process", &victim.id().to_string()]).await;
    victim.kill().unwrap();
    victim.wait().unwrap();
    assert_results(&lines, &["EPERM"]);
    // Its own it may lower.
    let lowered = fixture
        .shell("ulimit -n 100 && nice -n 1 sh -c 'ulimit -n'")
        .await;
    assert_eq!((lowered.out.as_str(), lowered.err.as_str()), ("100\n", ""));
}

#[tokio::test]
async fn cannot_signal_other_processes_including_its_inner_stage() {
    let fixture = SandboxFixture::landlock().await;
    let checks = fixture.report().await.checks;
    if checks
        .iter()
        .any(|check| check.name == "landlock" && check.detail.as_str() < "version 6")
    {
        eprintln!("skipped: this kernel's Landlock does not restrict signals");
        return;
    }
    assert_results(
        &fixture.lines(["signal", &std::process::id().to_string()]).await,
        &["EPERM"],
    );
    // Its inner stage is its parent.
    let out = fixture.shell("kill -9 $PPID 2>&1 || echo refused").await.out;
    assert!(out.ends_with("refused\n"), "{out}");
}

#[tokio::test]
async fn has_no_capability_even_when_root_runs_the_server() {
    let fixture = SandboxFixture::landlock().await;
    let out = fixture
        .shell("grep -E '^(Cap(Prm|Eff)|NoNewPrivs|Seccomp):' /proc/self/status")
        .await
        .out;
    let none = "CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n";
    assert_eq!(out, none);
}

#[tokio::test]
async fn kill_reaches_a_daemon_too() {
    let fixture = SandboxFixture::landlock().await;
    let mark = unique_mark(fixture.dir.path());
    let mut running = fixture.start(fixture.spec(["daemon", "and-stay", &mark])).await;
    wait_for_output(&mut running, "left behind").await;
    assert_eq!(processes_with(&mark).len(), 2);
    running.handle.kill();
    running.handle.wait().await;
    assert_eq!(processes_with(&mark), Vec::<i32>::new());
    let scratch = std::fs::read_dir(fixture.path("run")).unwrap().flatten();
    let left: Vec<_> = scratch
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("sandbox-"))
        .map(|entry| entry.file_name())
        .collect();
    assert_eq!(left, ["sandbox-etc"], "the scratch directory is gone");
}
