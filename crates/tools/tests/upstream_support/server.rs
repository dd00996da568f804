//! An MCP server (rmcp) whose tools show what a client passes through: results, progress, cancellation.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ListToolsResult,
        PaginatedRequestParams, ProgressNotificationParam, ServerCapabilities, ServerConfig,
        SubscriptionFilter, Tool,
    },
    service::{RequestContext, SubscriptionContext},
};
use serde_json::{Map, Value, json};
use tokio::sync::watch;

/// The server. Clones share its counters, as the sessions of one HTTP server do.
#[derive(Clone)]
pub struct ToolServer {
    /// Number of `sleep` calls that began.
    pub sleeping: Arc<AtomicUsize>,
    /// Number of `sleep` calls that were cancelled.
    pub cancelled: Arc<AtomicUsize>,
    /// Number of tools added by `grow`.
    pub grown: Arc<watch::Sender<usize>>,
    /// Tools a `tools/list` page.
    pub page: usize,
}

impl Default for ToolServer {
    fn default() -> Self {
        let page = std::env::var("TOOL_SERVER_PAGE")
            .ok()
            .and_then(|page| page.parse().ok())
            .unwrap_or(100);
        Self {
            sleeping: Arc::default(),
            cancelled: Arc::default(),
            grown: Arc::new(watch::Sender::new(0)),
            page,
        }
    }
}

impl ToolServer {
    fn tools(&self) -> Vec<Tool> {
        let object: Map<String, Value> = Map::from_iter([("type".to_owned(), json!("object"))]);
        let fixed = [
            "echo", "sleep", "progress", "rich", "crash", "grow", "env", "cwd", "pid", "read", "log",
        ];
        let grown = (0..*self.grown.borrow()).map(|n| format!("grown{n}"));
        let names = fixed.into_iter().map(str::to_owned).chain(grown);
        names
            .map(|name| Tool::new(name.clone(), format!("The tool {name}."), object.clone()))
            .collect()
    }
}

fn text(text: impl Into<String>) -> CallToolResult {
    CallToolResult::success(vec![ContentBlock::text(text.into())])
}

impl ServerHandler for ToolServer {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(
            ServerCapabilities::builder()
                .enable_tools()
                .enable_tool_list_changed()
                .build(),
        )
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        Some(requested.clone())
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let mut grown = self.grown.subscribe();
        loop {
            tokio::select! {
                _ = context.cancelled() => return Ok(()),
                changed = grown.changed() => {
                    if changed.is_err() || context.sink().notify_tool_list_changed().await.is_err() {
                        return Ok(());
                    }
                }
            }
        }
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let tools = self.tools();
        let from = request
            .and_then(|page| page.cursor)
            .and_then(|cursor| cursor.parse().ok())
            .unwrap_or(0usize);
        let to = (from + self.page).min(tools.len());
        let mut page = ListToolsResult::with_all_items(tools[from..to].to_vec());
        page.next_cursor = (to < tools.len()).then(|| to.to_string());
        Ok(page)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = request.arguments.unwrap_or_default();
        let string = |key: &str| {
            arguments
                .get(key)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        let number = |key: &str| arguments.get(key).and_then(Value::as_u64).unwrap_or_default();
        let result = match &*request.name {
            "echo" => text(string("text")),
            "sleep" => {
                self.sleeping.fetch_add(1, Ordering::SeqCst);
                tokio::select! {
                    () = tokio::time::sleep(std::time::Duration::from_millis(number("ms"))) => text("slept"),
                    () = context.ct.cancelled() => {
                        self.cancelled.fetch_add(1, Ordering::SeqCst);
                        text("cancelled")
                    }
                }
            }
            "progress" => {
                let token = context.meta.get_progress_token();
                for step in 1..=number("steps") {
                    if let Some(token) = token.clone() {
                        let progress = ProgressNotificationParam::new(token, step as f64)
                            .with_total(number("steps") as f64)
                            .with_message(format!("step {step}"));
                        let _ = context.peer.notify_progress(progress).await;
                    }
                }
                text("done")
            }
            "rich" => {
                let mut result = CallToolResult::success(vec![ContentBlock::image("aGk=", "image/png")]);
                result.structured_content = Some(json!({"z": 1, "a": [true, null]}));
                result.is_error = Some(true);
                result
            }
            #[allow(
                clippy::disallowed_methods,
                reason = "the tool ends the process in the middle of a call"
            )]
            "crash" => std::process::exit(number("code") as i32),
            "grow" => {
                self.grown.send_modify(|grown| *grown += 1);
                let _ = context.peer.notify_tool_list_changed().await;
                text("grown")
            }
            "env" => text(std::env::var(string("name")).unwrap_or_else(|_| "(unset)".into())),
            "cwd" => text(std::env::current_dir().unwrap().display().to_string()),
            "pid" => text(std::process::id().to_string()),
            "read" => text(std::fs::read_to_string(string("path")).unwrap_or_else(|error| error.to_string())),
            "refuse" => return Err(ErrorData::invalid_params("no, because", None)),
            other => return Err(ErrorData::invalid_params(format!("no tool {other}"), None)),
        };
        Ok(CallToolResponse::Complete(result))
    }
}
