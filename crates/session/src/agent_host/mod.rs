//! One agent process and the conversation with it, over ACP.
//!
//! - [`lines`], [`wire`]: its stdout and stdin, bounded whatever it does; [`stderr`]: its last words.
//! - [`Host`]: start, `initialize`, `session/new` or `session/load`, prompt, cancel.
//! - [`permission`], [`memory`]: what it asks of us, and the answers.
//! - [`scribe`]: what it reports, as events.

mod lines;
pub(crate) mod memory;
mod permission;
pub(crate) mod scribe;
mod stderr;
pub(crate) mod wire;

#[cfg(test)]
mod scribe_tests;

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
    agent::Permissions,
    relay::{INVALID_PARAMS, METHOD_NOT_FOUND, RpcError},
};
use oubliette_sandbox::{Handle, Level, Sandbox, SandboxError, Spec};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;

use self::{
    memory::MemoryDesk,
    stderr::StderrTail,
    wire::{Gone, Heard, Wire},
};
use crate::config::{SessionConfig, Voice};

/// The name `oubliette-client` has as the agent's MCP server.
const SERVER_NAME: &str = "oubliette";

/// How long an agent that closed its output has to exit and be read to the end.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// What an agent is started with.
pub(crate) struct Start {
    pub(crate) spec: Spec,
    /// The environment of `oubliette-client`.
    pub(crate) client_env: Vec<(String, String)>,
    pub(crate) permissions: Permissions,
    pub(crate) memory: MemoryDesk,
    /// The agent's instructions, for agents that take them with their conversation.
    pub(crate) prompt: Option<String>,
}

/// A conversation as the agent knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Conversation {
    /// The agent's own id of it.
    id: String,
    /// It has the agent's instructions.
    instructed: bool,
}

/// A running agent.
pub(crate) struct Host {
    wire: Wire,
    handle: Handle,
    stderr: StderrTail,
    permissions: Permissions,
    memory: MemoryDesk,
    client: McpServerStdio,
    cwd: PathBuf,
    prompt: Option<String>,
    /// Once it is open.
    conversation: Option<Conversation>,
    can_load: bool,
    cancelling: bool,
}

/// What came of one thing the agent said.
pub(crate) enum Happening {
    /// It reports.
    Update(Box<SessionUpdate>),
    /// It answers one of our requests.
    Answer {
        id: u64,
        outcome: Result<Value, RpcError>,
    },
    /// Nothing for the session.
    Attended,
}

impl Host {
    /// Starts the process. The sandbox stands and the program runs when this returns.
    pub(crate) async fn spawn(sandbox: &Arc<dyn Sandbox>, start: Start, voice: Voice) -> Result<Self> {
        let Start {
            spec,
            client_env,
            permissions,
            memory,
            prompt,
        } = start;
        let running = sandbox.spawn(spec).await.map_err(sandbox_error)?;
        let paths = running.paths;
        let env = client_env.into_iter().map(|(name, value)| {
            let seen = if value.starts_with('/') {
                paths.see(&value).to_string_lossy().into_owned()
            } else {
                value
            };
            EnvVariable::new(name, seen)
        });
        let client =
            McpServerStdio::new(SERVER_NAME, paths.see(oubliette_sandbox::spec::CLIENT)).env(env.collect());
        Ok(Self {
            wire: Wire::new(running.stdin, running.stdout, voice),
            handle: running.handle,
            stderr: StderrTail::follow(running.stderr),
            permissions,
            memory,
            client,
            cwd: paths.see(oubliette_sandbox::spec::WORKSPACE),
            prompt,
            conversation: None,
            can_load: false,
            cancelling: false,
        })
    }

    /// How strong its walls are.
    pub(crate) fn level(&self) -> Level {
        self.handle.level()
    }

    /// Its process on the host.
    pub(crate) fn pid(&self) -> u32 {
        self.handle.pid()
    }

    /// The conversation, once it is open.
    pub(crate) fn conversation(&self) -> Option<&Conversation> {
        self.conversation.as_ref()
    }

    /// The agent's own id of it.
    fn conversation_id(&self) -> &str {
        self.conversation.as_ref().map_or("", |open| &open.id)
    }

    /// `initialize`.
    pub(crate) async fn initialize(&mut self, config: &SessionConfig) -> Result<()> {
        let us = Implementation::new("oubliette", env!("CARGO_PKG_VERSION"));
        // No file system and no terminal are offered: the agent has its own, in the sandbox.
        let request = InitializeRequest::new(ProtocolVersion::V1).client_info(us);
        let answer = self
            .ask("initialize", &request, config.initialize_timeout)
            .await?;
        let answer: InitializeResponse = read("initialize", answer)?;
        if answer.protocol_version != ProtocolVersion::V1 {
            return Err(Error::unavailable(
                "the agent does not speak version 1 of the Agent Client Protocol",
            ));
        }
        self.can_load = answer.agent_capabilities.load_session;
        Ok(())
    }

    /// Opens the conversation: the old one where there is one and the agent can load it, else a new one.
    pub(crate) async fn open(&mut self, before: Option<&Conversation>, config: &SessionConfig) -> Result<()> {
        let servers = vec![McpServer::Stdio(self.client.clone())];
        // ACP has no stable field for instructions. This is where some agents look for them; the others get
        // them with the first message.
        let meta = self.prompt.as_ref().map(|prompt| {
            let append = serde_json::json!({ "append": prompt });
            serde_json::Map::from_iter([("systemPrompt".to_owned(), append)])
        });
        if let Some(before) = before.filter(|_| self.can_load) {
            let request = LoadSessionRequest::new(before.id.clone(), self.cwd.clone())
                .mcp_servers(servers.clone())
                .meta(meta.clone());
            match self.ask("session/load", &request, config.open_timeout).await {
                Ok(_) => {
                    self.conversation = Some(before.clone());
                    return Ok(());
                }
                // It may have lost its files; a new conversation is better than none.
                Err(error) if self.handle.exit().is_none() => {
                    tracing::info!(%error, "an agent could not load its conversation; it gets a new one");
                }
                Err(error) => return Err(error),
            }
        }
        let request = NewSessionRequest::new(self.cwd.clone())
            .mcp_servers(servers)
            .meta(meta);
        let answer = self.ask("session/new", &request, config.open_timeout).await?;
        let answer: NewSessionResponse = read("session/new", answer)?;
        self.conversation = Some(Conversation {
            id: answer.session_id.0.to_string(),
            instructed: self.prompt.is_none(),
        });
        Ok(())
    }

    /// Sends a prompt; its answer is heard under the returned id.
    pub(crate) fn prompt(&mut self, text: &str) -> Result<u64, Gone> {
        self.cancelling = false;
        let block = |text: &str| ContentBlock::Text(TextContent::new(text));
        // Agents know their own commands by a message's first character; those can do without.
        let due = self.conversation.as_ref().is_some_and(|open| !open.instructed);
        let instructions = self.prompt.as_deref().filter(|_| due && !text.starts_with('/'));
        let blocks = instructions.into_iter().chain([text]).map(block).collect();
        let given = instructions.is_some();
        let request = PromptRequest::new(self.conversation_id().to_owned(), blocks);
        let asked = self.wire.request("session/prompt", &request)?;
        if let Some(open) = self.conversation.as_mut() {
            open.instructed |= given;
        }
        Ok(asked)
    }

    /// Asks the agent to end the turn; permission requests are answered `cancelled` from now on.
    pub(crate) fn cancel(&mut self) -> Result<(), Gone> {
        self.cancelling = true;
        let cancel = CancelNotification::new(self.conversation_id().to_owned());
        self.wire.notify("session/cancel", &cancel)
    }

    /// The next thing the agent says. Dropping the future loses nothing.
    pub(crate) async fn hear(&mut self) -> Result<Heard, Gone> {
        self.wire.hear().await
    }

    /// Attends to what was heard. Not to be dropped half way: a request would stay unanswered.
    pub(crate) async fn attend(&mut self, heard: Heard) -> Result<Happening, Gone> {
        match heard {
            Heard::Answer { id, outcome } => Ok(Happening::Answer { id, outcome }),
            Heard::Notification { method, params } => Ok(match method.as_str() {
                "session/update" => match serde_json::from_value::<SessionNotification>(params) {
                    Ok(said)
                        if self.conversation.is_some() && self.conversation_id() == &*said.session_id.0 =>
                    {
                        Happening::Update(Box::new(said.update))
                    }
                    Ok(_) => Happening::Attended,
                    Err(error) => {
                        tracing::debug!(%error, "an agent's update was not understood");
                        Happening::Attended
                    }
                },
                _ => Happening::Attended,
            }),
            Heard::Request { id, method, params } => {
                let answer = self.serve(&method, params).await;
                self.wire.answer(id, answer)?;
                Ok(Happening::Attended)
            }
        }
    }

    async fn serve(&self, method: &str, params: Value) -> Result<Value, RpcError> {
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

    /// Asks and waits for the answer, attending to everything else meanwhile. What the agent reports
    /// before its conversation is open is history, and not logged again.
    async fn ask(&mut self, method: &str, params: &impl Serialize, patience: Duration) -> Result<Value> {
        let asked = match self.wire.request(method, params) {
            Ok(id) => id,
            Err(gone) => return Err(self.gone(gone).await),
        };
        let deadline = Instant::now() + patience;
        loop {
            let heard = match tokio::time::timeout_at(deadline, self.wire.hear()).await {
                Ok(heard) => heard,
                Err(_) => {
                    let text = format!(
                        "the agent did not answer {method} within {} s",
                        patience.as_secs_f32()
                    );
                    return Err(Error::timeout(self.with_stderr(text)));
                }
            };
            let happening = match heard {
                Ok(heard) => self.attend(heard).await,
                Err(gone) => Err(gone),
            };
            match happening {
                Ok(Happening::Answer { id, outcome }) if id == asked => {
                    return outcome.map_err(|error| {
                        let said = format!("the agent refused {method}: {}", agent_error(&error));
                        Error::unavailable(self.with_stderr(said))
                    });
                }
                Ok(_) => {}
                Err(gone) => return Err(self.gone(gone).await),
            }
        }
    }

    /// Why an agent cannot be talked to any more, with how it ended and its last words.
    pub(crate) async fn gone(&self, why: Gone) -> Error {
        if why == Gone::Closed {
            // Closing stdout and exiting are two moments; the exit says more.
            let exit = tokio::time::timeout(LAST_WORDS, self.handle.wait()).await;
            let _ = tokio::time::timeout(LAST_WORDS, self.stderr.closed()).await;
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

    /// Kills the whole tree and waits until it is gone.
    pub(crate) async fn stop(self) {
        self.handle.kill();
        self.handle.wait().await;
    }
}

/// An agent's error as text for people: some put the reason into `data`.
pub(crate) fn agent_error(error: &RpcError) -> String {
    match &error.data {
        Some(Value::String(more)) => format!("{}: {more}", error.message),
        Some(Value::Object(more)) => match more.get("details").or_else(|| more.get("message")) {
            Some(Value::String(more)) => format!("{}: {more}", error.message),
            _ => error.message.clone(),
        },
        _ => error.message.clone(),
    }
}

fn read<T: serde::de::DeserializeOwned>(method: &str, answer: Value) -> Result<T> {
    serde_json::from_value(answer)
        .map_err(|e| Error::unavailable(format!("the agent's answer to {method} was not understood: {e}")))
}

fn sandbox_error(error: SandboxError) -> Error {
    match error {
        SandboxError::Invalid(why) => Error::invalid(why),
        other => Error::unavailable(other.to_string()),
    }
}
