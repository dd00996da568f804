//! [`AgentProcess`]: one agent process and the conversation with it, over ACP.
//!
//! - [`connection`]: its stdout and stdin, bounded.
//! - [`AgentProcess`]: start, `initialize`, `session/new` or `session/load`, prompt, cancel.
//! - [`permission`], [`memory`]: answers to the agent's requests.
//! - [`turn_recorder`]: converts the agent's updates into events.

pub(crate) mod connection;
pub(crate) mod memory;
mod permission;
pub(crate) mod turn_recorder;

#[cfg(test)]
mod turn_recorder_tests;

use std::{path::PathBuf, sync::Arc, time::Duration};

use agent_client_protocol::{
    schema::ProtocolVersion,
    v1::schema::{
        CancelNotification, ContentBlock, EnvVariable, Implementation, InitializeRequest, InitializeResponse,
        LoadSessionRequest, McpServer, McpServerStdio, NewSessionRequest, NewSessionResponse, PromptRequest,
        RequestPermissionRequest, SessionNotification, SessionUpdate, TextContent,
    },
};
use oubliette_protocol::{
    Error, Result,
    agent::PermissionPolicy,
    relay::{INVALID_PARAMS, METHOD_NOT_FOUND, RpcError},
};
use oubliette_sandbox::{IsolationLevel, SandboxDriver, SandboxError, SandboxHandle, SandboxSpec};
use oubliette_tools::StderrTail;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;

use self::{
    connection::{AcpConnection, AcpConnectionError, AgentMessage},
    memory::MemoryHandler,
};
use crate::config::{AgentOutputLimits, SessionConfig};

/// The name of the MCP server `oubliette-client` in the agent's configuration.
const SERVER_NAME: &str = "oubliette";

/// How long to wait for the exit of an agent that closed its stdout, and then for the end of its stderr.
const EXIT_WAIT: Duration = Duration::from_secs(3);

/// What an agent process is started with.
pub(crate) struct AgentStart {
    pub(crate) spec: SandboxSpec,
    /// The environment of `oubliette-client`.
    pub(crate) client_env: Vec<(String, String)>,
    pub(crate) permissions: PermissionPolicy,
    pub(crate) memory: MemoryHandler,
    /// The definition's `prompt`, for ACP agents; `None` for the built-in agent, which gets it in its
    /// configuration.
    pub(crate) instructions: Option<String>,
}

/// An agent's conversation (an ACP session), stored to be loaded when the agent is started again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Conversation {
    /// The ACP session id the agent gave it.
    id: String,
    /// Whether the agent's instructions were sent in it.
    instructed: bool,
}

/// A running agent process and the ACP connection to it.
pub(crate) struct AgentProcess {
    connection: AcpConnection,
    handle: SandboxHandle,
    stderr: StderrTail,
    permissions: PermissionPolicy,
    memory: MemoryHandler,
    client: McpServerStdio,
    cwd: PathBuf,
    instructions: Option<String>,
    /// The open conversation; `None` until [`AgentProcess::open_conversation`] has succeeded.
    conversation: Option<Conversation>,
    can_load: bool,
    cancelling: bool,
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
    ) -> Result<Self> {
        let AgentStart {
            spec,
            client_env,
            permissions,
            memory,
            instructions,
        } = start;
        let running = sandbox.spawn(spec).await.map_err(sandbox_error)?;
        let paths = running.paths;
        let env = client_env.into_iter().map(|(name, value)| {
            let seen = if value.starts_with('/') {
                paths.resolve(&value).to_string_lossy().into_owned()
            } else {
                value
            };
            EnvVariable::new(name, seen)
        });
        let client = McpServerStdio::new(SERVER_NAME, paths.resolve(oubliette_sandbox::spec::CLIENT))
            .env(env.collect());
        Ok(Self {
            connection: AcpConnection::new(running.stdin, running.stdout, limits),
            handle: running.handle,
            stderr: StderrTail::follow(running.stderr),
            permissions,
            memory,
            client,
            cwd: paths.resolve(oubliette_sandbox::spec::WORKSPACE),
            instructions,
            conversation: None,
            can_load: false,
            cancelling: false,
        })
    }

    /// The isolation level of its sandbox.
    pub(crate) fn level(&self) -> IsolationLevel {
        self.handle.level()
    }

    /// Its process id on the host.
    pub(crate) fn pid(&self) -> u32 {
        self.handle.pid()
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
        let answer: InitializeResponse = parse_answer("initialize", answer)?;
        if answer.protocol_version != ProtocolVersion::V1 {
            return Err(Error::unavailable(
                "the agent does not speak version 1 of the Agent Client Protocol",
            ));
        }
        self.can_load = answer.agent_capabilities.load_session;
        Ok(())
    }

    /// Opens the conversation: loads `before` if the agent can, else starts a new one.
    pub(crate) async fn open_conversation(
        &mut self,
        before: Option<&Conversation>,
        config: &SessionConfig,
    ) -> Result<()> {
        let servers = vec![McpServer::Stdio(self.client.clone())];
        // ACP has no stable field for instructions. Some agents read `_meta.systemPrompt`; for the others
        // `prompt` sends them with the first message.
        let meta = self.instructions.as_ref().map(|instructions| {
            let append = serde_json::json!({ "append": instructions });
            serde_json::Map::from_iter([("systemPrompt".to_owned(), append)])
        });
        if let Some(before) = before.filter(|_| self.can_load) {
            let request = LoadSessionRequest::new(before.id.clone(), self.cwd.clone())
                .mcp_servers(servers.clone())
                .meta(meta.clone());
            match self
                .request_and_wait("session/load", &request, config.open_timeout)
                .await
            {
                Ok(_) => {
                    self.conversation = Some(before.clone());
                    return Ok(());
                }
                // The agent may have lost its files: it goes on with a new conversation.
                Err(error) if self.handle.exit().is_none() => {
                    tracing::info!(%error, "session/load failed; starting a new conversation");
                }
                Err(error) => return Err(error),
            }
        }
        let request = NewSessionRequest::new(self.cwd.clone())
            .mcp_servers(servers)
            .meta(meta);
        let answer = self
            .request_and_wait("session/new", &request, config.open_timeout)
            .await?;
        let answer: NewSessionResponse = parse_answer("session/new", answer)?;
        self.conversation = Some(Conversation {
            id: answer.session_id.0.to_string(),
            instructed: self.instructions.is_none(),
        });
        Ok(())
    }

    /// Sends a prompt; its answer arrives as [`HandledMessage::Response`] with the returned id.
    pub(crate) fn prompt(&mut self, text: &str) -> Result<u64, AcpConnectionError> {
        self.cancelling = false;
        let block = |text: &str| ContentBlock::Text(TextContent::new(text));
        // Agents recognise their own commands by a leading `/`, so nothing is put before such a message.
        let due = self.conversation.as_ref().is_some_and(|open| !open.instructed);
        let instructions = self
            .instructions
            .as_deref()
            .filter(|_| due && !text.starts_with('/'));
        let blocks = instructions.into_iter().chain([text]).map(block).collect();
        let given = instructions.is_some();
        let request = PromptRequest::new(self.conversation_id().to_owned(), blocks);
        let asked = self.connection.request("session/prompt", &request)?;
        if let Some(open) = self.conversation.as_mut() {
            open.instructed |= given;
        }
        Ok(asked)
    }

    /// Asks the agent to end the turn; permission requests are answered `cancelled` from now on.
    pub(crate) fn cancel(&mut self) -> Result<(), AcpConnectionError> {
        self.cancelling = true;
        let cancel = CancelNotification::new(self.conversation_id().to_owned());
        self.connection.notify("session/cancel", &cancel)
    }

    /// The next message of the agent. Cancel-safe.
    pub(crate) async fn receive(&mut self) -> Result<AgentMessage, AcpConnectionError> {
        self.connection.receive().await
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
                        HandledMessage::Update(Box::new(notification.update))
                    }
                    Ok(_) => HandledMessage::Handled,
                    Err(error) => {
                        tracing::debug!(%error, "session/update of an agent could not be parsed; ignored");
                        HandledMessage::Handled
                    }
                },
                _ => HandledMessage::Handled,
            }),
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
        match method {
            "session/request_permission" => {
                let request: RequestPermissionRequest =
                    serde_json::from_value(params).map_err(|e| refuse(INVALID_PARAMS, e.to_string()))?;
                let answer = permission::answer(&request, self.permissions, self.cancelling);
                serde_json::to_value(answer).map_err(|e| refuse(-32603, e.to_string()))
            }
            _ => Err(refuse(METHOD_NOT_FOUND, format!("{method} is not offered"))),
        }
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
            let message = match tokio::time::timeout_at(deadline, self.connection.receive()).await {
                Ok(message) => message,
                Err(_) => {
                    let text = format!(
                        "the agent did not answer {method} within {} s",
                        timeout.as_secs_f32()
                    );
                    return Err(Error::timeout(self.with_stderr(text)));
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
                        Error::unavailable(self.with_stderr(text))
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
            return Error::unavailable(self.with_stderr(format!("the agent stopped: {how}")));
        }
        Error::unavailable(self.with_stderr(format!("the agent was stopped: {why}")))
    }

    fn with_stderr(&self, text: String) -> String {
        match self.stderr.text() {
            Some(tail) => format!("{text}; its stderr ends: {tail}"),
            None => text,
        }
    }

    /// Kills the process and all its descendants, and waits until they are gone.
    pub(crate) async fn stop(self) {
        self.handle.kill();
        self.handle.wait().await;
    }
}

/// The text of an agent's JSON-RPC error. Some agents put the reason into `data`.
pub(crate) fn agent_error_text(error: &RpcError) -> String {
    match &error.data {
        Some(Value::String(more)) => format!("{}: {more}", error.message),
        Some(Value::Object(more)) => match more.get("details").or_else(|| more.get("message")) {
            Some(Value::String(more)) => format!("{}: {more}", error.message),
            _ => error.message.clone(),
        },
        _ => error.message.clone(),
    }
}

fn parse_answer<T: serde::de::DeserializeOwned>(method: &str, answer: Value) -> Result<T> {
    serde_json::from_value(answer)
        .map_err(|e| Error::unavailable(format!("the agent's answer to {method} was not understood: {e}")))
}

fn sandbox_error(error: SandboxError) -> Error {
    match error {
        SandboxError::Invalid(why) => Error::invalid(why),
        other => Error::unavailable(other.to_string()),
    }
}
