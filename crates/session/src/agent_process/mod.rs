//! [`AgentProcess`]: one agent process and the conversation with it, over ACP.
//!
//! - [`connection`]: its stdout and stdin, bounded.
//! - [`AgentProcess`]: start, `initialize`, cancel; [`tools_endpoint`]: how it is given its tools;
//!   [`capabilities`]: what the agent can do; [`conversation`]: `session/new`, `session/resume` or `session/load`;
//!   [`prompt`]: `session/prompt`; [`replay_filter`]: history that is replayed too late.
//! - [`permission`], [`open_permissions`], [`memory`]: answers to the agent's requests; [`tool_name`]: which tool a call or request is about.
//! - [`turn_recorder`]: converts the agent's updates into events, [`reported_calls`] those about tool calls;
//!   [`event_bounds`]: how large events may be; [`terminal_escapes`]: what is removed from their texts.

pub(crate) mod capabilities;
pub(crate) mod connection;
pub(crate) mod conversation;
pub(crate) mod event_bounds;
pub(crate) mod memory;
pub(crate) mod open_permissions;
pub(crate) mod permission;
pub(crate) mod prompt;
pub(crate) mod replay_filter;
pub(crate) mod reported_calls;
pub(crate) mod terminal_escapes;
pub(crate) mod tool_name;
pub(crate) mod tools_endpoint;
pub(crate) mod turn_recorder;

#[cfg(test)]
mod turn_recorder_tests;

use std::{path::PathBuf, sync::Arc, time::Duration};

use agent_client_protocol::{
    schema::ProtocolVersion,
    v1::schema::{
        CancelNotification, Implementation, InitializeRequest, InitializeResponse, McpServer,
        RequestPermissionRequest, RequestPermissionResponse, SessionNotification, SessionUpdate,
    },
};
use oubliette_protocol::{
    ByteBudget, Error, Result,
    relay::{INVALID_PARAMS, METHOD_NOT_FOUND, RpcError},
};
use oubliette_sandbox::{IsolationLevel, SandboxDriver, SandboxError, SandboxHandle, SandboxSpec};
use oubliette_tools::StderrTail;
use serde::Serialize;
use serde_json::Value;
use tokio::time::Instant;

pub(crate) use self::conversation::Conversation;
use self::{
    capabilities::AgentCapabilities,
    connection::{AcpConnection, AcpConnectionError, AgentMessage},
    event_bounds::{MAX_TEXT_BYTES, truncate_text},
    memory::MemoryHandler,
    open_permissions::{OpenPermissions, PermissionApprover},
    permission::{PermissionDecision, PermissionResponder},
    replay_filter::ReplayFilter,
    terminal_escapes::strip_escapes,
    tools_endpoint::ToolsEndpoint,
};
use crate::{
    config::{AgentOutputLimits, SessionConfig},
    shown_tools::ShownTools,
};

/// The method by which an agent asks for permission.
const REQUEST_PERMISSION: &str = "session/request_permission";

/// How long to wait for the exit of an agent that closed its stdout, and then for the end of its stderr.
const EXIT_WAIT: Duration = Duration::from_secs(3);

/// What an agent process is started with.
pub(crate) struct AgentStart {
    pub(crate) spec: SandboxSpec,
    pub(crate) tools_endpoint: ToolsEndpoint,
    pub(crate) permission_approver: PermissionApprover,
    pub(crate) permissions: PermissionResponder,
    pub(crate) memory: MemoryHandler,
    /// The definition's `prompt`, for ACP agents; `None` for the built-in agent, which gets it in its
    /// configuration.
    pub(crate) instructions: Option<String>,
}

/// A running agent process and the ACP connection to it.
pub(crate) struct AgentProcess {
    connection: AcpConnection,
    handle: SandboxHandle,
    stderr: StderrTail,
    open_permissions: OpenPermissions,
    permissions: PermissionResponder,
    memory: MemoryHandler,
    /// The MCP server that the agent is given.
    tools_server: McpServer,
    cwd: PathBuf,
    instructions: Option<String>,
    /// The open conversation; `None` until [`AgentProcess::open_conversation`] has succeeded.
    conversation: Option<Conversation>,
    capabilities: AgentCapabilities,
    cancelling: bool,
    /// Whether the conversation was loaded by a method that replays its history, and not prompted since.
    replays: bool,
    replay_filter: Option<ReplayFilter>,
    /// When the agent must have connected to its tools; `None` when that was checked.
    tools_due: Option<std::time::Instant>,
    /// What went wrong without stopping the agent, to be logged.
    notices: Vec<Error>,
}

/// What a message of the agent means for the session.
pub(crate) enum HandledMessage {
    /// The agent reports progress of its conversation.
    Update(Box<SessionUpdate>),
    /// The agent answers one of our requests.
    Response {
        id: u64,
        outcome: Result<Value, RpcError>,
    },
    /// The message was a request that has been answered, or was ignored.
    Handled,
}

impl AgentProcess {
    /// Starts the process. When this returns, the sandbox is set up and the program runs.
    pub(crate) async fn spawn(
        sandbox: &Arc<dyn SandboxDriver>,
        start: AgentStart,
        limits: AgentOutputLimits,
        buffers: ByteBudget,
    ) -> Result<Self> {
        let AgentStart {
            spec,
            tools_endpoint,
            permissions,
            permission_approver,
            memory,
            instructions,
        } = start;
        let running = sandbox.spawn(spec).await.map_err(sandbox_error)?;
        let paths = running.paths;
        let tools_server = tools_endpoint.into_server(&paths);
        Ok(Self {
            connection: AcpConnection::new(running.stdin, running.stdout, limits, buffers),
            handle: running.handle,
            stderr: StderrTail::follow(running.stderr),
            permissions,
            open_permissions: OpenPermissions::new(permission_approver),
            memory,
            tools_server,
            cwd: paths.resolve(oubliette_sandbox::spec::WORKSPACE),
            instructions,
            conversation: None,
            capabilities: AgentCapabilities::default(),
            cancelling: false,
            replays: false,
            replay_filter: None,
            tools_due: None,
            notices: Vec::new(),
        })
    }

    /// The isolation level of its sandbox.
    pub(crate) fn level(&self) -> IsolationLevel {
        self.handle.level()
    }

    /// The open conversation.
    pub(crate) fn conversation(&self) -> Option<&Conversation> {
        self.conversation.as_ref()
    }

    /// The ACP session id of the open conversation, or an empty string.
    fn conversation_id(&self) -> &str {
        self.conversation.as_ref().map_or("", |open| &open.id)
    }

    /// Sends ACP's `initialize` and checks the protocol version.
    pub(crate) async fn initialize(&mut self, config: &SessionConfig) -> Result<()> {
        let us = Implementation::new("oubliette", env!("CARGO_PKG_VERSION"));
        // No file system and no terminal capability: the agent uses those of its sandbox.
        let request = InitializeRequest::new(ProtocolVersion::V1).client_info(us);
        let answer = self
            .request_and_wait("initialize", &request, config.initialize_timeout)
            .await?;
        let parsed: InitializeResponse = parse_answer("initialize", answer.clone())?;
        if parsed.protocol_version != ProtocolVersion::V1 {
            return Err(Error::unavailable(
                "the agent does not speak version 1 of the Agent Client Protocol",
            ));
        }
        self.capabilities = AgentCapabilities::read(&parsed, &answer);
        match &self.tools_server {
            McpServer::Http(_) if !self.capabilities.http_servers => Err(Error::unavailable(format!(
                "\"runtime\": {{\"mcp_transport\": \"http\"}} is set, but {} says in its answer to initialize that it takes no \
                 MCP servers over HTTP (mcpCapabilities.http); remove mcp_transport from agent.json, so that it is given its \
                 tools over stdio",
                self.agent_name()
            ))),
            _ => Ok(()),
        }
    }

    /// What went wrong since the last call without stopping the agent.
    pub(crate) fn take_notices(&mut self) -> Vec<Error> {
        std::mem::take(&mut self.notices)
    }

    /// When the agent must have connected to its tools; `None` when that was checked.
    pub(crate) fn tools_due(&self) -> Option<std::time::Instant> {
        self.tools_due
    }

    /// Checks once whether the agent has connected to its tools. Returns the likely reason if it has not.
    pub(crate) fn check_tools(&mut self, listing: &ShownTools) -> Option<String> {
        self.tools_due = None;
        if listing.is_connected() {
            return None;
        }
        let agent = self.agent_name();
        Some(self.with_output(format!(
            "{agent} has opened its conversation and not {} that it was given for it. Some agents drop such servers until \
             their workspace is trusted, or take them only from their own configuration: `oubliette agent presets` has \
             settings that work",
            tools_endpoint::describe(&self.tools_server)
        )))
    }

    /// What the agent calls itself, for error texts.
    fn agent_name(&self) -> &str {
        match self.capabilities.agent.as_str() {
            "" => "the agent",
            named => named,
        }
    }

    /// Asks the agent to end the turn; permission requests are answered `cancelled` from now on.
    pub(crate) fn cancel(&mut self) -> Result<(), AcpConnectionError> {
        self.cancelling = true;
        let cancel = CancelNotification::new(self.conversation_id().to_owned());
        self.connection.notify("session/cancel", &cancel)
    }

    /// The next message of the agent. Cancel-safe.
    pub(crate) async fn receive(&mut self) -> Result<AgentMessage, AcpConnectionError> {
        loop {
            tokio::select! {
                message = self.connection.receive() => return message,
                (id, answer) = self.open_permissions.next() => self.connection.answer(id, encode_answer(answer))?,
            }
        }
    }

    /// Handles a message, and answers it if it is a request. Not cancel-safe: the request would stay unanswered.
    pub(crate) async fn handle(
        &mut self,
        message: AgentMessage,
    ) -> Result<HandledMessage, AcpConnectionError> {
        match message {
            AgentMessage::Response { id, outcome } => Ok(HandledMessage::Response { id, outcome }),
            AgentMessage::Notification { method, params } => Ok(match method.as_str() {
                "session/update" => match serde_json::from_value::<SessionNotification>(params) {
                    Ok(notification)
                        if self.conversation.is_some()
                            && self.conversation_id() == &*notification.session_id.0 =>
                    {
                        self.permissions.note_update(&notification.update);
                        let filter = self.replay_filter.as_mut();
                        match filter.is_none_or(|filter| filter.is_live(&notification.update)) {
                            true => HandledMessage::Update(Box::new(notification.update)),
                            false => HandledMessage::Handled,
                        }
                    }
                    Ok(_) => HandledMessage::Handled,
                    Err(error) => {
                        tracing::debug!(%error, "session/update of an agent could not be parsed; ignored");
                        HandledMessage::Handled
                    }
                },
                _ => HandledMessage::Handled,
            }),
            AgentMessage::Request { id, method, params } if method == REQUEST_PERMISSION => {
                let answer = match serde_json::from_value::<RequestPermissionRequest>(params) {
                    Err(error) => Err(invalid_params(&error)),
                    Ok(request) => match self.permissions.answer(&request, self.cancelling) {
                        PermissionDecision::Answered(response) => encode_answer(response),
                        PermissionDecision::AskAbout(tool) => {
                            match self.open_permissions.ask(id.clone(), request, tool) {
                                Some((_, answer)) => encode_answer(answer),
                                None => return Ok(HandledMessage::Handled),
                            }
                        }
                    },
                };
                self.connection.answer(id, answer)?;
                Ok(HandledMessage::Handled)
            }
            AgentMessage::Request { id, method, params } => {
                let answer = self.answer_request(&method, params).await;
                self.connection.answer(id, answer)?;
                Ok(HandledMessage::Handled)
            }
        }
    }

    async fn answer_request(&self, method: &str, params: Value) -> Result<Value, RpcError> {
        let refuse = |code, message: String| RpcError {
            code,
            message,
            data: None,
        };
        if let Some(answer) = self.memory.answer(method, &params).await {
            return answer;
        }
        Err(refuse(
            METHOD_NOT_FOUND,
            format!("{} is not offered", oubliette_protocol::id::quoted(method)),
        ))
    }

    /// Sends a request and waits for the response, handling other messages meanwhile. Updates received here are
    /// dropped: before the conversation is open they are replayed history, which is in the log already.
    async fn request_and_wait(
        &mut self,
        method: &str,
        params: &impl Serialize,
        timeout: Duration,
    ) -> Result<Value> {
        let asked = match self.connection.request(method, params) {
            Ok(id) => id,
            Err(error) => return Err(self.explain_connection_error(error).await),
        };
        let deadline = Instant::now() + timeout;
        loop {
            let message = match tokio::time::timeout_at(deadline, self.receive()).await {
                Ok(message) => message,
                Err(_) => {
                    let text = format!(
                        "the agent did not answer {method} within {} s, the limit that start_timeout of [session] in \
                         oubliette.toml raises",
                        timeout.as_secs_f32()
                    );
                    return Err(Error::timeout(self.with_output(text)));
                }
            };
            let handled = match message {
                Ok(message) => self.handle(message).await,
                Err(error) => Err(error),
            };
            match handled {
                Ok(HandledMessage::Response { id, outcome }) if id == asked => {
                    return outcome.map_err(|error| {
                        let text = format!("the agent refused {method}: {}", agent_error_text(&error));
                        Error::unavailable(self.with_output(text))
                    });
                }
                Ok(_) => {}
                Err(error) => return Err(self.explain_connection_error(error).await),
            }
        }
    }

    /// The error for a failed connection, with the agent's exit status and the end of its stderr.
    pub(crate) async fn explain_connection_error(&self, why: AcpConnectionError) -> Error {
        if why == AcpConnectionError::Closed {
            // A process closes its stdout shortly before it exits, and the exit status says more.
            let exit = tokio::time::timeout(EXIT_WAIT, self.handle.wait()).await;
            let _ = tokio::time::timeout(EXIT_WAIT, self.stderr.wait_closed()).await;
            let how = exit.map_or_else(|_| why.to_string(), |exit| format!("it ended with {exit}"));
            return Error::unavailable(self.with_output(format!("the agent stopped: {how}")));
        }
        let text = self.with_output(format!("the agent was stopped: {why}"));
        match why {
            AcpConnectionError::OverBudget(_) => Error::limit_exceeded(text),
            _ => Error::unavailable(text),
        }
    }

    /// Adds the end of what the agent wrote besides ACP: its stderr, and lines of its stdout that are no messages.
    fn with_output(&self, mut text: String) -> String {
        if let Some(tail) = self.stderr.text() {
            text.push_str(&format!("; its stderr ends: {tail}"));
        }
        if let Some(tail) = self.connection.rejected_lines() {
            text.push_str(&format!("; its stdout ends: {tail}"));
        }
        strip_escapes(&text).into_owned()
    }

    /// Kills the process and all its descendants, and waits until they are gone.
    pub(crate) async fn stop(self) {
        self.handle.kill();
        self.handle.wait().await;
    }
}

fn encode_answer(answer: RequestPermissionResponse) -> Result<Value, RpcError> {
    serde_json::to_value(answer).map_err(|error| RpcError {
        code: -32603,
        message: error.to_string(),
        data: None,
    })
}

fn invalid_params(error: &serde_json::Error) -> RpcError {
    RpcError {
        code: INVALID_PARAMS,
        message: error.to_string(),
        data: None,
    }
}

/// The text of an agent's JSON-RPC error, cut to a length fit for an event. Some agents put the reason into `data`.
pub(crate) fn agent_error_text(error: &RpcError) -> String {
    let text = match &error.data {
        Some(Value::String(more)) => format!("{}: {more}", error.message),
        Some(Value::Object(more)) => match more.get("details").or_else(|| more.get("message")) {
            Some(Value::String(more)) => format!("{}: {more}", error.message),
            _ => error.message.clone(),
        },
        _ => error.message.clone(),
    };
    truncate_text(strip_escapes(&text).into_owned(), MAX_TEXT_BYTES)
}

fn parse_answer<T: serde::de::DeserializeOwned>(method: &str, answer: Value) -> Result<T> {
    serde_json::from_value(answer).map_err(|e| {
        // The error may quote what the agent wrote.
        let text = format!("the agent's answer to {method} was not understood: {e}");
        Error::unavailable(truncate_text(text, MAX_TEXT_BYTES))
    })
}

fn sandbox_error(error: SandboxError) -> Error {
    match error {
        SandboxError::Invalid(why) => Error::invalid(why),
        SandboxError::LimitExceeded(why) => Error::limit_exceeded(why),
        other => Error::unavailable(other.to_string()),
    }
}
