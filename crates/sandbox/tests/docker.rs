//! The docker driver on a real engine: `OUBLIETTE_TEST_ENGINE` is its socket, `OUBLIETTE_TEST_IMAGE` an image with a
//! shell. Without them the tests pass without having tested anything; tests/python/test_docker.py sets them.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::path::PathBuf;
use std::time::Duration;

use oubliette_sandbox::{
    DockerDriver, DockerDriverConfig, ExitCause, PortForward, RunningSandbox, SandboxDriver, SandboxExit,
    SandboxGroup, SandboxSpec, SocketMount, TotalLimits, spec::CLIENT,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

struct Engine {
    dir: tempfile::TempDir,
    driver: DockerDriver,
    host: String,
}

impl Engine {
    async fn find() -> Option<Self> {
        let given = |name: &str| std::env::var(name).ok();
        let (Some(socket), Some(image)) = (given("OUBLIETTE_TEST_ENGINE"), given("OUBLIETTE_TEST_IMAGE"))
        else {
            eprintln!("without an engine nothing is tested");
            return None;
        };
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("workspace")).unwrap();
        let host = format!("unix://{socket}");
        let driver = DockerDriver::new(
            DockerDriverConfig {
                client: common::inside_program(),
                run_dir: dir.path().join("run"),
                host: host.clone(),
                runtime: None,
                network: "host".into(),
                image: Some(image),
                grace: Duration::from_secs(3),
            },
            TotalLimits::default(),
        );
        Some(Self {
            driver: driver.await.unwrap(),
            dir,
            host,
        })
    }

    fn spec<'a>(&self, argv: impl IntoIterator<Item = &'a str>) -> SandboxSpec {
        let mut spec = SandboxSpec::new("test", argv);
        spec.workspace = Some(self.workspace());
        spec
    }

    fn shell(&self, script: &str) -> SandboxSpec {
        self.spec(["/bin/sh", "-c", script])
    }

    fn workspace(&self) -> PathBuf {
        self.dir.path().join("workspace")
    }

    async fn run(&self, spec: SandboxSpec) -> (SandboxExit, String, String) {
        outcome(self.driver.spawn(spec).await.unwrap()).await
    }

    /// The engine's own command line.
    fn docker(&self, args: &[&str]) -> String {
        let done = std::process::Command::new("docker")
            .args(["-H", &self.host])
            .args(args)
            .output()
            .unwrap();
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    /// The containers that there are of this test.
    fn containers(&self) -> Vec<String> {
        let all = self.docker(&["ps", "-aq", "--no-trunc", "--format", "{{.ID}} {{.Mounts}}"]);
        let ids = all.lines().filter_map(|line| line.split(' ').next());
        let dir = self.dir.path().to_string_lossy().into_owned();
        ids.filter(|id| self.docker(&["inspect", id]).contains(&dir))
            .map(str::to_owned)
            .collect()
    }
}

async fn outcome(running: RunningSandbox) -> (SandboxExit, String, String) {
    let RunningSandbox {
        stdin,
        mut stdout,
        mut stderr,
        handle,
        ..
    } = running;
    drop(stdin);
    let (mut out, mut err) = (String::new(), String::new());
    let (_, _, exit) = tokio::join!(
        stdout.read_to_string(&mut out),
        stderr.read_to_string(&mut err),
        handle.wait()
    );
    (exit, out, err)
}

#[tokio::test]
async fn a_program_has_its_streams_its_environment_and_its_exit_code() {
    let Some(engine) = Engine::find().await else {
        return;
    };
    let mut spec = engine.shell("cat; echo err >&2; echo $SECRET $(id -u) $(pwd); touch made; exit 7");
    spec.env.push(("SECRET".into(), "k-123456".into()));
    let mut running = engine.driver.spawn(spec).await.unwrap();
    running.stdin.write_all(b"in\n").await.unwrap();
    let inspected = engine.docker(&["inspect", &engine.containers()[0]]);
    assert!(
        !inspected.contains("k-123456") && !inspected.contains("SECRET"),
        "{inspected}"
    );
    let (exit, out, err) = outcome(running).await;
    let uid = match rustix::process::geteuid().as_raw() {
        0 => 64_646,
        own => own,
    };
    assert_eq!(out, format!("in\nk-123456 {uid} /workspace\n"));
    assert_eq!((err.as_str(), exit.code, exit.cause), ("err\n", Some(7), None));
    assert!(engine.workspace().join("made").exists());
    assert_eq!(engine.containers(), [""; 0]);
}

#[tokio::test]
async fn much_output_arrives_whole_though_it_is_read_late() {
    let Some(engine) = Engine::find().await else {
        return;
    };
    let running = engine.driver.spawn(engine.shell("seq 1 200000")).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (exit, out, _) = outcome(running).await;
    assert!(exit.success(), "{exit}");
    assert!(
        out.lines()
            .map(|line| line.parse::<u32>().unwrap())
            .eq(1..=200_000),
        "{}",
        out.len()
    );
}

#[tokio::test]
async fn sockets_and_ports_lead_to_this_process() {
    let Some(engine) = Engine::find().await else {
        return;
    };
    let host = engine.dir.path().join("echo.sock");
    let listener = tokio::net::UnixListener::bind(&host).unwrap();
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = connection.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    let mut spec = engine.spec(["perl", "-e", PERL_CLIENT]);
    spec.sockets = vec![
        SocketMount::new(&host, "/mcp/relay.sock"),
        SocketMount::new(&host, "/run/oubliette/m.sock"),
    ];
    spec.forwards = vec![PortForward {
        port: 19_999,
        socket: "/run/oubliette/m.sock".into(),
    }];
    let (exit, out, err) = engine.run(spec).await;
    assert_eq!((out.as_str(), exit.code), ("by unix\nby tcp\n", Some(0)), "{err}");
}

const PERL_CLIENT: &str = r#"use Socket;
socket(my $u, PF_UNIX, SOCK_STREAM, 0); connect($u, sockaddr_un("/mcp/relay.sock")) or die "unix: $!";
syswrite($u, "by unix\n"); sysread($u, my $a, 100); syswrite(STDOUT, $a);
socket(my $t, PF_INET, SOCK_STREAM, 0); connect($t, sockaddr_in(19999, inet_aton("127.0.0.1"))) or die "tcp: $!";
syswrite($t, "by tcp\n"); sysread($t, my $b, 100); syswrite(STDOUT, $b);"#;

#[tokio::test]
async fn a_kill_and_a_dropped_handle_leave_no_container() {
    let Some(engine) = Engine::find().await else {
        return;
    };
    let running = engine
        .driver
        .spawn(engine.shell("sleep 600 & sleep 600"))
        .await
        .unwrap();
    running.handle.kill();
    let exit = running.handle.wait().await;
    assert_eq!((exit.signal, exit.cause), (Some(9), None));
    assert_eq!(engine.containers(), [""; 0]);
    drop(engine.driver.spawn(engine.shell("sleep 600")).await.unwrap());
    for _ in 0..200 {
        if engine.containers().is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{:?}", engine.containers());
}

#[tokio::test]
async fn a_signal_reaches_the_program() {
    let Some(engine) = Engine::find().await else {
        return;
    };
    let script = "trap 'echo told; exit 3' TERM; echo ready; while :; do sleep 0.1; done";
    let mut running = engine.driver.spawn(engine.shell(script)).await.unwrap();
    let mut ready = [0; 6];
    running.stdout.read_exact(&mut ready).await.unwrap();
    running.handle.terminate();
    let (exit, out, _) = outcome(running).await;
    assert_eq!((exit.code, out.as_str()), (Some(3), "told\n"));
}

#[tokio::test]
async fn a_container_killed_from_outside_and_one_out_of_memory_say_so() {
    let Some(engine) = Engine::find().await else {
        return;
    };
    let running = engine
        .driver
        .spawn(engine.shell("echo before; sleep 600"))
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    engine.docker(&["kill", &engine.containers()[0]]);
    let (exit, out, _) = outcome(running).await;
    assert_eq!(
        (exit.cause, out.as_str()),
        (Some(ExitCause::ContainerKilled), "before\n")
    );
    assert!(exit.to_string().contains("killed from outside"), "{exit}");

    let mut spec = engine.shell("exec perl -e '$x = \"x\" x (1 << 20); push @a, $x . $_ for 1 .. 100000'");
    spec.limits.memory_mb = Some(64);
    let (exit, ..) = engine.run(spec).await;
    assert!(exit.oom && !exit.success(), "{exit}");
    assert_eq!(engine.containers(), [""; 0]);
}

#[tokio::test]
async fn processes_are_limited() {
    let Some(engine) = Engine::find().await else {
        return;
    };
    let mut spec = engine.shell("for i in $(seq 1 60); do sleep 5 & done 2>&1; echo; jobs -p | wc -l");
    spec.limits.pids = Some(20);
    let (exit, out, err) = engine.run(spec).await;
    assert!(
        !exit.success() || exit.too_many_processes || out.contains("fork"),
        "{exit} {out} {err}"
    );
}

#[tokio::test]
async fn nothing_leads_out() {
    let Some(engine) = Engine::find().await else {
        return;
    };
    let script = "exec 2>&1
        grep -E '^(CapEff|CapPrm|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status
        touch /etc/x /usr/x /x; echo host > /proc/sys/kernel/hostname
        ls /sys/class/net | tr '\\n' ' '; echo
        ls /var/run/docker.sock /run/docker.sock; mount -t tmpfs none /mnt; unshare -m true
        cat /proc/1/environ; cat /opt/oubliette/stage/token; kill -9 1; ls /proc | grep -c '^[0-9]'";
    let (exit, out, _) = engine.run(engine.shell(script)).await;
    assert!(exit.success(), "{exit}\n{out}");
    for line in [
        "CapEff:\t0000000000000000",
        "CapPrm:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ] {
        assert!(out.contains(line), "{line}:\n{out}");
    }
    assert!(out.contains("\nlo \n"), "only a loopback:\n{out}");
    assert!(
        out.matches("Read-only file system").count() + out.matches("Permission denied").count() >= 5,
        "{out}"
    );
    assert!(!out.contains("HOSTNAME="), "{out}");
}

#[tokio::test]
async fn wrong_images_and_programs_are_named() {
    let Some(engine) = Engine::find().await else {
        return;
    };
    let missing = engine
        .driver
        .prepare_image(Some("oubliette-test-missing:1"), None, &|_| {})
        .await;
    let missing = missing.unwrap_err().to_string();
    assert!(
        missing.contains("oubliette-test-missing:1") && missing.contains("docker load"),
        "{missing}"
    );
    let refused = engine
        .driver
        .spawn(engine.spec(["/no/such/program"]))
        .await
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("/no/such/program") && refused.contains("image"),
        "{refused}"
    );
    assert_eq!(engine.containers(), [""; 0]);
}

#[tokio::test]
async fn sandboxes_of_a_group_use_its_image_and_do_not_see_each_other() {
    let Some(engine) = Engine::find().await else {
        return;
    };
    let image = engine
        .driver
        .prepare_image(None, None, &|_| {})
        .await
        .unwrap()
        .unwrap();
    assert!(image.digest.contains("sha256:"), "{image:?}");
    let group = SandboxGroup::new("session", Default::default());
    group.set_image(Some(image));
    let mut one = engine.shell("sleep 600");
    one.group = Some(group.clone());
    let mut two = engine.shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '");
    two.group = Some(group.clone());
    let running = engine.driver.spawn(one).await.unwrap();
    let (_, out, _) = engine.run(two).await;
    assert!(
        out.contains("remote-stage") && !out.contains("sleep 600"),
        "{out}"
    );
    group.kill();
    running.handle.wait().await;
    assert!(CLIENT.starts_with("/opt"));
}
