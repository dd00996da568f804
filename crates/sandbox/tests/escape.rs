//! Attempts to get out of a namespaced sandbox, each refused.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::os::unix::net::UnixListener;

use common::{Rig, refused};
use oubliette_sandbox::{Level, Mount, Network, Socket};

#[tokio::test]
async fn cannot_read_the_hosts_home_or_another_workspace() {
    let rig = Rig::new().await;
    std::fs::write(rig.path("other/secret"), "x").unwrap();
    let secret = rig.path("other/secret");
    let home = std::env::var("HOME").unwrap_or("/root".into());
    let run = rig.path("run");
    let lines = rig
        .lines([
            "list",
            &home,
            "/root",
            "/srv",
            "/var",
            run.to_str().unwrap(),
            rig.dir.path().to_str().unwrap(),
        ])
        .await;
    refused(&lines, &["ENOENT", "EACCES"]);
    let lines = rig
        .lines(["read", secret.to_str().unwrap(), "/etc/shadow", "/etc/gshadow"])
        .await;
    refused(&lines, &["ENOENT"]);
}

#[tokio::test]
async fn cannot_follow_links_or_dots_out_of_the_workspace() {
    let rig = Rig::new().await;
    std::fs::write(rig.path("other/secret"), "x").unwrap();
    let workspace = rig.path("workspace");
    std::os::unix::fs::symlink(rig.path("other/secret"), workspace.join("absolute")).unwrap();
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
    refused(&rig.lines(paths).await, &["ENOENT", "EACCES"]);
}

#[tokio::test]
async fn sees_no_process_of_the_host() {
    let rig = Rig::new().await;
    let outcome = rig.shell("ls /proc | grep -c '^[0-9]' ; cat /proc/1/comm").await;
    let mut lines = outcome.out.lines();
    // The inner stage, the shell, ls and grep.
    assert!(lines.next().unwrap().parse::<u32>().unwrap() <= 4, "{outcome:?}");
    assert_eq!(lines.next(), Some("oubliette-clien"));
}

#[tokio::test]
async fn cannot_change_the_kernels_settings() {
    let rig = Rig::new().await;
    let lines = rig
        .lines([
            "open-to-write",
            "/proc/sys/kernel/core_pattern",
            "/proc/sys/kernel/hostname",
            "/proc/sys/vm/overcommit_memory",
            "/proc/sysrq-trigger",
        ])
        .await;
    refused(&lines, &["EROFS", "EACCES", "ENOENT"]);
}

#[tokio::test]
async fn cannot_write_where_the_system_is() {
    let rig = Rig::new().await;
    let lines = rig
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
    refused(&lines, &["EROFS", "EACCES"]);
    let lines = rig
        .lines([
            "create",
            "/workspace/x",
            "/home/agent/x",
            "/tmp/x",
            "/run/x",
            "/dev/shm/x",
        ])
        .await;
    refused(&lines, &["ok"]);
}

#[tokio::test]
async fn a_read_only_mount_cannot_be_written() {
    let rig = Rig::new().await;
    std::fs::write(rig.path("other/file"), "x").unwrap();
    let spec = |args: [&str; 2]| {
        let mut spec = rig.spec(args);
        spec.mounts = vec![Mount::read_only(rig.path("other"), "/srv/given")];
        spec
    };
    assert_eq!(
        rig.run(spec(["read", "/srv/given/file"])).await.out,
        "/srv/given/file: ok\n"
    );
    let refusal = rig.run(spec(["create", "/srv/given/new"])).await.out;
    assert!(
        refusal.ends_with(": EROFS\n") || refusal.ends_with(": EACCES\n"),
        "{refusal}"
    );
}

#[tokio::test]
async fn cannot_mount() {
    let rig = Rig::new().await;
    refused(&rig.lines(["mounts"]).await, &["EPERM"]);
}

#[tokio::test]
async fn cannot_trace_or_read_other_processes() {
    let rig = Rig::new().await;
    refused(&rig.lines(["processes"]).await, &["EPERM", "EACCES"]);
}

#[tokio::test]
async fn cannot_make_namespaces() {
    let rig = Rig::new().await;
    refused(&rig.lines(["namespaces"]).await, &["EPERM", "ENOSYS"]);
}

#[tokio::test]
async fn cannot_make_raw_sockets() {
    let rig = Rig::new().await;
    let lines = rig.lines(["sockets"]).await;
    refused(&lines[..4], &["ok"]);
    refused(&lines[4..], &["EPERM"]);
}

#[tokio::test]
async fn cannot_reach_into_the_kernel() {
    let rig = Rig::new().await;
    let lines = rig.lines(["kernel"]).await;
    let (asking, trying): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.starts_with("ask "));
    refused(&asking, &["ok"]);
    refused(&trying, &["EPERM", "ENOSYS"]);
}

#[tokio::test]
async fn cannot_connect_to_the_hosts_loopback() {
    let rig = Rig::new().await;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    refused(&rig.lines(["connect", &address]).await, &["ECONNREFUSED"]);
    refused(&rig.lines(["connect", "192.0.2.1:80"]).await, &["ENETUNREACH"]);
}

#[tokio::test]
async fn cannot_connect_to_abstract_sockets_of_the_host() {
    use std::os::linux::net::SocketAddrExt;
    let rig = Rig::new().await;
    let name = format!("oubliette-test-{}", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let _listener = UnixListener::bind_addr(&address).unwrap();
    refused(&rig.lines(["connect-abstract", &name]).await, &["ECONNREFUSED"]);
    // With the host's network they are in the same namespace, and Landlock keeps them apart.
    let mut spec = rig.spec(["connect-abstract", &name]);
    spec.network = Network::Host;
    let checks = rig.report().await.checks;
    let landlock = checks.iter().find(|check| check.name == "landlock").unwrap();
    if landlock.detail.as_str() >= "version 6" {
        assert_eq!(rig.run(spec).await.out, format!("{name}: EPERM\n"));
    }
}

#[tokio::test]
async fn cannot_signal_processes_of_the_host() {
    let rig = Rig::new().await;
    let mut victim = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let line = rig
        .lines([
            "signal",
            &victim.id().to_string(),
            &std::process::id().to_string(),
        ])
        .await;
    victim.kill().unwrap();
    victim.wait().unwrap();
    refused(&line, &["ESRCH"]);
}

#[tokio::test]
async fn reaches_its_own_socket_and_no_other_sessions() {
    let rig = Rig::new().await;
    let (own, other) = (rig.path("own.sock"), rig.path("other/other.sock"));
    let _listeners = [
        UnixListener::bind(&own).unwrap(),
        UnixListener::bind(&other).unwrap(),
    ];
    let mut spec = rig.spec([
        "connect-unix",
        "/mcp/relay.sock",
        other.to_str().unwrap(),
        "/mcp/other.sock",
    ]);
    spec.sockets = vec![Socket::new(&own, "/mcp/relay.sock")];
    let out = rig.run(spec).await.out;
    let lines: Vec<String> = out.lines().map(str::to_owned).collect();
    refused(&lines[..1], &["ok"]);
    refused(&lines[1..], &["ENOENT"]);
}

#[tokio::test]
async fn there_is_no_docker_socket() {
    let rig = Rig::new().await;
    let lines = rig
        .lines(["connect-unix", "/var/run/docker.sock", "/run/docker.sock"])
        .await;
    refused(&lines, &["ENOENT"]);
}

#[tokio::test]
async fn is_not_root_and_has_no_capability() {
    let rig = Rig::new().await;
    let script =
        "id -u; id -g; id -un; grep -E '^(Cap(Inh|Prm|Eff|Amb)|NoNewPrivs|Seccomp):' /proc/self/status";
    let out = rig.shell(script).await.out;
    let expected = "1000\n1000\nagent\nCapInh:\t0000000000000000\nCapPrm:\t0000000000000000\n\
                    CapEff:\t0000000000000000\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n";
    assert_eq!(out, expected);
    assert_eq!(rig.report().await.level, Level::Namespaces);
}

#[tokio::test]
async fn inherits_no_file_of_the_server() {
    let rig = Rig::new().await;
    // 3 is the directory being listed.
    assert_eq!(rig.shell("ls /proc/self/fd").await.out, "0\n1\n2\n3\n");
}
