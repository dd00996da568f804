//! The prompt of a turn: the message, with the instructions and earlier turns that the agent does not know yet.

use agent_client_protocol::v1::schema::{ContentBlock, PromptRequest, TextContent};

use super::{
    AgentProcess,
    connection::AcpConnectionError,
    replay_filter::{EarlierTurn, ReplayFilter},
};

/// The prompt of one turn.
pub(crate) struct TurnPrompt<'a> {
    pub(crate) turn: u64,
    pub(crate) text: &'a str,
    /// The agent's earlier turns; needed only if [`AgentProcess::needs_earlier_turns`].
    pub(crate) earlier: &'a [EarlierTurn],
    /// The turn at which another agent last became the session's.
    pub(crate) others_since: Option<u64>,
}

impl AgentProcess {
    /// Whether the prompt needs the earlier turns: to tell them to the agent, or to recognise them in a late replay.
    pub(crate) fn needs_earlier_turns(&self) -> bool {
        self.replays || self.conversation.as_ref().is_some_and(|open| open.untold)
    }

    /// Sends the prompt of a turn; its answer arrives as [`HandledMessage::Response`](super::HandledMessage::Response) with the returned id.
    pub(crate) fn prompt(&mut self, prompt: TurnPrompt<'_>) -> Result<u64, AcpConnectionError> {
        let TurnPrompt {
            turn,
            text,
            earlier,
            others_since,
        } = prompt;
        self.cancelling = false;
        self.permissions.begin_turn();
        let open = self.conversation.as_ref();
        // Agents recognise their own commands by a leading `/`, so nothing is put before such a message.
        let is_command = text.starts_with('/');
        let instructions = self
            .instructions
            .as_deref()
            .filter(|_| !is_command && open.is_some_and(|open| !open.instructed));
        let told = !is_command && open.is_some_and(|open| open.untold);
        let history = told.then(|| retell(earlier)).flatten();
        let blocks: Vec<&str> = instructions
            .into_iter()
            .chain(history.as_deref())
            .chain([text])
            .collect();
        let replayed = std::mem::take(&mut self.replays);
        self.replay_filter = replayed.then(|| ReplayFilter::new(earlier, &blocks)).flatten();
        let given = instructions.is_some();
        let block = |text: &str| ContentBlock::Text(TextContent::new(text));
        let blocks = blocks.into_iter().map(block).collect();
        let request = PromptRequest::new(self.conversation_id().to_owned(), blocks);
        let asked = self.connection.request("session/prompt", &request)?;
        if let Some(open) = self.conversation.as_mut() {
            open.instructed |= given;
            open.untold &= !told;
            open.note_turn(turn, others_since);
        }
        Ok(asked)
    }
}

/// The earlier turns as one text for an agent that could not load them; `None` when there are none.
fn retell(earlier: &[EarlierTurn]) -> Option<String> {
    if earlier.is_empty() {
        return None;
    }
    let turns = earlier
        .iter()
        .map(|turn| format!("User: {}\n\nYou: {}\n\n", turn.message, turn.answer));
    let turns: String = turns.collect();
    Some(format!(
        "This conversation was begun earlier. What has been said in it so far:\n\n{turns}It goes on with the next message."
    ))
}
