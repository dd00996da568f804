//! Building, updating, editing and tearing down an agent's context, with real MCP servers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod plane_support;

use std::sync::Arc;

use oubliette_protocol::{ErrorCode, tool::HealthStatus};
use plane_support::{PlaneFixture, alive, program, stdio_server, within_timeout};
use serde_json::{Value, json};

async fn pid_of(fixture: &PlaneFixture, tool: &str) -> i32 {
    fixture
        .call(tool, json!({}))
        .await
        .unwrap()
        .joined_text()
        .parse()
        .unwrap()
}

fn kinds(fixture: &PlaneFixture, of: &[&str]) -> Vec<&'static str> {
    fixture
        .recorder
        .kinds()
        .into_iter()
        .filter(|kind| of.contains(kind))
        .collect()
}

#[tokio::test]
async fn context_build_and_teardown() {
    let fixture = PlaneFixture::new();
    let tools = json!({"use":["one","two"],"aliases":{"say":"@one/echo"}});
    let context = fixture
        .install(
            tools,
            &[stdio_server("one", json!({})), stdio_server("two", json!({}))],
        )
        .await;
    assert_eq!(
        fixture
            .call("say", json!({"text":"hi"}))
            .await
            .unwrap()
            .joined_text(),
        "hi"
    );
    assert_eq!(
        fixture
            .call("two_echo", json!({"text":"ho"}))
            .await
            .unwrap()
            .joined_text(),
        "ho"
    );
    assert!(
        context
            .servers()
            .iter()
            .all(|row| row.status == HealthStatus::Green && row.tools > 5)
    );
    let pids = [
        pid_of(&fixture, "one_pid").await,
        pid_of(&fixture, "two_pid").await,
    ];
    assert!(pids.into_iter().all(alive));

    let built = fixture.recorder.kinds();
    assert_eq!(built.first(), Some(&"build_started"));
    let finished = built.iter().position(|kind| *kind == "build_finished").unwrap();
    assert_eq!(
        built[..finished]
            .iter()
            .filter(|kind| **kind == "tool_server_ready")
            .count(),
        2
    );
    let registered = fixture.recorder.of("tool_registered");
    assert_eq!(registered.len(), context.registry().entries().len());
    assert!(
        registered
            .iter()
            .any(|e| e["tool"] == "say" && e["canonical"] == "@one/echo" && e["allowed"] == true)
    );

    let old = fixture.plane.uninstall().unwrap();
    within_timeout("the teardown", old.teardown()).await;
    assert!(!pids.into_iter().any(alive), "whole trees are gone");
    assert!(old.registry().entries().is_empty() && old.servers().is_empty());
    assert_eq!(
        kinds(
            &fixture,
            &[
                "teardown_started",
                "tool_server_stopped",
                "registry_cleared",
                "teardown_finished"
            ]
        ),
        [
            "teardown_started",
            "tool_server_stopped",
            "tool_server_stopped",
            "registry_cleared",
            "teardown_finished"
        ]
    );
    old.teardown().await;
    assert_eq!(fixture.recorder.of("teardown_started").len(), 1, "once is enough");
}

#[tokio::test]
async fn mcp_server_fails_to_start() {
    let fixture = PlaneFixture::new();
    let broken = stdio_server(
        "broken",
        json!({"env":{"TOOL_SERVER_SAYS":"no disk","TOOL_SERVER_EXITS":"1"},
        "restart":{"maxAttempts":0}}),
    );
    let tools = json!({"use":["broken","good"],"aliases":{"b":"@broken/echo"}});
    fixture
        .install(tools, &[broken, stdio_server("good", json!({}))])
        .await;
    assert_eq!(
        fixture
            .call("good_echo", json!({"text":"on"}))
            .await
            .unwrap()
            .joined_text(),
        "on"
    );
    let row = fixture
        .plane
        .list()
        .servers
        .into_iter()
        .find(|row| row.id.as_str() == "broken")
        .unwrap();
    assert_eq!(row.status, HealthStatus::Red);
    assert!(row.error.unwrap().contains("no disk"));
    let alias = fixture.row("b");
    assert!(!alias.available && alias.reason.to_string().contains("broken is down"));
    for tool in ["b", "broken_echo", "@broken/echo"] {
        let error = fixture.call(tool, json!({})).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::Unavailable, "{}", error.message);
    }
    assert!(
        fixture.recorder.of("tool_server_failed")[0]["stderr"]
            .as_str()
            .unwrap()
            .contains("no disk")
    );
    let calls = fixture.recorder.of("tool_call");
    assert_eq!(
        calls.iter().filter(|call| call["ok"] == false).count(),
        3,
        "allowed, but out of reach"
    );
}

#[tokio::test]
async fn mcp_capabilities_discovered_and_tool_metadata_exposed() {
    let fixture = PlaneFixture::new();
    fixture
        .install(
            json!({"use":["srv"],"aliases":{"say":"@srv/echo"}}),
            &[stdio_server("srv", json!({}))],
        )
        .await;
    let shown = fixture
        .plane
        .agent_tools()
        .into_iter()
        .find(|tool| tool.name == "say")
        .unwrap();
    assert_eq!(
        (shown.description.as_str(), &shown.input_schema["type"]),
        ("The tool echo.", &json!("object"))
    );
    let row = fixture.row("say");
    assert_eq!(
        (row.description, row.server.as_deref()),
        (shown.description, Some("srv"))
    );
    assert_eq!(
        fixture.plane.list().servers[0].tools,
        fixture.plane.agent_tools().len()
    );
}

#[tokio::test]
async fn tools_list_changed_is_followed() {
    let fixture = PlaneFixture::new();
    fixture
        .install(
            json!({"use":["srv"],"aliases":{"g":"@srv/grown0"}}),
            &[stdio_server("srv", json!({}))],
        )
        .await;
    assert!(!fixture.row("g").available);
    let mut changes = fixture.plane.changes();
    fixture.call("srv_grow", json!({})).await.unwrap();
    within_timeout("the grown tool", async {
        while !fixture.listed().contains(&"g".to_owned()) {
            changes.changed().await.unwrap();
        }
    })
    .await;
    assert!(
        fixture
            .recorder
            .of("tool_registered")
            .iter()
            .any(|e| e["canonical"] == "@srv/grown0")
    );
}

#[tokio::test]
async fn a_crashed_server_comes_back_with_its_tools() {
    let fixture = PlaneFixture::new();
    fixture
        .install(json!({"use":["srv"]}), &[stdio_server("srv", json!({}))])
        .await;
    let before = pid_of(&fixture, "srv_pid").await;
    let crashed = fixture.call("srv_crash", json!({})).await;
    assert!(crashed.is_err());
    // A call meanwhile waits for the restart.
    let after = pid_of(&fixture, "srv_pid").await;
    assert_ne!(before, after);
    within_timeout("the list", async {
        let mut changes = fixture.plane.changes();
        while !fixture.listed().contains(&"srv_echo".to_owned()) {
            changes.changed().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn one_server_is_restarted_or_reloaded_alone() {
    let fixture = PlaneFixture::new();
    let reader =
        json!({"id":"reader","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":["a"]}});
    let tools = json!({"use":["one","two","reader"]});
    let context = fixture
        .install(
            tools,
            &[
                stdio_server("one", json!({})),
                stdio_server("two", json!({})),
                reader.clone(),
            ],
        )
        .await;
    let (one, two) = (
        pid_of(&fixture, "one_pid").await,
        pid_of(&fixture, "two_pid").await,
    );

    context.restart_server(&"one".parse().unwrap()).await.unwrap();
    let again = pid_of(&fixture, "one_pid").await;
    assert!(again != one && !alive(one) && pid_of(&fixture, "two_pid").await == two);
    assert_eq!(
        context
            .restart_server(&"none".parse().unwrap())
            .await
            .unwrap_err()
            .code,
        ErrorCode::NotFound
    );
    assert_eq!(
        context
            .restart_server(&"reader".parse().unwrap())
            .await
            .unwrap_err()
            .code,
        ErrorCode::InvalidArgument
    );

    let tools = json!({"use":["one","two","reader"]});
    let changed = stdio_server("one", json!({"env":{"MARK":"changed"}}));
    let catalog = [changed.clone(), stdio_server("two", json!({})), reader.clone()];
    fixture.edit(&context, tools.clone(), &catalog).await.unwrap();
    let env = fixture
        .call("one_env", json!({"name":"MARK"}))
        .await
        .unwrap()
        .joined_text();
    assert!(env.contains("changed"), "{env}");
    assert!(!alive(again) && pid_of(&fixture, "two_pid").await == two);

    fixture.file("b/f", "now");
    assert!(
        fixture
            .call("reader_fs_read", json!({"path":"b/f"}))
            .await
            .is_err()
    );
    let mut wider = reader;
    wider["builtinPolicy"]["allowedPaths"] = json!(["b"]);
    let catalog = [changed.clone(), stdio_server("two", json!({})), wider.clone()];
    fixture.edit(&context, tools.clone(), &catalog).await.unwrap();
    assert_eq!(
        fixture
            .call("reader_fs_read", json!({"path":"b/f"}))
            .await
            .unwrap()
            .joined_text(),
        "now"
    );

    // An edit that asks for more of the host than is allowed is refused, and no server is stopped.
    let greedy = [changed, stdio_server("two", json!({"isolation":"host"})), wider];
    let refused = fixture.edit(&context, tools, &greedy).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::PermissionDenied);
    assert_eq!(pid_of(&fixture, "two_pid").await, two);
}

#[tokio::test]
async fn who_calls_a_tool_of_a_changed_server_waits_for_its_successor() {
    let fixture = PlaneFixture::new();
    let tools = json!({"use":["one"]});
    let context = fixture
        .install(tools.clone(), &[stdio_server("one", json!({}))])
        .await;
    let old = pid_of(&fixture, "one_pid").await;
    let before = fixture.listed();

    // The replacement starts only once the file `go` exists.
    let args = ["-c", "until [ -e go ]; do sleep 0.02; done; exec \"$0\""].map(Value::from);
    let args = args.into_iter().chain([json!(program())]).collect::<Value>();
    let changed = [stdio_server("one", json!({"command":"/bin/sh","args":args}))];
    let edit = fixture.edit(&context, tools.clone(), &changed);
    let (edited, called, ()) = tokio::join!(edit, pid_of(&fixture, "one_pid"), async {
        let stopped = |event: &Value| event["kind"] == "tool_server_stopped";
        fixture.recorder.wait("the end of the old one", stopped).await;
        assert!(!alive(old), "one of them at a time");
        assert_eq!(fixture.listed(), before, "the agent's list does not blink");
        assert_eq!(fixture.recorder.of("tool_server_ready").len(), 1);
        fixture.file("go", "");
    });
    edited.unwrap();
    assert!(called != old && alive(called));

    // A replacement that fails to start fails the waiting calls, with the reason.
    let broken = [stdio_server(
        "one",
        json!({"command":"/bin/false","restart":{"maxAttempts":0}}),
    )];
    let (edited, called) = tokio::join!(
        fixture.edit(&context, tools, &broken),
        fixture.call("one_pid", json!({}))
    );
    edited.unwrap();
    let error = called.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("one"), "{}", error.message);
    assert!(!fixture.row("one_pid").available);
}

#[tokio::test]
async fn edited_rules_apply_at_once_and_servers_keep_running() {
    let fixture = PlaneFixture::new();
    let catalog = [stdio_server("one", json!({})), stdio_server("two", json!({}))];
    let context = fixture.install(json!({"use":["one","two"]}), &catalog).await;
    let (one, two) = (
        pid_of(&fixture, "one_pid").await,
        pid_of(&fixture, "two_pid").await,
    );
    let mut changes = fixture.plane.changes();
    changes.mark_unchanged();

    let narrower = json!({"use":["one","two"],"allowed":["who","@two/*"],"aliases":{"who":"@one/pid"}});
    fixture.edit(&context, narrower, &catalog).await.unwrap();
    within_timeout("the plane's word", changes.changed())
        .await
        .unwrap();
    let refused = fixture.call("one_echo", json!({"text":"x"})).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::NotAllowed);
    assert!(
        fixture.listed().contains(&"who".to_owned()) && !fixture.listed().contains(&"one_echo".to_owned())
    );
    assert_eq!(
        (pid_of(&fixture, "who").await, pid_of(&fixture, "two_pid").await),
        (one, two),
        "an edit of the rules touches no server"
    );

    // A base tool is not from the catalog, and can be denied all the same.
    changes.mark_unchanged();
    let tools = json!({"use":["one","two"],"denied":["session_message"]});
    fixture.edit(&context, tools, &catalog).await.unwrap();
    within_timeout("the plane's word", changes.changed())
        .await
        .unwrap();
    assert!(
        fixture
            .row("session_message")
            .reason
            .to_string()
            .contains("denied")
    );
}

#[tokio::test]
async fn an_edited_use_starts_and_stops_only_what_it_names() {
    let fixture = PlaneFixture::new();
    let catalog = [
        stdio_server("one", json!({})),
        stdio_server("two", json!({})),
        stdio_server("three", json!({})),
    ];
    let context = fixture.install(json!({"use":["one","two"]}), &catalog).await;
    let (one, two) = (
        pid_of(&fixture, "one_pid").await,
        pid_of(&fixture, "two_pid").await,
    );

    fixture
        .edit(&context, json!({"use":["three","two"]}), &catalog)
        .await
        .unwrap();
    assert!(!alive(one) && alive(two) && pid_of(&fixture, "two_pid").await == two);
    let three = pid_of(&fixture, "three_pid").await;
    let gone = fixture.call("one_pid", json!({})).await.unwrap_err();
    assert_eq!(gone.code, ErrorCode::NotAllowed, "{gone}");
    let order: Vec<String> = context.servers().iter().map(|row| row.id.to_string()).collect();
    assert_eq!(order, ["three", "two"]);

    // Of several edits made while servers are still starting, the last one wins.
    let edits = [
        json!({"use":["one"]}),
        json!({"use":["two"]}),
        json!({"use":["two","one"]}),
    ];
    for result in futures::future::join_all(edits.map(|tools| fixture.edit(&context, tools, &catalog))).await
    {
        result.unwrap();
    }
    assert!(!alive(three));
    let order: Vec<String> = context.servers().iter().map(|row| row.id.to_string()).collect();
    assert_eq!(order, ["two", "one"]);
    pid_of(&fixture, "one_pid").await;
    context.teardown().await;
    fixture
        .edit(&context, json!({"use":["one"]}), &catalog)
        .await
        .unwrap();
    assert!(
        context.servers().is_empty(),
        "nothing starts in a context that was torn down"
    );
}

#[tokio::test]
async fn a_bad_agent_is_refused_before_anything_is_started() {
    let fixture = PlaneFixture::new();
    let greedy = stdio_server("srv", json!({"isolation":"host"}));
    let refused = fixture
        .build(json!({"use":["srv"]}), &[greedy])
        .await
        .err()
        .unwrap();
    assert_eq!(refused.code, ErrorCode::PermissionDenied);
    let missing = fixture
        .build(json!({"use":["srv","gone"]}), &[stdio_server("srv", json!({}))])
        .await
        .err()
        .unwrap();
    assert!(
        missing.message.contains("gone") && missing.message.contains("writer"),
        "{}",
        missing.message
    );
    let agent = json!({"name":"W","prompt":"p","sandbox":{"network":"host"}});
    assert!(fixture.build_agent(agent, &[]).await.is_err());
    assert!(fixture.recorder.all().is_empty());
}

#[tokio::test]
async fn values_read_from_the_environment_are_never_shown() {
    let mut fixture = PlaneFixture::new();
    fixture.env = [("API_KEY".to_owned(), "hunter2-and-more".to_owned())].into();
    fixture.trust.env = vec!["API_KEY".into()];
    let leaky = stdio_server(
        "leaky",
        json!({"env":{"KEY":"${env:API_KEY}","TOOL_SERVER_SAYS":"key ${env:API_KEY}",
        "TOOL_SERVER_EXITS":"1"},"restart":{"maxAttempts":0}}),
    );
    let good = stdio_server("good", json!({"env":{"KEY":"${env:API_KEY}"}}));
    fixture
        .install(json!({"use":["leaky","good"]}), &[leaky, good])
        .await;
    let env = fixture
        .call("good_env", json!({"name":"KEY"}))
        .await
        .unwrap()
        .joined_text();
    assert!(
        env.contains("hunter2-and-more"),
        "the server itself has it: {env}"
    );
    let shown = json!([fixture.recorder.all(), fixture.plane.list()]).to_string();
    assert!(!shown.contains("hunter2"), "{shown}");
}

#[tokio::test]
async fn in_the_real_sandbox_a_server_has_the_workspace_and_its_own_env() {
    let fixture = PlaneFixture::with_local_sandbox().await;
    fixture.file("f", "seen");
    let mut entry = stdio_server("srv", json!({"env":{"MINE":"yes"}}));
    entry["command"] = Value::from(oubliette_sandbox::spec::CLIENT);
    fixture.install(json!({"use":["srv"]}), &[entry]).await;
    let list = fixture.plane.list();
    assert_eq!(list.servers[0].status, HealthStatus::Green, "{:?}", list.servers);
    let read = fixture
        .call("srv_read", json!({"path":"/workspace/f"}))
        .await
        .unwrap();
    assert!(read.joined_text().contains("seen"), "{read:?}");
    assert!(
        fixture
            .call("srv_env", json!({"name":"MINE"}))
            .await
            .unwrap()
            .joined_text()
            .contains("yes")
    );
}

#[tokio::test]
async fn many_switches_leave_nothing_behind() {
    let fixture = PlaneFixture::new();
    let mut last = None;
    for n in 0..20 {
        let context = fixture
            .install(
                json!({"use":["a","b"]}),
                &[stdio_server("a", json!({})), stdio_server("b", json!({}))],
            )
            .await;
        let pids = [pid_of(&fixture, "a_pid").await, pid_of(&fixture, "b_pid").await];
        let old = fixture.plane.uninstall().unwrap();
        assert!(Arc::ptr_eq(&old, &context));
        within_timeout("the teardown", old.teardown()).await;
        assert!(!pids.into_iter().any(alive), "switch {n}");
        last = Some(Arc::downgrade(&context));
        drop((old, context));
    }
    assert_eq!(
        last.unwrap().strong_count(),
        0,
        "a torn down context is forgotten"
    );
}
