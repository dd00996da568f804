//! `session_queue_*`: the messages of a session that wait for their turn.

use std::borrow::Cow;

use oubliette_protocol::{Result, Scope, SessionId};
use oubliette_session::WaitingMessage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ActionCall, ActionHandler, Effect};

/// `session_queue_list`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionQueueList {
    /// Id of the session (`gogol_…`).
    pub session_id: SessionId,
}

/// `session_queue_remove`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionQueueRemove {
    /// Id of the session (`gogol_…`).
    pub session_id: SessionId,
    /// The turn whose message to remove, as session_message returned it and session_queue_list shows it.
    pub turn: u64,
}

/// Result of `session_queue_list`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct QueuedMessages {
    /// The messages that wait, in order.
    messages: Vec<WaitingMessage>,
}

/// Result of `session_queue_remove`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct QueueRemoval {
    /// The session.
    session_id: SessionId,
    /// The number of the turn that the message would have begun.
    turn: u64,
    /// True.
    removed: bool,
}

impl ActionHandler for SessionQueueList {
    type Output = QueuedMessages;

    const NAME: &'static str = "session_queue_list";
    const DESCRIPTION: &'static str =
        "List the messages of a session that wait for their turn, in order. Long texts are cut.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let sessions = &call.app.sessions;
        let waiting = sessions
            .queue_list(call.grant.principal(), &self.session_id)
            .await?;
        Ok(QueuedMessages { messages: waiting })
    }
}

impl ActionHandler for SessionQueueRemove {
    type Output = QueueRemoval;

    const NAME: &'static str = "session_queue_remove";
    const DESCRIPTION: &'static str =
        "Remove a message that waits for its turn. Its turn never begins; the session's log says so.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Delete;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(format!("{} turn {}", self.session_id, self.turn).into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        call.note_session(&self.session_id).await?;
        let sessions = &call.app.sessions;
        sessions
            .queue_remove(call.grant.principal(), &self.session_id, self.turn)
            .await?;
        Ok(QueueRemoval {
            session_id: self.session_id,
            turn: self.turn,
            removed: true,
        })
    }
}
