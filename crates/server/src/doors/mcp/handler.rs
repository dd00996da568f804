//! The MCP methods: tools are actions, resources are sessions' logs.

#![allow(deprecated, reason = "older revisions have what newer ones deprecate")]

use std::{
    borrow::Cow,
    collections::HashMap,
    convert::Infallible,
    sync::{Arc, OnceLock},
};

use http::request::Parts;
use oubliette_handoff::progress::{Heartbeat, ProgressNotifier, ProgressReports, with_progress};
use oubliette_protocol::{Error, event::SessionEvent, relay::ProgressCallback};
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, CompleteRequestParams, CompleteResult,
        ContentBlock, GetPromptRequestParams, GetPromptResponse, Implementation, ListPromptsResult,
        ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, PaginatedRequestParams,
        ProgressNotificationParam, ProtocolVersion, ReadResourceRequestParams, ReadResourceResponse,
        ServerCapabilities, ServerConfig, SetLevelRequestMethod, SetLevelRequestParams,
        SubscribeRequestParams, SubscriptionFilter, Tool, ToolAnnotations, UnsubscribeRequestParams,
    },
    service::{NotificationContext, Peer, RequestContext, SubscriptionContext},
};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{
    PROTOCOL_VERSIONS,
    approval_prompts::{self, PromptForm},
    event_stream, fixtures,
    mcp_sessions::McpSession,
    resources,
    session_manager::ClientGone,
};
use crate::{
    actions::{self, ActionDefinition, ClientContext, Effect, EventSink, RequestHop},
    app::App,
    auth::Grant,
};

const INSTRUCTIONS: &str = "Oubliette runs coding agents in sandboxes. Start with session_message: it starts a session \
in a project and returns its session_id. Events come as notifications/message (logger oubliette.session), or by polling \
session_events with wait_ms. Lend the agent tools of your own with session_message's context and answer each \
caller_tool_request event with caller_tool_response.";

/// rmcp's server handler of one MCP session, or of one stateless request.
#[derive(Clone)]
pub(crate) struct McpHandler {
    app: Arc<App>,
    /// The timer of progress notifications, one for all handlers of a server.
    heartbeat: Heartbeat,
}

impl McpHandler {
    /// A handler of a server's requests.
    pub(crate) fn new(app: Arc<App>, heartbeat: Heartbeat) -> Self {
        Self { app, heartbeat }
    }

    /// The grant that `mcp::serve` attached to this request.
    fn grant(context: &RequestContext<RoleServer>) -> Result<Grant, ErrorData> {
        let parts = context.extensions.get::<Parts>();
        let grant = parts.and_then(|p| p.extensions.get::<Grant>()).cloned();
        grant.ok_or_else(|| ErrorData::internal_error("a request without a grant", None))
    }

    /// The stateful MCP session of a request; `None` for a stateless one.
    fn mcp_session(&self, context: &RequestContext<RoleServer>) -> Option<Arc<McpSession>> {
        let parts = context.extensions.get::<Parts>()?;
        if !is_legacy(context) {
            return None;
        }
        let id = parts.headers.get(super::SESSION_ID_HEADER)?.to_str().ok()?;
        self.app.mcp_sessions.get(id)
    }

    /// A tool of the conformance suite, in a server started with `--test-fixtures`.
    fn fixture(&self, name: &str) -> Option<Tool> {
        fixtures::find(name).filter(|_| self.app.config.test_fixtures)
    }

    /// Performs the action that a tool call names. Its progress, if it has any, goes to `progress`.
    async fn call_action(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
        grant: Grant,
        progress: Option<ProgressCallback>,
    ) -> Result<CallToolResponse, ErrorData> {
        if actions::find(&request.name).is_none() {
            return Err(ErrorData::invalid_params(
                actions::unknown_action(&request.name).message,
                None,
            ));
        }
        let disconnected = context
            .extensions
            .get::<ClientGone>()
            .map(|g| g.0.clone())
            .unwrap_or_default();
        let gone = CancellationToken::new();
        let (announce, mut announced) = mpsc::unbounded_channel();
        let client = ClientContext {
            mcp_session: self.mcp_session(&context).map(|l| l.id.clone()),
            cancellation: gone.clone(),
            progress,
            stream: wants_events(&context)
                .then(|| Arc::new(ResponseEventSink(context.peer.clone())) as Arc<dyn EventSink>),
            awaited_session: Some(announce),
            messaged_session: None,
            stop_waiting: CancellationToken::new(),
            hop: RequestHop::First,
        };
        let prompt_form = PromptForm::of(&request, &context);
        let leaving = async {
            tokio::select! {
                () = context.ct.cancelled() => {}
                () = disconnected.cancelled() => {}
            }
            gone.cancel();
            // The action can see the cancellation but is not aborted: half a change is worse than a change without a client.
            std::future::pending::<Infallible>().await
        };
        if let (Some(PromptForm::Result), Some(state)) = (&prompt_form, &request.request_state) {
            let responses = request.input_responses.as_ref();
            let resumed = approval_prompts::resume(&self.app, &grant, state, responses, &client);
            return tokio::select! {
                resumed = resumed => resumed,
                never = leaving => match never {},
            };
        }
        let work = actions::perform(
            &self.app,
            &grant,
            &request.name,
            request.arguments.unwrap_or_default(),
            &client,
        );
        let mut approval = None;
        let prompting = async {
            match &prompt_form {
                Some(PromptForm::Request(peer)) => {
                    approval_prompts::ask_by_request(&self.app, &grant, peer, &mut announced).await
                }
                Some(PromptForm::Result) => {
                    if let Some(awaited) = announced.recv().await {
                        approval = Some(approval_prompts::first_approval(&self.app, &grant, &awaited).await);
                        client.stop_waiting.cancel();
                    }
                    std::future::pending().await
                }
                None => std::future::pending().await,
            }
        };
        let outcome = tokio::select! {
            outcome = work => outcome,
            never = leaving => match never {},
            never = prompting => match never {},
        };
        match (outcome, approval) {
            (Ok(reply), Some(approval)) if reply.get("text").is_none() => {
                let asked =
                    approval_prompts::input_required(&self.app, &grant, &reply, approval, Vec::new()).await;
                Ok(asked.map_or_else(|error| tool_result(Err(error)).into(), Into::into))
            }
            (outcome, _) => Ok(tool_result(outcome).into()),
        }
    }
}

/// Whether a request is of a revision with MCP sessions, before 2026-07-28.
pub(super) fn is_legacy(context: &RequestContext<RoleServer>) -> bool {
    context
        .protocol_version()
        .is_none_or(|v| v.as_str() < ProtocolVersion::V_2026_07_28.as_str())
}

/// Whether a stateless request wants events on its own response: it does if it names a log level.
pub(super) fn wants_events(context: &RequestContext<RoleServer>) -> bool {
    !is_legacy(context) && context.meta.log_level().is_some()
}

/// Sends events on the response stream of a stateless request.
struct ResponseEventSink(Peer<RoleServer>);

#[async_trait::async_trait]
impl EventSink for ResponseEventSink {
    async fn event(&self, event: &SessionEvent) {
        if event.body.is_pushed()
            && let Ok(notification) = event_stream::event_notification(event)
        {
            // A failure is ignored: the request of a client that disconnected is cancelled anyway.
            let _ = self.0.send_notification(notification).await;
        }
    }
}

/// Sends progress to the client of a request.
struct ClientProgress(Peer<RoleServer>);

impl ProgressNotifier for ClientProgress {
    async fn notify(&self, params: ProgressNotificationParam) {
        // A failure is ignored: the request of a client that disconnected is cancelled anyway.
        let _ = self.0.notify_progress(params).await;
    }
}

/// An action's MCP tool, from a cache: schemas are large, and rmcp asks for the tool with every call.
fn cached_tool(definition: &'static ActionDefinition) -> Tool {
    static TOOLS: OnceLock<HashMap<&'static str, Tool>> = OnceLock::new();
    let tools = TOOLS.get_or_init(|| actions::all().iter().map(|d| (d.name, build_tool(d))).collect());
    tools
        .get(definition.name)
        .cloned()
        .unwrap_or_else(|| build_tool(definition))
}

fn build_tool(definition: &'static ActionDefinition) -> Tool {
    let changes = definition.effect.changes();
    let annotations = ToolAnnotations::from_raw(
        None,
        Some(!changes),
        changes.then_some(definition.effect == Effect::Delete),
        changes.then_some(matches!(definition.effect, Effect::Set | Effect::Delete)),
        Some(false),
    );
    let schema = Arc::new((definition.schema)().clone());
    Tool::new(definition.name, definition.description, schema).with_annotations(annotations)
}

pub(super) fn tool_result(outcome: Result<Value, Error>) -> CallToolResult {
    match outcome {
        Ok(value) => CallToolResult::structured(value),
        Err(error) => {
            let mut result = CallToolResult::error(vec![ContentBlock::text(error.message.clone())]);
            result.structured_content = Some(error.body());
            result
        }
    }
}

impl ServerHandler for McpHandler {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_logging()
            .enable_completions()
            .enable_prompts()
            .enable_resources()
            .enable_resources_subscribe()
            .enable_tools()
            .build();
        ServerConfig::new(capabilities)
            .with_server_info(
                Implementation::new("oubliette", env!("CARGO_PKG_VERSION")).with_title("Oubliette"),
            )
            .with_instructions(INSTRUCTIONS)
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        Cow::Borrowed(PROTOCOL_VERSIONS)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let grant = Self::grant(&context)?;
        let mut tools: Vec<_> = actions::visible(&grant).map(cached_tool).collect();
        if self.app.config.test_fixtures {
            tools.extend(fixtures::tools());
        }
        Ok(ListToolsResult::with_all_items(tools))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        actions::find(name)
            .map(cached_tool)
            .or_else(|| self.fixture(name))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let grant = Self::grant(&context)?;
        if self.fixture(&request.name).is_some() {
            return fixtures::call(request, context).await;
        }
        let Some(token) = context.meta.get_progress_token() else {
            return self.call_action(request, context, grant, None).await;
        };
        let client = ClientProgress(context.peer.clone());
        let reports = Arc::new(ProgressReports::default());
        let calling = self.call_action(request, context, grant, Some(reports.queueing()));
        // Boxed, so that the handler of every request stays small.
        Box::pin(with_progress(calling, token, &reports, &self.heartbeat, &client)).await
    }

    async fn set_level(
        &self,
        _: SetLevelRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        // Accepted without effect: session events are not log lines, so no level hides them.
        match is_legacy(&context) {
            true => Ok(()),
            false => Err(ErrorData::method_not_found::<SetLevelRequestMethod>()),
        }
    }

    async fn complete(
        &self,
        request: CompleteRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        let grant = Self::grant(&context)?;
        resources::complete(&self.app, &grant, &request).await
    }

    // There are no prompts. An empty list is still served, because some clients ask without looking at capabilities.
    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Ok(ListPromptsResult::with_all_items(Vec::new()))
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        Err(ErrorData::invalid_params(
            format!("there is no prompt {:?}", request.name),
            None,
        ))
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let grant = Self::grant(&context)?;
        resources::list(&self.app, &grant, request.and_then(|r| r.cursor)).await
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(resources::templates())
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let grant = Self::grant(&context)?;
        Ok(resources::read(&self.app, &grant, &request.uri).await?.into())
    }

    async fn subscribe(
        &self,
        request: SubscribeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let grant = Self::grant(&context)?;
        let (session, last) = resources::resolve_uri(&self.app, &grant, &request.uri).await?;
        if let Some(mcp_session) = self.mcp_session(&context) {
            mcp_session.subscribe_updates(&session, last);
        }
        Ok(())
    }

    async fn unsubscribe(
        &self,
        request: UnsubscribeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let grant = Self::grant(&context)?;
        let (session, _) = resources::resolve_uri(&self.app, &grant, &request.uri).await?;
        if let Some(mcp_session) = self.mcp_session(&context) {
            mcp_session.unsubscribe_updates(&session);
        }
        Ok(())
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        // The lists of tools, prompts and resources send no change notifications; only sessions' logs do.
        let mut accepted = SubscriptionFilter::new();
        accepted.resource_subscriptions = requested.resource_subscriptions.clone();
        Some(accepted)
    }

    async fn listen(&self, subscription: SubscriptionContext) -> Result<(), ErrorData> {
        let grant = Self::grant(subscription.request_context())?;
        resources::listen(&self.app, &grant, subscription).await
    }

    // rmcp's own writes a log line for each client.
    async fn on_initialized(&self, _: NotificationContext<RoleServer>) {}
}
