//! The built-in agent with a script in place of a model, over real stdio and with a real MCP server.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[allow(unreachable_pub, reason = "shared by tests")]
mod support;

use serde_json::{Value, json};
use support::{AgentUnderTest, StoredMemory, script_config, stub_server, wait_for_note};

fn call(tool: &str, arguments: Value) -> Value {
    json!({ "call": { "tool": tool, "arguments": arguments } })
}

#[tokio::test]
async fn initialize_reports_version_and_capabilities() {
    let mut agent = AgentUnderTest::start(&script_config(json!([[]])), StoredMemory::default());
    let answer = agent.initialize().await;
    assert_eq!(answer["result"]["protocolVersion"], 1);
    assert_eq!(answer["result"]["agentCapabilities"]["loadSession"], true);
    assert_eq!(answer["result"]["agentInfo"]["name"], "oubliette-agent");
    assert!(agent.close().await.success(), "it ends well when stdin closes");
}

#[tokio::test]
async fn a_turn_reports_its_text_calls_and_results() {
    let dir = tempfile::tempdir().unwrap();
    let notes = dir.path().join("notes");
    let steps = json!([[
        { "say": "first " }, call("echo", json!({ "text": "héllo" })), call("fail", json!({})),
        call("hidden", json!({})), call("nobody", json!({})), { "sleep_ms": 1 }, { "say": "last" }
    ]]);
    let mut agent = AgentUnderTest::start(&script_config(steps), StoredMemory::default());
    let session = agent.open(json!([stub_server(&notes)])).await;
    let answer = agent.prompt(&session, "go").await;

    assert_eq!(answer["result"]["stopReason"], "end_turn");
    assert_eq!(agent.agent_text(), "first last");
    let calls = agent.updates_of_kind("tool_call");
    assert_eq!(
        calls
            .iter()
            .map(|c| c["title"].as_str().unwrap())
            .collect::<Vec<_>>(),
        ["echo", "fail", "hidden", "nobody"]
    );
    assert_eq!(calls[0]["rawInput"], json!({ "text": "héllo" }));
    let results = agent.updates_of_kind("tool_call_update");
    assert_eq!(results[0]["toolCallId"], calls[0]["toolCallId"]);
    assert_eq!(results[0]["status"], "completed");
    assert_eq!(
        results[0]["rawOutput"]["structuredContent"],
        json!({ "echoed": { "text": "héllo" } })
    );
    assert_eq!(results[0]["rawOutput"]["isError"], false);
    assert_eq!(
        results[0]["content"][0]["content"],
        json!({ "type": "text", "text": "héllo" })
    );
    assert_eq!(results[1]["status"], "failed");
    assert_eq!(results[1]["rawOutput"]["content"][0]["text"], "it did not work");
    assert_eq!(
        results[2]["rawOutput"]["content"][0]["text"],
        "not listed, still called"
    );
    assert_eq!(results[3]["status"], "failed");
    assert!(
        results[3]["rawOutput"]["content"][0]["text"]
            .as_str()
            .unwrap()
            .contains("unknown tool nobody")
    );
}

#[tokio::test]
async fn a_result_of_ten_megabytes_is_reported_truncated() {
    let dir = tempfile::tempdir().unwrap();
    let steps = json!([[call("big", json!({ "bytes": 10_000_000 })), { "say": "read" }]]);
    let mut agent = AgentUnderTest::start(&script_config(steps), StoredMemory::default());
    let session = agent.open(json!([stub_server(&dir.path().join("notes"))])).await;
    let answer = agent.prompt(&session, "go").await;

    assert_eq!(answer["result"]["stopReason"], "end_turn");
    assert_eq!(agent.agent_text(), "read");
    let result = agent.updates_of_kind("tool_call_update")[0];
    assert_eq!(result["status"], "completed");
    assert!(result.to_string().len() < 2 * 1024 * 1024);
    let text = result["rawOutput"]["content"][0]["text"].as_str().unwrap();
    assert!(text.len() > 500_000 && text.ends_with("more bytes were dropped]"));
    assert_eq!(result["content"][0]["content"]["text"], text);
}

#[tokio::test]
async fn parallel_calls_run_at_the_same_time() {
    let dir = tempfile::tempdir().unwrap();
    let steps =
        json!([[{ "parallel": [{ "tool": "meet", "arguments": {} }, { "tool": "meet", "arguments": {} }] }]]);
    let mut agent = AgentUnderTest::start(&script_config(steps), StoredMemory::default());
    let session = agent.open(json!([stub_server(&dir.path().join("notes"))])).await;
    let answer = agent.prompt(&session, "go").await;
    assert_eq!(answer["result"]["stopReason"], "end_turn");
    let results = agent.updates_of_kind("tool_call_update");
    assert_eq!(results.len(), 2);
    assert!(results.iter().all(|r| r["status"] == "completed"));
    assert_ne!(results[0]["toolCallId"], results[1]["toolCallId"]);
}

#[tokio::test]
async fn cancel_reaches_the_tool_and_ends_the_turn() {
    let dir = tempfile::tempdir().unwrap();
    let notes = dir.path().join("notes");
    let steps = json!([[call("wait", json!({})), { "say": "never" }], [{ "say": "next" }]]);
    let mut agent = AgentUnderTest::start(&script_config(steps), StoredMemory::default());
    let session = agent.open(json!([stub_server(&notes)])).await;
    let prompt = agent.start_prompt(&session, "go").await;
    agent.wait_for_update("tool_call").await;
    wait_for_note(&notes, "call wait").await;
    let busy = agent.start_prompt(&session, "me too").await;
    let busy = agent.wait_for_answer(busy).await;
    assert!(
        busy["error"]["message"]
            .as_str()
            .unwrap()
            .contains("a turn is running"),
        "{busy}"
    );
    agent
        .notify("session/cancel", json!({ "sessionId": session }))
        .await;
    let answer = agent.wait_for_answer(prompt).await;

    assert_eq!(answer["result"]["stopReason"], "cancelled");
    assert_eq!(agent.updates_of_kind("tool_call_update")[0]["status"], "failed");
    assert_eq!(agent.agent_text(), "");
    wait_for_note(&notes, "cancelled wait").await;
    assert_eq!(
        agent.prompt(&session, "again").await["result"]["stopReason"],
        "end_turn"
    );
    assert_eq!(agent.agent_text(), "next", "a cancelled turn was a turn");
}

#[tokio::test]
async fn a_cancel_sent_right_after_the_prompt_is_not_lost() {
    let mut agent = AgentUnderTest::start(
        &script_config(json!([[{ "sleep_ms": 3_600_000 }]])),
        StoredMemory::default(),
    );
    let session = agent.open(json!([])).await;
    let prompt = agent.start_prompt(&session, "go").await;
    agent
        .notify("session/cancel", json!({ "sessionId": session }))
        .await;
    assert_eq!(
        agent.wait_for_answer(prompt).await["result"]["stopReason"],
        "cancelled"
    );
    let second = agent.start_prompt(&session, "go").await;
    agent
        .notify("$/cancel_request", json!({ "requestId": second }))
        .await;
    assert_eq!(
        agent.wait_for_answer(second).await["result"]["stopReason"],
        "cancelled"
    );
}

#[tokio::test]
async fn the_turn_count_survives_a_killed_process() {
    let stored = StoredMemory::default();
    let turns =
        json!([[{ "say": "one" }], [{ "say": "two" }, { "sleep_ms": 3_600_000 }], [{ "say": "three" }]]);
    let mut first = AgentUnderTest::start(&script_config(turns.clone()), stored.clone());
    let session = first.open(json!([])).await;
    first.prompt(&session, "a").await;
    assert_eq!(first.agent_text(), "one");
    first.updates.clear();
    first.start_prompt(&session, "b").await;
    first.wait_for_update("agent_message_chunk").await;
    first.child.kill().await.unwrap();

    let mut second = AgentUnderTest::start(&script_config(turns), stored.clone());
    second.load(&session, json!([])).await;
    assert!(
        second.updates.is_empty(),
        "the host has the log; nothing is replayed into it"
    );
    second.prompt(&session, "c").await;
    assert_eq!(second.agent_text(), "three");
    second.prompt(&session, "d").await;
    assert_eq!(second.agent_text(), "three", "the last turn repeats");
    assert_eq!(stored.entries().len(), 4);
    assert_eq!(stored.entries()[1], json!({ "kind": "user", "text": "b" }));
}

#[tokio::test]
async fn memory_is_loaded_by_session_new_too() {
    let stored = StoredMemory::default();
    stored
        .0
        .lock()
        .unwrap()
        .push(json!({ "kind": "user", "text": "before" }));
    let mut agent = AgentUnderTest::start(
        &script_config(json!([[{ "say": "one" }], [{ "say": "two" }]])),
        stored,
    );
    let session = agent.open(json!([])).await;
    agent.prompt(&session, "go").await;
    assert_eq!(agent.agent_text(), "two");
}

#[tokio::test]
async fn a_host_without_memory_methods_works() {
    let mut agent = AgentUnderTest::start(
        &script_config(json!([[{ "say": "one" }], [{ "say": "two" }]])),
        StoredMemory::default(),
    );
    agent.has_memory_methods = false;
    let session = agent.open(json!([])).await;
    agent.prompt(&session, "go").await;
    agent.prompt(&session, "go").await;
    assert_eq!(agent.agent_text(), "two");
}

#[tokio::test]
async fn configuration_and_startup_errors_are_returned_to_the_host() {
    let broken = json!({ "prompt": "", "model": "script:x.json", "script": "{\"turns\":[[{\"shout\":1}]]}" });
    for (config, servers, expected) in [
        (broken, json!([]), "shout"),
        (
            json!({ "prompt": "", "model": "nonsense" }),
            json!([]),
            "<provider>/<model>",
        ),
        (
            script_config(json!([[]])),
            json!([{ "name": "no", "command": "/does/not/exist", "args": [], "env": [] }]),
            "/does/not/exist",
        ),
        (
            script_config(json!([[]])),
            json!([{ "name": "no", "command": "/bin/false", "args": [], "env": [] }]),
            "did not start",
        ),
    ] {
        let mut agent = AgentUnderTest::start(&config, StoredMemory::default());
        agent.initialize().await;
        let answer = agent
            .request("session/new", json!({ "cwd": "/", "mcpServers": servers }))
            .await;
        let message = answer["error"]["message"]
            .as_str()
            .unwrap_or_else(|| panic!("{answer}"));
        assert!(message.contains(expected), "{message}");
    }
    let mut agent = AgentUnderTest::start(&json!({ "prompt": "x" }), StoredMemory::default());
    let session = agent.open(json!([])).await;
    let answer = agent.prompt(&session, "go").await;
    assert!(
        answer["error"]["message"].as_str().unwrap().contains("no model"),
        "{answer}"
    );
}

#[tokio::test]
async fn invalid_messages_do_not_end_the_process() {
    let mut agent = AgentUnderTest::start(
        &script_config(json!([[{ "say": "still here" }]])),
        StoredMemory::default(),
    );
    agent.send_line("this is no JSON").await;
    agent
        .send_line("{\"jsonrpc\":\"2.0\",\"id\":899,\"method\":\"session/new\"}")
        .await;
    assert!(agent.wait_for_answer(899).await.get("error").is_some());
    let session = agent.open(json!([])).await;
    agent
        .send_line("{\"jsonrpc\":\"2.0\",\"id\":900,\"method\":\"no/such\",\"params\":{}}")
        .await;
    agent
        .send_line("{\"jsonrpc\":\"2.0\",\"id\":901,\"method\":\"session/prompt\",\"params\":{\"prompt\":7}}")
        .await;
    agent.send_line("[]").await;
    assert!(agent.wait_for_answer(900).await["error"]["code"] == -32601);
    assert!(agent.wait_for_answer(901).await.get("error").is_some());
    let unknown = agent.prompt("somebody else's", "go").await;
    assert!(
        unknown["error"]["message"]
            .as_str()
            .unwrap()
            .contains("no session"),
        "{unknown}"
    );
    agent.prompt(&session, "go").await;
    assert_eq!(agent.agent_text(), "still here");
}

#[tokio::test]
async fn a_dead_tool_server_fails_a_call_and_is_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let steps = json!([[call("environment", json!({})), call("die", json!({})), call("echo", json!({})), { "say": "on" }]]);
    let mut agent = AgentUnderTest::start(&script_config(steps), StoredMemory::default());
    let session = agent.open(json!([stub_server(&dir.path().join("notes"))])).await;
    let answer = agent.prompt(&session, "go").await;
    assert_eq!(answer["result"]["stopReason"], "end_turn");
    assert_eq!(agent.agent_text(), "on");
    let results = agent.updates_of_kind("tool_call_update");
    let names = results[0]["rawOutput"]["content"][0]["text"].as_str().unwrap();
    assert!(
        names.contains("GIVEN") && !names.contains("OUBLIETTE_AGENT_CONFIG"),
        "{names}"
    );
    assert_eq!(
        results[1]["rawOutput"]["structuredContent"]["error"]["code"],
        "unavailable"
    );
    assert_eq!(
        results[2]["status"], "completed",
        "it was started again: {}",
        results[2]
    );
}
