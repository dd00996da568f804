//! MCP for both lifecycles: handshakes, lists, calls that are not ordinary, change notices.

use std::{
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use oubliette_protocol::relay::MAX_LINE;
use oubliette_relay::CallOptions;
use rmcp::{
    ErrorData, RoleServer, ServerHandler, ServiceExt,
    model::{
        CallToolRequestParams, CallToolResponse, CompleteRequestMethod, CompleteRequestParams,
        CompleteResult, Implementation, ListPromptsRequestMethod, ListPromptsResult,
        ListResourceTemplatesRequestMethod, ListResourceTemplatesResult, ListResourcesRequestMethod,
        ListResourcesResult, ListToolsResult, PaginatedRequestParams, ProgressNotificationParam,
        ServerCapabilities, ServerConfig, SubscriptionFilter, Tool,
    },
    service::{
        NotificationContext, Peer, RequestContext, RunningService, ServerInitializeError, SubscriptionContext,
    },
    transport::async_rw::AsyncRwTransport,
};
use serde_json::value::to_raw_value;

use crate::{
    call::Calls,
    express::Lane,
    intake::Intake,
    out::{Out, Writer},
    outcome::to_mcp,
    patience::{Reports, Tell, patiently},
    stdio::Stdin,
};

/// How long the first `tools/list` waits to learn the tools.
const FIRST_LIST: Duration = Duration::from_secs(10);
/// The longest line that is read. More than the relay carries, so that a call that is too large is refused
/// with a reason: a line past this is dropped, and its sender would wait for ever.
const LONGEST_LINE: usize = 4 * MAX_LINE;
/// How long open calls may take to end once the agent has closed stdin.
pub(crate) const LAST_CALLS: Duration = Duration::from_secs(1);

/// The MCP server.
pub(crate) struct Bridge {
    calls: Arc<Calls>,
    lane: Arc<Lane<Calls>>,
    /// A legacy agent hears of changes by plain notifications; one teller is enough.
    telling: AtomicBool,
}

/// Serves stdin and stdout until the agent is gone.
pub(crate) async fn serve(calls: Calls, stdin: Stdin, out: Arc<Out>) -> ExitCode {
    let calls = Arc::new(calls);
    let lane = Lane::new(calls.clone(), out.clone());
    let bridge = Bridge {
        calls,
        lane: lane.clone(),
        telling: AtomicBool::new(false),
    };
    let intake = Intake::new(stdin, lane);
    let ended = intake.ended();
    let serving = async {
        let transport = AsyncRwTransport::new(intake, Writer(out)).with_max_line_length(LONGEST_LINE);
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

impl Tell for Peer<RoleServer> {
    async fn tell(&self, params: ProgressNotificationParam) {
        // An agent that is gone is noticed where its stdin is read.
        let _ = Box::pin(self.notify_progress(params)).await;
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
        let mut learnt = self.calls.registry.learnt();
        let _ = tokio::time::timeout(FIRST_LIST, learnt.wait_for(|learnt| *learnt)).await;
        Ok(ListToolsResult::with_all_items(self.calls.registry.list()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.calls.registry.get(name)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let version = context.protocol_version();
        let arguments = to_raw_value(&request.arguments.unwrap_or_default())
            .map_err(|why| ErrorData::invalid_params(why.to_string(), None))?;
        let options = CallOptions::default().cancel(context.ct.clone());
        let answer = match context.meta.get_progress_token() {
            None => self.calls.start(&request.name, &arguments, options).await,
            Some(token) => {
                let reports = Arc::new(Reports::default());
                let calling = self.calls.start(&request.name, &arguments, reports.hear(options));
                patiently(calling, token, &reports, &self.calls.beat, &context.peer).await
            }
        };
        Ok(to_mcp(answer.result(), version.as_ref()).into())
    }

    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        let agent = context.peer.peer_info();
        self.lane
            .open_for(agent.as_ref().map(|agent| &agent.protocol_version));
        if self.telling.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut changes = self.calls.registry.changes();
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
        let mut changes = self.calls.registry.changes();
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
