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
    config::{Config, Mind},
    memory::{Entry, Memory},
    model,
    tools::Tools,
    turn::{Ended, Turn},
    voice::Voice,
};

/// A conversation.
pub(crate) struct Session {
    id: SessionId,
    config: Arc<Config>,
    voice: Voice,
    tools: Tools,
    memory: tokio::sync::Mutex<Memory<ConnectionTo<Client>>>,
    running: Mutex<Option<CancellationToken>>,
}

/// Held while a turn runs; another one is refused meanwhile.
pub(crate) struct Running {
    session: Arc<Session>,
    /// Cancels the turn.
    pub(crate) cancel: CancellationToken,
}

impl Drop for Running {
    fn drop(&mut self) {
        *lock(&self.session.running) = None;
    }
}

impl Session {
    /// Starts the tool servers and remembers what was said before, side by side.
    pub(crate) async fn open(
        id: SessionId,
        config: Arc<Config>,
        connection: ConnectionTo<Client>,
        servers: &[McpServer],
        cwd: &std::path::Path,
    ) -> Result<Arc<Self>, Error> {
        let voice = Voice::new(connection.clone(), id.clone());
        let tools = async {
            Tools::start(servers, cwd)
                .await
                .map_err(|e| Error::new(ErrorCode::INTERNAL_ERROR.value(), e))
        };
        let (tools, memory) = tokio::try_join!(tools, Memory::load(connection))?;
        let memory = tokio::sync::Mutex::new(memory);
        Ok(Arc::new(Self {
            id,
            config,
            voice,
            tools,
            memory,
            running: Mutex::new(None),
        }))
    }

    pub(crate) fn id(&self) -> &SessionId {
        &self.id
    }

    /// Claims the session for a turn. Called as the prompt arrives, before anything waits, so that
    /// a cancel right behind it finds the turn.
    pub(crate) fn begin(self: &Arc<Self>) -> Option<Running> {
        let mut running = lock(&self.running);
        if running.is_some() {
            return None;
        }
        let cancel = CancellationToken::new();
        *running = Some(cancel.clone());
        drop(running);
        Some(Running {
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
    pub(crate) async fn turn(
        &self,
        prompt: &[ContentBlock],
        cancel: &CancellationToken,
    ) -> Result<PromptResponse, Error> {
        let mut memory = self.memory.lock().await;
        let before = memory.turns();
        let turn = Turn::new(before + 1, &self.voice, &self.tools, cancel);
        // Remembered first: a turn that dies half way still counts, so a script goes on after it.
        memory
            .append(Entry::User {
                text: text_of(prompt),
            })
            .await?;
        let mut response = PromptResponse::new(StopReason::EndTurn);
        let ended = match &self.config.mind {
            Mind::Script(script) => turn.follow(script.turn(before)).await,
            Mind::Model(wanted) => {
                let outcome = model::run(&turn, wanted, &self.config.prompt, &mut memory).await?;
                response = response.meta(outcome.meta());
                outcome.ended
            }
            Mind::Missing => {
                let remedy = "this agent has no model: set `model` in its agent.json to <provider>/<model>, such as \
                              anthropic/claude-sonnet-4-5, or to script:<file>";
                return Err(Error::new(ErrorCode::INVALID_PARAMS.value(), remedy));
            }
        };
        response.stop_reason = match ended {
            Ended::Done => StopReason::EndTurn,
            Ended::Cancelled => StopReason::Cancelled,
            Ended::TooLong => StopReason::MaxTokens,
            Ended::TooMany => StopReason::MaxTurnRequests,
            Ended::Refused => StopReason::Refusal,
        };
        Ok(response)
    }
}

/// A prompt as text: what is embedded is quoted, what is linked is named.
fn text_of(prompt: &[ContentBlock]) -> String {
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
