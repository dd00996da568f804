//! JSON-RPC, a message a line: to a child's stdio or to a socket, by hand.

use std::{path::Path, process::Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufRead, AsyncBufReadExt, AsyncWrite, AsyncWriteExt, BufReader},
    net::UnixStream,
    process::{Child, Command},
};

/// One conversation.
pub(crate) struct Lines {
    write: Box<dyn AsyncWrite + Send + Unpin>,
    read: Box<dyn AsyncBufRead + Send + Unpin>,
    next: u64,
    line: String,
    child: Option<Child>,
}

impl Lines {
    /// With a program, killed when this is dropped.
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
            next: 1,
            line: String::new(),
            child: Some(child),
        })
    }

    /// With whoever listens on a socket.
    pub(crate) async fn connect(socket: &Path) -> Result<Self> {
        let (read, write) = UnixStream::connect(socket).await?.into_split();
        let read = BufReader::with_capacity(64 * 1024, read);
        Ok(Self {
            write: Box::new(write),
            read: Box::new(read),
            next: 1,
            line: String::new(),
            child: None,
        })
    }

    /// An MCP session with the program.
    pub(crate) async fn mcp(command: &mut Command) -> Result<Self> {
        let mut lines = Self::spawn(command)?;
        let params = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}});
        lines.ask("initialize", &params).await?;
        lines
            .write
            .write_all(b"{\"jsonrpc\":\"2.0\",\"method\":\"notifications/initialized\"}\n")
            .await?;
        lines.ask("tools/list", &json!({})).await?;
        Ok(lines)
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.as_ref().and_then(Child::id)
    }

    /// Sends a request and does not wait.
    pub(crate) async fn send(&mut self, method: &str, params: &Value) -> Result<u64> {
        let id = self.next;
        self.next += 1;
        let line =
            format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"{method}\",\"params\":{params}}}\n");
        self.write.write_all(line.as_bytes()).await?;
        self.write.flush().await?;
        Ok(id)
    }

    /// The next answer, whichever it is; everything else is passed over.
    pub(crate) async fn answer(&mut self) -> Result<&str> {
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

    /// One request, and its answer.
    pub(crate) async fn ask(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.send(method, params).await?;
        let answer: Value = serde_json::from_str(self.answer().await?)?;
        Ok(answer["result"].clone())
    }

    /// One request and the line of its answer, unread.
    pub(crate) async fn call(&mut self, method: &str, params: &Value) -> Result<()> {
        self.send(method, params).await?;
        self.answer().await?;
        Ok(())
    }

    /// Keeps `open` requests under way until told to stop; how many were answered.
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
            self.answer().await?;
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
