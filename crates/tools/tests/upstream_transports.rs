//! Every transport in both MCP lifecycles: results, progress, errors, cancellation, list changes, reconnecting.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod upstream_support;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use oubliette_protocol::{ErrorCode, relay::ProgressReport, tool::HealthStatus};
use oubliette_tools::{CallContext, TrustedResources, upstream::Upstream};
use parking_lot::Mutex;
use rmcp::transport::streamable_http_server::StreamableHttpServerConfig;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use upstream_support::{
    SubprotocolChoice, UpstreamFixture, call_text, http_server, object, raw, remote_definition,
    server::ToolServer, soon, stdio_definition, tcp_server, ws_server,
};

/// Checks results, progress, errors and concurrent calls.
async fn check_call_features(upstream: &Arc<Upstream>) {
    assert_eq!(
        call_text(upstream, "echo", json!({"text":"héllo\n\"x\""})).await,
        "héllo\n\"x\""
    );

    // Images, structured results and isError arrive unchanged.
    let rich = soon(
        "rich",
        upstream.call("rich", object(json!({})), &CallContext::default()),
    )
    .await
    .unwrap();
    assert_eq!(
        rich.content,
        [json!({"type":"image","data":"aGk=","mimeType":"image/png"})]
    );
    assert_eq!(rich.structured_content, Some(json!({"z":1,"a":[true,null]})));
    assert!(rich.is_error);

    // Progress arrives in order.
    let seen: Arc<Mutex<Vec<ProgressReport>>> = Arc::default();
    let sink = seen.clone();
    let ctx = CallContext {
        progress: Some(Arc::new(move |progress| sink.lock().push(progress))),
        ..CallContext::default()
    };
    let done = soon(
        "progress",
        upstream.call("progress", object(json!({"steps":5})), &ctx),
    )
    .await
    .unwrap();
    assert_eq!(done.joined_text(), "done");
    let steps: Vec<f64> = seen.lock().iter().map(|progress| progress.progress).collect();
    assert_eq!(steps, [1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(seen.lock()[0].message.as_deref(), Some("step 1"));
    assert_eq!(seen.lock()[0].total, Some(5.0));

    // A JSON-RPC error is passed on as a tool error.
    let error = upstream
        .call("refuse", object(json!({})), &CallContext::default())
        .await
        .unwrap_err();
    assert_eq!(
        (error.code, error.message.as_str()),
        (ErrorCode::ToolError, "no, because")
    );

    // Calls do not wait for each other.
    let slow = tokio::spawn({
        let upstream = upstream.clone();
        async move { call_text(&upstream, "sleep", json!({"ms":200})).await }
    });
    let many = (0..50).map(|n| {
        let upstream = upstream.clone();
        async move {
            assert_eq!(
                call_text(&upstream, "echo", json!({"text":n.to_string()})).await,
                n.to_string()
            )
        }
    });
    futures::future::join_all(many).await;
    assert_eq!(slow.await.unwrap(), "slept");
}

async fn check_cancellation(upstream: &Arc<Upstream>, server: &ToolServer) {
    let cancel = CancellationToken::new();
    let ctx = CallContext {
        cancel: cancel.clone(),
        ..CallContext::default()
    };
    let count = |what: &AtomicUsize| what.load(Ordering::SeqCst);
    let (slept, before) = (count(&server.sleeping), count(&server.cancelled));
    let call = tokio::spawn({
        let upstream = upstream.clone();
        async move { upstream.call("sleep", object(json!({"ms":60_000})), &ctx).await }
    });
    // Over HTTP a cancellation can overtake its request, so wait until the server counts the call as begun.
    soon("the call to begin", async {
        while count(&server.sleeping) == slept {
            tokio::task::yield_now().await;
        }
    })
    .await;
    cancel.cancel();
    assert!(
        soon("the cancelled call", call)
            .await
            .unwrap()
            .unwrap_err()
            .message
            .contains("cancelled")
    );
    soon("the server's cancellation", async {
        while count(&server.cancelled) == before {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

async fn check_list_changes(upstream: &Arc<Upstream>, server: &ToolServer) {
    let mut changes = upstream.changes();
    // In the discover lifecycle the subscription may not be made yet, so the change is repeated.
    soon("the changed list", async {
        while !upstream.tools().iter().any(|tool| &*tool.name == "grown0") {
            server.grown.send_modify(|grown| *grown += 1);
            let pause = std::time::Duration::from_millis(300);
            let _ = tokio::time::timeout(pause, changes.changed()).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stdio_carries_results_progress_and_errors() {
    check_call_features(
        &UpstreamFixture::new(stdio_definition(json!({})))
            .start_ready()
            .await,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ws_tcp_mcp_server_connected() {
    let server = ToolServer::default();
    let address = tcp_server(server.clone(), CancellationToken::new()).await;
    let upstream = UpstreamFixture::new(remote_definition("tcp", address, json!({})))
        .start_ready()
        .await;
    assert_eq!(upstream.status().transport, "tcp");
    check_call_features(&upstream).await;
    check_cancellation(&upstream, &server).await;

    for subprotocol in [SubprotocolChoice::Chosen, SubprotocolChoice::Ignored] {
        let seen = Arc::default();
        let address = ws_server(subprotocol, Arc::clone(&seen)).await;
        let headers = json!({"headers":{"x-key":"${env:WS_KEY}"}});
        let mut fixture = UpstreamFixture::new(remote_definition(
            "ws",
            format!("ws://{address}/mcp?x=1"),
            headers,
        ));
        fixture.spec.setup.trust = Arc::new(TrustedResources {
            env: vec!["WS_KEY".into()],
            ..TrustedResources::default()
        });
        fixture.spec.setup.env = Arc::new(std::collections::HashMap::from([(
            "WS_KEY".to_owned(),
            "k-123456".to_owned(),
        )]));
        let upstream = fixture.start_ready().await;
        assert_eq!(upstream.status().transport, "ws");
        check_call_features(&upstream).await;
        let seen: Vec<(String, String)> = seen.lock().clone();
        assert!(
            seen.contains(&("sec-websocket-protocol".into(), "mcp".into())),
            "{seen:?}"
        );
        assert!(seen.contains(&("x-key".into(), "k-123456".into())), "{seen:?}");
        soon("the stop", upstream.stop("done")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn http_mcp_server_connected() {
    let server = ToolServer::default();
    for config in [
        StreamableHttpServerConfig::default(),
        StreamableHttpServerConfig::default()
            .with_legacy_session_mode(false)
            .with_json_response(true),
    ] {
        let sessions = config.legacy_session_mode;
        let address = http_server(server.clone(), config, None, CancellationToken::new()).await;
        let upstream = UpstreamFixture::new(remote_definition(
            "http",
            format!("http://{address}/mcp"),
            json!({}),
        ))
        .start_ready()
        .await;
        assert_eq!(upstream.status().transport, "http");
        check_call_features(&upstream).await;
        if sessions {
            check_cancellation(&upstream, &server).await;
        }
        soon("the stop", upstream.stop("done")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tcp_list_changes_are_followed() {
    let server = ToolServer::default();
    let address = tcp_server(server.clone(), CancellationToken::new()).await;
    let upstream = UpstreamFixture::new(remote_definition("tcp", address, json!({})))
        .start_ready()
        .await;
    let mut changes = upstream.changes();
    call_text(&upstream, "grow", json!({})).await;
    soon("the changed list", async {
        while !upstream.tools().iter().any(|tool| &*tool.name == "grown0") {
            changes.changed().await.unwrap();
        }
    })
    .await;
}

/// A server that supports revision 2026-07-28 only and refuses `initialize`.
async fn discover_only_server(mut peer: raw::RawServerConnection, discovered: mpsc::UnboundedSender<()>) {
    while let Some(request) = peer.next().await {
        let meta = &request["params"]["_meta"];
        match request["method"].as_str().unwrap_or_default() {
            "initialize" => peer.refuse(&request, -32601, "Method not found").await,
            "notifications/initialized" => panic!("there is no such thing here"),
            "server/discover" => {
                let _ = discovered.send(());
                let answer = json!({"supportedVersions":["2026-07-28"],"capabilities":{"tools":{"listChanged":true}},
                    "serverInfo":{"name":"modern","version":"1"},"resultType":"complete",
                    "ttlMs":0,"cacheScope":"private"});
                peer.answer(&request, answer).await;
            }
            _ if request["id"].is_null() => {}
            _ if meta["io.modelcontextprotocol/protocolVersion"] != "2026-07-28" => {
                peer.refuse(&request, -32602, "no version in _meta").await;
            }
            "tools/list" => {
                let tools = raw::tools(&["echo", "ask"]);
                let answer =
                    json!({"tools":tools,"resultType":"complete","ttlMs":60000,"cacheScope":"private"});
                peer.answer(&request, answer).await;
            }
            "subscriptions/listen" => {
                let about = json!({"io.modelcontextprotocol/subscriptionId":request["id"]});
                let filter = request["params"]["notifications"].clone();
                let params = json!({"_meta":about,"notifications":filter});
                peer.send(json!({"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":params})).await;
                let params = json!({ "_meta": about });
                peer.send(
                    json!({"jsonrpc":"2.0","method":"notifications/tools/list_changed","params":params}),
                )
                .await;
            }
            "tools/call" if request["params"]["name"] == "ask" => {
                let answer = json!({"resultType":"input_required","inputRequests":{"a":{"method":"elicitation/create"}}});
                peer.answer(&request, answer).await;
            }
            "tools/call" => {
                let text = request["params"]["arguments"]["text"].clone();
                let answer = json!({"content":[{"type":"text","text":text}],"resultType":"complete"});
                peer.answer(&request, answer).await;
            }
            _ => peer.refuse(&request, -32601, "Method not found").await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_discover_lifecycle_works_over_tcp() {
    let (sender, mut discovered) = mpsc::unbounded_channel();
    let address = raw::listen(move |peer| discover_only_server(peer, sender.clone())).await;
    let check = json!({"healthCheck":{"intervalMs":20,"timeoutMs":60000,"failures":1}});
    let fixture = UpstreamFixture::new(remote_definition("tcp", address, check));
    let upstream = fixture.start_ready().await;
    assert_eq!(call_text(&upstream, "echo", json!({"text":"new"})).await, "new");
    // A result that asks for input is an error: no client here can give it.
    let error = upstream
        .call("ask", object(json!({})), &CallContext::default())
        .await
        .unwrap_err();
    assert!(
        error.code == ErrorCode::ToolError && error.message.contains("asks for input"),
        "{error}"
    );
    // Health checks use server/discover, since this revision has no ping.
    for _ in 0..4 {
        soon("a check", discovered.recv()).await.unwrap();
    }
    assert_eq!(
        fixture.recorder.health_changes(),
        [(HealthStatus::Yellow, HealthStatus::Green)]
    );
    upstream.stop("done").await;
}

/// An HTTP server that supports revision 2026-07-28 only: [`ToolServer`] behind a layer that refuses `initialize`.
async fn discover_only_http_server(server: ToolServer) -> SocketAddr {
    use axum::{body, extract::Request, middleware, response::IntoResponse};
    let inner = rmcp::transport::StreamableHttpService::new(
        move || Ok(server.clone()),
        Arc::new(rmcp::transport::streamable_http_server::session::local::LocalSessionManager::default()),
        StreamableHttpServerConfig::default(),
    );
    let refuse = |request: Request, next: middleware::Next| async move {
        let (parts, body) = request.into_parts();
        let bytes = body::to_bytes(body, 1 << 20).await.unwrap();
        let message: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        if message["method"] == "initialize" {
            let error = json!({"code":-32601,"message":"Method not found"});
            let answer = json!({"jsonrpc":"2.0","id":message["id"],"error":error});
            let kind = [("content-type", "application/json")];
            return (http::StatusCode::BAD_REQUEST, kind, answer.to_string()).into_response();
        }
        next.run(Request::from_parts(parts, bytes.into())).await
    };
    let router = axum::Router::new()
        .fallback_service(inner)
        .layer(middleware::from_fn(refuse));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn the_discover_lifecycle_works_over_http() {
    let server = ToolServer::default();
    let address = discover_only_http_server(server.clone()).await;
    let upstream = UpstreamFixture::new(remote_definition("http", format!("http://{address}/"), json!({})))
        .start_ready()
        .await;
    check_call_features(&upstream).await;
    check_cancellation(&upstream, &server).await;
    check_list_changes(&upstream, &server).await;
    upstream.stop("done").await;
}

/// An HTTP server on its own runtime, so that it can end at once like a killed process.
struct KillableHttpServer {
    runtime: Option<tokio::runtime::Runtime>,
    handler: ToolServer,
}

impl KillableHttpServer {
    fn start(address: SocketAddr) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (handler, config) = (ToolServer::default(), StreamableHttpServerConfig::default());
        let serve = http_server(handler.clone(), config, Some(address), CancellationToken::new());
        std::thread::scope(|scope| scope.spawn(|| runtime.block_on(serve)).join().unwrap());
        Self {
            runtime: Some(runtime),
            handler,
        }
    }

    fn kill(mut self) {
        let runtime = self.runtime.take().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| runtime.shutdown_timeout(std::time::Duration::from_secs(60)));
        });
    }
}

impl Drop for KillableHttpServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_server_that_was_killed_is_reconnected() {
    // Bound but not listening: keeps the port reserved while the server is down.
    let kept = tokio::net::TcpSocket::new_v4().unwrap();
    kept.set_reuseaddr(true).unwrap();
    kept.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = kept.local_addr().unwrap();
    let server = KillableHttpServer::start(address);
    let fixture = UpstreamFixture::new(remote_definition(
        "http",
        format!("http://{address}/mcp"),
        json!({}),
    ));
    let upstream = fixture.start_ready().await;
    let open = tokio::spawn({
        let upstream = upstream.clone();
        async move {
            upstream
                .call("sleep", object(json!({"ms":60_000})), &CallContext::default())
                .await
        }
    });
    soon("the call to begin", async {
        while server.handler.sleeping.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    server.kill();
    let error = soon("the open call", open).await.unwrap().unwrap_err();
    assert!(error.message.contains("outcome unknown"), "{}", error.message);
    fixture.recorder.wait("tool_server_failed", 1).await;
    let _again = KillableHttpServer::start(address);
    fixture.recorder.wait("tool_server_ready", 2).await;
    assert_eq!(call_text(&upstream, "echo", json!({"text":"back"})).await, "back");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_connection_is_reopened() {
    let listener = raw::listen(|mut peer| async move {
        peer.complete_startup(raw::tools(&["a"])).await;
        if peer.number == 0 {
            // Close in the middle of a call.
            peer.expect_method("tools/call").await;
            return;
        }
        while let Some(request) = peer.next().await {
            peer.answer(&request, json!({"content":[{"type":"text","text":"back"}]}))
                .await;
        }
    })
    .await;
    let fixture = UpstreamFixture::new(remote_definition("tcp", listener, json!({})));
    let upstream = fixture.start_ready().await;
    let error = soon(
        "a",
        upstream.call("a", object(json!({})), &CallContext::default()),
    )
    .await
    .unwrap_err();
    assert!(error.message.contains("outcome unknown"), "{}", error.message);
    assert_eq!(call_text(&upstream, "a", json!({})).await, "back");
    assert_eq!(fixture.recorder.count("tool_server_starting"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_to_a_server_without_it_fails_with_a_reason() {
    let config = StreamableHttpServerConfig::default();
    let address = http_server(ToolServer::default(), config, None, CancellationToken::new()).await;
    for (transport, scheme) in [("ws", "wss"), ("http", "https")] {
        let more = json!({"restart":{"maxAttempts":0}});
        let fixture = UpstreamFixture::new(remote_definition(
            transport,
            format!("{scheme}://{address}/mcp"),
            more,
        ));
        let row = fixture.start().await.status();
        assert_eq!(row.status, HealthStatus::Red);
        let error = row.error.unwrap();
        assert!(error.contains(&address.to_string()), "{error}");
        assert!(
            !error.contains("not ready within"),
            "it does not wait for the time limit: {error}"
        );
    }
}
