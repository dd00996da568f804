//! A server on a free port in the test's process, and clients that speak raw HTTP to it.

#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used
)]

pub mod siblings;

use std::sync::Arc;

use oubliette_home::HomeDir;
use oubliette_protocol::{ProjectId, Scope, SessionId, WorkspaceId, event::SessionStatus};
use oubliette_server::testing::{self, App, RunningServer, ServeOptions, ServerConfig, TokenSpec, expose};
use oubliette_store::SessionRow;
use reqwest::{Client, RequestBuilder, Response};
use serde_json::{Value, json};

/// A running server with an empty home and an admin token.
pub struct InProcessServer {
    pub app: Arc<App>,
    pub url: String,
    pub admin: String,
    pub http: Client,
    running: Option<RunningServer>,
    _home: tempfile::TempDir,
}

impl InProcessServer {
    pub async fn start() -> Self {
        Self::start_with("").await
    }

    /// Starts with this text as oubliette.toml.
    pub async fn start_with(config: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = HomeDir::at(dir.path().join("home")).unwrap();
        testing::create_home(&home).unwrap();
        let mut config = ServerConfig::parse(config, "oubliette.toml", &|_| None).unwrap();
        config.listen = "127.0.0.1:0".parse().unwrap();
        let running = testing::start(ServeOptions {
            home,
            config,
            insecure: false,
        })
        .await
        .unwrap();
        let admin = testing::populate(&running.app).await.unwrap().unwrap();
        Self {
            app: running.app.clone(),
            url: running.url(),
            admin,
            http: client(),
            running: Some(running),
            _home: dir,
        }
    }

    pub async fn stop(mut self) {
        self.running.take().unwrap().stop().await;
    }

    pub async fn token(&self, scope: Scope, project: Option<&ProjectId>) -> String {
        let mint = TokenSpec {
            name: "t".into(),
            scope,
            project: project.cloned(),
            expires_at: None,
            session: None,
        };
        let (_, token) = self.app.auth.mint(mint).await.unwrap();
        expose(&token).to_owned()
    }

    pub fn post(&self, path: &str) -> RequestBuilder {
        self.http.post(format!("{}{path}", self.url))
    }

    pub fn get(&self, path: &str) -> RequestBuilder {
        self.http.get(format!("{}{path}", self.url))
    }

    /// Calls a tool by REST; status and body of the response.
    pub async fn tool(&self, token: &str, name: &str, arguments: Value) -> (u16, Value) {
        let response = self
            .post(&format!("/api/tools/{name}"))
            .bearer_auth(token)
            .json(&arguments)
            .send()
            .await
            .unwrap();
        let status = response.status().as_u16();
        (status, response.json().await.unwrap())
    }

    pub async fn project(&self, name: &str) -> ProjectId {
        let (status, project) = self
            .tool(&self.admin, "project_create", json!({ "name": name }))
            .await;
        assert_eq!(status, 200, "{project}");
        project["project_id"].as_str().unwrap().parse().unwrap()
    }

    pub async fn default_workspace(&self, project: &ProjectId) -> WorkspaceId {
        self.app
            .store
            .project_get(project)
            .await
            .unwrap()
            .unwrap()
            .default_workspace
    }

    /// Inserts a session that is only a row and a log, without an agent process.
    pub async fn session(&self, project: &ProjectId, parent: Option<&SessionId>) -> SessionId {
        let id = SessionId::generate();
        let now = oubliette_store::now();
        let root = match parent {
            Some(parent) => self.app.store.session_get(parent).await.unwrap().unwrap().root_id,
            None => id.clone(),
        };
        let row = SessionRow {
            session_id: id.clone(),
            project_id: project.clone(),
            workspace_id: self.default_workspace(project).await,
            agent: "demo".parse().unwrap(),
            status: SessionStatus::Ended,
            reason: None,
            parent_id: parent.cloned(),
            root_id: root,
            depth: parent.map_or(0, |_| 1),
            turn: 0,
            created_at: now,
            updated_at: now,
            created_by: None,
            title: None,
            agent_session: None,
            isolation: None,
            images: None,
        };
        self.app.store.session_insert(row).await.unwrap();
        id
    }
}

pub fn client() -> Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder().no_proxy().build().unwrap()
}

/// Reads the SSE events of a response.
pub struct SseReader {
    response: Response,
    buffer: String,
}

/// One SSE event.
#[derive(Debug, Clone, PartialEq)]
pub struct SseFrame {
    pub id: Option<String>,
    pub event: Option<String>,
    pub data: Value,
}

impl SseReader {
    pub fn new(response: Response) -> Self {
        assert_eq!(response.status(), 200);
        Self {
            response,
            buffer: String::new(),
        }
    }

    /// The next event with data; `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<SseFrame> {
        loop {
            while let Some(end) = self.buffer.find("\n\n") {
                let block: String = self.buffer.drain(..end + 2).collect();
                let field = |name: &str| {
                    let mut lines = block.lines().filter_map(|l| l.strip_prefix(name));
                    lines.next().map(|v| v.trim_start().to_owned())
                };
                if let Some(data) = field("data:").filter(|d| !d.is_empty()) {
                    return Some(SseFrame {
                        id: field("id:"),
                        event: field("event:"),
                        data: serde_json::from_str(&data).unwrap(),
                    });
                }
            }
            let chunk = tokio::time::timeout(std::time::Duration::from_secs(60), self.response.chunk());
            let chunk = chunk.await.expect("an event within a minute").ok()??;
            self.buffer
                .push_str(&String::from_utf8_lossy(&chunk).replace("\r\n", "\n"));
        }
    }
}

/// A minimal MCP client over raw HTTP.
pub struct RawMcpClient<'a> {
    pub server: &'a InProcessServer,
    pub token: String,
    pub session: Option<String>,
    pub version: &'static str,
    id: std::sync::atomic::AtomicI64,
}

impl<'a> RawMcpClient<'a> {
    /// Initializes a stateful MCP session of a revision.
    pub async fn stateful(server: &'a InProcessServer, token: &str, version: &'static str) -> Self {
        let mut client = Self {
            server,
            token: token.into(),
            session: None,
            version,
            id: 1.into(),
        };
        let params = json!({"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
        let response = client.send("initialize", params).await;
        client.session = Some(response.headers()["mcp-session-id"].to_str().unwrap().to_owned());
        let answer = SseReader::new(response).next().await.unwrap().data;
        assert_eq!(answer["result"]["protocolVersion"], version, "{answer}");
        let accepted = client
            .request(json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))
            .send()
            .await
            .unwrap();
        assert_eq!(accepted.status(), 202);
        client
    }

    /// A stateless client of revision 2026-07-28.
    pub fn stateless(server: &'a InProcessServer, token: &str) -> Self {
        Self {
            server,
            token: token.into(),
            session: None,
            version: "2026-07-28",
            id: 1.into(),
        }
    }

    pub fn request(&self, body: Value) -> RequestBuilder {
        let mut request = self
            .server
            .post("/mcp")
            .bearer_auth(&self.token)
            .header("accept", "application/json, text/event-stream")
            .header("mcp-protocol-version", self.version);
        if let Some(method) = body["method"].as_str().filter(|_| self.version == "2026-07-28") {
            request = request.header("mcp-method", method);
            if let Some(name) = body["params"]["name"].as_str().or(body["params"]["uri"].as_str()) {
                request = request.header("mcp-name", name);
            }
        }
        if let Some(session) = &self.session {
            request = request.header("mcp-session-id", session);
        }
        request.json(&body)
    }

    pub fn message(&self, method: &str, mut params: Value) -> Value {
        if self.version == "2026-07-28" {
            params["_meta"]["io.modelcontextprotocol/protocolVersion"] = json!(self.version);
            params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = json!({});
        }
        let id = self.id.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
    }

    pub async fn send(&self, method: &str, params: Value) -> Response {
        let message = self.message(method, params);
        self.request(message).send().await.unwrap()
    }

    /// Sends a request and returns its JSON-RPC response, with `result` or `error`.
    pub async fn call_method(&self, method: &str, params: Value) -> Value {
        let response = self.send(method, params).await;
        let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
        match kind.starts_with("text/event-stream") {
            false => response.json().await.unwrap(),
            true => {
                let mut events = SseReader::new(response);
                loop {
                    let frame = events.next().await.expect("an answer").data;
                    if frame.get("result").is_some() || frame.get("error").is_some() {
                        return frame;
                    }
                }
            }
        }
    }

    pub async fn call_tool(&self, tool: &str, arguments: Value) -> Value {
        self.call_method("tools/call", json!({"name": tool, "arguments": arguments}))
            .await["result"]
            .clone()
    }

    /// Opens the GET stream, resumed after the event id `last` if there is one.
    pub async fn listen(&self, last: Option<&str>) -> SseReader {
        let mut request = self
            .server
            .get("/mcp")
            .bearer_auth(&self.token)
            .header("accept", "text/event-stream")
            .header("mcp-protocol-version", self.version)
            .header("mcp-session-id", self.session.as_ref().unwrap());
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        SseReader::new(request.send().await.unwrap())
    }
}
