//! One conversation, and the turn that runs in it.

use std::sync::{Arc, Mutex, PoisonError};

use agent_client_protocol::{
    Client, Error, ErrorCode,
    v1::{
        ConnectionTo,
        schema::{ContentBlock, EmbeddedResourceResource, McpServer, PromptResponse, SessionId, StopReason},
    },
};
use tokio_util::sync::CancellationToken;

use crate::{
    config::{AgentProcessConfig, ModelChoice},
    memory::{ConversationMemory, MemoryEntry},
    model,
    tool_servers::ToolServers,
    turn::{AgentTurn, AgentTurnEnd},
    updates::UpdateSender,
};

/// One ACP session: its tool servers, its memory and its running turn.
pub(crate) struct AgentSession {
    id: SessionId,
    config: Arc<AgentProcessConfig>,
    update_sender: UpdateSender,
    tools: ToolServers,
    memory: tokio::sync::Mutex<ConversationMemory<ConnectionTo<Client>>>,
    running: Mutex<Option<CancellationToken>>,
}

/// Marks the session as busy while a turn runs; dropping it lets the next prompt in.
pub(crate) struct ActiveTurn {
    session: Arc<AgentSession>,
    /// Cancels the turn.
    pub(crate) cancel: CancellationToken,
}

impl Drop for ActiveTurn {
    fn drop(&mut self) {
        *lock(&self.session.running) = None;
    }
}

impl AgentSession {
    /// Starts the tool servers and loads the memory, concurrently.
    pub(crate) async fn open(
        id: SessionId,
        config: Arc<AgentProcessConfig>,
        connection: ConnectionTo<Client>,
        servers: &[McpServer],
        cwd: &std::path::Path,
    ) -> Result<Arc<Self>, Error> {
        let update_sender = UpdateSender::new(connection.clone(), id.clone());
        let tools = async {
            ToolServers::start(servers, cwd)
                .await
                .map_err(|e| Error::new(ErrorCode::INTERNAL_ERROR.value(), e))
        };
        let (tools, memory) = tokio::try_join!(tools, ConversationMemory::load(connection))?;
        let memory = tokio::sync::Mutex::new(memory);
        Ok(Arc::new(Self {
            id,
            config,
            update_sender,
            tools,
            memory,
            running: Mutex::new(None),
        }))
    }

    pub(crate) fn id(&self) -> &SessionId {
        &self.id
    }

    /// Claims the session for a turn; `None` while another one runs. Called as the prompt arrives, before any
    /// await, so that a cancel that follows immediately finds the turn.
    pub(crate) fn begin_turn(self: &Arc<Self>) -> Option<ActiveTurn> {
        let mut running = lock(&self.running);
        if running.is_some() {
            return None;
        }
        let cancel = CancellationToken::new();
        *running = Some(cancel.clone());
        drop(running);
        Some(ActiveTurn {
            session: self.clone(),
            cancel,
        })
    }

    /// Cancels the running turn, if there is one.
    pub(crate) fn cancel(&self) {
        if let Some(cancel) = lock(&self.running).as_ref() {
            cancel.cancel();
        }
    }

    /// Runs a turn to its end.
    pub(crate) async fn run_turn(
        &self,
        prompt: &[ContentBlock],
        cancel: &CancellationToken,
    ) -> Result<PromptResponse, Error> {
        let mut memory = self.memory.lock().await;
        let before = memory.turns_begun();
        let turn = AgentTurn::new(before + 1, &self.update_sender, &self.tools, cancel);
        // Stored first: a turn that is interrupted still counts, so a script continues after it.
        memory
            .append(MemoryEntry::User {
                text: prompt_text(prompt),
            })
            .await?;
        let mut response = PromptResponse::new(StopReason::EndTurn);
        let ended = match &self.config.model_choice {
            ModelChoice::Script(script) => turn.run_script(script.steps_of_turn(before)).await,
            ModelChoice::Model(wanted) => {
                let outcome = model::run_turn(&turn, wanted, &self.config.prompt, &mut memory).await?;
                response = response.meta(outcome.meta());
                outcome.ended
            }
            ModelChoice::Missing => {
                let remedy = "this agent has no model: set `model` in its agent.json to <provider>/<model>, such as \
                              anthropic/claude-sonnet-4-5, or to script:<file>";
                return Err(Error::new(ErrorCode::INVALID_PARAMS.value(), remedy));
            }
        };
        response.stop_reason = match ended {
            AgentTurnEnd::Completed => StopReason::EndTurn,
            AgentTurnEnd::Cancelled => StopReason::Cancelled,
            AgentTurnEnd::OutputLimit => StopReason::MaxTokens,
            AgentTurnEnd::RequestLimit => StopReason::MaxTurnRequests,
            AgentTurnEnd::Refused => StopReason::Refusal,
        };
        Ok(response)
    }
}

/// A prompt as text: embedded resources are included, linked ones only named.
fn prompt_text(prompt: &[ContentBlock]) -> String {
    let texts = prompt.iter().map(|block| match block {
        ContentBlock::Text(text) => text.text.clone(),
        ContentBlock::ResourceLink(link) => format!("[{}]({})", link.name, link.uri),
        ContentBlock::Resource(embedded) => match &embedded.resource {
            EmbeddedResourceResource::TextResourceContents(text) => format!("{}:\n{}", text.uri, text.text),
            EmbeddedResourceResource::BlobResourceContents(blob) => format!("[binary file {}]", blob.uri),
            _ => "[a resource of an unknown kind]".to_owned(),
        },
        ContentBlock::Image(_) => "[an image, which this agent cannot see]".to_owned(),
        ContentBlock::Audio(_) => "[audio, which this agent cannot hear]".to_owned(),
        _ => "[content of an unknown kind]".to_owned(),
    });
    texts.collect::<Vec<_>>().join("\n\n")
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
