//! Waits for the turn of a message that was accepted before: for a client whose waiting `session_message` was answered with a
//! question.

use futures::StreamExt as _;
use oubliette_protocol::{
    Error, Principal, Result, SessionId,
    event::{EventBody, MessageRole, SessionStatus},
};
use tokio_util::sync::CancellationToken;

use crate::{
    Sessions,
    callers::{HoldKind, PresenceKey},
    request::MessageReply,
};

/// The turn to wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnToAwait {
    /// The session.
    pub session_id: SessionId,
    /// The number of the turn.
    pub turn: u64,
    /// The index of the last event that was seen.
    pub since: i64,
    /// Whether it had begun at that event. If not, it comes after turns whose end is not its own.
    pub begun: bool,
}

impl Sessions {
    /// Waits until a turn has ended, as `session_message` with `wait` does. When `stop` is cancelled it returns without
    /// text. The caller counts as present meanwhile.
    pub async fn wait_for_turn(
        &self,
        principal: &Principal,
        mcp_session: Option<String>,
        awaited: &TurnToAwait,
        stop: &CancellationToken,
    ) -> Result<MessageReply> {
        let id = &awaited.session_id;
        // First: one that begins leaves the queue in the transaction that makes it the session's last turn.
        let queued = self.deps.store.queue_list(id).await?;
        let is_queued = queued.iter().any(|message| message.turn == awaited.turn);
        let row = self.visible_row(principal, id).await?;
        let is_known = is_queued || row.turn >= awaited.turn;
        if !is_known || awaited.since > self.deps.store.events().last_index(id).await? {
            return Err(Error::invalid(format!("session {id} has no such turn")));
        }
        let hold = self.hold_presence(
            PresenceKey {
                principal: principal.token_id.clone(),
                caller_id: None,
                session: Some(id.clone()),
                mcp_session,
            },
            HoldKind::Wait,
        );
        let text = tokio::select! {
            text = self.turn_text(awaited) => Some(text?),
            () = stop.cancelled() => None,
        };
        hold.answered();
        let status = self.visible_row(principal, id).await?.status;
        Ok(MessageReply {
            session_id: id.clone(),
            turn: awaited.turn,
            status,
            text,
        })
    }

    /// The text of a turn once it has ended, or the error it ended with.
    async fn turn_text(&self, awaited: &TurnToAwait) -> Result<String> {
        let TurnToAwait {
            session_id,
            turn,
            since,
            begun,
        } = awaited;
        let mut events = self.deps.store.events().follow(session_id, *since);
        let (mut begun, mut failure) = (*begun, None);
        while let Some(event) = events.next().await {
            match &event?.body {
                EventBody::TurnCompleted {
                    turn: ended, text, ..
                } if ended == turn => return Ok(text.clone()),
                EventBody::TurnCompleted { turn: ended, .. } if ended > turn => break,
                EventBody::TurnCompleted { .. } => failure = None,
                EventBody::Message {
                    role: MessageRole::User,
                    ..
                } if !begun => {
                    let row = self.deps.store.session_get(session_id).await?;
                    begun = row.is_none_or(|row| row.turn >= *turn);
                    failure = None;
                }
                EventBody::Error {
                    code,
                    message,
                    skipped_turn: Some(skipped),
                    ..
                } if skipped == turn => {
                    return Err(Error::new(*code, message.clone()));
                }
                EventBody::Error { code, message, .. } => failure = Some(Error::new(*code, message.clone())),
                EventBody::Status { status, .. } => match (status, failure.take()) {
                    (SessionStatus::Ended, failed) => {
                        let ended = || Error::conflict(format!("session {session_id} was ended"));
                        return Err(failed.unwrap_or_else(ended));
                    }
                    (_, Some(failed)) if begun => return Err(failed),
                    (_, _) => {}
                },
                _ => {}
            }
        }
        Err(Error::unavailable("the session ended before the turn did"))
    }
}
