//! MCP for both lifecycles: lists, calls, progress, cancellation, change notices.

use std::{
    collections::VecDeque,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use oubliette_protocol::{
    Object,
    relay::{AgentCallParams, CallerToolParams, MAX_LINE, OwnCallParams, method},
    tool::CallResult,
};
use oubliette_relay::{CallOptions, Progress};
use parking_lot::Mutex;
use rmcp::{
    ErrorData, RoleServer, ServerHandler, ServiceExt,
    model::{
        CallToolRequestParams, CallToolResponse, CompleteRequestMethod, CompleteRequestParams,
        CompleteResult, Implementation, ListPromptsRequestMethod, ListPromptsResult,
        ListResourceTemplatesRequestMethod, ListResourceTemplatesResult, ListResourcesRequestMethod,
        ListResourcesResult, ListToolsResult, PaginatedRequestParams, ProgressNotificationParam,
        ProgressToken, ServerCapabilities, ServerConfig, SubscriptionFilter, Tool,
    },
    service::{
        NotificationContext, RequestContext, RunningService, ServerInitializeError, SubscriptionContext,
    },
    transport::async_rw::AsyncRwTransport,
};
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::{
    link::Link,
    outcome::{answered, away, failed, to_mcp},
    registry::{Registry, Route},
    stdio,
};

/// How long the first `tools/list` waits to learn the tools.
const FIRST_LIST: Duration = Duration::from_secs(10);
/// How often an agent that asked for progress hears that its call still waits.
const STILL_HERE: Duration = Duration::from_secs(5);
/// How many reports of one call may wait to be passed on.
const MAX_REPORTS: usize = 16;
/// The longest line that is read. More than the relay carries, so that a call that is too large is refused
/// with a reason: a line past this is dropped, and its sender would wait for ever.
const LONGEST_LINE: usize = 4 * MAX_LINE;
/// How long open calls may take to end once the agent has closed stdin.
const LAST_CALLS: Duration = Duration::from_secs(1);

/// The MCP server.
pub(crate) struct Bridge {
    registry: Arc<Registry>,
    link: Arc<Link>,
    /// A legacy agent hears of changes by plain notifications; one teller is enough.
    telling: AtomicBool,
}

/// Serves stdin and stdout until the agent is gone.
pub(crate) async fn serve(bridge: Bridge) -> ExitCode {
    let (stdin, stdout, ended) = stdio::open();
    let serving = async {
        let transport = AsyncRwTransport::new(stdin, stdout).with_max_line_length(LONGEST_LINE);
        match bridge.serve(transport).await {
            Ok(running) => wait(running).await,
            Err(ServerInitializeError::ConnectionClosed(_)) => ExitCode::SUCCESS,
            Err(why) => {
                eprintln!("oubliette-client: the agent does not speak MCP: {why}");
                ExitCode::FAILURE
            }
        }
    };
    let gone = async {
        ended.cancelled().await;
        tokio::time::sleep(LAST_CALLS).await;
    };
    tokio::select! {
        code = serving => code,
        () = gone => ExitCode::SUCCESS,
    }
}

async fn wait(running: RunningService<RoleServer, Bridge>) -> ExitCode {
    match running.waiting().await {
        Ok(_) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("oubliette-client: stopped: {why}");
            ExitCode::FAILURE
        }
    }
}

impl Bridge {
    pub(crate) fn new(registry: Arc<Registry>, link: Arc<Link>) -> Self {
        Self {
            registry,
            link,
            telling: AtomicBool::new(false),
        }
    }

    /// Method and params of a call by this route.
    fn request(&self, route: &Route, arguments: Object) -> (String, Value) {
        let arguments = Value::Object(arguments);
        match route.clone() {
            Route::Caller { caller_id, tool } => {
                let params = CallerToolParams {
                    tool,
                    arguments: Some(arguments),
                    caller_id: Some(caller_id),
                };
                (method::CALLER_TOOL.into(), json!(params))
            }
            Route::Agent(tool) => (
                method::AGENT_CALL_TOOL.into(),
                json!(AgentCallParams {
                    tool,
                    arguments: Some(arguments)
                }),
            ),
            Route::Base(tool) => (tool, arguments),
            Route::Own(tool) => {
                let api_key = self
                    .link
                    .key()
                    .map(|key| key.expose().to_owned())
                    .unwrap_or_default();
                (
                    method::OUBLIETTE_CALL_TOOL.into(),
                    json!(OwnCallParams {
                        tool,
                        arguments: Some(arguments),
                        api_key
                    }),
                )
            }
        }
    }

    async fn call(&self, name: &str, arguments: Object, context: &RequestContext<RoleServer>) -> CallResult {
        let route = self.registry.route(name, self.link.key().is_some());
        let Some(peer) = self.link.peer() else {
            return away(self.link.socket());
        };
        let (method, params) = self.request(&route, arguments);
        let options = CallOptions::default().cancel(context.ct.clone());
        let outcome = match context.meta.get_progress_token() {
            None => peer.call_with(&method, params, options).await,
            Some(token) => {
                let reports = Arc::new(Reports::default());
                let heard = reports.clone();
                let calling = peer.call_with(
                    &method,
                    params,
                    options.on_progress(move |report| heard.push(report)),
                );
                tokio::select! {
                    outcome = calling => outcome,
                    never = keep_patient(context, token, &reports) => match never {},
                }
            }
        };
        match outcome {
            Ok(value) => answered(&route, value),
            Err(why) => failed(why),
        }
    }
}

/// Reports not yet passed on. Small: every waiting call has one.
#[derive(Default)]
struct Reports {
    queue: Mutex<VecDeque<Progress>>,
    more: Notify,
}

impl Reports {
    /// Reports are for patience, not for the record: one that finds no room is dropped.
    fn push(&self, report: Progress) {
        let mut queue = self.queue.lock();
        if queue.len() < MAX_REPORTS {
            queue.push_back(report);
            self.more.notify_one();
        }
    }

    async fn next(&self) -> Progress {
        loop {
            if let Some(report) = self.queue.lock().pop_front() {
                return report;
            }
            self.more.notified().await;
        }
    }
}

/// Sends what the server reports, and a sign of life when it reports nothing.
async fn keep_patient(
    context: &RequestContext<RoleServer>,
    token: ProgressToken,
    reports: &Reports,
) -> std::convert::Infallible {
    // Each value must be above the last, and a sign of life must not overtake a later report.
    const STEP: f64 = 0.001;
    let mut last = 0.0_f64;
    loop {
        let heard = tokio::time::timeout(STILL_HERE, reports.next()).await.ok();
        last = match &heard {
            Some(report) if report.progress > last => report.progress,
            _ => last + STEP,
        };
        let mut params = ProgressNotificationParam::new(token.clone(), last);
        params.total = heard.as_ref().and_then(|report| report.total);
        params.message = heard.map_or_else(|| Some("still waiting".into()), |report| report.message);
        // An agent that is gone is noticed where its stdin is read.
        let _ = Box::pin(context.peer.notify_progress(params)).await;
    }
}

impl ServerHandler for Bridge {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_tool_list_changed()
            .build();
        let about = Implementation::new("oubliette-client", env!("CARGO_PKG_VERSION"));
        ServerConfig::new(capabilities).with_server_info(about)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        // Once learnt this returns at once for good.
        let mut learnt = self.registry.learnt();
        let _ = tokio::time::timeout(FIRST_LIST, learnt.wait_for(|learnt| *learnt)).await;
        Ok(ListToolsResult::with_all_items(self.registry.list()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.registry.get(name)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let version = context.protocol_version();
        let result = self
            .call(&request.name, request.arguments.unwrap_or_default(), &context)
            .await;
        Ok(to_mcp(result, version.as_ref()).into())
    }

    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        if self.telling.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut changes = self.registry.changes();
        while changes.changed().await.is_ok() {
            if context.peer.notify_tool_list_changed().await.is_err() {
                return;
            }
        }
    }

    fn accepted_subscription_filter(&self, _: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        Some(SubscriptionFilter::builder().tools_list_changed().build())
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let mut changes = self.registry.changes();
        loop {
            tokio::select! {
                () = context.cancelled() => return Ok(()),
                changed = changes.changed() => {
                    if changed.is_err() || context.sink().notify_tool_list_changed().await.is_err() {
                        return Ok(());
                    }
                }
            }
        }
    }

    // Not offered. The defaults would answer all the same.

    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListPromptsRequestMethod>())
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListResourcesRequestMethod>())
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListResourceTemplatesRequestMethod>())
    }

    async fn complete(
        &self,
        _: CompleteRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        Err(ErrorData::method_not_found::<CompleteRequestMethod>())
    }
}
