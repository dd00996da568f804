// What an agent and the server see of `oubliette-client`. Included twice: for a client that uses the relay socket and
// for one that hands its streams off.

use oubliette_relay::{ProgressReport, RpcError};
use serde_json::{Value, json};

use super::support::{TestAgent, TestServer, config};

fn server() -> TestServer {
    TestServer::start(STREAMS)
}

fn server_with(callers: &[Value]) -> TestServer {
    TestServer::with_callers(STREAMS, callers)
}

fn myapp() -> Value {
    let schema = json!({"type":"object","properties":{"message":{"type":"string"}}});
    json!({"caller_id":"myapp","tools":[
        {"name":"send_notification","description":"Send notification","inputSchema":schema},
        {"name":"plain"}]})
}

#[tokio::test]
async fn the_first_list_has_caller_tools_with_their_schemas() {
    let mut server = server_with(&[myapp()]);
    // The server takes its time to say what the agent has: the list waits for it, and for nothing else.
    *server.script.agent_tools.lock() = None;
    let mut agent = server.agent();
    agent.initialize().await;
    let list = agent.start("tools/list", json!({})).await;
    let asked = server.asked().await;
    assert_eq!(asked.method, "agent_tools");
    asked.answer(
        json!({"tools":[{"name":"read","description":"Reads","inputSchema":{"type":"object"}}],"base":[]}),
    );
    let tools = agent.answer(list).await["result"]["tools"].clone();
    let schema = json!({"type":"object","properties":{"message":{"type":"string"}}});
    assert_eq!(
        tools,
        json!([
            {"name":"myapp_send_notification","description":"Send notification","inputSchema":schema},
            {"name":"myapp_plain","inputSchema":{"type":"object"}},
            {"name":"read","description":"Reads","inputSchema":{"type":"object"}},
        ])
    );
    assert!(
        agent.heard.is_empty(),
        "the first list is no change: {:?}",
        agent.heard
    );
}

#[tokio::test]
async fn a_caller_tool_call_goes_out_and_its_answer_comes_back() {
    let mut server = server_with(&[myapp()]);
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    let id = agent
        .start_call("myapp_send_notification", json!({"message":"hello"}))
        .await;
    let asked = server.asked().await;
    assert_eq!(asked.method, "caller_tool");
    assert_eq!(
        asked.params,
        json!({"tool":"send_notification","arguments":{"message":"hello"},"caller_id":"myapp"})
    );
    asked.answer(json!({"status":"sent"}));
    let result = agent.answer(id).await["result"].clone();
    assert_eq!(result["structuredContent"], json!({"status":"sent"}));
    assert_eq!(
        result["content"],
        json!([{"type":"text","text":r#"{"status":"sent"}"#}])
    );
    assert_eq!(result["isError"], false);
}

#[tokio::test]
async fn content_a_caller_sends_keeps_its_shape() {
    let mut server = server_with(&[myapp()]);
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    let image = json!({"content":[{"type":"text","text":"a picture"},
        {"type":"image","data":"iVBORw0KGgo=","mimeType":"image/png"}],"isError":false});
    let id = agent.start_call("myapp_plain", json!({})).await;
    server.asked().await.answer(image.clone());
    assert_eq!(agent.answer(id).await["result"], image);
}

#[tokio::test]
async fn a_large_result_arrives_or_is_refused_with_a_reason() {
    let mut server = server_with(&[myapp()]);
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;

    // Ten megabytes are carried whole.
    let ten = json!({"content":[{"type":"text","text":"x".repeat(10_000_000)}],"isError":false});
    let id = agent.start_call("myapp_plain", json!({})).await;
    server.asked().await.answer(ten.clone());
    assert!(agent.answer(id).await["result"] == ten);

    // As data and as text it would be a line that clients drop: the text is enough.
    let id = agent.start_call("myapp_plain", json!({})).await;
    server
        .asked()
        .await
        .answer(json!({ "rows": "x".repeat(10_000_000) }));
    let result = agent.answer(id).await["result"].clone();
    assert_eq!(result["isError"], false);
    assert!(result.get("structuredContent").is_none());
    assert!(result["content"][0]["text"].as_str().unwrap().len() > 10_000_000);

    // Escaped twice it does not fit either way.
    let id = agent.start_call("myapp_plain", json!({})).await;
    server
        .asked()
        .await
        .answer(json!({ "rows": "\"".repeat(6_000_000) }));
    let result = agent.answer(id).await["result"].clone();
    assert_eq!(result["isError"], true);
    assert_eq!(result["structuredContent"]["error"]["code"], "limit_exceeded");

    // What the relay itself cannot carry is refused there, and the connection lives on.
    let id = agent.start_call("myapp_plain", json!({})).await;
    server.asked().await.answer(json!("x".repeat(17 * 1024 * 1024)));
    let result = agent.answer(id).await["result"].clone();
    assert_eq!(result["structuredContent"]["error"]["code"], "limit_exceeded");
    let id = agent.start_call("myapp_plain", json!({})).await;
    server.asked().await.answer(json!("small"));
    assert_eq!(agent.answer(id).await["result"]["content"][0]["text"], "small");
}

#[tokio::test]
async fn arguments_too_large_to_carry_are_refused_with_a_reason() {
    let server = server_with(&[myapp()]);
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    let id = agent
        .start_call("myapp_plain", json!({ "text": "x".repeat(17 * 1024 * 1024) }))
        .await;
    let result = agent.answer(id).await["result"].clone();
    assert_eq!(result["structuredContent"]["error"]["code"], "limit_exceeded");
}

#[tokio::test]
async fn every_error_of_the_relay_is_an_error_result_with_its_code() {
    let mut server = server_with(&[myapp()]);
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    for (code, word, message) in [
        (-32004, "timeout", "no answer within 60 s"),
        (-32005, "caller_disconnected", "the caller is gone"),
        (
            -32003,
            "not_allowed",
            "tool myapp_plain is not allowed for agent a",
        ),
        (-32000, "tool_error", "recipient not found"),
    ] {
        let id = agent.start_call("myapp_plain", json!({})).await;
        server.asked().await.refuse(code, word, message);
        let result = agent.answer(id).await["result"].clone();
        assert_eq!(result["isError"], true);
        assert_eq!(result["content"], json!([{"type":"text","text":message}]));
        assert_eq!(
            result["structuredContent"]["error"],
            json!({"code":word,"message":message})
        );
    }
}

#[tokio::test]
async fn two_callers_with_one_tool_name_are_told_apart() {
    let other = json!({"caller_id":"other","tools":[{"name":"plain"}]});
    let mut server = server_with(&[myapp(), other]);
    let mut agent = server.agent();
    agent.initialize().await;
    assert_eq!(
        agent.names().await,
        ["myapp_send_notification", "myapp_plain", "other_plain"]
    );
    let id = agent.start_call("other_plain", json!({})).await;
    let asked = server.asked().await;
    assert_eq!(
        asked.params,
        json!({"tool":"plain","arguments":{},"caller_id":"other"})
    );
    asked.answer(json!("ok"));
    agent.answer(id).await;
}

#[tokio::test]
async fn a_changed_declaration_changes_the_list_live() {
    let mut server = server_with(&[myapp()]);
    let mut agent = server.agent();
    agent.initialize().await;
    let peer = server.peer().await;
    assert_eq!(agent.names().await.len(), 2);
    peer.send_raw(&config(&json!({"caller_id":"myapp","tools":[{"name":"new"}]})))
        .await
        .unwrap();
    agent.notice("notifications/tools/list_changed").await;
    assert_eq!(agent.names().await, ["myapp_new"]);
    peer.send_raw(&config(&json!({"caller_id":"second","tools":[{"name":"x"}]})))
        .await
        .unwrap();
    agent.notice("notifications/tools/list_changed").await;
    assert_eq!(agent.names().await, ["myapp_new", "second_x"]);
    peer.send_raw(&config(&json!({"caller_id":"myapp","tools":[]})))
        .await
        .unwrap();
    agent.notice("notifications/tools/list_changed").await;
    assert_eq!(agent.names().await, ["second_x"]);
}

#[tokio::test]
async fn changed_agent_tools_are_asked_for_again() {
    let mut server = server();
    let mut agent = server.agent();
    agent.initialize().await;
    let peer = server.peer().await;
    assert!(agent.names().await.is_empty());
    *server.script.agent_tools.lock() =
        Some(json!({"tools":[{"name":"read"}],"base":[{"name":"project_list"}]}));
    peer.notify("agent_tools_changed", json!({})).await.unwrap();
    agent.notice("notifications/tools/list_changed").await;
    assert_eq!(agent.names().await, ["project_list", "read"]);
}

#[tokio::test]
async fn catalog_tools_and_base_tools_use_their_own_methods() {
    let mut server = server();
    let base = json!([{"name":"session_message"},{"name":"session_events"},{"name":"project_list"}]);
    *server.script.agent_tools.lock() = Some(json!({"tools":[{"name":"read"}],"base":base}));
    let mut agent = server.agent();
    agent.initialize().await;
    assert_eq!(
        agent.names().await,
        ["session_message", "session_events", "project_list", "read"]
    );

    let id = agent.start_call("project_list", json!({"limit":1})).await;
    let asked = server.asked().await;
    assert_eq!(
        (asked.method.as_str(), &asked.params),
        ("project_list", &json!({"limit":1}))
    );
    asked.answer(json!({"projects":[]}));
    assert_eq!(
        agent.answer(id).await["result"]["structuredContent"],
        json!({"projects":[]})
    );

    let result =
        json!({"content":[{"type":"text","text":"file"}],"structuredContent":{"size":4},"isError":false});
    for name in ["read", "@files/read_file", "files_read_file"] {
        let id = agent.start_call(name, json!({"path":"a"})).await;
        let asked = server.asked().await;
        assert_eq!(asked.method, "agent_call_tool");
        assert_eq!(asked.params, json!({"tool":name,"arguments":{"path":"a"}}));
        asked.answer(result.clone());
        assert_eq!(agent.answer(id).await["result"], result);
    }
    let id = agent.start_call("nonsense", json!({})).await;
    server
        .asked()
        .await
        .refuse(-32000, "not_found", "no tool nonsense");
    assert_eq!(
        agent.answer(id).await["result"]["structuredContent"]["error"]["code"],
        "not_found"
    );
}

#[tokio::test]
async fn a_valid_key_lists_oubliettes_own_tools_under_their_prefix() {
    let mut server = server();
    *server.script.own_tools.lock() = Some(Ok(
        json!({"tools":[{"name":"project_create","description":"Makes","inputSchema":{"type":"object"}}]}),
    ));
    let mut agent = server.agent_with_key("oub_secret");
    agent.initialize().await;
    assert_eq!(agent.names().await, ["oubliette_project_create"]);
    // Listed or not, the server decides.
    for tool in ["project_create", "token_create"] {
        let id = agent
            .start_call(&format!("oubliette_{tool}"), json!({"name":"p"}))
            .await;
        let asked = server.asked().await;
        assert_eq!(asked.method, "oubliette_call_tool");
        assert_eq!(
            asked.params,
            json!({"tool":tool,"arguments":{"name":"p"},"api_key":"oub_secret"})
        );
        asked.answer(json!({"project_id":"proj_1"}));
        let result = agent.answer(id).await["result"].clone();
        assert_eq!(result["structuredContent"], json!({"project_id":"proj_1"}));
        assert_eq!(result["content"][0]["text"], r#"{"project_id":"proj_1"}"#);
    }
    let id = agent.start_call("oubliette_token_create", json!({})).await;
    server
        .asked()
        .await
        .refuse(-32002, "permission_denied", "this needs admin");
    assert_eq!(
        agent.answer(id).await["result"]["structuredContent"]["error"]["code"],
        "permission_denied"
    );
    assert!(!agent.end().await.contains("oub_secret"));
}

#[tokio::test]
async fn a_refused_key_is_a_warning_and_the_start_goes_on() {
    let mut server = server_with(&[myapp()]);
    let refused = RpcError {
        code: -32001,
        message: "the key is not valid".into(),
        data: Some(json!({"code":"unauthenticated"})),
    };
    *server.script.own_tools.lock() = Some(Err(refused));
    let mut agent = server.agent_with_key("oub_wrong");
    agent.initialize().await;
    assert_eq!(agent.names().await, ["myapp_send_notification", "myapp_plain"]);
    let id = agent.start_call("oubliette_project_list", json!({})).await;
    let asked = server.asked().await;
    assert_eq!(asked.params["api_key"], "oub_wrong");
    asked.refuse(-32001, "unauthenticated", "the key is not valid");
    assert_eq!(agent.answer(id).await["result"]["isError"], true);
    let said = agent.end().await;
    assert!(said.contains("warning") && said.contains("refused"), "{said}");
    assert!(!said.contains("oub_wrong"), "{said}");
}

#[tokio::test]
async fn without_a_key_nothing_is_asked_and_nothing_is_listed() {
    let mut server = server();
    for key in [None, Some("")] {
        let mut agent = match key {
            None => server.agent(),
            Some(key) => server.agent_with_key(key),
        };
        agent.initialize().await;
        assert!(agent.names().await.is_empty());
        let id = agent.start_call("oubliette_project_list", json!({})).await;
        let asked = server.asked().await;
        assert_eq!(asked.method, "agent_call_tool");
        asked.refuse(-32000, "not_found", "no such tool");
        assert_eq!(agent.answer(id).await["result"]["isError"], true);
    }
    assert!(
        !server
            .script
            .log
            .lock()
            .iter()
            .any(|method| method.starts_with("oubliette"))
    );
}

#[tokio::test]
async fn a_cancelled_call_is_cancelled_at_the_server_and_disturbs_no_other() {
    let mut server = server_with(&[myapp()]);
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    let stays = agent.start_call("myapp_plain", json!({"n":1})).await;
    let first = server.asked().await;
    let goes = agent.start_call("myapp_plain", json!({"n":2})).await;
    let second = server.asked().await;
    let cancelled = json!({"requestId":goes,"reason":"changed my mind"});
    agent
        .send(&json!({"jsonrpc":"2.0","method":"notifications/cancelled","params":cancelled}))
        .await;
    second.context.cancel().cancelled().await;
    first.answer(json!("still here"));
    assert_eq!(
        agent.answer(stays).await["result"]["content"][0]["text"],
        "still here"
    );
    assert!(
        agent.heard.is_empty(),
        "a cancelled call is not answered: {:?}",
        agent.heard
    );
}

#[tokio::test]
async fn the_servers_progress_reaches_the_agent_and_never_falls() {
    let mut server = server_with(&[myapp()]);
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    let params = json!({"name":"myapp_plain","arguments":{},"_meta":{"progressToken":"t1"}});
    let id = agent.start("tools/call", params).await;
    let asked = server.asked().await;
    for progress in [1.0, 2.0, 2.0] {
        asked.context.progress(&ProgressReport {
            progress,
            total: Some(4.0),
            message: Some("step".into()),
        });
    }
    let (mut last, mut steps) = (0.0, 0);
    while steps < 3 {
        let params = agent.notice("notifications/progress").await["params"].clone();
        assert_eq!(params["progressToken"], "t1");
        assert!(params["progress"].as_f64().unwrap() > last);
        last = params["progress"].as_f64().unwrap();
        // The client's own heartbeat may come in between.
        if params["message"] == "step" {
            assert_eq!(params["total"], 4.0);
            steps += 1;
        }
    }
    asked.answer(Value::Null);
    agent.answer(id).await;
}

#[tokio::test]
async fn a_waiting_agent_is_sent_heartbeats() {
    let mut server = server_with(&[myapp()]);
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    let params = json!({"name":"myapp_plain","arguments":{},"_meta":{"progressToken":7}});
    let id = agent.start("tools/call", params).await;
    let asked = server.asked().await;
    let notice = agent.notice("notifications/progress").await;
    assert_eq!(notice["params"]["progressToken"], 7);
    asked.answer(Value::Null);
    agent.answer(id).await;
}

#[tokio::test]
async fn many_calls_at_once_each_get_their_own_answer_in_any_order() {
    let mut server = server_with(&[myapp()]);
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    let mut ids = Vec::new();
    let mut asked = Vec::new();
    for n in 0..300 {
        ids.push(agent.start_call("myapp_plain", json!({"n":n})).await);
        asked.push(server.asked().await);
    }
    for asked in asked.into_iter().rev() {
        let n = asked.params["arguments"]["n"].clone();
        asked.answer(json!({"n":n}));
    }
    for _ in 0..300 {
        let answer = agent.read().await;
        let at = ids.iter().position(|id| answer["id"] == *id).unwrap();
        assert_eq!(answer["result"]["structuredContent"]["n"], at);
    }
}

#[tokio::test]
async fn oubliettes_own_tools_are_asked_for_once_and_kept_across_a_loss() {
    let mut server = server();
    *server.script.own_tools.lock() = Some(Ok(json!({"tools":[{"name":"project_list"}]})));
    let mut agent = server.agent_with_key("oub_x");
    agent.initialize().await;
    assert_eq!(agent.names().await, ["oubliette_project_list"]);
    server.peer().await.close();
    *server.script.agent_tools.lock() = Some(json!({"tools":[{"name":"read"}]}));
    server.peer().await;
    agent.notice("notifications/tools/list_changed").await;
    assert_eq!(agent.names().await, ["read", "oubliette_project_list"]);
    assert_eq!(
        server
            .script
            .log
            .lock()
            .iter()
            .filter(|m| *m == "oubliette_tools")
            .count(),
        1
    );
}

#[tokio::test]
async fn a_server_that_comes_late_is_waited_for() {
    let mut server = server_with(&[myapp()]);
    server.stop_listening();
    let mut agent = server.agent();
    agent.initialize().await;
    let list = agent.start("tools/list", json!({})).await;
    server.listen();
    assert_eq!(
        agent.answer(list).await["result"]["tools"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
}

#[tokio::test]
async fn reconnecting_to_a_server_that_hangs_up_is_logged_once() {
    let mut server = server_with(&[myapp()]);
    *server.script.agent_tools.lock() = None;
    let mut agent = server.agent();
    agent.initialize().await;
    let list = agent.start("tools/list", json!({})).await;
    for _ in 0..3 {
        server.peer().await.close();
    }
    *server.script.agent_tools.lock() = Some(json!({"tools":[]}));
    assert_eq!(
        agent.answer(list).await["result"]["tools"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    let said = agent.end().await;
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[tokio::test]
async fn the_stateless_lifecycle_lists_calls_and_hears_of_changes() {
    let mut server = server_with(&[myapp()]);
    let mut agent = server.agent();
    agent.speak_modern();
    let discovered = agent.ask("server/discover", json!({})).await["result"].clone();
    assert!(
        discovered["supportedVersions"]
            .as_array()
            .unwrap()
            .contains(&json!("2026-07-28")),
        "{discovered}"
    );
    assert_eq!(discovered["capabilities"]["tools"]["listChanged"], true);
    let list = agent.ask("tools/list", json!({})).await["result"].clone();
    assert_eq!(list["resultType"], "complete");
    assert_eq!(list["tools"].as_array().unwrap().len(), 2);

    let filter = json!({"notifications":{"toolsListChanged":true}});
    let listening = agent.start("subscriptions/listen", filter).await;
    agent.notice("notifications/subscriptions/acknowledged").await;
    let peer = server.peer().await;
    peer.send_raw(&config(&json!({"caller_id":"myapp","tools":[{"name":"new"}]})))
        .await
        .unwrap();
    let notice = agent.notice("notifications/tools/list_changed").await;
    assert_eq!(
        notice["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"],
        listening
    );
    assert_eq!(agent.names().await, ["myapp_new"]);

    let id = agent.start_call("myapp_new", json!({})).await;
    server
        .asked()
        .await
        .answer(json!({"content":[],"structuredContent":[1]}));
    let result = agent.answer(id).await["result"].clone();
    assert_eq!(
        (&result["resultType"], &result["structuredContent"]),
        (&json!("complete"), &json!([1]))
    );

    let id = agent.start_call("myapp_new", json!({})).await;
    let asked = server.asked().await;
    let cancelled = json!({"requestId":id});
    agent
        .send(&json!({"jsonrpc":"2.0","method":"notifications/cancelled","params":cancelled}))
        .await;
    asked.context.cancel().cancelled().await;
}

#[tokio::test]
async fn what_is_not_offered_is_method_not_found() {
    let server = server();
    let mut agent = server.agent();
    let about = agent.initialize().await;
    assert_eq!(about["capabilities"], json!({"tools":{"listChanged":true}}));
    for method in [
        "prompts/list",
        "resources/list",
        "resources/templates/list",
        "logging/setLevel",
    ] {
        let params = if method == "logging/setLevel" {
            json!({"level":"info"})
        } else {
            json!({})
        };
        assert_eq!(
            agent.ask(method, params).await["error"]["code"],
            -32601,
            "{method}"
        );
    }
}

#[tokio::test]
async fn older_revisions_are_spoken() {
    for version in ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"] {
        let server = server_with(&[myapp()]);
        let mut agent = server.agent();
        let params =
            json!({"protocolVersion":version,"capabilities":{},"clientInfo":{"name":"t","version":"0"}});
        assert_eq!(
            agent.ask("initialize", params).await["result"]["protocolVersion"],
            version
        );
        assert_eq!(agent.names().await.len(), 2);
    }
}

#[tokio::test]
async fn the_client_ends_when_stdin_ends_even_with_a_call_open() {
    let mut server = server_with(&[myapp()]);
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    agent.start_call("myapp_plain", json!({})).await;
    let asked = server.asked().await;
    agent.close_stdin();
    asked.context.cancel().cancelled().await;
    assert_eq!(
        agent.end().await.matches('\n').count(),
        0,
        "an orderly end writes nothing to stderr"
    );
}

#[tokio::test]
async fn version_help_and_unknown_arguments_are_answered() {
    let server = server();
    let run = async |arg: &str| server.command().arg(arg).output().await.unwrap();
    let version = run("--version").await;
    assert_eq!(
        String::from_utf8(version.stdout).unwrap(),
        format!("oubliette-client {}\n", env!("CARGO_PKG_VERSION"))
    );
    assert!(
        String::from_utf8(run("--help").await.stdout)
            .unwrap()
            .contains("OUBLIETTE_SOCKET")
    );
    let wrong = run("--nonsense").await;
    assert_eq!(wrong.status.code(), Some(2));
    assert!(wrong.stdout.is_empty());
    // Started by anyone but the server, the inner stage says so and does nothing.
    let inner = run("sandbox-init").await;
    assert!(!inner.status.success() && inner.stdout.is_empty());
    assert!(String::from_utf8(inner.stderr).unwrap().contains("sandbox-init"));
}

#[tokio::test]
async fn session_transcript() {
    let mut server = server_with(&[myapp()]);
    let mut agent: TestAgent = server.agent();
    let mut transcript = Vec::new();
    transcript.push(agent.initialize().await);
    transcript.push(agent.ask("tools/list", json!({})).await);
    let id = agent
        .start_call("myapp_send_notification", json!({"message":"hi"}))
        .await;
    server.asked().await.answer(json!({"status":"sent"}));
    transcript.push(agent.answer(id).await);
    let id = agent.start_call("myapp_plain", json!({})).await;
    server
        .asked()
        .await
        .refuse(-32005, "caller_disconnected", "the caller has gone");
    transcript.push(agent.answer(id).await);
    insta::assert_json_snapshot!("session_transcript", transcript, { "[0].serverInfo.version" => "[version]" });
}
