//! A small MCP server on stdio for the agent's tests. Its argument is a file it appends its events to.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::disallowed_methods)]

use std::{
    io::Write,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use rmcp::{
    ErrorData, RoleServer, ServerHandler, ServiceExt,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ListToolsResult,
        PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
    },
    service::RequestContext,
};
use serde_json::{Value, json};
use tokio::sync::Barrier;

struct StubToolServer {
    notes: std::path::PathBuf,
    pair: Arc<Barrier>,
    grown: AtomicBool,
}

impl StubToolServer {
    fn append_note(&self, line: &str) {
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.notes)
            .unwrap();
        writeln!(file, "{line}").unwrap();
    }
}

fn tool(name: &'static str) -> Tool {
    let schema = json!({ "type": "object", "properties": { "text": { "type": "string" } } });
    Tool::new(name, "a tool for tests", schema.as_object().unwrap().clone())
}

fn text_content(text: impl Into<String>) -> Vec<ContentBlock> {
    vec![ContentBlock::text(text.into())]
}

impl ServerHandler for StubToolServer {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_tool_list_changed()
            .build();
        ServerConfig::new(capabilities)
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let mut tools = vec![
            tool("echo"),
            tool("fail"),
            tool("meet"),
            tool("wait"),
            tool("grow"),
            tool("odd.name/x"),
        ];
        if self.grown.load(Ordering::SeqCst) {
            tools.push(tool("grown"));
        }
        Ok(ListToolsResult::with_all_items(tools))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = Value::Object(request.arguments.unwrap_or_default());
        self.append_note(&format!("call {} {arguments}", request.name));
        let result = match request.name.as_ref() {
            "echo" | "odd.name/x" | "grown" => {
                let mut result =
                    CallToolResult::success(text_content(arguments["text"].as_str().unwrap_or("nothing")));
                result.structured_content = Some(json!({ "echoed": arguments }));
                result
            }
            // A result of as many bytes as requested.
            "big" => {
                let bytes = arguments["bytes"].as_u64().unwrap_or(0) as usize;
                CallToolResult::success(text_content("x".repeat(bytes)))
            }
            "fail" => CallToolResult::error(text_content("it did not work")),
            // Answers only once two calls are running at the same time.
            "meet" => {
                self.pair.wait().await;
                CallToolResult::success(text_content("met"))
            }
            "wait" => {
                context.ct.cancelled().await;
                self.append_note("cancelled wait");
                CallToolResult::success(text_content("too late"))
            }
            "grow" => {
                self.grown.store(true, Ordering::SeqCst);
                context.peer.notify_tool_list_changed().await.unwrap();
                CallToolResult::success(text_content("one tool more"))
            }
            "environment" => {
                let names = std::env::vars()
                    .map(|(name, _)| name)
                    .collect::<Vec<_>>()
                    .join(" ");
                CallToolResult::success(text_content(names))
            }
            "die" => std::process::exit(3),
            "hidden" => CallToolResult::success(text_content("not listed, still called")),
            other => return Err(ErrorData::invalid_params(format!("unknown tool {other}"), None)),
        };
        Ok(result.into())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let notes = std::env::args()
        .nth(1)
        .expect("the file to note events in")
        .into();
    let stub = StubToolServer {
        notes,
        pair: Arc::new(Barrier::new(2)),
        grown: AtomicBool::new(false),
    };
    let service = stub.serve(rmcp::transport::stdio()).await.expect("a client");
    service.waiting().await.expect("an end");
}
