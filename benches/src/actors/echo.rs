//! The bare MCP echo server: rmcp without anything around it, over stdio or over HTTP.

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use axum::Router;
use rmcp::{
    ErrorData, RoleServer, ServerHandler, ServiceExt,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ListToolsResult,
        PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
    },
    service::RequestContext,
    transport::streamable_http_server::{
        StreamableHttpServerConfig, StreamableHttpService, session::local::LocalSessionManager,
    },
};
use serde_json::{Map, Value, json};

#[derive(Clone)]
struct EchoServer;

/// Arguments: a tag that distinguishes this process in `/proc`, and a start-up delay in milliseconds.
pub(crate) fn serve_stdio(arguments: &[String]) -> Result<()> {
    let delay = arguments.get(1).and_then(|ms| ms.parse().ok()).unwrap_or(0);
    std::thread::sleep(Duration::from_millis(delay));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let service = EchoServer.serve(rmcp::transport::io::stdio_pipes()).await?;
        service.waiting().await?;
        Ok(())
    })
}

pub(crate) fn serve_http() -> Result<()> {
    super::serve_until_stdin_ends(|| {
        // Configured as Oubliette's own endpoint is, so that only Oubliette's extra work makes the difference.
        let config = StreamableHttpServerConfig::default().with_json_response(true);
        let service = StreamableHttpService::new(
            || Ok(EchoServer),
            Arc::new(LocalSessionManager::default()),
            config,
        );
        Router::new().nest_service("/mcp", service)
    })
}

impl ServerHandler for EchoServer {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let schema: Map<String, Value> = Map::from_iter([("type".to_owned(), json!("object"))]);
        Ok(ListToolsResult::with_all_items(vec![Tool::new(
            "echo",
            "Returns its text.",
            schema,
        )]))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = request.arguments.unwrap_or_default();
        let text = arguments.get("text").and_then(Value::as_str).unwrap_or_default();
        Ok(CallToolResult::success(vec![ContentBlock::text(text.to_owned())]).into())
    }
}
