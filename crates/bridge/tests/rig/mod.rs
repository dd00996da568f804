//! The real `oubliette-client` between a raw MCP agent and a scripted relay server.
#![allow(dead_code, unreachable_pub)]

use std::{path::PathBuf, process::Stdio, sync::Arc};

use async_trait::async_trait;
use oubliette_relay::{Handler, Limits, Peer, RequestContext, RpcError};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines},
    net::UnixListener,
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command},
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

/// A request that reached the server; the test answers it.
pub struct Asked {
    pub method: String,
    pub params: Value,
    pub context: RequestContext,
    reply: oneshot::Sender<Result<Value, RpcError>>,
}

impl Asked {
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
pub struct Script {
    pub callers: Mutex<Vec<Value>>,
    pub agent_tools: Mutex<Option<Value>>,
    pub own_tools: Mutex<Option<Result<Value, RpcError>>>,
    pub log: Mutex<Vec<String>>,
    asked: mpsc::UnboundedSender<Asked>,
    peers: mpsc::UnboundedSender<Peer>,
}

#[async_trait]
impl Handler for Script {
    async fn connected(&self, peer: &Peer) {
        let callers = self.callers.lock().clone();
        for params in callers {
            peer.notify_raw(&config(&params)).await.unwrap();
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
            .send(Asked {
                method: method.into(),
                params,
                context,
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

/// The scripted server; dropping its listener and peers is the server going away.
pub struct Server {
    pub script: Arc<Script>,
    asked: mpsc::UnboundedReceiver<Asked>,
    peers: mpsc::UnboundedReceiver<Peer>,
    accepting: Option<JoinHandle<()>>,
    socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl Server {
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (asked_tx, asked) = mpsc::unbounded_channel();
        let (peers_tx, peers) = mpsc::unbounded_channel();
        let script = Arc::new(Script {
            callers: Mutex::default(),
            agent_tools: Mutex::new(Some(json!({"tools":[],"base":[]}))),
            own_tools: Mutex::default(),
            log: Mutex::default(),
            asked: asked_tx,
            peers: peers_tx,
        });
        let socket = dir.path().join("relay.sock");
        let mut server = Self {
            script,
            asked,
            peers,
            accepting: None,
            socket,
            _dir: dir,
        };
        server.listen();
        server
    }

    pub fn with_callers(callers: &[Value]) -> Self {
        let server = Self::start();
        *server.script.callers.lock() = callers.to_vec();
        server
    }

    pub fn listen(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
        let listener = UnixListener::bind(&self.socket).unwrap();
        let script = self.script.clone();
        self.accepting = Some(tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                Peer::spawn(stream, script.clone(), Limits::default());
            }
        }));
    }

    pub fn stop_listening(&mut self) {
        self.accepting.take().unwrap().abort();
        let _ = std::fs::remove_file(&self.socket);
    }

    pub async fn peer(&mut self) -> Peer {
        self.peers.recv().await.unwrap()
    }

    pub async fn asked(&mut self) -> Asked {
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
        command
    }

    pub fn agent(&self) -> Agent {
        Agent::spawn(self.command())
    }

    pub fn agent_with_key(&self, key: &str) -> Agent {
        let mut command = self.command();
        command.env("OUBLIETTE_API_KEY", key);
        Agent::spawn(command)
    }
}

/// The agent's side of stdio.
pub struct Agent {
    pub child: Child,
    stdin: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    stderr: ChildStderr,
    next: u64,
    modern: bool,
    pub heard: Vec<Value>,
}

impl Agent {
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let stderr = child.stderr.take().unwrap();
        Self {
            child,
            stdin,
            lines,
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

    /// Ends the client and gives what it said on stderr.
    pub async fn end(mut self) -> String {
        self.stdin = None;
        let mut said = String::new();
        self.stderr.read_to_string(&mut said).await.unwrap();
        assert!(self.child.wait().await.unwrap().success());
        said
    }
}
