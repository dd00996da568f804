//! `/mcp` by raw HTTP: four revisions on one endpoint.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{InProcessServer, RawMcpClient, SseReader};
use oubliette_protocol::{
    Scope, SessionId,
    event::{EventBody, MessageRole, SessionStatus},
};
use serde_json::{Value, json};

const STATEFUL_VERSIONS: [&str; 3] = ["2025-03-26", "2025-06-18", "2025-11-25"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_revision_lists_and_calls_tools() {
    let server = InProcessServer::start().await;
    let mut clients = vec![RawMcpClient::stateless(&server, &server.admin)];
    for version in STATEFUL_VERSIONS {
        clients.push(RawMcpClient::stateful(&server, &server.admin, version).await);
    }
    for client in &clients {
        let tools = client.call_method("tools/list", json!({})).await;
        let tools = tools["result"]["tools"].as_array().unwrap();
        let list = tools.iter().find(|t| t["name"] == "project_list").unwrap();
        assert!(
            tools
                .iter()
                .all(|t| !t["name"].as_str().unwrap().starts_with("test_")),
            "fixtures are served to whoever asks for them only"
        );
        assert_eq!(
            (&list["inputSchema"]["type"], &list["annotations"]["readOnlyHint"]),
            (&json!("object"), &json!(true))
        );
        let result = client.call_tool("project_list", json!({})).await;
        assert_eq!(result["isError"], false, "{}: {result}", client.version);
        let text: Value = serde_json::from_str(result["content"][0]["text"].as_str().unwrap()).unwrap();
        assert_eq!(text, result["structuredContent"]);
        let refused = client.call_tool("project_get", json!({ "project": "x" })).await;
        assert_eq!(refused["isError"], true);
        assert_eq!(refused["structuredContent"]["error"]["code"], "invalid_argument");
        let unknown = client
            .call_method("tools/call", json!({ "name": "nothing", "arguments": {} }))
            .await;
        assert_eq!(unknown["error"]["code"], -32602, "{}: {unknown}", client.version);
        let prompts = client.call_method("prompts/list", json!({})).await;
        assert_eq!(
            prompts["result"]["prompts"],
            json!([]),
            "{}: {prompts}",
            client.version
        );
        let prompt = client
            .call_method("prompts/get", json!({ "name": "nothing" }))
            .await;
        assert_eq!(prompt["error"]["code"], -32602, "{}: {prompt}", client.version);
        let level = client
            .call_method("logging/setLevel", json!({ "level": "error" }))
            .await;
        assert_eq!(
            level.get("error").is_some(),
            client.version == "2026-07-28",
            "{level}"
        );
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_is_shown_what_it_may_call_and_every_call_is_checked_again() {
    let server = InProcessServer::start().await;
    let reader = RawMcpClient::stateless(&server, &server.token(Scope::Read, None).await);
    let tools = reader.call_method("tools/list", json!({})).await;
    let names: Vec<_> = tools["result"]["tools"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["name"].as_str().unwrap())
        .collect();
    assert!(
        names.contains(&"project_list")
            && !names.contains(&"project_create")
            && !names.contains(&"token_list"),
        "{names:?}"
    );
    let refused = reader.call_tool("project_create", json!({ "name": "a" })).await;
    assert_eq!(refused["structuredContent"]["error"]["code"], "permission_denied");
    server.stop().await;
}

async fn post_body(server: &InProcessServer, version: &str, kind: &str, body: &'static str) -> (u16, Value) {
    let request = server
        .post("/mcp")
        .bearer_auth(&server.admin)
        .header("accept", "application/json, text/event-stream")
        .header("content-type", kind)
        .header("mcp-protocol-version", version);
    let response = request.body(body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_bodies_are_answered_with_400() {
    let server = InProcessServer::start().await;
    for version in ["2025-11-25", "2026-07-28"] {
        for (body, code) in [
            ("{", -32700),
            ("", -32700),
            ("nonsense", -32700),
            ("[]", -32600),
            (r#"[{"jsonrpc":"2.0","id":1,"method":"ping"}]"#, -32600),
            (r#"{"hello":"there"}"#, -32600),
            ("5", -32600),
        ] {
            let (status, answer) = post_body(&server, version, "application/json; charset=utf-8", body).await;
            assert_eq!(status, 400, "{version}: {body}");
            assert_eq!(answer["error"]["code"], code, "{version}: {body}: {answer}");
        }
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_not_declared_as_json_is_answered_with_415() {
    let server = InProcessServer::start().await;
    let ping = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    for content_type in ["", "text/plain", "application/json-patch+json"] {
        let (status, answer) = post_body(&server, "2025-11-25", content_type, ping).await;
        assert_eq!(
            (status, &answer["error"]["code"]),
            (415, &json!(-32600)),
            "{content_type}: {answer}"
        );
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_mcp_session_id_works_for_its_owner_only() {
    let server = InProcessServer::start().await;
    let client = RawMcpClient::stateful(&server, &server.admin, "2025-11-25").await;
    let mut thief = RawMcpClient::stateless(&server, &server.token(Scope::Admin, None).await);
    thief.session = client.session.clone();
    thief.version = "2025-11-25";
    assert_eq!(thief.send("tools/list", json!({})).await.status(), 404);
    let delete = |token: &str, session: &str| {
        let url = format!("{}/mcp", server.url);
        let request = server
            .http
            .delete(url)
            .bearer_auth(token)
            .header("mcp-session-id", session);
        async move { request.send().await.unwrap().status().as_u16() }
    };
    let session = client.session.clone().unwrap();
    assert_eq!(delete(&thief.token, &session).await, 404);
    assert!(client.call_method("tools/list", json!({})).await["result"].is_object());
    assert_eq!(delete(&client.token, &session).await, 204);
    assert_eq!(client.send("tools/list", json!({})).await.status(), 404);
    server.stop().await;
}

fn assistant_message(text: &str) -> EventBody {
    EventBody::Message {
        role: MessageRole::Assistant,
        text: text.into(),
    }
}

/// A new session with an empty log, recorded as messaged by the client's MCP session, so that its events are pushed.
async fn messaged_session(server: &InProcessServer, client: &RawMcpClient<'_>) -> SessionId {
    let project = server.project("p").await;
    let session = server.session(&project, None).await;
    let mcp_session = server
        .app
        .mcp_sessions
        .get(client.session.as_ref().unwrap())
        .unwrap();
    mcp_session.record_message(&session, -1);
    session
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_get_stream_pushes_events_and_resumes_by_last_event_id() {
    let server = InProcessServer::start().await;
    for version in STATEFUL_VERSIONS {
        let client = RawMcpClient::stateful(&server, &server.admin, version).await;
        let mut stream = client.listen(None).await;
        let session = messaged_session(&server, &client).await;
        client
            .call_method("logging/setLevel", json!({ "level": "emergency" }))
            .await;
        let log = server.app.store.events();
        log.append(
            &session,
            vec![
                assistant_message("0"),
                EventBody::Delta { text: "d".into() },
                assistant_message("2"),
            ],
        )
        .await
        .unwrap();
        let first = stream.next().await.unwrap();
        assert_eq!(first.data["method"], "notifications/message");
        let params = &first.data["params"];
        assert_eq!(
            (&params["logger"], &params["level"]),
            (&json!("oubliette.session"), &json!("info"))
        );
        assert_eq!(
            (&params["data"]["type"], &params["data"]["index"]),
            (&json!("message"), &json!(0))
        );
        let second = stream.next().await.unwrap();
        assert_eq!(
            second.data["params"]["data"]["index"], 2,
            "{version}: a delta is not pushed"
        );
        drop(stream);
        log.append(&session, vec![assistant_message("3")]).await.unwrap();
        let mut resumed = client.listen(second.id.as_deref()).await;
        assert_eq!(resumed.next().await.unwrap().data["params"]["data"]["index"], 3);
        let mut again = client.listen(None).await;
        assert_eq!(
            again.next().await.unwrap().data["params"]["data"]["index"],
            0,
            "from where it messaged"
        );
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_event_goes_to_the_newest_get_stream_only() {
    let server = InProcessServer::start().await;
    let client = RawMcpClient::stateful(&server, &server.admin, "2025-11-25").await;
    let mut old = client.listen(None).await;
    let session = messaged_session(&server, &client).await;
    let log = server.app.store.events();
    log.append(&session, vec![assistant_message("0")]).await.unwrap();
    let first = old.next().await.unwrap();
    let mut new = client.listen(first.id.as_deref()).await;
    log.append(&session, vec![assistant_message("1")]).await.unwrap();
    assert_eq!(new.next().await.unwrap().data["params"]["data"]["index"], 1);
    drop(new);
    log.append(&session, vec![assistant_message("2")]).await.unwrap();
    assert_eq!(
        old.next().await.unwrap().data["params"]["data"]["index"],
        1,
        "it goes on where it was itself"
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_delays_no_other_request() {
    let server = InProcessServer::start().await;
    let client = RawMcpClient::stateful(&server, &server.admin, "2025-11-25").await;
    let stream = client.listen(None).await;
    let session = messaged_session(&server, &client).await;
    let big = "x".repeat(64 * 1024);
    for _ in 0..50 {
        server
            .app
            .store
            .events()
            .append(&session, vec![assistant_message(&big); 10])
            .await
            .unwrap();
    }
    for _ in 0..50 {
        assert!(client.call_method("tools/list", json!({})).await["result"].is_object());
    }
    // The server may have closed a connection that was not read for long; then the client reconnects and has missed
    // nothing.
    let (mut stream, mut last) = (stream, None);
    for index in 0..500 {
        let frame = match stream.next().await {
            Some(frame) => frame,
            None => {
                stream = client.listen(last.as_deref()).await;
                stream.next().await.unwrap()
            }
        };
        assert_eq!(frame.data["params"]["data"]["index"], index);
        last = frame.id;
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn revoking_a_token_ends_its_get_stream() {
    let server = InProcessServer::start().await;
    let (_, made) = server
        .tool(
            &server.admin,
            "token_create",
            json!({ "name": "n", "scope": "read" }),
        )
        .await;
    let client = RawMcpClient::stateful(&server, made["token"].as_str().unwrap(), "2025-11-25").await;
    let mut stream = client.listen(None).await;
    server
        .tool(
            &server.admin,
            "token_revoke",
            json!({ "token_id": made["token_id"] }),
        )
        .await;
    assert_eq!(stream.next().await, None);
    assert_eq!(client.send("tools/list", json!({})).await.status(), 401);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_mcp_sessions_are_closed_unless_a_stream_is_open() {
    let server = InProcessServer::start_with("[server]\nmcp_session_idle = \"3s\"").await;
    let idle = RawMcpClient::stateful(&server, &server.admin, "2025-11-25").await;
    let listening = RawMcpClient::stateful(&server, &server.admin, "2025-11-25").await;
    let _stream = listening.listen(None).await;
    let gone = async {
        while server
            .app
            .mcp_sessions
            .get(idle.session.as_ref().unwrap())
            .is_some()
        {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), gone)
        .await
        .unwrap();
    assert_eq!(idle.send("tools/list", json!({})).await.status(), 404);
    assert!(listening.call_method("tools/list", json!({})).await["result"].is_object());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_ids_are_completed_only_for_visible_sessions() {
    let server = InProcessServer::start().await;
    let (mine, other) = (server.project("mine").await, server.project("other").await);
    let session = server.session(&mine, None).await;
    server.session(&other, None).await;
    let client = RawMcpClient::stateless(&server, &server.token(Scope::Read, Some(&mine)).await);
    let template = "oubliette://sessions/{session_id}/events";
    for (uri, value, found) in [
        (template, "gogol_", json!([session])),
        (template, "nothing", json!([])),
        ("test://{session_id}", "", json!([])),
    ] {
        let asked = json!({ "ref": { "type": "ref/resource", "uri": uri }, "argument": { "name": "session_id", "value": value } });
        let answer = client.call_method("completion/complete", asked).await;
        assert_eq!(
            answer["result"]["completion"]["values"], found,
            "{uri} {value}: {answer}"
        );
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stateless_clients_discover_read_and_poll() {
    let server = InProcessServer::start().await;
    let project = server.project("p").await;
    let session = server.session(&project, None).await;
    server
        .app
        .store
        .events()
        .append(
            &session,
            vec![assistant_message("0"), EventBody::Delta { text: "d".into() }],
        )
        .await
        .unwrap();
    let client = RawMcpClient::stateless(&server, &server.admin);
    let found = client.call_method("server/discover", json!({})).await;
    assert!(
        found["result"]["supportedVersions"]
            .as_array()
            .unwrap()
            .contains(&json!("2026-07-28")),
        "{found}"
    );
    assert!(
        !found["result"]["supportedVersions"]
            .as_array()
            .unwrap()
            .contains(&json!("2024-11-05")),
        "{found}"
    );
    let uri = format!("oubliette://sessions/{session}/events");
    let read = client.call_method("resources/read", json!({ "uri": uri })).await;
    let log: Value = serde_json::from_str(read["result"]["contents"][0]["text"].as_str().unwrap()).unwrap();
    assert_eq!(
        (log["events"].as_array().unwrap().len(), &log["last_index"]),
        (2, &json!(1))
    );
    assert!(read["result"]["ttlMs"].is_number(), "{read}");
    let lost = client
        .call_method("resources/read", json!({ "uri": "test://nowhere" }))
        .await;
    assert_eq!(
        (&lost["error"]["code"], &lost["error"]["data"]["uri"]),
        (&json!(-32602), &json!("test://nowhere")),
        "{lost}"
    );
    let polled = client
        .call_tool(
            "session_events",
            json!({ "session_id": session, "since_index": 0 }),
        )
        .await;
    assert_eq!(polled["structuredContent"]["last_index"], 1, "{polled}");
    // With a log level the same events also come as notifications on the response stream.
    let params = json!({ "name": "session_events", "arguments": { "session_id": session, "wait_ms": 1000 },
        "_meta": { "io.modelcontextprotocol/logLevel": "info" } });
    let mut stream = SseReader::new(client.send("tools/call", params).await);
    let pushed = stream.next().await.unwrap().data;
    assert_eq!(
        (&pushed["method"], &pushed["params"]["data"]["index"]),
        (&json!("notifications/message"), &json!(0))
    );
    let answer = stream.next().await.unwrap().data;
    assert_eq!(
        answer["result"]["structuredContent"]["events"]
            .as_array()
            .unwrap()
            .len(),
        2,
        "{answer}"
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscription_signals_new_events_of_a_log() {
    let server = InProcessServer::start().await;
    let project = server.project("p").await;
    let session = server.session(&project, None).await;
    let uri = format!("oubliette://sessions/{session}/events");
    let client = RawMcpClient::stateless(&server, &server.admin);
    let params = json!({ "notifications": { "resourceSubscriptions": [uri] } });
    let mut stream = SseReader::new(client.send("subscriptions/listen", params).await);
    let accepted = stream.next().await.unwrap().data;
    assert_eq!(
        accepted["method"], "notifications/subscriptions/acknowledged",
        "{accepted}"
    );
    server
        .app
        .store
        .events()
        .append(
            &session,
            vec![EventBody::Status {
                status: SessionStatus::Idle,
                reason: None,
            }],
        )
        .await
        .unwrap();
    let signal = stream.next().await.unwrap().data;
    assert_eq!(
        (&signal["method"], &signal["params"]["uri"]),
        (&json!("notifications/resources/updated"), &json!(uri))
    );
    drop(stream);
    // Events that came while the subscription began are not missed: a log that is not empty is signalled at once.
    let params = json!({ "notifications": { "resourceSubscriptions": [uri] } });
    let mut stream = SseReader::new(client.send("subscriptions/listen", params).await);
    stream.next().await.unwrap();
    let signal = stream.next().await.unwrap().data;
    assert_eq!(signal["method"], "notifications/resources/updated", "{signal}");
    drop(stream);
    // The same for a stateful client, on its GET stream.
    let legacy = RawMcpClient::stateful(&server, &server.admin, "2025-06-18").await;
    let mut stream = legacy.listen(None).await;
    assert!(
        legacy
            .call_method("resources/subscribe", json!({ "uri": uri }))
            .await["result"]
            .is_object()
    );
    server
        .app
        .store
        .events()
        .append(&session, vec![assistant_message("x")])
        .await
        .unwrap();
    assert_eq!(
        stream.next().await.unwrap().data["method"],
        "notifications/resources/updated"
    );
    server.stop().await;
}
