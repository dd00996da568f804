//! Resource limits of sandboxes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{SandboxFixture, wait_for_output};
use oubliette_os::DiskWatch;
use oubliette_sandbox::{ResourceLimits, SandboxDriver, SandboxGroup, SandboxReport};

/// The detail of the report's check with this name.
fn check_detail(report: &SandboxReport, name: &str) -> String {
    report
        .checks
        .iter()
        .find(|check| check.name == name)
        .unwrap()
        .detail
        .clone()
}

#[tokio::test]
async fn a_fork_bomb_is_bounded() {
    let fixture = SandboxFixture::new().await;
    if check_detail(&fixture.report().await, "process limit").starts_with("not kept") {
        eprintln!("skipped: root without cgroups cannot be bounded, and the report says so");
        return;
    }
    let mut spec = fixture.spec(["fork"]);
    spec.limits = ResourceLimits {
        pids: Some(40),
        ..ResourceLimits::default()
    };
    let outcome = fixture.run(spec).await;
    let (count, why) = outcome.out.trim().split_once(" then ").expect(&outcome.out);
    assert!(count.parse::<u32>().unwrap() <= 40, "{outcome:?}");
    assert_eq!(why, "EAGAIN");
}

#[tokio::test]
async fn exceeding_the_memory_limit_is_reported_as_out_of_memory() {
    let fixture = SandboxFixture::new().await;
    let mut spec = fixture.spec(["allocate", "400"]);
    spec.limits = ResourceLimits {
        memory_mb: Some(100),
        ..ResourceLimits::default()
    };
    let outcome = fixture.run(spec).await;
    if check_detail(&fixture.report().await, "memory limit").starts_with("cgroup") {
        assert_eq!(
            (outcome.exit.signal, outcome.exit.oom),
            (Some(libc::SIGKILL), true),
            "{outcome:?}"
        );
    } else {
        assert_eq!(outcome.out, "allocate: ENOMEM\n", "{outcome:?}");
    }
    let mut spec = fixture.spec(["allocate", "40"]);
    spec.limits = ResourceLimits {
        memory_mb: Some(100),
        ..ResourceLimits::default()
    };
    assert_eq!(fixture.run(spec).await.out, "allocate: ok (40)\n");
}

#[tokio::test]
async fn tmpfs_sizes_are_bounded() {
    let fixture = SandboxFixture::new().await;
    for place in ["/tmp", "/dev/shm", "/run"] {
        let mut spec = fixture.spec(["fill", place]);
        spec.limits = ResourceLimits {
            memory_mb: Some(128),
            ..ResourceLimits::default()
        };
        let outcome = fixture.run(spec).await;
        let count: u32 = outcome.out.split_whitespace().next().unwrap().parse().unwrap();
        assert!(count <= 64, "{place}: {outcome:?}");
    }
}

#[tokio::test]
async fn exceeding_the_disk_limit_is_detected() {
    let fixture = SandboxFixture::new().await;
    let mut spec = fixture.spec(["fill", "/workspace"]);
    spec.limits = ResourceLimits {
        workspace_mb: Some(8),
        ..ResourceLimits::default()
    };
    let running = fixture.start(spec).await;
    let usage = DiskWatch::new([fixture.path("workspace")], 8)
        .every(std::time::Duration::from_millis(5))
        .exceeded()
        .await;
    running.handle.kill();
    running.handle.wait().await;
    assert!(usage.over && usage.bytes > 8 << 20);
}

#[tokio::test]
async fn one_file_cannot_exceed_the_limit() {
    let fixture = SandboxFixture::new().await;
    let mut spec = fixture.command(["sh", "-c", "head -c 9000000 /dev/zero > big; wc -c < big"]);
    spec.limits = ResourceLimits {
        workspace_mb: Some(8),
        ..ResourceLimits::default()
    };
    assert_eq!(fixture.run(spec).await.out, format!("{}\n", 8 << 20));
}

#[tokio::test]
async fn open_files_are_bounded() {
    let fixture = SandboxFixture::new().await;
    let mut spec = fixture.command(["sh", "-c", "ulimit -n; ulimit -Hn"]);
    spec.limits = ResourceLimits {
        open_files: Some(100),
        ..ResourceLimits::default()
    };
    assert_eq!(fixture.run(spec).await.out, "100\n100\n");
}

#[tokio::test]
async fn cgroups_are_removed_at_the_end() {
    let fixture = SandboxFixture::new().await;
    if !check_detail(&fixture.report().await, "process limit").starts_with("cgroup") {
        eprintln!("skipped: no cgroups here");
        return;
    }
    let mut running = fixture.start(fixture.spec(["wait"])).await;
    wait_for_output(&mut running, "waiting").await;
    let groups = groups_of(running.handle.pid().unwrap());
    assert!(!groups.is_empty());
    running.handle.kill();
    running.handle.wait().await;
    assert!(groups.iter().all(|group| !group.exists()), "{groups:?}");
}

#[tokio::test]
async fn cgroups_left_by_a_killed_server_are_removed_at_the_next_start() {
    let fixture = SandboxFixture::new().await;
    if !check_detail(&fixture.report().await, "process limit").starts_with("cgroup") {
        eprintln!("skipped: no cgroups here");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mark = common::unique_mark(dir.path());
    let mut server = std::process::Command::new(common::inside_program())
        .args(["hold-namespaces", dir.path().to_str().unwrap(), &mark])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 8];
    std::io::Read::read_exact(&mut server.stdout.take().unwrap(), &mut said).unwrap();
    let mut held = common::processes_with(&mark).into_iter().map(i32::unsigned_abs);
    let groups = groups_of(held.find(|pid| *pid != server.id()).unwrap());
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(!groups.is_empty() && groups.iter().all(|group| group.exists()));
    let config = oubliette_sandbox::LocalDriverConfig {
        client: common::inside_program(),
        minimum: oubliette_sandbox::IsolationLevel::Namespaces,
        bwrap: None,
        run_dir: dir.path().into(),
    };
    // A group may stay busy for a moment after its processes died; a driver tries to remove it once, at its start.
    while groups.iter().any(|group| group.exists()) {
        let next = oubliette_sandbox::LocalDriver::new(config.clone()).await.unwrap();
        assert!(next.probe().await.ok);
    }
}

/// Directories of Oubliette's cgroups that a process is in.
fn groups_of(pid: u32) -> Vec<std::path::PathBuf> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let one = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let mount = std::path::Path::new("/sys/fs/cgroup").join(controllers);
        path.contains("/oubliette-")
            .then(|| mount.join(path.trim_start_matches('/')))
    };
    text.lines().filter_map(one).collect()
}

#[tokio::test]
async fn the_report_says_how_each_limit_is_enforced() {
    let fixture = SandboxFixture::new().await;
    let report = fixture.report().await;
    assert!(report.ok);
    for name in [
        "bubblewrap",
        "namespaces",
        "landlock",
        "seccomp",
        "memory limit",
        "process limit",
        "cpu limit",
    ] {
        let check = report.checks.iter().find(|check| check.name == name).expect(name);
        assert!(!check.detail.is_empty());
        assert_eq!(check.remedy.is_some(), !check.ok, "{check:?}");
    }
}

#[tokio::test]
async fn sandboxes_of_a_group_share_its_limits() {
    let fixture = SandboxFixture::new().await;
    let report = fixture.report().await;
    if !check_detail(&report, "process limit").starts_with("cgroup") {
        eprintln!("skipped: no cgroups here");
        return;
    }
    let limits = ResourceLimits {
        pids: Some(40),
        ..ResourceLimits::default()
    };
    let group = SandboxGroup::new("test", limits.clone());
    let grouped = |args: &[&str]| {
        let mut spec = fixture.spec(args.iter().copied());
        spec.limits = limits.clone();
        spec.group = Some(group.clone());
        spec
    };
    let mut first = fixture.start(grouped(&["fork", "hold"])).await;
    let mut first_count = String::new();
    // It holds what it got until its stdin is closed.
    let mut reader = tokio::io::BufReader::new(&mut first.stdout);
    tokio::io::AsyncBufReadExt::read_line(&mut reader, &mut first_count)
        .await
        .unwrap();
    let count = |text: &str| text.split_whitespace().next().unwrap().parse::<u64>().unwrap();
    assert!(count(&first_count) <= 40, "{first_count}");
    // Nothing is left of the group's processes for another sandbox, and one outside the group is not concerned.
    assert!(fixture.try_start(grouped(&["cwd"])).await.is_err());
    assert!(fixture.run(fixture.spec(["cwd"])).await.exit.success());
    group.set_limits(&ResourceLimits {
        pids: Some(60),
        ..limits.clone()
    });
    assert!(fixture.run(grouped(&["cwd"])).await.exit.success());
    first.handle.kill();
    first.handle.wait().await;
    assert!(fixture.run(grouped(&["cwd"])).await.exit.success());
}
