//! A minimal HTTP/1.1 client: one connection, one request at a time. A client library's cost would be in both
//! sides of every ratio and hide the difference.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
};

/// How long to wait for an answer before the suite fails.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// A keep-alive connection.
pub(crate) struct HttpConnection {
    stream: BufReader<TcpStream>,
    address: SocketAddr,
    /// Header lines sent with every request, each with its line end.
    headers: String,
}

/// A complete response.
#[derive(Debug)]
pub(crate) struct HttpAnswer {
    pub(crate) status: u16,
    pub(crate) session: Option<String>,
    pub(crate) body: Vec<u8>,
    events: bool,
}

#[derive(Debug, Default)]
struct ResponseHead {
    status: u16,
    length: Option<usize>,
    chunked: bool,
    events: bool,
    session: Option<String>,
}

impl HttpAnswer {
    /// The body as JSON; of an event stream, the last event with a `result` or an `error`.
    pub(crate) fn json(&self) -> Result<Value> {
        if !self.events {
            return serde_json::from_slice(&self.body)
                .with_context(|| format!("status {}: {}", self.status, String::from_utf8_lossy(&self.body)));
        }
        let text = std::str::from_utf8(&self.body)?;
        let data = text.lines().filter_map(|line| line.strip_prefix("data:"));
        let answers = data.filter_map(|data| serde_json::from_str::<Value>(data.trim()).ok());
        let mut answers = answers.filter(|v| v.get("result").is_some() || v.get("error").is_some());
        answers
            .last_item()
            .with_context(|| format!("no answer in {text:?}"))
    }
}

/// The last item of an iterator that is not double-ended.
trait LastItem: Iterator + Sized {
    fn last_item(&mut self) -> Option<Self::Item> {
        self.fold(None, |_, item| Some(item))
    }
}

impl<I: Iterator> LastItem for I {}

impl HttpConnection {
    pub(crate) async fn connect(address: SocketAddr, headers: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::with_capacity(64 * 1024, stream),
            address,
            headers: headers.to_owned(),
        })
    }

    /// A new connection to the same address with the same headers.
    pub(crate) async fn open_another(&self) -> Result<Self> {
        Self::connect(self.address, &self.headers).await
    }

    pub(crate) fn add_header(&mut self, name: &str, value: &str) {
        self.headers += &format!("{name}: {value}\r\n");
    }

    pub(crate) async fn post(&mut self, path: &str, more: &str, body: &str) -> Result<HttpAnswer> {
        let length = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{}{more}\r\n{body}",
            self.address, self.headers
        );
        self.exchange(&request).await
    }

    pub(crate) async fn get(&mut self, path: &str) -> Result<HttpAnswer> {
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: {}\r\n{}\r\n",
            self.address, self.headers
        );
        self.exchange(&request).await
    }

    async fn exchange(&mut self, request: &str) -> Result<HttpAnswer> {
        let exchange = async {
            self.stream.get_mut().write_all(request.as_bytes()).await?;
            let head = self.read_head().await?;
            let body = self.read_body(&head).await?;
            Ok(HttpAnswer {
                status: head.status,
                session: head.session,
                body,
                events: head.events,
            })
        };
        tokio::time::timeout(ANSWER_TIMEOUT, exchange)
            .await
            .context("no answer")?
    }

    /// Sends a GET and turns the connection into a stream of server-sent events.
    pub(crate) async fn into_event_stream(mut self, path: &str) -> Result<SseEvents> {
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: {}\r\nAccept: text/event-stream\r\n{}\r\n",
            self.address, self.headers
        );
        self.stream.get_mut().write_all(request.as_bytes()).await?;
        let head = self.read_head().await?;
        if head.status != 200 || !head.chunked {
            let body = self.read_body(&head).await?;
            bail!(
                "{path}: status {}: {}",
                head.status,
                String::from_utf8_lossy(&body)
            );
        }
        Ok(SseEvents {
            http: self,
            text: Vec::new(),
            read: 0,
        })
    }

    async fn read_line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).await? == 0 {
            bail!("the server closed the connection");
        }
        line.truncate(line.trim_end().len());
        Ok(line)
    }

    async fn read_head(&mut self) -> Result<ResponseHead> {
        let first = self.read_line().await?;
        let status = first.split(' ').nth(1).and_then(|code| code.parse().ok());
        let mut head = ResponseHead {
            status: status.with_context(|| format!("no HTTP: {first}"))?,
            ..ResponseHead::default()
        };
        loop {
            let line = self.read_line().await?;
            let Some((name, value)) = line.split_once(':') else {
                return Ok(head);
            };
            let value = value.trim();
            match name.to_ascii_lowercase().as_str() {
                "content-length" => head.length = Some(value.parse()?),
                "transfer-encoding" => head.chunked = value.eq_ignore_ascii_case("chunked"),
                "content-type" => head.events = value.starts_with("text/event-stream"),
                "mcp-session-id" => head.session = Some(value.to_owned()),
                _ => {}
            }
        }
    }

    async fn read_body(&mut self, head: &ResponseHead) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        if head.chunked {
            while self.read_chunk(&mut body).await? {}
        } else if let Some(length) = head.length {
            body.resize(length, 0);
            self.stream.read_exact(&mut body).await?;
        }
        Ok(body)
    }

    /// Appends the next chunk of a chunked body; false at the last one.
    async fn read_chunk(&mut self, to: &mut Vec<u8>) -> Result<bool> {
        let line = self.read_line().await?;
        let size = usize::from_str_radix(line.split(';').next().unwrap_or_default(), 16)
            .with_context(|| format!("no chunk: {line:?}"))?;
        let before = to.len();
        to.resize(before + size, 0);
        self.stream.read_exact(&mut to[before..]).await?;
        self.read_line().await?;
        Ok(size > 0)
    }
}

/// A stream of server-sent events.
pub(crate) struct SseEvents {
    http: HttpConnection,
    text: Vec<u8>,
    read: usize,
}

impl SseEvents {
    /// The data of the next event with non-empty data.
    pub(crate) async fn next(&mut self) -> Result<String> {
        loop {
            while let Some(end) = self.text[self.read..].iter().position(|byte| *byte == b'\n') {
                let line = &self.text[self.read..self.read + end];
                let data = line
                    .strip_prefix(b"data:")
                    .map(|data| String::from_utf8_lossy(data).trim().to_owned());
                self.read += end + 1;
                if let Some(data) = data.filter(|data| !data.is_empty()) {
                    return Ok(data);
                }
            }
            self.text.drain(..self.read);
            self.read = 0;
            if !self.http.read_chunk(&mut self.text).await? {
                bail!("the stream ended");
            }
        }
    }
}
