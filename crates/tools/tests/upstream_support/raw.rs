//! Servers written line by line, to do what no library would.

use std::{net::SocketAddr, sync::Arc};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    net::{
        TcpListener,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

/// One connection as a server sees it.
pub struct Peer {
    pub lines: Lines<BufReader<OwnedReadHalf>>,
    pub write: OwnedWriteHalf,
    /// Which connection it is, from 0.
    pub number: usize,
}

impl Peer {
    /// The next message, if there is one.
    pub async fn next(&mut self) -> Option<Value> {
        let line = self.lines.next_line().await.ok()??;
        Some(serde_json::from_str(&line).unwrap())
    }

    /// The next message with this method, others passed over.
    pub async fn method(&mut self, method: &str) -> Value {
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
        let request = self.method("initialize").await;
        self.answer(&request, hello()).await;
        self.method("notifications/initialized").await;
    }

    /// The whole start, with these tools.
    pub async fn greet(&mut self, tools: Value) {
        self.initialize().await;
        let request = self.method("tools/list").await;
        self.answer(&request, json!({ "tools": tools })).await;
    }

    /// Reads until the other side closes.
    pub async fn drain(&mut self) {
        while let Ok(Some(_)) = self.lines.next_line().await {}
    }
}

/// The answer to `initialize`.
pub fn hello() -> Value {
    json!({"protocolVersion":"2025-11-25","capabilities":{"tools":{"listChanged":true}},
        "serverInfo":{"name":"raw","version":"0"}})
}

/// Tools with these names.
pub fn tools(names: &[&str]) -> Value {
    names
        .iter()
        .map(|name| json!({"name":name,"inputSchema":{"type":"object"}}))
        .collect()
}

/// Listens, and gives every connection to `serve`.
pub async fn listen<F, Fut>(serve: F) -> SocketAddr
where
    F: Fn(Peer) -> Fut + Send + Sync + 'static,
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
            tokio::spawn(serve(Peer {
                lines: BufReader::new(read).lines(),
                write,
                number,
            }));
        }
    });
    address
}
