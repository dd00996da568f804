//! The life cycle of a sandbox: what the program gets, how it is ended, and that nothing is left behind.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;

use common::{SandboxFixture, pidfd, processes_with, unique_mark, wait_for_end, wait_for_output};
use oubliette_sandbox::{
    BindMount, PortForward, SandboxError, SandboxHandle, SandboxSpec, SocketMount, StopTimeouts, stop,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test]
async fn the_environment_is_exactly_what_was_given() {
    let fixture = SandboxFixture::new().await;
    let mut spec = fixture.spec(["env"]);
    spec.env = vec![
        ("KEY".into(), "value with spaces\nand lines".into()),
        ("LANG".into(), "de_DE.UTF-8".into()),
    ];
    let out = fixture.run(spec).await.out;
    let mut names: Vec<&str> = out
        .lines()
        .filter_map(|line| Some(line.split_once('=')?.0))
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["HOME", "KEY", "LANG", "PATH", "TMPDIR", "USER"]);
    assert!(
        out.contains("HOME=/home/agent\n") && out.contains("LANG=de_DE.UTF-8\n"),
        "{out}"
    );
}

#[tokio::test]
async fn the_environment_is_in_no_command_line() {
    let fixture = SandboxFixture::new().await;
    let secret = format!("secret-{}", unique_mark(fixture.dir.path()));
    let mut spec = fixture.spec(["wait"]);
    spec.env = vec![("KEY".into(), secret.clone())];
    let mut running = fixture.start(spec).await;
    wait_for_output(&mut running, "waiting").await;
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let words = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        assert!(
            !String::from_utf8_lossy(&words).contains(&secret),
            "{}",
            entry.path().display()
        );
    }
    // The inner stage had it too; its environment must not be readable either.
    assert!(
        !fixture
            .shell("cat /proc/1/environ; true")
            .await
            .out
            .contains(&secret)
    );
}

#[tokio::test]
async fn a_large_environment_is_passed_completely() {
    let fixture = SandboxFixture::new().await;
    let mut spec = fixture.command(["sh", "-c", "echo ${#B0} ${#B9}"]);
    spec.env = (0..10).map(|n| (format!("B{n}"), "x".repeat(100_000))).collect();
    assert_eq!(fixture.run(spec).await.out, "100000 100000\n");
}

#[tokio::test]
async fn the_workspace_is_the_working_directory_and_is_shared() {
    let fixture = SandboxFixture::new().await;
    std::fs::write(fixture.path("workspace/in"), "from outside").unwrap();
    let outcome = fixture
        .shell("pwd; cat in; echo from inside > out; echo $HOME > ~/home")
        .await;
    assert_eq!(outcome.out, "/workspace\nfrom outside");
    assert_eq!(
        std::fs::read_to_string(fixture.path("workspace/out")).unwrap(),
        "from inside\n"
    );
    assert_eq!(
        std::fs::read_to_string(fixture.path("home/home")).unwrap(),
        "/home/agent\n"
    );
}

#[tokio::test]
async fn ordinary_programs_work() {
    let fixture = SandboxFixture::new().await;
    let script = "set -e; echo a | sort > /tmp/x; cat /tmp/x; echo b > /dev/stdout; echo c > /dev/null; \
                  head -c 3 /dev/urandom | wc -c; mkdir -p d/e; mv d /tmp/../workspace/f; ls -d f/e; \
                  (sleep 0.01 & wait); ulimit -c; hostname 2>/dev/null || cat /etc/hostname";
    let outcome = fixture.shell(script).await;
    assert_eq!(outcome.out, "a\nb\n3\nf/e\n0\noubliette\n", "{outcome:?}");
}

/// Tests the interpreters that are installed, with a memory limit as an agent would have.
#[tokio::test]
async fn interpreters_work() {
    let fixture = SandboxFixture::new().await;
    let node = "const {execSync} = require('child_process'); const {Worker} = require('worker_threads');\
                new Worker('require(\"worker_threads\").parentPort.postMessage(1)', {eval: true})\
                .on('message', () => console.log(execSync('echo fine').toString().trim()))";
    let python = "import subprocess, threading, tempfile, ssl, socket; socket.socketpair();\
                  t = threading.Thread(target=lambda: print(subprocess.check_output(['echo', 'fine']).decode().strip()));\
                  t.start(); t.join(); tempfile.TemporaryFile()";
    for (program, flag, script) in [
        ("node", "-e", node),
        ("python3", "-c", python),
        ("perl", "-e", "print `echo fine`"),
    ] {
        if !std::path::Path::new("/usr/bin").join(program).exists() {
            eprintln!("skipped: no {program} in /usr/bin");
            continue;
        }
        let mut spec = fixture.command([program, flag, script]);
        spec.limits.memory_mb = Some(1024);
        let outcome = fixture.run(spec).await;
        assert_eq!(outcome.out, "fine\n", "{program}: {outcome:?}");
    }
}

#[tokio::test]
async fn stdin_and_stdout_carry_large_data_and_end() {
    let fixture = SandboxFixture::new().await;
    let mut running = fixture.start(fixture.spec(["echo"])).await;
    let sent = vec![b'x'; 1 << 20];
    let mut stdin = running.stdin;
    let writing = async {
        stdin.write_all(&sent).await.unwrap();
        drop(stdin);
    };
    let mut received = Vec::new();
    let (_, read) = tokio::join!(writing, running.stdout.read_to_end(&mut received));
    read.unwrap();
    assert_eq!(received.len(), 1 << 20);
    assert!(running.handle.wait().await.success());
}

#[tokio::test]
async fn the_exit_code_or_signal_is_reported() {
    let fixture = SandboxFixture::new().await;
    let exit = fixture.run(fixture.spec(["exit", "7"])).await.exit;
    assert_eq!((exit.code, exit.signal), (Some(7), None));
    // A code above 128 is not mistaken for a signal.
    assert_eq!(
        fixture.run(fixture.spec(["exit", "143"])).await.exit.code,
        Some(143)
    );
    let exit = fixture.shell("kill -USR1 $$").await.exit;
    assert_eq!((exit.code, exit.signal), (None, Some(libc::SIGUSR1)));
}

#[tokio::test]
async fn a_missing_program_is_named_in_the_error() {
    let fixture = SandboxFixture::new().await;
    match fixture.try_start(fixture.command(["no-such-program"])).await {
        Err(SandboxError::Program { program, reason }) => {
            assert_eq!(program, "no-such-program");
            assert_eq!(reason, "no such program in the sandbox");
        }
        other => panic!("{other:?}"),
    }
    let mut spec = fixture.command(["true"]);
    spec.cwd = "/workspace/not/there".into();
    let error = fixture.try_start(spec).await.unwrap_err().to_string();
    assert!(error.contains("/workspace/not/there"), "{error}");
}

#[tokio::test]
async fn a_missing_mount_source_is_named_in_the_error() {
    let fixture = SandboxFixture::new().await;
    let mut spec = fixture.command(["true"]);
    spec.mounts = vec![BindMount::read_only("/no/such/thing", "/thing")];
    let error = fixture.try_start(spec).await.unwrap_err().to_string();
    assert_eq!(error, "/no/such/thing does not exist");
    let mut spec = fixture.command(["true"]);
    spec.mounts = vec![BindMount::read_only("/usr", "/x/../y")];
    assert!(matches!(
        fixture.try_start(spec).await,
        Err(SandboxError::Invalid(_))
    ));
}

#[tokio::test]
async fn mounts_may_be_nested_and_may_be_in_etc() {
    let fixture = SandboxFixture::new().await;
    std::fs::write(fixture.path("other/file"), "found").unwrap();
    let mut spec = fixture.command(["cat", "/srv/a/b/file", "/srv/a/b/c", "/etc/extra/file"]);
    spec.mounts = vec![
        BindMount::read_only(fixture.path("other/file"), "/srv/a/b/c"),
        BindMount::read_write(fixture.path("other"), "/srv/a/b"),
        BindMount::read_only(fixture.path("other"), "/etc/extra"),
    ];
    std::fs::write(fixture.path("other/c"), "").unwrap();
    assert_eq!(fixture.run(spec).await.out, "foundfoundfound");
}

#[tokio::test]
async fn a_port_inside_is_forwarded_to_the_socket() {
    let fixture = SandboxFixture::new().await;
    let socket = fixture.path("model.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = std::thread::spawn(move || {
        for _ in 0..3 {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            stream.read_to_end(&mut asked).unwrap();
            // More than all buffers on the way hold.
            stream.write_all(&asked.repeat(100_000)).unwrap();
        }
    });
    let mut spec = fixture.command(["sh", "-c", ASK]);
    spec.sockets = vec![SocketMount::new(&socket, "/run/oubliette/model.sock")];
    spec.forwards = vec![PortForward {
        port: 19999,
        socket: "/run/oubliette/model.sock".into(),
    }];
    let outcome = fixture.run(spec).await;
    assert_eq!(outcome.out, "1100007\n1100007\n1100007\n", "{outcome:?}");
    server.join().unwrap();
}

const ASK: &str = "/opt/oubliette/oubliette-client ask 127.0.0.1:19999 hello-world > a & \
                   /opt/oubliette/oubliette-client ask 127.0.0.1:19999 hello-world > b & \
                   /opt/oubliette/oubliette-client ask 127.0.0.1:19999 hello-world > c & \
                   wait; wc -c < a; wc -c < b; wc -c < c";

#[tokio::test]
async fn on_the_hosts_network_a_port_serves_its_own_user_and_must_be_free() {
    let fixture = SandboxFixture::new().await;
    let socket = fixture.path("model.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    // Bound but not listening, this socket reserves the port for the test after the listener is closed.
    let kept = tokio::net::TcpSocket::new_v4().unwrap();
    kept.set_reuseaddr(true).unwrap();
    kept.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let taken = std::net::TcpListener::bind(kept.local_addr().unwrap()).unwrap();
    let port = taken.local_addr().unwrap().port();
    let spec = |fixture: &SandboxFixture| {
        let mut spec = fixture.spec(["ask", &format!("127.0.0.1:{port}"), "hello"]);
        spec.network = oubliette_sandbox::SandboxNetwork::Host;
        spec.sockets = vec![SocketMount::new(&socket, "/run/oubliette/model.sock")];
        spec.forwards = vec![PortForward {
            port,
            socket: "/run/oubliette/model.sock".into(),
        }];
        spec
    };
    let error = fixture.try_start(spec(&fixture)).await.unwrap_err().to_string();
    assert!(
        error.contains(&format!("listening on 127.0.0.1:{port}")),
        "{error}"
    );
    // Shut down, not only dropped: a process that another test is just forking has the descriptor too, until exec.
    let taken = std::net::TcpStream::from(OwnedFd::from(taken));
    taken.shutdown(std::net::Shutdown::Both).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // Reads everything: closing a socket with unread data resets the connection and discards the answer.
        stream.read_to_end(&mut Vec::new()).unwrap();
        stream.write_all(b"answered").unwrap();
    });
    let outcome = fixture.run(spec(&fixture)).await;
    assert!(outcome.out.contains("answered"), "{outcome:?}");
    server.join().unwrap();
}

#[tokio::test]
async fn a_port_without_a_server_closes_its_connections() {
    let fixture = SandboxFixture::new().await;
    let socket = fixture.path("model.sock");
    drop(UnixListener::bind(&socket).unwrap());
    let mut spec = fixture.spec(["ask", "127.0.0.1:19999", "hello"]);
    spec.sockets = vec![SocketMount::new(&socket, "/run/oubliette/model.sock")];
    spec.forwards = vec![PortForward {
        port: 19999,
        socket: "/run/oubliette/model.sock".into(),
    }];
    let outcome = fixture.run(spec).await;
    assert!(
        outcome.exit.success() && !outcome.out.contains("hello"),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn terminate_reaches_the_program_alone() {
    let fixture = SandboxFixture::new().await;
    let mut running = fixture
        .start(fixture.command([
            "sh",
            "-c",
            "trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep 0.05; done",
        ]))
        .await;
    wait_for_output(&mut running, "ready").await;
    running.handle.terminate();
    wait_for_output(&mut running, "bye").await;
    assert_eq!(running.handle.wait().await.code, Some(3));
}

#[tokio::test]
async fn kill_ends_the_whole_tree_at_once() {
    let fixture = SandboxFixture::new().await;
    let (running, tree) = program_with_daemon(&fixture).await;
    running.handle.kill();
    let exit = running.handle.wait().await;
    assert_eq!((exit.code, exit.signal), (None, Some(libc::SIGKILL)));
    assert!(tree.iter().all(has_ended), "all of it is gone when wait returns");
    assert_eq!(
        processes_with(&unique_mark(fixture.dir.path())),
        Vec::<i32>::new()
    );
}

#[tokio::test]
async fn dropping_the_last_handle_ends_the_whole_tree() {
    let fixture = SandboxFixture::new().await;
    let (running, tree) = program_with_daemon(&fixture).await;
    let second: SandboxHandle = running.handle.clone();
    drop(running);
    assert!(second.exit().is_none());
    drop(second);
    for process in &tree {
        wait_for_end(process).await;
    }
}

#[tokio::test]
async fn a_daemon_does_not_outlive_the_program() {
    let fixture = SandboxFixture::new().await;
    let mark = unique_mark(fixture.dir.path());
    let outcome = fixture.run(fixture.spec(["daemon", &mark])).await;
    assert_eq!(outcome.out, "left behind\n");
    assert!(outcome.exit.success());
    assert_eq!(processes_with(&mark), Vec::<i32>::new());
}

#[tokio::test]
async fn stop_closes_stdin_then_terminates_then_kills() {
    let fixture = SandboxFixture::new().await;
    let grace = StopTimeouts {
        close: std::time::Duration::from_secs(20),
        ..StopTimeouts::default()
    };
    let running = fixture.start(fixture.spec(["echo"])).await;
    assert!(
        stop(Some(running.stdin), &running.handle, grace).await.success(),
        "ends when stdin does"
    );
    let stubborn = fixture.command(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"]);
    let mut running = fixture.start(stubborn).await;
    wait_for_output(&mut running, "ready").await;
    let short = std::time::Duration::from_millis(50);
    let exit = stop(
        Some(running.stdin),
        &running.handle,
        StopTimeouts {
            close: short,
            terminate: short,
        },
    )
    .await;
    assert_eq!(exit.signal, Some(libc::SIGKILL));
}

#[tokio::test]
async fn a_handle_knows_its_own_processes() {
    let fixture = SandboxFixture::new().await;
    let mark = unique_mark(fixture.dir.path());
    let mut running = fixture.start(fixture.spec(["daemon", "and-stay", &mark])).await;
    wait_for_output(&mut running, "left behind").await;
    assert!(
        processes_with(&mark)
            .iter()
            .all(|pid| running.handle.contains(pid.unsigned_abs()))
    );
    assert!(!running.handle.contains(std::process::id()));
    assert!(!running.handle.contains(1));
}

#[tokio::test]
async fn a_host_that_is_fixed_needs_no_restart() {
    let dir = tempfile::tempdir().unwrap();
    let bwrap = dir.path().join("bwrap");
    let fixture =
        SandboxFixture::with(oubliette_sandbox::IsolationLevel::Landlock, Some(bwrap.clone())).await;
    assert_eq!(
        fixture.report().await.level,
        oubliette_sandbox::IsolationLevel::Landlock
    );
    std::os::unix::fs::symlink("/usr/bin/bwrap", &bwrap).unwrap();
    while fixture.report().await.level != oubliette_sandbox::IsolationLevel::Namespaces {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert!(fixture.run(fixture.spec(["cwd"])).await.exit.success());
}

#[tokio::test]
async fn many_sandboxes_start_at_once() {
    let fixture = SandboxFixture::new().await;
    let outcomes = (0..24).map(|_| fixture.run(fixture.spec(["cwd"])));
    let outcomes = join_all(outcomes).await;
    assert!(
        outcomes.iter().all(|outcome| outcome.out == "/workspace\n"),
        "{outcomes:?}"
    );
}

async fn join_all<T>(futures: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut running: Vec<_> = futures.map(Box::pin).collect();
    let mut done = Vec::new();
    std::future::poll_fn(|context| {
        running.retain_mut(|future| match future.as_mut().poll(context) {
            std::task::Poll::Ready(value) => {
                done.push(value);
                false
            }
            std::task::Poll::Pending => true,
        });
        if running.is_empty() {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    done
}

#[tokio::test]
async fn a_cancelled_start_leaves_no_process() {
    let fixture = SandboxFixture::new().await;
    fixture.report().await;
    let mark = unique_mark(fixture.dir.path());
    let starting = fixture.try_start(fixture.spec(["wait", &mark]));
    // Polled once, then dropped; the process may or may not have been started by now.
    tokio::select! { biased; _ = starting => {}, () = std::future::ready(()) => {} }
    let mut running = fixture.start(fixture.spec(["wait"])).await;
    wait_for_output(&mut running, "waiting").await;
    while !processes_with(&mark).is_empty() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_host_without_bubblewrap_is_refused_with_the_remedy() {
    let fixture = SandboxFixture::with(
        oubliette_sandbox::IsolationLevel::Namespaces,
        Some("/nonexistent/bwrap".into()),
    )
    .await;
    let error = fixture
        .try_start(SandboxSpec::new("t", ["true"]))
        .await
        .unwrap_err();
    assert!(matches!(error, SandboxError::Unavailable { .. }), "{error:?}");
    assert!(
        error.remedy().unwrap().contains("apt-get install bubblewrap"),
        "{error}"
    );
    let report = fixture.report().await;
    assert!(!report.ok);
    assert!(
        report
            .checks
            .iter()
            .any(|check| check.name == "namespaces" && !check.ok && check.remedy.is_some())
    );
}

/// A program and a daemon it left behind, both running.
async fn program_with_daemon(fixture: &SandboxFixture) -> (oubliette_sandbox::RunningSandbox, Vec<OwnedFd>) {
    let mark = unique_mark(fixture.dir.path());
    let mut running = fixture.start(fixture.spec(["daemon", "and-stay", &mark])).await;
    wait_for_output(&mut running, "left behind").await;
    let tree: Vec<OwnedFd> = processes_with(&mark).into_iter().filter_map(pidfd).collect();
    assert_eq!(tree.len(), 2);
    (running, tree)
}

fn has_ended(process: &OwnedFd) -> bool {
    let mut fds = [rustix::event::PollFd::new(process, rustix::event::PollFlags::IN)];
    let now = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    rustix::event::poll(&mut fds, Some(&now)).unwrap() == 1
}
