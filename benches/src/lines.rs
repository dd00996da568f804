//! A minimal JSON-RPC client, one message per line, over a child's stdio or a Unix socket.

use std::{path::Path, process::Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufRead, AsyncBufReadExt, AsyncWrite, AsyncWriteExt, BufReader},
    net::UnixStream,
    process::{Child, Command},
};

/// One JSON-RPC connection.
pub(crate) struct JsonRpcLines {
    write: Box<dyn AsyncWrite + Send + Unpin>,
    read: Box<dyn AsyncBufRead + Send + Unpin>,
    next_id: u64,
    line: String,
    child: Option<Child>,
}

impl JsonRpcLines {
    /// Starts a program and connects to its stdio. It is killed when this is dropped.
    pub(crate) fn spawn(command: &mut Command) -> Result<Self> {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let mut child = command.spawn().context("cannot start a program")?;
        let write = child.stdin.take().context("no stdin")?;
        let read = BufReader::new(child.stdout.take().context("no stdout")?);
        Ok(Self {
            write: Box::new(write),
            read: Box::new(read),
            next_id: 1,
            line: String::new(),
            child: Some(child),
        })
    }

    /// Connects to a Unix socket.
    pub(crate) async fn connect(socket: &Path) -> Result<Self> {
        let (read, write) = UnixStream::connect(socket).await?.into_split();
        let read = BufReader::with_capacity(64 * 1024, read);
        Ok(Self {
            write: Box::new(write),
            read: Box::new(read),
            next_id: 1,
            line: String::new(),
            child: None,
        })
    }

    /// Starts an MCP server program and performs the handshake and a tools/list.
    pub(crate) async fn spawn_mcp(command: &mut Command) -> Result<Self> {
        let mut lines = Self::spawn(command)?;
        let params = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}});
        lines.request("initialize", &params).await?;
        lines
            .write
            .write_all(b"{\"jsonrpc\":\"2.0\",\"method\":\"notifications/initialized\"}\n")
            .await?;
        lines.request("tools/list", &json!({})).await?;
        Ok(lines)
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.as_ref().and_then(Child::id)
    }

    /// Sends a request without waiting for its answer; returns its id.
    pub(crate) async fn send(&mut self, method: &str, params: &Value) -> Result<u64> {
        let id = self.next_id;
        self.next_id += 1;
        let line =
            format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"{method}\",\"params\":{params}}}\n");
        self.write.write_all(line.as_bytes()).await?;
        self.write.flush().await?;
        Ok(id)
    }

    /// Reads the next answer, to whichever request; notifications are skipped.
    pub(crate) async fn next_answer(&mut self) -> Result<&str> {
        loop {
            self.line.clear();
            if self.read.read_line(&mut self.line).await? == 0 {
                bail!("the other side hung up");
            }
            if self.line.contains("\"method\":") && !self.line.contains("\"result\":") {
                continue;
            }
            if self.line.contains("\"error\":{") || self.line.contains("\"isError\":true") {
                bail!("refused: {}", self.line.trim());
            }
            return Ok(&self.line);
        }
    }

    /// Sends a request and returns the result of its answer.
    pub(crate) async fn request(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.send(method, params).await?;
        let answer: Value = serde_json::from_str(self.next_answer().await?)?;
        Ok(answer["result"].clone())
    }

    /// Sends a request and waits for its answer, which is not parsed.
    pub(crate) async fn call(&mut self, method: &str, params: &Value) -> Result<()> {
        self.send(method, params).await?;
        self.next_answer().await?;
        Ok(())
    }

    /// Keeps `open` requests in flight while `go_on` returns true; returns how many were answered.
    pub(crate) async fn flood(
        &mut self,
        method: &str,
        params: &Value,
        open: usize,
        go_on: impl Fn() -> bool,
    ) -> Result<usize> {
        for _ in 0..open {
            self.send(method, params).await?;
        }
        let (mut answered, mut waiting) = (0, open);
        while waiting > 0 {
            self.next_answer().await?;
            answered += 1;
            waiting -= 1;
            if go_on() {
                self.send(method, params).await?;
                waiting += 1;
            }
        }
        Ok(answered)
    }
}
