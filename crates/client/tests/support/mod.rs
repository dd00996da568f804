//! Runs the real `oubliette-client` between a raw MCP agent and a scripted relay server.
#![allow(dead_code, unreachable_pub)]

use std::{
    os::unix::net::UnixStream as StdStream,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    sync::Arc,
};

use async_trait::async_trait;
use oubliette_handoff::{handshake, interceptor};
use oubliette_os::{DescriptorWorker, PassedDescriptors, UntrustedListener};
use oubliette_protocol::{Error, relay::method, tool::ToolSource};
use oubliette_relay::{
    PeerHandler, PeerLimits, ProgressCallback, ProgressReport, RequestContext, RpcError, RpcPeer,
};
use parking_lot::Mutex;
use serde_json::{
    Value, json,
    value::{RawValue, to_raw_value},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, Lines},
    net::{UnixListener, UnixStream},
    process::{Child, ChildStderr, Command},
    sync::{mpsc, oneshot},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

/// A request that reached the server; the test answers it.
pub struct ServerRequest {
    pub method: String,
    pub params: Value,
    pub context: RequestChannel,
    reply: oneshot::Sender<Result<Value, RpcError>>,
}

/// The way a request came, by which it is cancelled and reported on.
pub enum RequestChannel {
    Relay(RequestContext),
    HandedOff {
        cancel: CancellationToken,
        progress: Option<ProgressCallback>,
    },
}

impl RequestChannel {
    pub fn cancel(&self) -> &CancellationToken {
        match self {
            Self::Relay(context) => &context.cancel,
            Self::HandedOff { cancel, .. } => cancel,
        }
    }

    pub fn progress(&self, report: &ProgressReport) {
        match self {
            Self::Relay(context) => context.report_progress(report),
            Self::HandedOff { progress, .. } => progress.as_ref().unwrap()(report.clone()),
        }
    }
}

impl ServerRequest {
    pub fn answer(self, result: Value) {
        let _ = self.reply.send(Ok(result));
    }

    pub fn refuse(self, code: i64, word: &str, message: &str) {
        let data = Some(json!({ "code": word }));
        let _ = self.reply.send(Err(RpcError {
            code,
            message: message.into(),
            data,
        }));
    }
}

/// What the server answers by itself; every other request is handed to the test.
pub struct ServerScript {
    pub callers: Mutex<Vec<Value>>,
    pub agent_tools: Mutex<Option<Value>>,
    pub own_tools: Mutex<Option<Result<Value, RpcError>>>,
    pub log: Mutex<Vec<String>>,
    asked: mpsc::UnboundedSender<ServerRequest>,
    peers: mpsc::UnboundedSender<RpcPeer>,
}

#[async_trait]
impl PeerHandler for ServerScript {
    async fn connected(&self, peer: &RpcPeer) {
        let callers = self.callers.lock().clone();
        for params in callers {
            peer.send_raw(&config(&params)).await.unwrap();
        }
        let _ = self.peers.send(peer.clone());
    }

    async fn request(&self, method: &str, params: Value, context: RequestContext) -> Result<Value, RpcError> {
        self.log.lock().push(method.into());
        let canned = match method {
            "agent_tools" => self.agent_tools.lock().clone().map(Ok),
            "oubliette_tools" => self.own_tools.lock().clone(),
            _ => None,
        };
        if let Some(answer) = canned {
            return answer;
        }
        let (reply, answer) = oneshot::channel();
        let cancel = context.cancel.clone();
        self.asked
            .send(ServerRequest {
                method: method.into(),
                params,
                context: RequestChannel::Relay(context),
                reply,
            })
            .unwrap();
        tokio::select! {
            answer = answer => answer.unwrap(),
            () = cancel.cancelled() => Err(RpcError { code: -32000, message: "cancelled".into(), data: None }),
        }
    }
}

pub fn config(params: &Value) -> Value {
    json!({"jsonrpc":"2.0","method":"caller_tools_config","type":"caller_tools_config","params":params})
}

/// The catalog tools of a server that streams are handed off to: calls go to the test, as over the relay.
struct ScriptedTools(Arc<ServerScript>);

impl interceptor::LocalTools for ScriptedTools {
    fn call(
        &self,
        name: &str,
        arguments: &RawValue,
        _key: Option<&str>,
        cancel: CancellationToken,
        progress: Option<ProgressCallback>,
    ) -> Option<interceptor::PendingResult> {
        let from_caller = self.0.callers.lock().iter().any(|caller| {
            let id = caller["caller_id"].as_str().unwrap();
            name.starts_with(&format!("{id}_"))
        });
        if from_caller || method::BASE_TOOLS.contains(&name) || name.starts_with("oubliette_") {
            return None;
        }
        let arguments: Value = serde_json::from_str(arguments.get()).unwrap();
        let (reply, answer) = oneshot::channel();
        let asked = ServerRequest {
            method: "agent_call_tool".into(),
            params: json!({"tool": name, "arguments": arguments}),
            context: RequestChannel::HandedOff {
                cancel: cancel.clone(),
                progress,
            },
            reply,
        };
        self.0.asked.send(asked).unwrap();
        let answer = async move {
            let answer = tokio::select! {
                answer = answer => answer.unwrap_or_else(|_| Err(nothing())),
                () = cancel.cancelled() => Err(nothing()),
            };
            let raw = to_raw_value(&answer.map_err(Error::from)?).unwrap();
            Ok((ToolSource::Catalog, raw))
        };
        Some(Box::pin(answer))
    }
}

fn nothing() -> RpcError {
    RpcError {
        code: -32000,
        message: "cancelled".into(),
        data: None,
    }
}

fn bind(socket: &Path) -> UnixListener {
    let _ = std::fs::remove_file(socket);
    UnixListener::bind(socket).unwrap()
}

/// Who reads and writes the agent's streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Streams {
    /// The client, which makes its calls over the relay socket.
    KeptByClient,
    /// The server, after a hand-off.
    HandedOff,
}

/// The scripted server; dropping its listener and peers is the server going away.
pub struct TestServer {
    pub script: Arc<ServerScript>,
    asked: mpsc::UnboundedReceiver<ServerRequest>,
    peers: mpsc::UnboundedReceiver<RpcPeer>,
    accepting: Option<JoinSet<()>>,
    streams: Streams,
    /// Ends every hand-off.
    pub hang_up: CancellationToken,
    socket: PathBuf,
    handoff_socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl TestServer {
    pub fn start(streams: Streams) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (asked_tx, asked) = mpsc::unbounded_channel();
        let (peers_tx, peers) = mpsc::unbounded_channel();
        let script = Arc::new(ServerScript {
            callers: Mutex::default(),
            agent_tools: Mutex::new(Some(json!({"tools":[],"base":[]}))),
            own_tools: Mutex::default(),
            log: Mutex::default(),
            asked: asked_tx,
            peers: peers_tx,
        });
        let socket = dir.path().join("relay.sock");
        let handoff_socket = dir.path().join("stdio.sock");
        let mut server = Self {
            script,
            asked,
            peers,
            accepting: None,
            streams,
            hang_up: CancellationToken::new(),
            socket,
            handoff_socket,
            _dir: dir,
        };
        server.listen();
        server
    }

    pub fn with_callers(streams: Streams, callers: &[Value]) -> Self {
        let server = Self::start(streams);
        *server.script.callers.lock() = callers.to_vec();
        server
    }

    pub fn listen(&mut self) {
        let mut accepting = JoinSet::new();
        let listener = bind(&self.socket);
        let script = self.script.clone();
        accepting.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                RpcPeer::spawn(stream, script.clone(), PeerLimits::default());
            }
        });
        if self.streams == Streams::HandedOff {
            let worker = DescriptorWorker::default();
            let passed = PassedDescriptors::Expected;
            let listener = UntrustedListener::bind(&self.handoff_socket, passed, worker).unwrap();
            let (script, hang_up) = (self.script.clone(), self.hang_up.clone());
            accepting.spawn(async move {
                let mut interceptors = JoinSet::new();
                while let Ok(stream) = listener.accept().await {
                    let (tools, hang_up) = (ScriptedTools(script.clone()), hang_up.clone());
                    interceptors.spawn(async move {
                        let handed_off = handshake::accept(stream).await.unwrap();
                        interceptor::run(
                            handed_off,
                            tools,
                            hang_up,
                            oubliette_protocol::ByteBudget::default(),
                        )
                        .await;
                    });
                }
            });
        }
        self.accepting = Some(accepting);
    }

    /// Stops as a server that is killed does.
    pub fn stop_listening(&mut self) {
        self.accepting.take().unwrap().abort_all();
        let _ = std::fs::remove_file(&self.socket);
        let _ = std::fs::remove_file(&self.handoff_socket);
    }

    pub async fn peer(&mut self) -> RpcPeer {
        self.peers.recv().await.unwrap()
    }

    pub async fn asked(&mut self) -> ServerRequest {
        self.asked.recv().await.unwrap()
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oubliette-client"));
        command
            .env_clear()
            .env("OUBLIETTE_SOCKET", &self.socket)
            .kill_on_drop(true);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if self.streams == Streams::HandedOff {
            command.env("OUBLIETTE_HANDOFF_SOCKET", &self.handoff_socket);
        }
        command
    }

    pub fn agent(&self) -> TestAgent {
        TestAgent::spawn(self.command())
    }

    pub fn agent_with_key(&self, key: &str) -> TestAgent {
        let mut command = self.command();
        command.env("OUBLIETTE_API_KEY", key);
        TestAgent::spawn(command)
    }
}

/// The agent's side of stdio.
pub struct TestAgent {
    pub child: Child,
    stdin: Option<Box<dyn AsyncWrite + Send + Unpin>>,
    lines: Lines<BufReader<Box<dyn AsyncRead + Send + Unpin>>>,
    stderr: ChildStderr,
    next: u64,
    modern: bool,
    pub heard: Vec<Value>,
}

impl TestAgent {
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = child.stdout.take().unwrap();
        Self::with(child, Box::new(stdin), Box::new(stdout))
    }

    /// An agent whose streams were made by the test.
    pub fn over(mut command: Command, stdin: StdStream, stdout: StdStream) -> Self {
        let child = command.spawn().unwrap();
        // It holds the client's ends of the streams.
        drop(command);
        let [stdin, stdout] = [stdin, stdout].map(|stream| {
            stream.set_nonblocking(true).unwrap();
            UnixStream::from_std(stream).unwrap()
        });
        Self::with(child, Box::new(stdin), Box::new(stdout))
    }

    fn with(
        mut child: Child,
        stdin: Box<dyn AsyncWrite + Send + Unpin>,
        stdout: Box<dyn AsyncRead + Send + Unpin>,
    ) -> Self {
        let stderr = child.stderr.take().unwrap();
        Self {
            child,
            stdin: Some(stdin),
            lines: BufReader::new(stdout).lines(),
            stderr,
            next: 1,
            modern: false,
            heard: Vec::new(),
        }
    }

    pub async fn send(&mut self, message: &Value) {
        let line = format!("{message}\n");
        self.stdin
            .as_mut()
            .unwrap()
            .write_all(line.as_bytes())
            .await
            .unwrap();
    }

    pub async fn read(&mut self) -> Value {
        let line = self
            .lines
            .next_line()
            .await
            .unwrap()
            .expect("the client closed stdout");
        serde_json::from_str(&line).unwrap()
    }

    /// Sends a request without waiting for its answer.
    pub async fn start(&mut self, method: &str, mut params: Value) -> u64 {
        let id = self.next;
        self.next += 1;
        if self.modern {
            params["_meta"]["io.modelcontextprotocol/protocolVersion"] = json!("2026-07-28");
            params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = json!({});
            params["_meta"]["io.modelcontextprotocol/clientInfo"] = json!({"name":"test","version":"0"});
        }
        self.send(&json!({"jsonrpc":"2.0","id":id,"method":method,"params":params}))
            .await;
        id
    }

    pub async fn start_call(&mut self, tool: &str, arguments: Value) -> u64 {
        self.start("tools/call", json!({"name":tool,"arguments":arguments}))
            .await
    }

    /// The answer to this request; notifications that come before it are kept.
    pub async fn answer(&mut self, id: u64) -> Value {
        loop {
            let message = self.read().await;
            if message["id"] == id && message.get("method").is_none() {
                return message;
            }
            self.heard.push(message);
        }
    }

    pub async fn ask(&mut self, method: &str, params: Value) -> Value {
        let id = self.start(method, params).await;
        self.answer(id).await
    }

    pub async fn notice(&mut self, method: &str) -> Value {
        if let Some(at) = self.heard.iter().position(|m| m["method"] == method) {
            return self.heard.remove(at);
        }
        loop {
            let message = self.read().await;
            if message["method"] == method {
                return message;
            }
            self.heard.push(message);
        }
    }

    pub async fn tell(&mut self, method: &str, params: Value) {
        self.send(&json!({"jsonrpc":"2.0","method":method,"params":params}))
            .await;
    }

    pub async fn initialize(&mut self) -> Value {
        let params = json!({"protocolVersion":"2025-11-25","capabilities":{},
            "clientInfo":{"name":"test","version":"0"}});
        let answer = self.ask("initialize", params).await;
        self.send(&json!({"jsonrpc":"2.0","method":"notifications/initialized"}))
            .await;
        answer["result"].clone()
    }

    pub fn speak_modern(&mut self) {
        self.modern = true;
    }

    pub async fn tools(&mut self) -> Vec<Value> {
        let answer = self.ask("tools/list", json!({})).await;
        answer["result"]["tools"]
            .as_array()
            .unwrap_or_else(|| panic!("no tools: {answer}"))
            .clone()
    }

    pub async fn names(&mut self) -> Vec<String> {
        self.tools()
            .await
            .iter()
            .map(|tool| tool["name"].as_str().unwrap().to_owned())
            .collect()
    }

    pub async fn call(&mut self, tool: &str, arguments: Value) -> Value {
        let id = self.start_call(tool, arguments).await;
        self.answer(id).await["result"].clone()
    }

    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Ends the client and returns what it wrote to stderr.
    pub async fn end(mut self) -> String {
        self.stdin = None;
        let (status, said) = self.wait().await;
        assert!(status.success());
        said
    }

    /// Waits until the client ends by itself; its exit status and what it wrote to stderr.
    pub async fn wait(mut self) -> (ExitStatus, String) {
        let mut said = String::new();
        self.stderr.read_to_string(&mut said).await.unwrap();
        (self.child.wait().await.unwrap(), said)
    }
}
