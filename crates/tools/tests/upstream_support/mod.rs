//! Fixtures of the tool-server tests: a recorder of debugger events, an MCP server over every transport, and
//! hand-written servers that misbehave (`raw`).

#![allow(dead_code, unreachable_pub, missing_docs)]

pub mod raw;
pub mod server;

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures::{SinkExt, StreamExt};
use oubliette_protocol::{JsonObject, Slug, catalog::ToolDefinition, debug::DebugBody, tool::HealthStatus};
use oubliette_sandbox::{HostDriver, SandboxDriver};
use oubliette_tools::{
    CallContext, CallThread, DebugSink, ServerSetup, TrustedResources,
    upstream::{Upstream, UpstreamSpec},
};
use parking_lot::Mutex;
use rmcp::{
    ServiceExt,
    transport::streamable_http_server::{
        StreamableHttpServerConfig, StreamableHttpService, session::local::LocalSessionManager,
    },
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch};
use tokio_tungstenite::tungstenite::{
    self, Message,
    handshake::server::{Request, Response},
};
use tokio_util::sync::CancellationToken;

use server::ToolServer;

/// Upper bound of every wait; a test that reaches it fails.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Awaits `future`, or fails the test after [`TEST_TIMEOUT`] naming `what`.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(TEST_TIMEOUT, future).await {
        Ok(done) => done,
        Err(_) => panic!("timed out waiting for {what}"),
    }
}

/// Records debugger events and lets tests wait for them.
pub struct UpstreamDebugRecorder {
    events: Mutex<Vec<DebugBody>>,
    count: watch::Sender<usize>,
}

impl UpstreamDebugRecorder {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            events: Mutex::default(),
            count: watch::Sender::new(0),
        })
    }

    pub fn events(&self) -> Vec<DebugBody> {
        self.events.lock().clone()
    }

    pub fn kinds(&self) -> Vec<&'static str> {
        self.events.lock().iter().map(DebugBody::kind).collect()
    }

    /// Every health change, as (from, to).
    pub fn health_changes(&self) -> Vec<(HealthStatus, HealthStatus)> {
        let change = |body: &DebugBody| match body {
            DebugBody::HealthChanged { from, to, .. } => Some((*from, *to)),
            _ => None,
        };
        self.events.lock().iter().filter_map(change).collect()
    }

    pub fn count(&self, kind: &str) -> usize {
        self.kinds().iter().filter(|k| **k == kind).count()
    }

    /// Waits until `count` events of this kind were recorded.
    pub async fn wait(&self, kind: &str, count: usize) {
        let mut news = self.count.subscribe();
        soon(&format!("{count} {kind}, have {:?}", self.kinds()), async {
            while self.count(kind) < count {
                news.changed().await.unwrap();
            }
        })
        .await;
    }
}

impl DebugSink for UpstreamDebugRecorder {
    fn record(&self, agent: Option<&Slug>, body: DebugBody) {
        assert_eq!(agent.map(Slug::as_str), Some("tester"));
        self.events.lock().push(body);
        self.count.send_modify(|count| *count += 1);
    }
}

/// The spec of a server under test, with the recorder and the workspace it refers to.
pub struct UpstreamFixture {
    pub recorder: Arc<UpstreamDebugRecorder>,
    pub workspace: tempfile::TempDir,
    pub spec: UpstreamSpec,
}

impl UpstreamFixture {
    /// Builds the spec from a `tool.json`. Stdio servers run without isolation, through the host driver.
    pub fn new(definition: Value) -> Self {
        let ToolDefinition::Mcp(server) = ToolDefinition::from_value(definition).unwrap() else {
            panic!("no server")
        };
        let recorder = UpstreamDebugRecorder::new();
        let workspace = tempfile::tempdir().unwrap();
        let host: Arc<dyn SandboxDriver> = Arc::new(HostDriver::new(tool_server_path()));
        let spec = UpstreamSpec {
            setup: ServerSetup {
                trust: Arc::new(TrustedResources {
                    host_tools: vec![server.id.clone()],
                    ..TrustedResources::default()
                }),
                agent: "tester".parse().unwrap(),
                workspace: workspace.path().to_path_buf(),
                sandbox: host.clone(),
                host,
                limits: Default::default(),
                group: None,
                env: Arc::new(HashMap::<String, String>::new()),
                debug: recorder.clone(),
                programs: None,
                caches: None,
                proxy: None,
                thread: CallThread::current_runtime(),
                buffers: Default::default(),
            },
            server,
        };
        Self {
            recorder,
            workspace,
            spec,
        }
    }

    /// Starts the server and waits until the first start has succeeded or failed.
    pub async fn start(&self) -> Arc<Upstream> {
        let upstream = Upstream::start(self.spec.clone());
        soon("the first start", upstream.wait_first_start()).await;
        upstream
    }

    /// Starts the server and asserts that it is up.
    pub async fn start_ready(&self) -> Arc<Upstream> {
        let upstream = self.start().await;
        assert_eq!(
            upstream.status().status,
            HealthStatus::Green,
            "{:?}",
            upstream.status()
        );
        assert!(upstream.is_up());
        upstream
    }
}

/// Path of `examples/tool_server`: the test server, and the inner stage of the sandbox it runs in.
pub fn tool_server_path() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let program = here
        .parent()
        .and_then(Path::parent)
        .unwrap()
        .join("examples/tool_server");
    assert!(
        program.exists(),
        "build it first: cargo build -p oubliette-tools --examples"
    );
    program
}

/// A stdio definition of the test server, merged with `more`.
pub fn stdio_definition(more: Value) -> Value {
    let base = json!({"id":"srv","kind":"mcp","transport":"stdio","command":tool_server_path(),
        "timeouts":{"startupMs":60000,"requestMs":60000}});
    merged(base, more)
}

/// A definition of a server reached at `endpoint`, merged with `more`.
pub fn remote_definition(transport: &str, endpoint: impl std::fmt::Display, more: Value) -> Value {
    let base = json!({"id":"srv","kind":"mcp","transport":transport,"endpoint":endpoint.to_string(),
        "timeouts":{"startupMs":60000,"requestMs":60000}});
    merged(base, more)
}

fn merged(mut base: Value, more: Value) -> Value {
    let fields = more.as_object().unwrap().clone();
    base.as_object_mut().unwrap().extend(fields);
    base
}

pub fn object(value: Value) -> JsonObject {
    value.as_object().unwrap().clone()
}

/// Calls a tool and returns the text of its result; an error fails the test.
pub async fn call_text(upstream: &Upstream, tool: &str, arguments: Value) -> String {
    let called = soon(
        tool,
        upstream.call(tool, object(arguments), &CallContext::default()),
    )
    .await;
    called
        .unwrap_or_else(|error| panic!("{tool}: {error}"))
        .joined_text()
}

/// [`ToolServer`] over TCP; cancelling `stop` closes the listener and its connections.
pub async fn tcp_server(handler: ToolServer, stop: CancellationToken) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (handler, stop) = (handler.clone(), stop.clone());
            tokio::spawn(stop.run_until_cancelled_owned(async move {
                if let Ok(service) = handler.serve(stream).await {
                    let _ = service.waiting().await;
                }
            }));
        }
    }));
    address
}

/// Whether a WebSocket server confirms the offered subprotocol `mcp`.
#[derive(Clone, Copy)]
pub enum SubprotocolChoice {
    Chosen,
    Ignored,
}

/// [`ToolServer`] over WebSocket; appends the handshake's headers to `seen`.
pub async fn ws_server(
    subprotocol: SubprotocolChoice,
    seen: Arc<Mutex<Vec<(String, String)>>>,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let seen = seen.clone();
            tokio::spawn(async move {
                #[allow(clippy::result_large_err, reason = "the library's signature")]
                let callback = |request: &Request, mut response: Response| {
                    for (name, value) in request.headers() {
                        seen.lock()
                            .push((name.to_string(), value.to_str().unwrap_or_default().to_owned()));
                    }
                    if let SubprotocolChoice::Chosen = subprotocol {
                        response
                            .headers_mut()
                            .insert("sec-websocket-protocol", "mcp".parse().unwrap());
                    }
                    Ok::<_, tungstenite::handshake::server::ErrorResponse>(response)
                };
                let socket = tokio_tungstenite::accept_hdr_async(stream, callback)
                    .await
                    .unwrap();
                let (sink, stream) = socket.split();
                let sink = sink.with(|message: rmcp::model::ServerJsonRpcMessage| async move {
                    Ok::<_, tungstenite::Error>(Message::text(serde_json::to_string(&message).unwrap()))
                });
                let stream = stream.filter_map(|message| async move {
                    serde_json::from_str(message.ok()?.to_text().ok()?).ok()
                });
                if let Ok(service) = ToolServer::default()
                    .serve((Box::pin(sink), Box::pin(stream)))
                    .await
                {
                    let _ = service.waiting().await;
                }
            });
        }
    });
    address
}

/// [`ToolServer`] over streamable HTTP, on `address` or a free port.
pub async fn http_server(
    handler: ToolServer,
    config: StreamableHttpServerConfig,
    address: Option<SocketAddr>,
    stop: CancellationToken,
) -> SocketAddr {
    let listener = TcpListener::bind(address.unwrap_or(([127, 0, 0, 1], 0).into()))
        .await
        .unwrap();
    let address = listener.local_addr().unwrap();
    let service = StreamableHttpService::new(
        move || Ok(handler.clone()),
        Arc::new(LocalSessionManager::default()),
        config.with_cancellation_token(stop.clone()),
    );
    let router = axum::Router::new().fallback_service(service);
    tokio::spawn(async move {
        // Cancelling drops open connections too, as killing the server's process would.
        stop.run_until_cancelled_owned(async move { axum::serve(listener, router).await })
            .await
    });
    address
}
