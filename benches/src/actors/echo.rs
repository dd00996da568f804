//! The bare echo server: rmcp and nothing else, over stdio or over HTTP.

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
struct Echo;

/// Arguments: a tag that tells this one from others, and how long it takes to start.
pub(crate) fn stdio(arguments: &[String]) -> Result<()> {
    let delay = arguments.get(1).and_then(|ms| ms.parse().ok()).unwrap_or(0);
    std::thread::sleep(Duration::from_millis(delay));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let service = Echo.serve(rmcp::transport::io::stdio_pipes()).await?;
        service.waiting().await?;
        Ok(())
    })
}

pub(crate) fn http() -> Result<()> {
    super::serve(|| {
        // As ours is configured, so that only what ours does on top makes the difference.
        let config = StreamableHttpServerConfig::default().with_json_response(true);
        let service =
            StreamableHttpService::new(|| Ok(Echo), Arc::new(LocalSessionManager::default()), config);
        Router::new().nest_service("/mcp", service)
    })
}

impl ServerHandler for Echo {
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
            "Says what it is told.",
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
