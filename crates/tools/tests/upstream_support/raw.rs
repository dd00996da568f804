//! MCP servers over TCP that write JSON-RPC lines by hand, for behaviour no MCP library allows.

use std::{net::SocketAddr, sync::Arc};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    net::{
        TcpListener,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

/// The server's end of one connection.
pub struct RawServerConnection {
    pub lines: Lines<BufReader<OwnedReadHalf>>,
    pub write: OwnedWriteHalf,
    /// Index of the connection at its listener, from 0.
    pub number: usize,
}

impl RawServerConnection {
    /// The next message; `None` when the client has closed.
    pub async fn next(&mut self) -> Option<Value> {
        let line = self.lines.next_line().await.ok()??;
        Some(serde_json::from_str(&line).unwrap())
    }

    /// Reads until a message with this method comes; others are discarded.
    pub async fn expect_method(&mut self, method: &str) -> Value {
        loop {
            let message = self
                .next()
                .await
                .unwrap_or_else(|| panic!("closed before {method}"));
            if message["method"] == method {
                return message;
            }
        }
    }

    pub async fn send(&mut self, message: Value) {
        self.line(&message.to_string()).await;
    }

    pub async fn line(&mut self, line: &str) {
        let _ = self.write.write_all(format!("{line}\n").as_bytes()).await;
    }

    pub async fn answer(&mut self, request: &Value, result: Value) {
        self.send(json!({"jsonrpc":"2.0","id":request["id"],"result":result}))
            .await;
    }

    pub async fn refuse(&mut self, request: &Value, code: i64, message: &str) {
        let error = json!({"code":code,"message":message});
        self.send(json!({"jsonrpc":"2.0","id":request["id"],"error":error}))
            .await;
    }

    /// Answers `initialize`.
    pub async fn initialize(&mut self) {
        let request = self.expect_method("initialize").await;
        self.answer(&request, initialize_result()).await;
        self.expect_method("notifications/initialized").await;
    }

    /// Answers `initialize` and `tools/list`.
    pub async fn complete_startup(&mut self, tools: Value) {
        self.initialize().await;
        let request = self.expect_method("tools/list").await;
        self.answer(&request, json!({ "tools": tools })).await;
    }

    /// Reads and discards until the client closes.
    pub async fn drain(&mut self) {
        while let Ok(Some(_)) = self.lines.next_line().await {}
    }
}

/// The answer to `initialize`.
pub fn initialize_result() -> Value {
    json!({"protocolVersion":"2025-11-25","capabilities":{"tools":{"listChanged":true}},
        "serverInfo":{"name":"raw","version":"0"}})
}

/// Tool descriptions with these names and an empty object schema.
pub fn tools(names: &[&str]) -> Value {
    names
        .iter()
        .map(|name| json!({"name":name,"inputSchema":{"type":"object"}}))
        .collect()
}

/// Listens on a free port and runs `serve` for every connection.
pub async fn listen<F, Fut>(serve: F) -> SocketAddr
where
    F: Fn(RawServerConnection) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serve = Arc::new(serve);
    tokio::spawn(async move {
        for number in 0.. {
            let Ok((stream, _)) = listener.accept().await else {
                return;
            };
            let (read, write) = stream.into_split();
            tokio::spawn(serve(RawServerConnection {
                lines: BufReader::new(read).lines(),
                write,
                number,
            }));
        }
    });
    address
}
