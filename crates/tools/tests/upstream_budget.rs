//! What a tool server sends or is sent is charged to the session's budget, whatever the transport: a call for which there
//! is no room fails with `limit_exceeded`, and the connection and the other calls on it live on.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod upstream_support;

use oubliette_protocol::{ByteBudget, ErrorCode};
use oubliette_tools::CallContext;
use rmcp::transport::StreamableHttpServerConfig;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use upstream_support::{
    SubprotocolChoice, UpstreamFixture, call_text, http_server, object, remote_definition,
    server::ToolServer, soon, stdio_definition, tcp_server, ws_server,
};

const BUDGET: usize = 1 << 20;

/// Calls with results and arguments that have no room, between others that have.
async fn check_charges(definition: Value) {
    let mut fixture = UpstreamFixture::new(definition);
    let budget = ByteBudget::new("session_buffer_mb", BUDGET);
    fixture.spec.setup.buffers = budget.clone();
    let upstream = fixture.start_ready().await;
    let transport = upstream.status().transport;
    let file = |name: &str, bytes: usize| {
        let path = fixture.workspace.path().join(name);
        std::fs::write(&path, "x".repeat(bytes)).unwrap();
        json!({ "path": path })
    };
    let (large, small) = (file("large", 3 * BUDGET), file("small", BUDGET / 8));
    let large_text = json!({"text": "x".repeat(2 * BUDGET)});
    for (tool, arguments, why) in [
        ("read", &large, "no room"),
        ("echo", &large_text, "did not get the call"),
    ] {
        let context = CallContext::default();
        let called = upstream.call(tool, object(arguments.clone()), &context);
        let error = soon(tool, called).await.unwrap_err();
        assert_eq!(
            error.code,
            ErrorCode::LimitExceeded,
            "{transport}, {tool}: {error}"
        );
        assert!(error.message.contains(why), "{transport}, {tool}: {error}");
        let text = call_text(&upstream, "read", small.clone()).await;
        assert_eq!(text.len(), BUDGET / 8, "{transport}");
    }
    assert_eq!(
        fixture.recorder.count("tool_server_starting"),
        1,
        "{transport}: the connection lives on"
    );
    soon("the stop", upstream.stop("done")).await;
    soon("what is charged to be given back", async {
        while budget.used() > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_without_room_fails_alone_over_stdio_and_tcp() {
    check_charges(stdio_definition(json!({}))).await;
    let address = tcp_server(ToolServer::default(), CancellationToken::new()).await;
    check_charges(remote_definition("tcp", address, json!({}))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_without_room_fails_alone_over_websocket() {
    let address = ws_server(SubprotocolChoice::Chosen, Default::default()).await;
    check_charges(remote_definition("ws", format!("ws://{address}"), json!({}))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_without_room_fails_alone_over_http() {
    for config in [
        StreamableHttpServerConfig::default(),
        StreamableHttpServerConfig::default()
            .with_legacy_session_mode(false)
            .with_json_response(true),
    ] {
        let address = http_server(ToolServer::default(), config, None, CancellationToken::new()).await;
        check_charges(remote_definition(
            "http",
            format!("http://{address}/mcp"),
            json!({}),
        ))
        .await;
    }
}
