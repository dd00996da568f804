//! How much of the machine a sandbox may use.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Rig, heard};
use oubliette_sandbox::{DiskWatch, Limits, Report, Sandbox};

fn kept(report: &Report, name: &str) -> String {
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
    let rig = Rig::new().await;
    if kept(&rig.report().await, "process limit") == "not kept" {
        eprintln!("skipped: root without cgroups cannot be bounded, and the report says so");
        return;
    }
    let mut spec = rig.spec(["fork"]);
    spec.limits = Limits {
        pids: Some(40),
        ..Limits::default()
    };
    let outcome = rig.run(spec).await;
    let (count, why) = outcome.out.trim().split_once(" then ").expect(&outcome.out);
    assert!(count.parse::<u32>().unwrap() <= 40, "{outcome:?}");
    assert_eq!(why, "EAGAIN");
}

#[tokio::test]
async fn a_memory_hog_is_ended_and_told_apart() {
    let rig = Rig::new().await;
    let mut spec = rig.spec(["allocate", "400"]);
    spec.limits = Limits {
        memory_mb: Some(100),
        ..Limits::default()
    };
    let outcome = rig.run(spec).await;
    if kept(&rig.report().await, "memory limit").starts_with("cgroup") {
        assert_eq!(
            (outcome.exit.signal, outcome.exit.oom),
            (Some(libc::SIGKILL), true),
            "{outcome:?}"
        );
    } else {
        assert_eq!(outcome.out, "allocate: ENOMEM\n", "{outcome:?}");
    }
    let mut spec = rig.spec(["allocate", "40"]);
    spec.limits = Limits {
        memory_mb: Some(100),
        ..Limits::default()
    };
    assert_eq!(rig.run(spec).await.out, "allocate: ok (40)\n");
}

#[tokio::test]
async fn files_in_memory_are_bounded() {
    let rig = Rig::new().await;
    for place in ["/tmp", "/dev/shm", "/run"] {
        let mut spec = rig.spec(["fill", place]);
        spec.limits = Limits {
            memory_mb: Some(128),
            ..Limits::default()
        };
        let outcome = rig.run(spec).await;
        let count: u32 = outcome.out.split_whitespace().next().unwrap().parse().unwrap();
        assert!(count <= 64, "{place}: {outcome:?}");
    }
}

#[tokio::test]
async fn filling_the_disk_is_noticed() {
    let rig = Rig::new().await;
    let mut spec = rig.spec(["fill", "/workspace"]);
    spec.limits = Limits {
        workspace_mb: Some(8),
        ..Limits::default()
    };
    let running = rig.start(spec).await;
    let usage = DiskWatch::new([rig.path("workspace")], 8)
        .every(std::time::Duration::from_millis(5))
        .exceeded()
        .await;
    running.handle.kill();
    running.handle.wait().await;
    assert!(usage.over && usage.bytes > 8 << 20);
}

#[tokio::test]
async fn one_file_cannot_outgrow_the_limit() {
    let rig = Rig::new().await;
    let mut spec = rig.command(["sh", "-c", "head -c 9000000 /dev/zero > big; wc -c < big"]);
    spec.limits = Limits {
        workspace_mb: Some(8),
        ..Limits::default()
    };
    assert_eq!(rig.run(spec).await.out, format!("{}\n", 8 << 20));
}

#[tokio::test]
async fn open_files_are_bounded() {
    let rig = Rig::new().await;
    let mut spec = rig.command(["sh", "-c", "ulimit -n; ulimit -Hn"]);
    spec.limits = Limits {
        open_files: Some(100),
        ..Limits::default()
    };
    assert_eq!(rig.run(spec).await.out, "100\n100\n");
}

#[tokio::test]
async fn cgroups_are_removed_at_the_end() {
    let rig = Rig::new().await;
    if !kept(&rig.report().await, "process limit").starts_with("cgroup") {
        eprintln!("skipped: no cgroups here");
        return;
    }
    let mut running = rig.start(rig.spec(["wait"])).await;
    heard(&mut running, "waiting").await;
    let groups = groups_of(running.handle.pid());
    assert!(!groups.is_empty());
    running.handle.kill();
    running.handle.wait().await;
    assert!(groups.iter().all(|group| !group.exists()), "{groups:?}");
}

#[tokio::test]
async fn cgroups_a_killed_server_left_are_removed_at_the_next_start() {
    let rig = Rig::new().await;
    if !kept(&rig.report().await, "process limit").starts_with("cgroup") {
        eprintln!("skipped: no cgroups here");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mark = common::mark(dir.path());
    let mut server = std::process::Command::new(common::helper())
        .args(["hold-namespaces", dir.path().to_str().unwrap(), &mark])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 8];
    std::io::Read::read_exact(&mut server.stdout.take().unwrap(), &mut said).unwrap();
    let mut held = common::processes(&mark).into_iter().map(i32::unsigned_abs);
    let groups = groups_of(held.find(|pid| *pid != server.id()).unwrap());
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(!groups.is_empty() && groups.iter().all(|group| group.exists()));
    let config = oubliette_sandbox::LocalConfig {
        client: common::helper(),
        minimum: oubliette_sandbox::Level::Namespaces,
        bwrap: None,
        run_dir: dir.path().into(),
    };
    // The kernel may need a moment to let go of the dead; a server looks once at each start.
    while groups.iter().any(|group| group.exists()) {
        let next = oubliette_sandbox::Local::new(config.clone()).await.unwrap();
        assert!(next.probe().await.ok);
    }
}

/// Directories of the cgroups of ours that a process is in.
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
async fn the_report_says_how_each_limit_is_kept() {
    let rig = Rig::new().await;
    let report = rig.report().await;
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
