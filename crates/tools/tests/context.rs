//! Building, following, reloading and tearing down a context, with real MCP servers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod plane_support;

use std::sync::Arc;

use oubliette_protocol::{ErrorCode, tool::Light};
use plane_support::{World, program, server, soon};
use serde_json::{Value, json};

async fn pid_of(world: &World, tool: &str) -> i32 {
    world
        .call(tool, json!({}))
        .await
        .unwrap()
        .joined_text()
        .parse()
        .unwrap()
}

fn alive(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn kinds(world: &World, of: &[&str]) -> Vec<&'static str> {
    world
        .recorder
        .kinds()
        .into_iter()
        .filter(|kind| of.contains(kind))
        .collect()
}

#[tokio::test]
async fn context_build_and_teardown() {
    let world = World::new();
    let tools = json!({"use":["one","two"],"aliases":{"say":"@one/echo"}});
    let context = world
        .install(tools, &[server("one", json!({})), server("two", json!({}))])
        .await;
    assert_eq!(
        world
            .call("say", json!({"text":"hi"}))
            .await
            .unwrap()
            .joined_text(),
        "hi"
    );
    assert_eq!(
        world
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
            .all(|row| row.status == Light::Green && row.tools > 5)
    );
    let pids = [pid_of(&world, "one_pid").await, pid_of(&world, "two_pid").await];
    assert!(pids.into_iter().all(alive));

    let built = world.recorder.kinds();
    assert_eq!(built.first(), Some(&"build_started"));
    let finished = built.iter().position(|kind| *kind == "build_finished").unwrap();
    assert_eq!(
        built[..finished]
            .iter()
            .filter(|kind| **kind == "tool_server_ready")
            .count(),
        2
    );
    let registered = world.recorder.of("tool_registered");
    assert_eq!(registered.len(), context.registry().entries().len());
    assert!(
        registered
            .iter()
            .any(|e| e["tool"] == "say" && e["canonical"] == "@one/echo" && e["allowed"] == true)
    );

    let old = world.plane.take().unwrap();
    soon("the teardown", old.teardown()).await;
    assert!(!pids.into_iter().any(alive), "whole trees are gone");
    assert!(old.registry().entries().is_empty() && old.servers().is_empty());
    assert_eq!(
        kinds(
            &world,
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
    assert_eq!(world.recorder.of("teardown_started").len(), 1, "once is enough");
}

#[tokio::test]
async fn mcp_server_fails_to_start() {
    let world = World::new();
    let broken = server(
        "broken",
        json!({"env":{"TOOL_SERVER_SAYS":"no disk","TOOL_SERVER_EXITS":"1"},
        "restart":{"maxAttempts":0}}),
    );
    let tools = json!({"use":["broken","good"],"aliases":{"b":"@broken/echo"}});
    world.install(tools, &[broken, server("good", json!({}))]).await;
    assert_eq!(
        world
            .call("good_echo", json!({"text":"on"}))
            .await
            .unwrap()
            .joined_text(),
        "on"
    );
    let row = world
        .plane
        .list()
        .servers
        .into_iter()
        .find(|row| row.id.as_str() == "broken")
        .unwrap();
    assert_eq!(row.status, Light::Red);
    assert!(row.error.unwrap().contains("no disk"));
    let alias = world.row("b");
    assert!(!alias.available && alias.reason.unwrap().contains("broken is down"));
    for tool in ["b", "broken_echo", "@broken/echo"] {
        let error = world.call(tool, json!({})).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::Unavailable, "{}", error.message);
    }
    assert!(
        world.recorder.of("tool_server_failed")[0]["stderr"]
            .as_str()
            .unwrap()
            .contains("no disk")
    );
    let calls = world.recorder.of("tool_call");
    assert_eq!(
        calls.iter().filter(|call| call["ok"] == false).count(),
        3,
        "allowed, but out of reach"
    );
}

#[tokio::test]
async fn mcp_capabilities_discovered_and_tool_metadata_exposed() {
    let world = World::new();
    world
        .install(
            json!({"use":["srv"],"aliases":{"say":"@srv/echo"}}),
            &[server("srv", json!({}))],
        )
        .await;
    let shown = world
        .plane
        .agent_tools()
        .into_iter()
        .find(|tool| tool.name == "say")
        .unwrap();
    assert_eq!(
        (shown.description.as_str(), &shown.input_schema["type"]),
        ("The tool echo.", &json!("object"))
    );
    let row = world.row("say");
    assert_eq!(
        (row.description, row.server.as_deref()),
        (shown.description, Some("srv"))
    );
    assert_eq!(
        world.plane.list().servers[0].tools,
        world.plane.agent_tools().len()
    );
}

#[tokio::test]
async fn tools_list_changed_is_followed() {
    let world = World::new();
    world
        .install(
            json!({"use":["srv"],"aliases":{"g":"@srv/grown0"}}),
            &[server("srv", json!({}))],
        )
        .await;
    assert!(!world.row("g").available);
    let mut changes = world.plane.changes();
    world.call("srv_grow", json!({})).await.unwrap();
    soon("the grown tool", async {
        while !world.listed().contains(&"g".to_owned()) {
            changes.changed().await.unwrap();
        }
    })
    .await;
    assert!(
        world
            .recorder
            .of("tool_registered")
            .iter()
            .any(|e| e["canonical"] == "@srv/grown0")
    );
}

#[tokio::test]
async fn a_crashed_server_comes_back_with_its_tools() {
    let world = World::new();
    world
        .install(json!({"use":["srv"]}), &[server("srv", json!({}))])
        .await;
    let before = pid_of(&world, "srv_pid").await;
    let crashed = world.call("srv_crash", json!({})).await;
    assert!(crashed.is_err());
    // A call meanwhile waits for the restart.
    let after = pid_of(&world, "srv_pid").await;
    assert_ne!(before, after);
    soon("the list", async {
        let mut changes = world.plane.changes();
        while !world.listed().contains(&"srv_echo".to_owned()) {
            changes.changed().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn one_server_is_restarted_or_reloaded_alone() {
    let world = World::new();
    let reader =
        json!({"id":"reader","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":["a"]}});
    let tools = json!({"use":["one","two","reader"]});
    let context = world
        .install(
            tools,
            &[server("one", json!({})), server("two", json!({})), reader.clone()],
        )
        .await;
    let (one, two) = (pid_of(&world, "one_pid").await, pid_of(&world, "two_pid").await);

    context.restart_server(&"one".parse().unwrap()).await.unwrap();
    let again = pid_of(&world, "one_pid").await;
    assert!(again != one && !alive(one) && pid_of(&world, "two_pid").await == two);
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
    let changed = server("one", json!({"env":{"MARK":"changed"}}));
    let catalog = [changed.clone(), server("two", json!({})), reader.clone()];
    world.edit(&context, tools.clone(), &catalog).await.unwrap();
    let env = world
        .call("one_env", json!({"name":"MARK"}))
        .await
        .unwrap()
        .joined_text();
    assert!(env.contains("changed"), "{env}");
    assert!(!alive(again) && pid_of(&world, "two_pid").await == two);

    world.file("b/f", "now");
    assert!(world.call("reader_fs_read", json!({"path":"b/f"})).await.is_err());
    let mut wider = reader;
    wider["builtinPolicy"]["allowedPaths"] = json!(["b"]);
    let catalog = [changed.clone(), server("two", json!({})), wider.clone()];
    world.edit(&context, tools.clone(), &catalog).await.unwrap();
    assert_eq!(
        world
            .call("reader_fs_read", json!({"path":"b/f"}))
            .await
            .unwrap()
            .joined_text(),
        "now"
    );

    // A change that asks for what it may not have is refused, and nothing is stopped.
    let greedy = [changed, server("two", json!({"isolation":"host"})), wider];
    let refused = world.edit(&context, tools, &greedy).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::PermissionDenied);
    assert_eq!(pid_of(&world, "two_pid").await, two);
}

#[tokio::test]
async fn who_calls_a_tool_of_a_changed_server_waits_for_its_successor() {
    let world = World::new();
    let tools = json!({"use":["one"]});
    let context = world.install(tools.clone(), &[server("one", json!({}))]).await;
    let old = pid_of(&world, "one_pid").await;
    let before = world.listed();

    // It begins when it is told to.
    let args = ["-c", "until [ -e go ]; do sleep 0.02; done; exec \"$0\""].map(Value::from);
    let args = args.into_iter().chain([json!(program())]).collect::<Value>();
    let changed = [server("one", json!({"command":"/bin/sh","args":args}))];
    let edit = world.edit(&context, tools.clone(), &changed);
    let (edited, called, ()) = tokio::join!(edit, pid_of(&world, "one_pid"), async {
        let stopped = |event: &Value| event["kind"] == "tool_server_stopped";
        world.recorder.wait("the end of the old one", stopped).await;
        assert!(!alive(old), "one of them at a time");
        assert_eq!(world.listed(), before, "the agent's list does not blink");
        assert_eq!(world.recorder.of("tool_server_ready").len(), 1);
        world.file("go", "");
    });
    edited.unwrap();
    assert!(called != old && alive(called));

    // One that does not come keeps nobody waiting, and says why.
    let broken = [server(
        "one",
        json!({"command":"/bin/false","restart":{"maxAttempts":0}}),
    )];
    let (edited, called) = tokio::join!(
        world.edit(&context, tools, &broken),
        world.call("one_pid", json!({}))
    );
    edited.unwrap();
    let error = called.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("one"), "{}", error.message);
    assert!(!world.row("one_pid").available);
}

#[tokio::test]
async fn an_edited_agent_is_governed_anew_and_its_servers_stay() {
    let world = World::new();
    let catalog = [server("one", json!({})), server("two", json!({}))];
    let context = world.install(json!({"use":["one","two"]}), &catalog).await;
    let (one, two) = (pid_of(&world, "one_pid").await, pid_of(&world, "two_pid").await);
    let mut changes = world.plane.changes();
    changes.mark_unchanged();

    let narrower = json!({"use":["one","two"],"allowed":["who","@two/*"],"aliases":{"who":"@one/pid"}});
    world.edit(&context, narrower, &catalog).await.unwrap();
    soon("the plane's word", changes.changed()).await.unwrap();
    let refused = world.call("one_echo", json!({"text":"x"})).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::NotAllowed);
    assert!(world.listed().contains(&"who".to_owned()) && !world.listed().contains(&"one_echo".to_owned()));
    assert_eq!(
        (pid_of(&world, "who").await, pid_of(&world, "two_pid").await),
        (one, two),
        "an edit of the rules touches no server"
    );

    // A base tool is no tool of the catalog, and denied all the same.
    changes.mark_unchanged();
    let tools = json!({"use":["one","two"],"denied":["session_message"]});
    world.edit(&context, tools, &catalog).await.unwrap();
    soon("the plane's word", changes.changed()).await.unwrap();
    assert!(world.row("session_message").reason.unwrap().contains("denied"));
}

#[tokio::test]
async fn an_edited_use_starts_and_stops_only_what_it_names() {
    let world = World::new();
    let catalog = [
        server("one", json!({})),
        server("two", json!({})),
        server("three", json!({})),
    ];
    let context = world.install(json!({"use":["one","two"]}), &catalog).await;
    let (one, two) = (pid_of(&world, "one_pid").await, pid_of(&world, "two_pid").await);

    world
        .edit(&context, json!({"use":["three","two"]}), &catalog)
        .await
        .unwrap();
    assert!(!alive(one) && alive(two) && pid_of(&world, "two_pid").await == two);
    let three = pid_of(&world, "three_pid").await;
    let gone = world.call("one_pid", json!({})).await.unwrap_err();
    assert_eq!(gone.code, ErrorCode::NotAllowed, "{gone}");
    let order: Vec<String> = context.servers().iter().map(|row| row.id.to_string()).collect();
    assert_eq!(order, ["three", "two"]);

    // What was asked for while the servers were still on their way: the last word counts.
    let edits = [
        json!({"use":["one"]}),
        json!({"use":["two"]}),
        json!({"use":["two","one"]}),
    ];
    for result in futures::future::join_all(edits.map(|tools| world.edit(&context, tools, &catalog))).await {
        result.unwrap();
    }
    assert!(!alive(three));
    let order: Vec<String> = context.servers().iter().map(|row| row.id.to_string()).collect();
    assert_eq!(order, ["two", "one"]);
    pid_of(&world, "one_pid").await;
    context.teardown().await;
    world
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
    let world = World::new();
    let greedy = server("srv", json!({"isolation":"host"}));
    let refused = world
        .build(json!({"use":["srv"]}), &[greedy])
        .await
        .err()
        .unwrap();
    assert_eq!(refused.code, ErrorCode::PermissionDenied);
    let missing = world
        .build(json!({"use":["srv","gone"]}), &[server("srv", json!({}))])
        .await
        .err()
        .unwrap();
    assert!(
        missing.message.contains("gone") && missing.message.contains("writer"),
        "{}",
        missing.message
    );
    let agent = json!({"name":"W","prompt":"p","sandbox":{"network":"host"}});
    assert!(world.build_agent(agent, &[]).await.is_err());
    assert!(world.recorder.all().is_empty());
}

#[tokio::test]
async fn what_is_read_from_the_environment_is_never_shown() {
    let mut world = World::new();
    world.env = [("API_KEY".to_owned(), "hunter2-and-more".to_owned())].into();
    world.trust.env = vec!["API_KEY".into()];
    let leaky = server(
        "leaky",
        json!({"env":{"KEY":"${env:API_KEY}","TOOL_SERVER_SAYS":"key ${env:API_KEY}",
        "TOOL_SERVER_EXITS":"1"},"restart":{"maxAttempts":0}}),
    );
    let good = server("good", json!({"env":{"KEY":"${env:API_KEY}"}}));
    world
        .install(json!({"use":["leaky","good"]}), &[leaky, good])
        .await;
    let env = world
        .call("good_env", json!({"name":"KEY"}))
        .await
        .unwrap()
        .joined_text();
    assert!(
        env.contains("hunter2-and-more"),
        "the server itself has it: {env}"
    );
    let shown = json!([world.recorder.all(), world.plane.list()]).to_string();
    assert!(!shown.contains("hunter2"), "{shown}");
}

#[tokio::test]
async fn in_the_real_sandbox_a_server_has_the_workspace_and_its_own_env() {
    let world = World::local().await;
    world.file("f", "seen");
    let mut entry = server("srv", json!({"env":{"MINE":"yes"}}));
    entry["command"] = Value::from(oubliette_sandbox::spec::CLIENT);
    world.install(json!({"use":["srv"]}), &[entry]).await;
    let list = world.plane.list();
    assert_eq!(list.servers[0].status, Light::Green, "{:?}", list.servers);
    let read = world
        .call("srv_read", json!({"path":"/workspace/f"}))
        .await
        .unwrap();
    assert!(read.joined_text().contains("seen"), "{read:?}");
    assert!(
        world
            .call("srv_env", json!({"name":"MINE"}))
            .await
            .unwrap()
            .joined_text()
            .contains("yes")
    );
}

#[tokio::test]
async fn many_switches_leave_nothing_behind() {
    let world = World::new();
    let mut last = None;
    for n in 0..20 {
        let context = world
            .install(
                json!({"use":["a","b"]}),
                &[server("a", json!({})), server("b", json!({}))],
            )
            .await;
        let pids = [pid_of(&world, "a_pid").await, pid_of(&world, "b_pid").await];
        let old = world.plane.take().unwrap();
        assert!(Arc::ptr_eq(&old, &context));
        soon("the teardown", old.teardown()).await;
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
