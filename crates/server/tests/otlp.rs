//! What a server with running agents exports to an OpenTelemetry collector.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

use axum::{Json, Router, extract::State, routing::post};
use common::{InProcessServer, siblings::build_sibling_programs};
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// The requests a collector received.
type ReceivedExports = Arc<Mutex<Vec<Value>>>;

/// Starts a collector on a free port: its endpoint and the requests it receives.
async fn collector() -> (String, ReceivedExports) {
    async fn take(State(received): State<ReceivedExports>, Json(request): Json<Value>) -> Json<Value> {
        received.lock().unwrap().push(request);
        Json(json!({}))
    }
    let received = ReceivedExports::default();
    let router = Router::new()
        .route("/v1/traces", post(take))
        .with_state(received.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, router).await });
    (endpoint, received)
}

/// A server with an agent that writes a file, reads a missing one, and in its second turn calls a denied tool.
async fn server(endpoint: &str) -> InProcessServer {
    build_sibling_programs();
    let server = InProcessServer::start_with(&format!("[otlp]\nendpoint = \"{endpoint}\"")).await;
    let definition = json!({
        "name": "Tracer", "prompt": "p", "model": "script:script.json",
        "tools": {"use": ["reader", "writer", "shell"], "denied": ["@shell/*"], "aliases": {"write": "@writer/fs_write"}},
    });
    let script = json!({"turns": [
        [{"call": {"tool": "write", "arguments": {"path": "a.txt", "content": "a-private-argument"}}},
         {"call": {"tool": "reader_fs_read", "arguments": {"path": "missing.txt"}}},
         {"say": "a-private-message"}],
        [{"call": {"tool": "shell_shell_exec", "arguments": {"argv": ["ls"]}}}],
    ]});
    let files = [("script.json".to_owned(), script.to_string())].into();
    let slug = "tracer".parse().unwrap();
    server
        .app
        .library
        .agent_put(slug, definition, files)
        .await
        .unwrap();
    server
}

async fn send_message(server: &InProcessServer, session: Option<&str>) -> Value {
    let mut message = json!({"message": "go", "wait": true});
    match session {
        Some(session) => message["session_id"] = session.into(),
        None => message["agent"] = "tracer".into(),
    }
    let (status, reply) = server.tool(&server.admin, "session_message", message).await;
    assert_eq!((status, &reply["status"]), (200, &json!("idle")), "{reply}");
    reply
}

fn attribute<'a>(span: &'a Value, key: &str) -> &'a Value {
    let all = span["attributes"].as_array().unwrap();
    let found = all.iter().find(|attribute| attribute["key"] == key);
    found.map_or(&Value::Null, |found| &found["value"])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_is_a_trace_and_a_call_is_a_span() {
    let (endpoint, received) = collector().await;
    let server = server(&endpoint).await;
    let first = send_message(&server, None).await;
    let session = first["session_id"].as_str().unwrap();
    send_message(&server, Some(session)).await;
    server.stop().await;

    let requests = received.lock().unwrap().clone();
    let all = serde_json::to_string(&requests).unwrap();
    assert!(!all.contains("a-private-"), "{all}");
    let scopes = requests.iter().map(|request| &request["resourceSpans"][0]);
    let spans: Vec<&Value> = scopes
        .flat_map(|resource| resource["scopeSpans"][0]["spans"].as_array().unwrap())
        .collect();
    let traces: BTreeSet<&str> = spans
        .iter()
        .map(|span| span["traceId"].as_str().unwrap())
        .collect();
    assert_eq!(traces.len(), 2, "one trace a turn: {spans:#?}");

    let of_turn = |turn: &str| -> (&Value, Vec<&Value>) {
        let all = spans.iter().copied();
        let (roots, calls): (Vec<_>, Vec<_>) = all
            .filter(|span| attribute(span, "oubliette.turn")["intValue"] == turn)
            .partition(|span| span["parentSpanId"].is_null());
        assert_eq!(roots.len(), 1, "{spans:#?}");
        for call in &calls {
            assert_eq!(call["traceId"], roots[0]["traceId"]);
            assert_eq!(call["parentSpanId"], roots[0]["spanId"]);
            assert_eq!(attribute(call, "oubliette.session_id")["stringValue"], session);
            assert_eq!(attribute(call, "oubliette.agent")["stringValue"], "tracer");
        }
        (roots[0], calls)
    };
    let (root, calls) = of_turn("1");
    assert_eq!(root["name"], "invoke_agent tracer");
    assert_eq!(root["status"], json!({}));
    assert_eq!(root["traceId"].as_str().unwrap().len(), 32);
    assert_eq!(root["spanId"].as_str().unwrap().len(), 16);
    assert_eq!(calls.len(), 2, "{calls:#?}");
    assert_eq!(calls[0]["name"], "execute_tool write");
    assert_eq!(calls[0]["status"], json!({}));
    assert_eq!(
        attribute(calls[0], "oubliette.canonical")["stringValue"],
        "@writer/fs_write"
    );
    assert_eq!(attribute(calls[0], "oubliette.source")["stringValue"], "catalog");
    assert_eq!(attribute(calls[0], "oubliette.ok")["boolValue"], true);
    assert_eq!(calls[1]["name"], "execute_tool reader_fs_read");
    assert_eq!(calls[1]["status"]["code"], 2);
    assert_eq!(attribute(calls[1], "oubliette.ok")["boolValue"], false);
    assert!(attribute(calls[1], "oubliette.error")["stringValue"].is_string());

    let (_, calls) = of_turn("2");
    assert_eq!(calls.len(), 1, "{calls:#?}");
    assert_eq!(attribute(calls[0], "oubliette.blocked")["boolValue"], true);
    assert_eq!(calls[0]["status"]["code"], 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_collector_does_not_affect_sessions() {
    // A collector that accepts connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let with_silent = server(&format!("http://{}", silent.local_addr().unwrap())).await;
    assert_eq!(
        send_message(&with_silent, None).await["text"],
        "a-private-message"
    );
    with_silent.stop().await;
    // A port nobody listens on.
    let gone = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    let without = server(&format!("http://{gone}")).await;
    assert_eq!(send_message(&without, None).await["text"], "a-private-message");
    without.stop().await;
}
