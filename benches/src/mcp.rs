//! MCP over streamable HTTP, by hand.

use std::net::SocketAddr;

use anyhow::{Result, bail};
use serde_json::{Value, json};

use crate::http::{Answer, Http};

/// Which lifecycle is spoken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Revision {
    /// Stateful, 2025-11-25.
    Legacy,
    /// Stateless, 2026-07-28.
    Modern,
}

/// A client on one connection.
pub(crate) struct Mcp {
    http: Http,
    path: String,
    revision: Revision,
    next: u64,
}

const MODERN: &str = "2026-07-28";
const LEGACY: &str = "2025-06-18";

impl Mcp {
    /// Opens a session, or none when the revision has none.
    pub(crate) async fn open(
        address: SocketAddr,
        path: &str,
        token: &str,
        revision: Revision,
    ) -> Result<Self> {
        let version = match revision {
            Revision::Legacy => LEGACY,
            Revision::Modern => MODERN,
        };
        let mut headers = "Accept: application/json, text/event-stream\r\n".to_owned();
        if !token.is_empty() {
            headers += &format!("Authorization: Bearer {token}\r\n");
        }
        let http = Http::connect(address, &headers).await?;
        let mut client = Self {
            http,
            path: path.to_owned(),
            revision,
            next: 1,
        };
        if revision == Revision::Legacy {
            let params = json!({"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}});
            let hello =
                json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}).to_string();
            let answer = client.http.post(path, "", &hello).await?;
            let result = answer.json()?;
            if result.get("result").is_none() {
                bail!("initialize: {result}");
            }
            if let Some(session) = &answer.session {
                client.http.add_header("Mcp-Session-Id", session);
            }
        }
        client.http.add_header("MCP-Protocol-Version", version);
        if revision == Revision::Legacy {
            let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"}).to_string();
            client.http.post(path, "", &ready).await?;
        }
        Ok(client)
    }

    /// The same session on a connection of its own; its requests count from `first`.
    pub(crate) async fn another(&self, first: u64) -> Result<Self> {
        let http = self.http.another().await?;
        Ok(Self {
            http,
            path: self.path.clone(),
            revision: self.revision,
            next: first,
        })
    }

    async fn send(&mut self, tool: &str, arguments: &Value) -> Result<Answer> {
        let id = self.next;
        self.next += 1;
        let (body, headers) = match self.revision {
            Revision::Legacy => (
                format!(
                    r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"{tool}","arguments":{arguments}}}}}"#
                ),
                String::new(),
            ),
            Revision::Modern => (
                format!(
                    r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"{tool}","arguments":{arguments},"_meta":{{"io.modelcontextprotocol/protocolVersion":"{MODERN}","io.modelcontextprotocol/clientCapabilities":{{}}}}}}}}"#
                ),
                format!("Mcp-Method: tools/call\r\nMcp-Name: {tool}\r\n"),
            ),
        };
        self.http.post(&self.path, &headers, &body).await
    }

    /// Calls a tool that must succeed. Only a look at the bytes: what a client makes of them is its own.
    pub(crate) async fn call(&mut self, tool: &str, arguments: &Value) -> Result<()> {
        let answer = self.send(tool, arguments).await?;
        let has = |text: &[u8]| answer.body.windows(text.len()).any(|part| part == text);
        if answer.status != 200 || !has(b"\"result\"") || has(b"\"isError\":true") {
            bail!(
                "{tool}: status {}: {}",
                answer.status,
                String::from_utf8_lossy(&answer.body)
            );
        }
        Ok(())
    }
}
