//! Minimal HTTP clients, so that in a test with a million requests the server's cost dominates.

use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
};

/// One connection for tool calls, one at a time.
pub struct RawToolConnection {
    stream: BufReader<TcpStream>,
    head: String,
}

impl RawToolConnection {
    /// Connects.
    pub async fn open(port: u16, token: &str) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::new(stream),
            head: format!(
                "Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
            ),
        })
    }

    /// Calls a tool; returns the HTTP status and the body.
    pub async fn post(&mut self, tool: &str, body: &Value) -> Result<(u16, Value)> {
        let (body, head) = (body.to_string(), &self.head);
        let request = format!(
            "POST /api/tools/{tool} HTTP/1.1\r\n{head}Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.stream.get_mut().write_all(request.as_bytes()).await?;
        let (status, length) = read_head(&mut self.stream).await?;
        let mut answer = vec![0; length.context("an answer has a length")?];
        self.stream.read_exact(&mut answer).await?;
        Ok((status, serde_json::from_slice(&answer)?))
    }
}

/// A pool of connections for tool calls with one token.
pub struct RawToolPool {
    port: u16,
    token: String,
    free: Mutex<Vec<RawToolConnection>>,
}

impl RawToolPool {
    /// An empty pool; connections are opened when needed.
    pub fn new(port: u16, token: &str) -> Self {
        Self {
            port,
            token: token.to_owned(),
            free: Mutex::default(),
        }
    }

    /// Calls a tool over a free connection, or a new one; returns the HTTP status and the body.
    pub async fn post(&self, tool: &str, body: &Value) -> Result<(u16, Value)> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut connection = match free {
            Some(connection) => connection,
            None => RawToolConnection::open(self.port, &self.token).await?,
        };
        let answer = connection.post(tool, body).await?;
        self.free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(connection);
        Ok(answer)
    }
}

/// A caller's event stream. Dropping it closes the connection.
pub struct RawEventStream {
    stream: BufReader<TcpStream>,
    line: String,
}

impl RawEventStream {
    /// Opens a session's stream for a caller; the first event is the one after index `since`.
    pub async fn open(port: u16, token: &str, session: &str, caller: &str, since: i64) -> Result<Self> {
        let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", port)).await?);
        // HTTP/1.0, so that the body is not chunked.
        let request = format!(
            "GET /api/sessions/{session}/events?caller_id={caller}&since_index={since} HTTP/1.0\r\n\
             Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n\r\n"
        );
        stream.get_mut().write_all(request.as_bytes()).await?;
        let (status, _) = read_head(&mut stream).await?;
        anyhow::ensure!(status == 200, "HTTP {status}");
        Ok(Self {
            stream,
            line: String::new(),
        })
    }

    /// Waits for the next event of a type; others are skipped without parsing.
    pub async fn next_of(&mut self, kind: &str) -> Result<Value> {
        let mark = format!("\"type\":\"{kind}\"");
        loop {
            self.line.clear();
            let read = self.stream.read_line(&mut self.line).await?;
            anyhow::ensure!(read > 0, "the stream ended");
            if let Some(data) = self.line.strip_prefix("data:")
                && data.contains(&mark)
            {
                return Ok(serde_json::from_str(data)?);
            }
        }
    }
}

/// Reads a response head: the status, and the content length if there is one.
async fn read_head(stream: &mut BufReader<TcpStream>) -> Result<(u16, Option<usize>)> {
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let status = line.split(' ').nth(1).context("a status line")?.parse()?;
    let mut length = None;
    loop {
        line.clear();
        stream.read_line(&mut line).await?;
        match line.trim_end().split_once(':') {
            None => return Ok((status, length)),
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                length = Some(value.trim().parse()?);
            }
            Some(_) => {}
        }
    }
}
