//! `session_queue_list` and `session_queue_remove`: the messages of a session that wait for their turn.

use oubliette_protocol::{Error, Principal, Result, SessionId};
use schemars::JsonSchema;
use serde::Serialize;

use crate::{Sessions, live::TaskCommand};

/// Maximum length of a message's text in a list, in characters.
const MAX_LISTED_CHARS: usize = 2_000;

/// A message that waits for its turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct WaitingMessage {
    /// The number of the turn it will begin.
    pub turn: u64,
    /// Its text, or the beginning of it.
    pub text: String,
    /// Whether only the beginning of the text is shown.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
}

impl Sessions {
    /// The messages that wait for their turn, in order.
    pub async fn queue_list(&self, principal: &Principal, id: &SessionId) -> Result<Vec<WaitingMessage>> {
        self.visible_row(principal, id).await?;
        let waiting = self.deps.store.queue_list(id).await?;
        // The message of a turn that is starting is in the queue until it is logged; it can no longer be removed.
        let begun = self.current_turn(id);
        let waiting = waiting.into_iter().filter(|message| Some(message.turn) != begun);
        Ok(waiting
            .map(|message| {
                let cut = message.text.char_indices().nth(MAX_LISTED_CHARS);
                WaitingMessage {
                    turn: message.turn,
                    truncated: cut.is_some(),
                    text: cut
                        .map_or(message.text.as_str(), |(end, _)| &message.text[..end])
                        .to_owned(),
                }
            })
            .collect())
    }

    /// Removes the message that waits for a turn; `not_found` when none does.
    pub async fn queue_remove(&self, principal: &Principal, id: &SessionId, turn: u64) -> Result<()> {
        self.visible_row(principal, id).await?;
        let Some(live) = self.in_memory(id) else {
            // Sessions with waiting messages are in memory from the start of the server on.
            return Err(Error::not_found(format!("no message waits for turn {turn}")));
        };
        live.send_command(|reply| TaskCommand::RemoveQueued(turn, reply))
            .await?
    }
}
