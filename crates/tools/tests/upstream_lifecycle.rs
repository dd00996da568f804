//! "MCP Server Lifecycle" and "Tool Discovery" of the tool-orchestration specification, with real processes.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod upstream_support;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use oubliette_protocol::{ErrorCode, debug::DebugBody, tool::HealthStatus};
use oubliette_sandbox::{IsolationLevel, LocalDriver, LocalDriverConfig, SandboxDriver};
use oubliette_tools::{CallContext, TrustedResources, upstream::Upstream};
use serde_json::json;
use upstream_support::{
    UpstreamFixture, call_text, object, raw, remote_definition, soon, stdio_definition, tool_server_path,
};

use HealthStatus::{Green, Red, Yellow};

/// Whether the process runs; a zombie does not.
fn is_running(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name in brackets.
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with('Z') && !rest.starts_with('X'))
}

async fn wait_until_gone(pid: &str) {
    soon(&format!("the end of process {pid}"), async {
        while is_running(pid) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

// Single-threaded, so that the start has not begun when the first status is read.
#[tokio::test]
async fn stdio_mcp_server_spawned() {
    let mut fixture = UpstreamFixture::new(stdio_definition(
        json!({"env":{"OWN":"own","TOKEN":"${env:HOST_TOKEN}"}}),
    ));
    fixture.spec.setup.trust = Arc::new(TrustedResources {
        env: vec!["HOST_TOKEN".into()],
        ..TrustedResources::default()
    });
    fixture.spec.setup.env = Arc::new(HashMap::from([("HOST_TOKEN".to_owned(), "hunter22".to_owned())]));
    let upstream = Upstream::start(fixture.spec.clone());
    let row = upstream.status();
    assert_eq!((row.status, row.last_check), (Yellow, None), "starting");
    soon("ready", upstream.wait_first_start()).await;

    let row = upstream.status();
    assert!(row.last_check.is_some(), "it answered when it was started");
    assert_eq!(
        (row.status, row.transport.as_str(), row.error),
        (Green, "stdio", None)
    );
    assert_eq!(row.tools, upstream.tools().len());
    assert_eq!(call_text(&upstream, "echo", json!({"text":"hi"})).await, "hi");
    assert_eq!(call_text(&upstream, "env", json!({"name":"OWN"})).await, "own");
    assert_eq!(
        call_text(&upstream, "env", json!({"name":"TOKEN"})).await,
        "hunter22"
    );
    assert_eq!(
        call_text(&upstream, "env", json!({"name":"CARGO_MANIFEST_DIR"})).await,
        "(unset)"
    );
    let workspace = fixture.workspace.path().canonicalize().unwrap();
    assert_eq!(
        Path::new(&call_text(&upstream, "cwd", json!({})).await),
        workspace
    );
    assert_eq!(
        fixture.recorder.kinds(),
        ["tool_server_starting", "tool_server_ready", "health_changed"]
    );

    let pid = call_text(&upstream, "pid", json!({})).await;
    upstream.stop("the test is over").await;
    assert!(!is_running(&pid), "nothing is left when stop returns");
    let events = fixture.recorder.events();
    assert!(events.iter().any(|event| matches!(event,
        DebugBody::ToolServerStopped { server, reason } if server == "srv" && reason == "the test is over")));
    let error = upstream
        .call("echo", object(json!({})), &CallContext::default())
        .await
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(upstream.restart().await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn stdio_mcp_server_spawned_in_its_own_sandbox() {
    let run_dir = tempfile::tempdir().unwrap();
    let config = LocalDriverConfig {
        client: tool_server_path(),
        minimum: IsolationLevel::Landlock,
        bwrap: None,
        run_dir: run_dir.path().to_path_buf(),
    };
    let local = LocalDriver::new(config).await.unwrap();
    let report = local.probe().await;
    if !report.ok {
        eprintln!("no sandbox here: {report:?}");
        return;
    }
    let programs: PathBuf = tool_server_path().parent().unwrap().to_path_buf();
    let mut fixture = UpstreamFixture::new(stdio_definition(json!({"read_only":[programs]})));
    fixture.spec.setup.trust = Arc::new(TrustedResources {
        read_only: vec![programs],
        ..TrustedResources::default()
    });
    fixture.spec.setup.sandbox = Arc::new(local);
    std::fs::write(fixture.workspace.path().join("note"), "from the workspace").unwrap();
    let upstream = fixture.start_ready().await;
    assert_eq!(
        call_text(&upstream, "read", json!({"path":"note"})).await,
        "from the workspace"
    );
    if report.level == IsolationLevel::Namespaces {
        assert_eq!(call_text(&upstream, "cwd", json!({})).await, "/workspace");
    }
    let elsewhere = call_text(&upstream, "read", json!({"path":run_dir.path().join("x")})).await;
    assert!(
        elsewhere.contains("No such file") || elsewhere.contains("denied"),
        "{elsewhere}"
    );

    // A crash inside the sandbox is reported with its exit code, and the server is restarted.
    let lost = upstream
        .call("crash", object(json!({"code":7})), &CallContext::default())
        .await
        .unwrap_err();
    assert!(
        lost.message.contains("outcome unknown") && lost.message.contains("exit code 7"),
        "{}",
        lost.message
    );
    assert_eq!(call_text(&upstream, "echo", json!({"text":"back"})).await, "back");
    upstream.stop("done").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stdio_host_isolation_and_paths_need_trust() {
    for (more, word) in [
        (json!({"isolation":"host"}), "host_tools"),
        (json!({"network":"host"}), "host_network"),
        (json!({"read_only":["/usr"]}), "read_only"),
        (json!({"args":["${env:SECRET}"]}), "SECRET"),
        (json!({"network":"proxy"}), "no proxy"),
    ] {
        let mut fixture = UpstreamFixture::new(stdio_definition(more.clone()));
        fixture.spec.setup.trust = Arc::default();
        let upstream = fixture.start().await;
        let row = upstream.status();
        assert_eq!(
            (row.status, row.next_retry),
            (Red, None),
            "{more}: no start would be better"
        );
        assert!(row.error.unwrap().contains(word), "{more}");
    }
    let fixture = UpstreamFixture::new(stdio_definition(json!({"isolation":"host"})));
    assert_eq!(
        call_text(&*fixture.start_ready().await, "echo", json!({"text":"x"})).await,
        "x"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_server_fails_to_start() {
    // A server that exits, with a reason and a secret on stderr.
    let env = json!({"TOOL_SERVER_EXITS":"1","TOOL_SERVER_SAYS":"no licence for ${env:KEY}"});
    let mut fixture = UpstreamFixture::new(stdio_definition(json!({"env":env,"restart":{"maxAttempts":0}})));
    fixture.spec.setup.trust = Arc::new(TrustedResources {
        env: vec!["KEY".into()],
        ..TrustedResources::default()
    });
    fixture.spec.setup.env = Arc::new(HashMap::from([("KEY".to_owned(), "s3cret-key".to_owned())]));
    let upstream = fixture.start().await;
    let row = upstream.status();
    let error = row.error.unwrap();
    assert_eq!((row.status, row.next_retry, row.tools), (Red, None, 0));
    assert!(
        error.contains("exit code 3") && error.contains("no licence for"),
        "{error}"
    );
    assert!(!error.contains("s3cret-key"), "{error}");
    let failed = fixture
        .recorder
        .events()
        .into_iter()
        .find_map(|event| match event {
            DebugBody::ToolServerFailed {
                server,
                error,
                stderr,
            } => Some((server, error, stderr.unwrap())),
            _ => None,
        });
    let (server, error, stderr) = failed.unwrap();
    assert!(server == "srv" && error.contains("exit code 3") && stderr.contains("no licence for"));
    assert!(!stderr.contains("s3cret-key"));
    let refused = upstream
        .call("echo", object(json!({})), &CallContext::default())
        .await
        .unwrap_err();
    assert!(
        refused.code == ErrorCode::Unavailable && refused.message.contains("no licence"),
        "{refused}"
    );
    assert_eq!(fixture.recorder.health_changes(), [(Yellow, Red)]);

    // A program that does not exist.
    let fixture = UpstreamFixture::new(stdio_definition(json!({"command":"no-such-program-anywhere"})));
    let row = fixture.start().await.status();
    assert_eq!(row.status, Red);
    assert!(row.error.unwrap().contains("no-such-program-anywhere"));

    // A port nobody listens on.
    let fixture = UpstreamFixture::new(remote_definition(
        "tcp",
        "127.0.0.1:1",
        json!({"restart":{"maxAttempts":0}}),
    ));
    assert!(
        fixture
            .start()
            .await
            .status()
            .error
            .unwrap()
            .contains("cannot connect")
    );

    // A server that never answers.
    let address = raw::listen(|mut peer| async move { peer.drain().await }).await;
    let slow = json!({"timeouts":{"startupMs":2000},"restart":{"maxAttempts":0}});
    let fixture = UpstreamFixture::new(remote_definition("tcp", address, slow));
    let error = fixture.start().await.status().error.unwrap();
    assert!(
        error.contains("not ready within 2000 ms") && error.contains("handshake"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_is_restarted_and_only_its_open_call_fails() {
    let fixture = UpstreamFixture::new(stdio_definition(json!({})));
    let other = UpstreamFixture::new(stdio_definition(json!({"id":"other"})));
    let (upstream, bystander) = (fixture.start_ready().await, other.start_ready().await);
    let unharmed = {
        let bystander = bystander.clone();
        tokio::spawn(async move { call_text(&bystander, "sleep", json!({"ms":300})).await })
    };
    let pid = call_text(&upstream, "pid", json!({})).await;
    let ctx = CallContext::default();
    let mut open = std::pin::pin!(upstream.call("sleep", object(json!({"ms":60_000})), &ctx));
    // Requests are written in order, so this call has reached the server once the next one is answered.
    assert!(futures::poll!(&mut open).is_pending());
    call_text(&upstream, "echo", json!({"text":"x"})).await;
    let killed = std::process::Command::new("kill")
        .args(["-9", &pid])
        .status()
        .unwrap();
    assert!(killed.success());

    let error = soon("the open call", open).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(
        error.message.contains("outcome unknown") && error.message.contains("signal 9"),
        "{}",
        error.message
    );
    // A call during the restart waits for it.
    assert_eq!(
        call_text(&upstream, "echo", json!({"text":"again"})).await,
        "again"
    );
    assert_ne!(call_text(&upstream, "pid", json!({})).await, pid);
    fixture.recorder.wait("health_changed", 4).await;
    assert_eq!(
        fixture.recorder.health_changes(),
        [(Yellow, Green), (Green, Red), (Red, Yellow), (Yellow, Green)]
    );
    assert_eq!(fixture.recorder.count("tool_server_failed"), 1);
    assert_eq!(unharmed.await.unwrap(), "slept");
    assert_eq!(other.recorder.health_changes(), [(Yellow, Green)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_restarts_left_stays_down_until_it_is_restarted() {
    // Completes one handshake, then closes every connection until `well` is set.
    let well = Arc::new(AtomicBool::new(false));
    let is_well = well.clone();
    let address = raw::listen(move |mut peer| {
        let is_well = is_well.clone();
        async move {
            if peer.number == 0 || is_well.load(Ordering::SeqCst) {
                peer.complete_startup(raw::tools(&["a"])).await;
                if peer.number > 0 {
                    peer.drain().await;
                }
            }
        }
    })
    .await;
    let fixture = UpstreamFixture::new(remote_definition(
        "tcp",
        address,
        json!({"restart":{"maxAttempts":2}}),
    ));
    let upstream = fixture.start().await;
    fixture.recorder.wait("tool_server_failed", 3).await;
    fixture.recorder.wait("health_changed", 6).await;
    let row = soon("red", async {
        loop {
            let row = upstream.status();
            if row.status == Red {
                return row;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(
        (row.status, row.next_retry, row.tools),
        (Red, None, 1),
        "its tools stay known"
    );
    assert!(!upstream.is_up());
    let refused = upstream
        .call("a", object(json!({})), &CallContext::default())
        .await
        .unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unavailable);
    assert_eq!(
        fixture.recorder.count("tool_server_starting"),
        3,
        "the start and two restarts"
    );

    assert!(soon("a vain restart", upstream.restart()).await.is_err());
    well.store(true, Ordering::SeqCst);
    soon("a restart", upstream.restart()).await.unwrap();
    assert!(upstream.is_up());
    assert_eq!(upstream.status().status, Green);
    upstream.stop("done").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn max_attempts_zero_means_no_restart() {
    let fixture = UpstreamFixture::new(stdio_definition(json!({"restart":{"maxAttempts":0}})));
    let upstream = fixture.start_ready().await;
    let lost = upstream
        .call("crash", object(json!({"code":1})), &CallContext::default())
        .await
        .unwrap_err();
    assert!(lost.message.contains("outcome unknown"));
    fixture.recorder.wait("tool_server_failed", 1).await;
    let refused = upstream
        .call("echo", object(json!({})), &CallContext::default())
        .await
        .unwrap_err();
    assert!(refused.message.contains("down"), "{}", refused.message);
    assert_eq!(upstream.status().next_retry, None);
    assert_eq!(fixture.recorder.count("tool_server_starting"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_health_check() {
    // The first connection answers one ping, then none; the next answers all.
    let address = raw::listen(|mut peer| async move {
        peer.complete_startup(raw::tools(&["a"])).await;
        let mut answered = 0;
        while let Some(request) = peer.next().await {
            match request["method"].as_str() {
                Some("ping") if peer.number > 0 || answered == 0 => {
                    answered += 1;
                    peer.answer(&request, json!({})).await;
                }
                _ => {}
            }
        }
    })
    .await;
    let check = json!({"healthCheck":{"intervalMs":30,"timeoutMs":100,"failures":2}});
    let fixture = UpstreamFixture::new(remote_definition("tcp", address, check));
    // Not `start_ready`: the status may have left green already.
    let upstream = fixture.start().await;
    fixture.recorder.wait("health_changed", 3).await;
    assert!(
        upstream.status().last_check.is_some(),
        "a check that found it down is one"
    );
    fixture.recorder.wait("health_changed", 5).await;
    let lights = fixture.recorder.health_changes();
    assert_eq!(
        lights[..5],
        [
            (Yellow, Green),
            (Green, Yellow),
            (Yellow, Red),
            (Red, Yellow),
            (Yellow, Green)
        ],
        "a miss is yellow, two are red, then it is brought back"
    );
    let failed = fixture
        .recorder
        .events()
        .into_iter()
        .find_map(|event| match event {
            DebugBody::ToolServerFailed { error, .. } => Some(error),
            _ => None,
        });
    assert!(failed.unwrap().contains("2 times in a row"));
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_health_check_of_servers_without_ping() {
    #[derive(Clone, Copy)]
    enum PingSupport {
        Refused,
        Ignored,
    }
    for kind in [PingSupport::Refused, PingSupport::Ignored] {
        let (sender, mut checks) = tokio::sync::mpsc::unbounded_channel();
        let address = raw::listen(move |mut peer| {
            let sender = sender.clone();
            async move {
                peer.complete_startup(raw::tools(&["a"])).await;
                while let Some(request) = peer.next().await {
                    match (kind, request["method"].as_str()) {
                        (PingSupport::Refused, Some("ping")) => {
                            peer.refuse(&request, -32601, "no such method").await
                        }
                        (PingSupport::Ignored, Some("ping")) => continue,
                        (_, Some("tools/list")) => peer.answer(&request, json!({"tools":[]})).await,
                        _ => continue,
                    }
                    let _ = sender.send(());
                }
            }
        })
        .await;
        let check = json!({"healthCheck":{"intervalMs":20,"timeoutMs":3000,"failures":1}});
        let fixture = UpstreamFixture::new(remote_definition("tcp", address, check));
        let upstream = fixture.start_ready().await;
        for _ in 0..4 {
            soon("a check", checks.recv()).await.unwrap();
        }
        let row = upstream.status();
        assert_eq!(row.status, Green);
        assert!(row.last_check > Some(row.since), "three checks are over: {row:?}");
        assert_eq!(fixture.recorder.health_changes(), [(Yellow, Green)]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_capabilities_discovered() {
    // Three tools a page: all pages are read.
    let fixture = UpstreamFixture::new(stdio_definition(json!({"env":{"TOOL_SERVER_PAGE":"3"}})));
    let upstream = fixture.start_ready().await;
    let tools = upstream.tools();
    let echo = tools.iter().find(|tool| &*tool.name == "echo").unwrap();
    assert_eq!(
        (echo.description.as_str(), &*echo.input_schema),
        ("The tool echo.", &json!({"type":"object"}))
    );
    assert_eq!(tools.len(), 11);

    // The list is read again when the server reports a change.
    let mut changes = upstream.changes();
    call_text(&upstream, "grow", json!({})).await;
    soon("the changed list", async {
        while !upstream.tools().iter().any(|tool| &*tool.name == "grown0") {
            changes.changed().await.unwrap();
        }
    })
    .await;
    assert_eq!(upstream.status().tools, 12);
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_kills_the_process_tree_of_a_server_that_ignores_sigterm() {
    // Ignores the end of its stdin and SIGTERM, and has a child in another session (setsid).
    let script = "trap '' TERM HUP; setsid sleep 1000 & echo $! >child; echo $$ >own; \
                  while :; do sleep 1000; done";
    let fixture = UpstreamFixture::new(stdio_definition(
        json!({"command":"sh","args":["-c",script],"restart":{"maxAttempts":0}}),
    ));
    let upstream = Upstream::start(fixture.spec.clone());
    let read = |name: &str| std::fs::read_to_string(fixture.workspace.path().join(name)).unwrap_or_default();
    soon("the script", async {
        while !read("own").ends_with('\n') || !read("child").ends_with('\n') {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let (own, child) = (read("own").trim().to_owned(), read("child").trim().to_owned());
    assert!(is_running(&own) && is_running(&child));
    soon("the stop", upstream.stop("enough")).await;
    wait_until_gone(&own).await;
    wait_until_gone(&child).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_a_server_ends_it() {
    let fixture = UpstreamFixture::new(stdio_definition(json!({})));
    let upstream = fixture.start_ready().await;
    let pid = call_text(&upstream, "pid", json!({})).await;
    drop(upstream);
    wait_until_gone(&pid).await;
    fixture.recorder.wait("tool_server_stopped", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_on_request_gives_a_new_process() {
    let fixture = UpstreamFixture::new(stdio_definition(json!({})));
    let upstream = fixture.start_ready().await;
    let pid = call_text(&upstream, "pid", json!({})).await;
    soon("the restart", upstream.restart()).await.unwrap();
    assert_ne!(call_text(&upstream, "pid", json!({})).await, pid);
    assert!(!is_running(&pid));
    assert_eq!(
        fixture.recorder.health_changes(),
        [(Yellow, Green), (Green, Yellow), (Yellow, Green)],
        "no crash, no red"
    );
}
