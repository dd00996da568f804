//! What the tests of tool servers share: a recorder for the debugger, servers over every transport, and raw
//! ones that misbehave.

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
use oubliette_protocol::{
    Object, Slug,
    catalog::{McpServer, ToolDefinition},
    debug::DebugBody,
    tool::Light,
};
use oubliette_sandbox::{Host, Sandbox};
use oubliette_tools::{
    CallContext, CallThread, DebugSink, Trust,
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

/// Nothing in these tests takes this long.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(done) => done,
        Err(_) => panic!("waited in vain: {what}"),
    }
}

/// Keeps debugger events and lets tests wait for them.
pub struct Recorder {
    events: Mutex<Vec<DebugBody>>,
    count: watch::Sender<usize>,
}

impl Recorder {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            events: Mutex::default(),
            count: watch::Sender::new(0),
        })
    }

    pub fn all(&self) -> Vec<DebugBody> {
        self.events.lock().clone()
    }

    pub fn kinds(&self) -> Vec<&'static str> {
        self.events.lock().iter().map(DebugBody::kind).collect()
    }

    /// Every change of light.
    pub fn lights(&self) -> Vec<(Light, Light)> {
        let change = |body: &DebugBody| match body {
            DebugBody::HealthChanged { from, to, .. } => Some((*from, *to)),
            _ => None,
        };
        self.events.lock().iter().filter_map(change).collect()
    }

    pub fn count(&self, kind: &str) -> usize {
        self.kinds().iter().filter(|k| **k == kind).count()
    }

    /// Waits until there are so many events of a kind.
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

impl DebugSink for Recorder {
    fn record(&self, agent: Option<&Slug>, body: DebugBody) {
        assert_eq!(agent.map(Slug::as_str), Some("tester"));
        self.events.lock().push(body);
        self.count.send_modify(|count| *count += 1);
    }
}

/// A server under test with all that belongs to it.
pub struct Bench {
    pub recorder: Arc<Recorder>,
    pub workspace: tempfile::TempDir,
    pub spec: UpstreamSpec,
}

impl Bench {
    /// For this `tool.json`.
    pub fn new(definition: Value) -> Self {
        let ToolDefinition::Mcp(server) = ToolDefinition::from_value(definition).unwrap() else {
            panic!("no server")
        };
        let recorder = Recorder::new();
        let workspace = tempfile::tempdir().unwrap();
        let host: Arc<dyn Sandbox> = Arc::new(Host::new(program()));
        let spec = UpstreamSpec {
            trust: Arc::new(Trust {
                host_tools: vec![server.id.clone()],
                ..Trust::default()
            }),
            server,
            agent: "tester".parse().unwrap(),
            workspace: workspace.path().to_path_buf(),
            sandbox: host.clone(),
            host,
            limits: Default::default(),
            env: Arc::new(HashMap::<String, String>::new()),
            debug: recorder.clone(),
            proxy_socket: None,
            thread: CallThread::here(),
        };
        Self {
            recorder,
            workspace,
            spec,
        }
    }

    /// Starts it and waits for the end of the first start.
    pub async fn start(&self) -> Arc<Upstream> {
        let upstream = Upstream::start(self.spec.clone());
        soon("the first start", upstream.settled()).await;
        upstream
    }

    /// Starts it; it must be ready.
    pub async fn up(&self) -> Arc<Upstream> {
        let upstream = self.start().await;
        assert_eq!(upstream.status().status, Light::Green, "{:?}", upstream.status());
        assert!(upstream.is_up());
        upstream
    }
}

/// The test server and inner stage, built with this crate's tests.
pub fn program() -> PathBuf {
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
pub fn stdio(more: Value) -> Value {
    let base = json!({"id":"srv","kind":"mcp","transport":"stdio","command":program(),
        "timeouts":{"startupMs":60000,"requestMs":60000}});
    merged(base, more)
}

/// A definition of something that listens, merged with `more`.
pub fn at(transport: &str, endpoint: impl std::fmt::Display, more: Value) -> Value {
    let base = json!({"id":"srv","kind":"mcp","transport":transport,"endpoint":endpoint.to_string(),
        "timeouts":{"startupMs":60000,"requestMs":60000}});
    merged(base, more)
}

fn merged(mut base: Value, more: Value) -> Value {
    let fields = more.as_object().unwrap().clone();
    base.as_object_mut().unwrap().extend(fields);
    base
}

pub fn object(value: Value) -> Object {
    value.as_object().unwrap().clone()
}

/// Calls a tool and gives the text of its result.
pub async fn ask(upstream: &Upstream, tool: &str, arguments: Value) -> String {
    let called = soon(
        tool,
        upstream.call(tool, object(arguments), &CallContext::default()),
    )
    .await;
    called
        .unwrap_or_else(|error| panic!("{tool}: {error}"))
        .joined_text()
}

/// A server definition for tests that build their own spec.
pub fn server(definition: Value) -> McpServer {
    match ToolDefinition::from_value(definition).unwrap() {
        ToolDefinition::Mcp(server) => server,
        ToolDefinition::Builtin(_) => panic!("no server"),
    }
}

/// The real server over TCP; dropping the token's guard closes it with its connections.
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

/// What a WebSocket server does with the offered subprotocol.
#[derive(Clone, Copy)]
pub enum Subprotocol {
    Chosen,
    Ignored,
}

/// The real server over WebSocket; records the headers of the handshake.
pub async fn ws_server(subprotocol: Subprotocol, seen: Arc<Mutex<Vec<(String, String)>>>) -> SocketAddr {
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
                    if let Subprotocol::Chosen = subprotocol {
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

/// The real server over streamable HTTP, at the address if one is given.
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
        // Connections do not outlive the server, as when its process is killed.
        stop.run_until_cancelled_owned(async move { axum::serve(listener, router).await })
            .await
    });
    address
}
