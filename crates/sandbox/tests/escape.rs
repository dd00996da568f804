//! Attempts to escape from a sandbox with namespaces, each refused.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::os::unix::net::UnixListener;

use common::{SandboxFixture, assert_results};
use oubliette_sandbox::{BindMount, IsolationLevel, SandboxNetwork, SocketMount};

#[tokio::test]
async fn cannot_read_the_hosts_home_or_another_workspace() {
    let fixture = SandboxFixture::new().await;
    std::fs::write(fixture.path("other/secret"), "x").unwrap();
    let secret = fixture.path("other/secret");
    let home = std::env::var("HOME").unwrap_or("/root".into());
    let run = fixture.path("run");
    let lines = fixture
        .lines([
            "list",
            &home,
            "/root",
            "/srv",
            "/var",
            run.to_str().unwrap(),
            fixture.dir.path().to_str().unwrap(),
        ])
        .await;
    assert_results(&lines, &["ENOENT", "EACCES"]);
    let lines = fixture
        .lines(["read", secret.to_str().unwrap(), "/etc/shadow", "/etc/gshadow"])
        .await;
    assert_results(&lines, &["ENOENT"]);
}

#[tokio::test]
async fn cannot_follow_links_or_dots_out_of_the_workspace() {
    let fixture = SandboxFixture::new().await;
    std::fs::write(fixture.path("other/secret"), "x").unwrap();
    let workspace = fixture.path("workspace");
    std::os::unix::fs::symlink(fixture.path("other/secret"), workspace.join("absolute")).unwrap();
    std::os::unix::fs::symlink("../other/secret", workspace.join("relative")).unwrap();
    std::os::unix::fs::symlink("/proc/1/root/etc/shadow", workspace.join("through-proc")).unwrap();
    let paths = [
        "read",
        "/workspace/absolute",
        "/workspace/relative",
        "/workspace/through-proc",
        "/workspace/../other/secret",
        "/workspace/../../../../../../etc/shadow",
        "/proc/self/root/../other/secret",
    ];
    assert_results(&fixture.lines(paths).await, &["ENOENT", "EACCES"]);
}

#[tokio::test]
async fn sees_no_process_of_the_host() {
    let fixture = SandboxFixture::new().await;
    let outcome = fixture
        .shell("ls /proc | grep -c '^[0-9]' ; cat /proc/1/comm")
        .await;
    let mut lines = outcome.out.lines();
    // The inner stage, the shell, ls and grep.
    assert!(lines.next().unwrap().parse::<u32>().unwrap() <= 4, "{outcome:?}");
    assert_eq!(lines.next(), Some("oubliette-clien"));
}

#[tokio::test]
async fn cannot_change_the_kernels_settings() {
    let fixture = SandboxFixture::new().await;
    let lines = fixture
        .lines([
            "open-to-write",
            "/proc/sys/kernel/core_pattern",
            "/proc/sys/kernel/hostname",
            "/proc/sys/vm/overcommit_memory",
            "/proc/sysrq-trigger",
        ])
        .await;
    assert_results(&lines, &["EROFS", "EACCES", "ENOENT"]);
}

#[tokio::test]
async fn cannot_write_to_system_directories() {
    let fixture = SandboxFixture::new().await;
    let lines = fixture
        .lines([
            "create",
            "/x",
            "/usr/x",
            "/etc/x",
            "/dev/x",
            "/home/x",
            "/opt/oubliette/x",
            "/usr/bin/sh",
        ])
        .await;
    assert_results(&lines, &["EROFS", "EACCES"]);
    let lines = fixture
        .lines([
            "create",
            "/workspace/x",
            "/home/agent/x",
            "/tmp/x",
            "/run/x",
            "/dev/shm/x",
        ])
        .await;
    assert_results(&lines, &["ok"]);
}

#[tokio::test]
async fn a_read_only_mount_cannot_be_written() {
    let fixture = SandboxFixture::new().await;
    std::fs::write(fixture.path("other/file"), "x").unwrap();
    let spec = |args: [&str; 2]| {
        let mut spec = fixture.spec(args);
        spec.mounts = vec![BindMount::read_only(fixture.path("other"), "/srv/given")];
        spec
    };
    assert_eq!(
        fixture.run(spec(["read", "/srv/given/file"])).await.out,
        "/srv/given/file: ok\n"
    );
    let refusal = fixture.run(spec(["create", "/srv/given/new"])).await.out;
    assert!(
        refusal.ends_with(": EROFS\n") || refusal.ends_with(": EACCES\n"),
        "{refusal}"
    );
}

#[tokio::test]
async fn cannot_mount() {
    let fixture = SandboxFixture::new().await;
    assert_results(&fixture.lines(["mounts"]).await, &["EPERM"]);
}

#[tokio::test]
async fn cannot_trace_or_read_other_processes() {
    let fixture = SandboxFixture::new().await;
    assert_results(&fixture.lines(["processes"]).await, &["EPERM", "EACCES"]);
}

#[tokio::test]
async fn cannot_make_namespaces() {
    let fixture = SandboxFixture::new().await;
    assert_results(&fixture.lines(["namespaces"]).await, &["EPERM", "ENOSYS"]);
}

#[tokio::test]
async fn cannot_make_raw_sockets() {
    let fixture = SandboxFixture::new().await;
    let lines = fixture.lines(["sockets"]).await;
    assert_results(&lines[..4], &["ok"]);
    assert_results(&lines[4..], &["EPERM"]);
}

#[tokio::test]
async fn cannot_send_out_of_band_data() {
    let fixture = SandboxFixture::new().await;
    let lines = fixture.lines(["out-of-band"]).await;
    assert_results(&lines[..3], &["EBADF"]);
    assert_results(&lines[3..], &["EPERM"]);
}

#[tokio::test]
async fn cannot_reach_into_the_kernel() {
    let fixture = SandboxFixture::new().await;
    let lines = fixture.lines(["kernel"]).await;
    let (asking, trying): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.starts_with("ask "));
    assert_results(&asking, &["ok"]);
    assert_results(&trying, &["EPERM", "ENOSYS"]);
}

#[tokio::test]
async fn cannot_connect_to_the_hosts_loopback() {
    let fixture = SandboxFixture::new().await;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    assert_results(&fixture.lines(["connect", &address]).await, &["ECONNREFUSED"]);
    assert_results(
        &fixture.lines(["connect", "192.0.2.1:80"]).await,
        &["ENETUNREACH"],
    );
}

#[tokio::test]
async fn cannot_connect_to_abstract_sockets_of_the_host() {
    use std::os::linux::net::SocketAddrExt;
    let fixture = SandboxFixture::new().await;
    let name = format!("oubliette-test-{}", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let _listener = UnixListener::bind_addr(&address).unwrap();
    assert_results(
        &fixture.lines(["connect-abstract", &name]).await,
        &["ECONNREFUSED"],
    );
    // With the host's network they are in the same namespace; Landlock refuses the connection.
    let mut spec = fixture.spec(["connect-abstract", &name]);
    spec.network = SandboxNetwork::Host;
    let checks = fixture.report().await.checks;
    let landlock = checks.iter().find(|check| check.name == "landlock").unwrap();
    if landlock.detail.as_str() >= "version 6" {
        assert_eq!(fixture.run(spec).await.out, format!("{name}: EPERM\n"));
    }
}

#[tokio::test]
async fn cannot_signal_processes_of_the_host() {
    let fixture = SandboxFixture::new().await;
    let mut victim = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let line = fixture
        .lines([
            "signal",
            &victim.id().to_string(),
            &std::process::id().to_string(),
        ])
        .await;
    victim.kill().unwrap();
    victim.wait().unwrap();
    assert_results(&line, &["ESRCH"]);
}

#[tokio::test]
async fn reaches_its_own_socket_and_no_other_sessions() {
    let fixture = SandboxFixture::new().await;
    let (own, other) = (fixture.path("own.sock"), fixture.path("other/other.sock"));
    let _listeners = [
        UnixListener::bind(&own).unwrap(),
        UnixListener::bind(&other).unwrap(),
    ];
    let mut spec = fixture.spec([
        "connect-unix",
        "/mcp/relay.sock",
        other.to_str().unwrap(),
        "/mcp/other.sock",
    ]);
    spec.sockets = vec![SocketMount::new(&own, "/mcp/relay.sock")];
    let out = fixture.run(spec).await.out;
    let lines: Vec<String> = out.lines().map(str::to_owned).collect();
    assert_results(&lines[..1], &["ok"]);
    assert_results(&lines[1..], &["ENOENT"]);
}

#[tokio::test]
async fn there_is_no_docker_socket() {
    let fixture = SandboxFixture::new().await;
    let lines = fixture
        .lines(["connect-unix", "/var/run/docker.sock", "/run/docker.sock"])
        .await;
    assert_results(&lines, &["ENOENT"]);
}

#[tokio::test]
async fn is_not_root_and_has_no_capability() {
    let fixture = SandboxFixture::new().await;
    let script =
        "id -u; id -g; id -un; grep -E '^(Cap(Inh|Prm|Eff|Amb)|NoNewPrivs|Seccomp):' /proc/self/status";
    let out = fixture.shell(script).await.out;
    let expected = "1000\n1000\nagent\nCapInh:\t0000000000000000\nCapPrm:\t0000000000000000\n\
                    CapEff:\t0000000000000000\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n";
    assert_eq!(out, expected);
    assert_eq!(fixture.report().await.level, IsolationLevel::Namespaces);
}

#[tokio::test]
async fn inherits_no_file_descriptor_of_the_server() {
    let fixture = SandboxFixture::new().await;
    // 3 is the directory being listed.
    assert_eq!(fixture.shell("ls /proc/self/fd").await.out, "0\n1\n2\n3\n");
}

#[tokio::test]
async fn shared_memory_and_queues_are_not_the_hosts() {
    let fixture = SandboxFixture::new().await;
    // They may be made, in a namespace that ends with the sandbox: nothing of them is seen outside.
    let before = ipc_of_the_host();
    fixture.lines(["ipc"]).await;
    assert_eq!(ipc_of_the_host(), before);
}

fn ipc_of_the_host() -> [String; 3] {
    ["shm", "sem", "msg"]
        .map(|kind| std::fs::read_to_string(format!("/proc/sysvipc/{kind}")).unwrap_or_default())
}

#[tokio::test]
async fn cannot_change_limits_or_priorities_of_processes_of_the_host() {
    let fixture = SandboxFixture::new().await;
    let mut victim = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let lines = fixture.lines(["other-process", &victim.id().to_string()]).await;
    victim.kill().unwrap();
    victim.wait().unwrap();
    let (user, process): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.contains("of a user"));
    assert_results(&process, &["ESRCH"]);
    // Of the user's processes only those inside are found: whether they may be raised depends on what they have.
    assert_results(&user, &["ok", "EACCES", "ESRCH"]);
}
