//! Every transport, both lifecycles, and what passes through them.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod upstream_support;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use oubliette_protocol::{ErrorCode, tool::Light};
use oubliette_tools::{CallContext, Progress, Trust, upstream::Upstream};
use parking_lot::Mutex;
use rmcp::transport::streamable_http_server::StreamableHttpServerConfig;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use upstream_support::{
    Bench, Subprotocol, ask, at, http_server, object, raw, server::ToolServer, soon, stdio, tcp_server,
    ws_server,
};

/// Calls every tool whose result shows what passes.
async fn everything_passes(upstream: &Arc<Upstream>) {
    assert_eq!(
        ask(upstream, "echo", json!({"text":"héllo\n\"x\""})).await,
        "héllo\n\"x\""
    );

    // Images, structured results and isError as they are.
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

    // Progress in order.
    let seen: Arc<Mutex<Vec<Progress>>> = Arc::default();
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

    // The server's own error.
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
        async move { ask(&upstream, "sleep", json!({"ms":200})).await }
    });
    let many = (0..50).map(|n| {
        let upstream = upstream.clone();
        async move {
            assert_eq!(
                ask(&upstream, "echo", json!({"text":n.to_string()})).await,
                n.to_string()
            )
        }
    });
    futures::future::join_all(many).await;
    assert_eq!(slow.await.unwrap(), "slept");
}

async fn cancellation_passes(upstream: &Arc<Upstream>, server: &ToolServer) {
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
    // Over HTTP requests overtake each other: only the server knows that it has begun.
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

async fn changes_are_followed(upstream: &Arc<Upstream>, server: &ToolServer) {
    let mut changes = upstream.changes();
    // On the newer lifecycle the subscription may still be on its way.
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
async fn stdio_passes_everything() {
    everything_passes(&Bench::new(stdio(json!({}))).up().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ws_tcp_mcp_server_connected() {
    let server = ToolServer::default();
    let address = tcp_server(server.clone(), CancellationToken::new()).await;
    let upstream = Bench::new(at("tcp", address, json!({}))).up().await;
    assert_eq!(upstream.status().transport, "tcp");
    everything_passes(&upstream).await;
    cancellation_passes(&upstream, &server).await;

    for subprotocol in [Subprotocol::Chosen, Subprotocol::Ignored] {
        let seen = Arc::default();
        let address = ws_server(subprotocol, Arc::clone(&seen)).await;
        let headers = json!({"headers":{"x-key":"${env:WS_KEY}"}});
        let mut bench = Bench::new(at("ws", format!("ws://{address}/mcp?x=1"), headers));
        bench.spec.trust = Arc::new(Trust {
            env: vec!["WS_KEY".into()],
            ..Trust::default()
        });
        bench.spec.env = Arc::new(std::collections::HashMap::from([(
            "WS_KEY".to_owned(),
            "k-123456".to_owned(),
        )]));
        let upstream = bench.up().await;
        assert_eq!(upstream.status().transport, "ws");
        everything_passes(&upstream).await;
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
        let upstream = Bench::new(at("http", format!("http://{address}/mcp"), json!({})))
            .up()
            .await;
        assert_eq!(upstream.status().transport, "http");
        everything_passes(&upstream).await;
        if sessions {
            cancellation_passes(&upstream, &server).await;
        }
        soon("the stop", upstream.stop("done")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tcp_list_changes_are_followed() {
    let server = ToolServer::default();
    let address = tcp_server(server.clone(), CancellationToken::new()).await;
    let upstream = Bench::new(at("tcp", address, json!({}))).up().await;
    let mut changes = upstream.changes();
    ask(&upstream, "grow", json!({})).await;
    soon("the changed list", async {
        while !upstream.tools().iter().any(|tool| &*tool.name == "grown0") {
            changes.changed().await.unwrap();
        }
    })
    .await;
}

/// A server of revision 2026-07-28 alone: it knows no `initialize`.
async fn modern(mut peer: raw::Peer, discovered: mpsc::UnboundedSender<()>) {
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
async fn the_new_lifecycle_is_spoken() {
    let (sender, mut discovered) = mpsc::unbounded_channel();
    let address = raw::listen(move |peer| modern(peer, sender.clone())).await;
    let check = json!({"healthCheck":{"intervalMs":20,"timeoutMs":60000,"failures":1}});
    let bench = Bench::new(at("tcp", address, check));
    let upstream = bench.up().await;
    assert_eq!(ask(&upstream, "echo", json!({"text":"new"})).await, "new");
    // Nobody is there to answer its questions.
    let error = upstream
        .call("ask", object(json!({})), &CallContext::default())
        .await
        .unwrap_err();
    assert!(
        error.code == ErrorCode::ToolError && error.message.contains("asks for input"),
        "{error}"
    );
    // Health checks do without ping.
    for _ in 0..4 {
        soon("a check", discovered.recv()).await.unwrap();
    }
    assert_eq!(bench.recorder.lights(), [(Light::Yellow, Light::Green)]);
    upstream.stop("done").await;
}

/// An HTTP server of revision 2026-07-28 alone, in front of the real one.
async fn modern_http(server: ToolServer) -> SocketAddr {
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
async fn the_new_lifecycle_is_spoken_over_http() {
    let server = ToolServer::default();
    let address = modern_http(server.clone()).await;
    let upstream = Bench::new(at("http", format!("http://{address}/"), json!({})))
        .up()
        .await;
    everything_passes(&upstream).await;
    cancellation_passes(&upstream, &server).await;
    changes_are_followed(&upstream, &server).await;
    upstream.stop("done").await;
}

/// A server on a runtime of its own, which can be ended as a killed process is.
struct Killable {
    runtime: Option<tokio::runtime::Runtime>,
    handler: ToolServer,
}

impl Killable {
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

impl Drop for Killable {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_server_that_went_away_is_reached_again() {
    // Bound and not listened on, the port is nobody else's while the server is away.
    let kept = tokio::net::TcpSocket::new_v4().unwrap();
    kept.set_reuseaddr(true).unwrap();
    kept.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = kept.local_addr().unwrap();
    let server = Killable::start(address);
    let bench = Bench::new(at("http", format!("http://{address}/mcp"), json!({})));
    let upstream = bench.up().await;
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
    bench.recorder.wait("tool_server_failed", 1).await;
    let _again = Killable::start(address);
    bench.recorder.wait("tool_server_ready", 2).await;
    assert_eq!(ask(&upstream, "echo", json!({"text":"back"})).await, "back");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_connection_is_made_again() {
    let listener = raw::listen(|mut peer| async move {
        peer.greet(raw::tools(&["a"])).await;
        if peer.number == 0 {
            // Hang up in the middle of a call.
            peer.method("tools/call").await;
            return;
        }
        while let Some(request) = peer.next().await {
            peer.answer(&request, json!({"content":[{"type":"text","text":"back"}]}))
                .await;
        }
    })
    .await;
    let bench = Bench::new(at("tcp", listener, json!({})));
    let upstream = bench.up().await;
    let error = soon(
        "a",
        upstream.call("a", object(json!({})), &CallContext::default()),
    )
    .await
    .unwrap_err();
    assert!(error.message.contains("outcome unknown"), "{}", error.message);
    assert_eq!(ask(&upstream, "a", json!({})).await, "back");
    assert_eq!(bench.recorder.count("tool_server_starting"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_to_a_server_without_it_fails_with_a_reason() {
    let config = StreamableHttpServerConfig::default();
    let address = http_server(ToolServer::default(), config, None, CancellationToken::new()).await;
    for (transport, scheme) in [("ws", "wss"), ("http", "https")] {
        let more = json!({"restart":{"maxAttempts":0}});
        let bench = Bench::new(at(transport, format!("{scheme}://{address}/mcp"), more));
        let row = bench.start().await.status();
        assert_eq!(row.status, Light::Red);
        let error = row.error.unwrap();
        assert!(error.contains(&address.to_string()), "{error}");
        assert!(
            !error.contains("not ready within"),
            "it does not wait for the time limit: {error}"
        );
    }
}
