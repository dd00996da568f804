//! MCP in both lifecycles, by the MCP library: handshakes, lists, calls that do not take the fast path, change
//! notifications.

use std::{
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use oubliette_protocol::relay::MAX_LINE_BYTES;
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

use oubliette_handoff::{
    agent_output::AgentOutputWriter,
    fast_path::{CallBackend, FastPath},
    line_filter::{LAST_CALLS_TIMEOUT, LineFilter},
    outcome::to_mcp,
    progress::{ProgressNotifier, ProgressReports, with_progress},
};

use crate::{relay_calls::RelayCalls, session_tools::SessionTools, stdio::AgentStreams};

/// How long the first `tools/list` waits for the tools to be loaded from the server.
const FIRST_LIST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of a line that is read, in bytes. It is more than the relay carries, so that a call that is too
/// large is refused with a reason: the library drops a line longer than this, and its sender would wait for ever.
const MAX_AGENT_LINE: usize = 4 * MAX_LINE_BYTES;

/// Handles the MCP requests that do not take the fast path.
pub(crate) struct ClientMcpService {
    calls: RelayCalls,
    /// The fast path of stdin and stdout; HTTP has none.
    fast_path: Option<Arc<FastPath<RelayCalls>>>,
    /// Whether a task sends plain change notifications already, as an agent with a handshake expects them: one is
    /// enough.
    sends_changes: AtomicBool,
}

/// Serves the agent until it is gone, or the server that its streams were handed off to.
pub(crate) async fn serve(calls: RelayCalls, agent: AgentStreams) -> ExitCode {
    let AgentStreams {
        input,
        output,
        server_gone,
    } = agent;
    let fast_path = FastPath::new(calls.clone(), output.clone());
    let service = ClientMcpService::new(calls, Some(fast_path.clone()));
    let filter = LineFilter::new(input, fast_path);
    let input_ended = filter.input_ended();
    let serving = async {
        let transport =
            AsyncRwTransport::new(filter, AgentOutputWriter(output)).with_max_line_length(MAX_AGENT_LINE);
        match service.serve(transport).await {
            Ok(running) => wait(running).await,
            Err(ServerInitializeError::ConnectionClosed(_)) => ExitCode::SUCCESS,
            Err(why) => {
                eprintln!("oubliette-client: the agent does not speak MCP: {why}");
                ExitCode::FAILURE
            }
        }
    };
    let agent_gone = async {
        input_ended.cancelled().await;
        tokio::time::sleep(LAST_CALLS_TIMEOUT).await;
    };
    let code = tokio::select! {
        code = serving => code,
        () = agent_gone => ExitCode::SUCCESS,
        () = server_gone.cancelled() => ExitCode::FAILURE,
    };
    // The same read ends the service and fires the token: which of them is noticed first does not matter.
    if server_gone.is_cancelled() {
        eprintln!("oubliette-client: the server that stdin and stdout were handed off to has gone; ending");
        return ExitCode::FAILURE;
    }
    code
}

async fn wait(running: RunningService<RoleServer, ClientMcpService>) -> ExitCode {
    match running.waiting().await {
        Ok(_) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("oubliette-client: stopped: {why}");
            ExitCode::FAILURE
        }
    }
}

/// An agent reached by the MCP library.
struct LibraryPeer<'a>(&'a Peer<RoleServer>);

impl ProgressNotifier for LibraryPeer<'_> {
    async fn notify(&self, params: ProgressNotificationParam) {
        let _ = Box::pin(self.0.notify_progress(params)).await;
    }
}

impl ClientMcpService {
    pub(crate) fn new(calls: RelayCalls, fast_path: Option<Arc<FastPath<RelayCalls>>>) -> Self {
        Self {
            calls,
            fast_path,
            sends_changes: AtomicBool::new(false),
        }
    }

    fn tools(&self) -> &SessionTools {
        self.calls.tools()
    }
}

impl ServerHandler for ClientMcpService {
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
        // Once the tools are loaded this returns at once.
        let mut loaded = self.tools().loaded();
        let _ = tokio::time::timeout(FIRST_LIST_TIMEOUT, loaded.wait_for(|loaded| *loaded)).await;
        let tools = self.tools().list();
        self.calls.report_listed(&tools).await;
        Ok(ListToolsResult::with_all_items(tools))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.tools().get(name)
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
                let reports = Arc::new(ProgressReports::default());
                let report = reports.queueing();
                let options = options.on_progress(move |progress| report(progress));
                let call = self.calls.start(&request.name, &arguments, options);
                let agent = LibraryPeer(&context.peer);
                with_progress(call, token, &reports, self.calls.heartbeat(), &agent).await
            }
        };
        Ok(to_mcp(answer.into_result(), version.as_ref()).into())
    }

    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        let agent = context.peer.peer_info();
        if let Some(fast_path) = &self.fast_path {
            fast_path.enable_for(agent.as_ref().map(|agent| &agent.protocol_version));
        }
        if self.sends_changes.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut changes = self.tools().changes();
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
        let mut changes = self.tools().changes();
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

    // Not offered. The library's defaults would answer with empty lists.

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
