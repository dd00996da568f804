//! A minimal MCP client over streamable HTTP.

use std::net::SocketAddr;

use anyhow::{Result, bail};
use serde_json::{Value, json};

use crate::http::{HttpAnswer, HttpConnection};

/// Which MCP lifecycle the client uses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum BenchMcpRevision {
    /// Stateful: `initialize` and a session id. It offers revision 2025-06-18.
    Legacy,
    /// Stateless, revision 2026-07-28.
    Modern,
}

/// An MCP client on one HTTP connection.
pub(crate) struct McpHttpClient {
    http: HttpConnection,
    path: String,
    revision: BenchMcpRevision,
    next_id: u64,
}

const MODERN: &str = "2026-07-28";
const LEGACY: &str = "2025-06-18";

impl McpHttpClient {
    /// Connects, and opens an MCP session in the stateful lifecycle.
    pub(crate) async fn open(
        address: SocketAddr,
        path: &str,
        token: &str,
        revision: BenchMcpRevision,
    ) -> Result<Self> {
        let version = match revision {
            BenchMcpRevision::Legacy => LEGACY,
            BenchMcpRevision::Modern => MODERN,
        };
        let mut headers = "Accept: application/json, text/event-stream\r\n".to_owned();
        if !token.is_empty() {
            headers += &format!("Authorization: Bearer {token}\r\n");
        }
        let http = HttpConnection::connect(address, &headers).await?;
        let mut client = Self {
            http,
            path: path.to_owned(),
            revision,
            next_id: 1,
        };
        if revision == BenchMcpRevision::Legacy {
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
        if revision == BenchMcpRevision::Legacy {
            let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"}).to_string();
            client.http.post(path, "", &ready).await?;
        }
        Ok(client)
    }

    /// The same MCP session on a new connection; its request ids count from `first`.
    pub(crate) async fn with_new_connection(&self, first: u64) -> Result<Self> {
        let http = self.http.open_another().await?;
        Ok(Self {
            http,
            path: self.path.clone(),
            revision: self.revision,
            next_id: first,
        })
    }

    async fn send(&mut self, tool: &str, arguments: &Value) -> Result<HttpAnswer> {
        let id = self.next_id;
        self.next_id += 1;
        let (body, headers) = match self.revision {
            BenchMcpRevision::Legacy => (
                format!(
                    r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"{tool}","arguments":{arguments}}}}}"#
                ),
                String::new(),
            ),
            BenchMcpRevision::Modern => (
                format!(
                    r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"{tool}","arguments":{arguments},"_meta":{{"io.modelcontextprotocol/protocolVersion":"{MODERN}","io.modelcontextprotocol/clientCapabilities":{{}}}}}}}}"#
                ),
                format!("Mcp-Method: tools/call\r\nMcp-Name: {tool}\r\n"),
            ),
        };
        self.http.post(&self.path, &headers, &body).await
    }

    /// Calls a tool that must succeed. The answer is searched, not parsed, to keep the client's cost out of the
    /// numbers.
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
