//! Runs the real binary over stdio with plain JSON-RPC, and acts as the ACP host that stores its memory.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
};

pub const DEADLINE: Duration = Duration::from_secs(60);

/// The memory entries the host stores for an agent; they outlive the agent's process.
#[derive(Clone, Default)]
pub struct StoredMemory(pub Arc<Mutex<Vec<Value>>>);

impl StoredMemory {
    pub fn entries(&self) -> Vec<Value> {
        self.0.lock().unwrap().clone()
    }
}

/// A running `oubliette-agent` process and the host's side of its connection.
pub struct AgentUnderTest {
    pub child: Child,
    stdin: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    next_id: u64,
    pub stored: StoredMemory,
    /// Every `session/update`, in order.
    pub updates: Vec<Value>,
    /// Whether the host implements the memory methods.
    pub has_memory_methods: bool,
}

pub fn stub_tools() -> PathBuf {
    let agent = Path::new(env!("CARGO_BIN_EXE_oubliette-agent"));
    let stub = agent.parent().unwrap().join("examples/stub_tools");
    assert!(stub.exists(), "build the examples first: {}", stub.display());
    stub
}

pub fn stub_server(notes: &Path) -> Value {
    json!({ "name": "stub", "command": stub_tools(), "args": [notes], "env": [{ "name": "GIVEN", "value": "1" }] })
}

pub fn script_config(turns: Value) -> Value {
    json!({ "prompt": "", "model": "script:x.json", "script": json!({ "turns": turns }).to_string() })
}

impl AgentUnderTest {
    pub fn start(config: &Value, stored: StoredMemory) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_oubliette-agent"))
            .env("OUBLIETTE_AGENT_CONFIG", config.to_string())
            .env("http_proxy", "http://127.0.0.1:9/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self {
            child,
            stdin,
            lines,
            next_id: 0,
            stored,
            updates: Vec::new(),
            has_memory_methods: true,
        }
    }

    pub async fn send_line(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().unwrap();
        stdin.write_all(line.as_bytes()).await.unwrap();
        stdin.write_all(b"\n").await.unwrap();
        stdin.flush().await.unwrap();
    }

    pub async fn send(&mut self, method: &str, params: Value) -> u64 {
        self.next_id += 1;
        let id = self.next_id;
        self.send_line(
            &json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params }).to_string(),
        )
        .await;
        id
    }

    pub async fn notify(&mut self, method: &str, params: Value) {
        self.send_line(&json!({ "jsonrpc": "2.0", "method": method, "params": params }).to_string())
            .await;
    }

    /// The agent's next message; memory requests are answered and skipped. `None`: it closed stdout.
    pub async fn next_message(&mut self) -> Option<Value> {
        loop {
            let line = tokio::time::timeout(DEADLINE, self.lines.next_line())
                .await
                .expect("silence")
                .unwrap()?;
            let message: Value = serde_json::from_str(&line).expect(&line);
            match message["method"].as_str() {
                Some("session/update") => self.updates.push(message["params"]["update"].clone()),
                Some(method) if method.starts_with("_oubliette/memory/") => {
                    self.answer_memory(method.to_owned(), &message).await;
                    continue;
                }
                _ => {}
            }
            return Some(message);
        }
    }

    async fn answer_memory(&mut self, method: String, message: &Value) {
        let mut reply = json!({ "jsonrpc": "2.0", "id": message["id"] });
        if self.has_memory_methods {
            let mut stored = self.stored.0.lock().unwrap();
            let given = || message["params"]["entries"].as_array().unwrap().clone();
            reply["result"] = match method.rsplit('/').next().unwrap() {
                "load" => json!({ "entries": *stored }),
                "append" => {
                    stored.extend(given());
                    json!({})
                }
                "replace" => {
                    *stored = given();
                    json!({})
                }
                other => panic!("unknown memory method {other}"),
            };
        } else {
            reply["error"] = json!({ "code": -32601, "message": "Method not found" });
        }
        self.send_line(&reply.to_string()).await;
    }

    /// Waits for the response to a request; updates that come before it are collected.
    pub async fn wait_for_answer(&mut self, id: u64) -> Value {
        loop {
            let message = self.next_message().await.expect("the agent ended");
            if message["id"] == json!(id) && message.get("method").is_none() {
                return message;
            }
        }
    }

    pub async fn request(&mut self, method: &str, params: Value) -> Value {
        let id = self.send(method, params).await;
        self.wait_for_answer(id).await
    }

    pub async fn initialize(&mut self) -> Value {
        self.request(
            "initialize",
            json!({ "protocolVersion": 1, "clientCapabilities": {} }),
        )
        .await
    }

    /// Sends `initialize` and `session/new`; returns the session's id.
    pub async fn open(&mut self, servers: Value) -> String {
        self.initialize().await;
        let cwd = std::env::temp_dir();
        let answer = self
            .request("session/new", json!({ "cwd": cwd, "mcpServers": servers }))
            .await;
        answer["result"]["sessionId"]
            .as_str()
            .unwrap_or_else(|| panic!("{answer}"))
            .to_owned()
    }

    /// Sends `initialize` and `session/load`.
    pub async fn load(&mut self, id: &str, servers: Value) {
        self.initialize().await;
        let cwd = std::env::temp_dir();
        let params = json!({ "sessionId": id, "cwd": cwd, "mcpServers": servers });
        let answer = self.request("session/load", params).await;
        assert!(answer.get("result").is_some(), "{answer}");
    }

    pub async fn start_prompt(&mut self, session: &str, text: &str) -> u64 {
        let prompt = json!([{ "type": "text", "text": text }]);
        self.send(
            "session/prompt",
            json!({ "sessionId": session, "prompt": prompt }),
        )
        .await
    }

    /// Runs a whole turn and returns the response; `updates` then has only this turn's updates.
    pub async fn prompt(&mut self, session: &str, text: &str) -> Value {
        self.updates.clear();
        let id = self.start_prompt(session, text).await;
        self.wait_for_answer(id).await
    }

    /// Waits for an update of this kind.
    pub async fn wait_for_update(&mut self, kind: &str) -> Value {
        loop {
            if let Some(found) = self.updates.iter().find(|u| u["sessionUpdate"] == kind) {
                return found.clone();
            }
            self.next_message().await.expect("the agent ended");
        }
    }

    pub fn agent_text(&self) -> String {
        let said = self
            .updates
            .iter()
            .filter(|u| u["sessionUpdate"] == "agent_message_chunk");
        said.map(|u| u["content"]["text"].as_str().unwrap()).collect()
    }

    pub fn agent_thoughts(&self) -> String {
        let thought = self
            .updates
            .iter()
            .filter(|u| u["sessionUpdate"] == "agent_thought_chunk");
        thought.map(|u| u["content"]["text"].as_str().unwrap()).collect()
    }

    pub fn updates_of_kind(&self, kind: &str) -> Vec<&Value> {
        self.updates
            .iter()
            .filter(|u| u["sessionUpdate"] == kind)
            .collect()
    }

    /// Closes stdin and waits for the process.
    pub async fn close(mut self) -> std::process::ExitStatus {
        drop(self.stdin.take());
        tokio::time::timeout(DEADLINE, self.child.wait())
            .await
            .expect("it did not end")
            .unwrap()
    }
}

/// Waits until the stub server's notes have a line that starts with `start`.
pub async fn wait_for_note(notes: &Path, start: &str) -> String {
    let look = async {
        loop {
            let text = std::fs::read_to_string(notes).unwrap_or_default();
            if let Some(line) = text.lines().find(|line| line.starts_with(start)) {
                return line.to_owned();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(DEADLINE, look)
        .await
        .unwrap_or_else(|_| panic!("never noted: {start}"))
}
