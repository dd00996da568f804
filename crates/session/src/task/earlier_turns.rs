//! The earlier turns of an agent, read from the session's log: for an agent that could not load its own conversation, or
//! that replays it too late.

use std::{collections::VecDeque, sync::Arc};

use oubliette_protocol::{
    Result, Slug,
    event::{EventBody, MessageRole, SessionEvent},
};

use crate::agent_process::replay_filter::EarlierTurn;

use super::SessionTask;

/// How far back the log is read, in events.
const MAX_EVENTS: i64 = 20_000;
/// How many events are read at once.
const PAGE: usize = 1_000;
/// How much text of the last turns is retold, in bytes.
const MAX_BYTES: usize = 128 * 1024;

impl SessionTask {
    /// The last turns of an agent before the turn `before`, oldest first, within bounds.
    pub(super) async fn earlier_turns(&self, agent: &Slug, before: u64) -> Result<Vec<EarlierTurn>> {
        let log = self.env.deps.store.events();
        let last = log.last_index(&self.env.session).await?;
        let mut since = (last - MAX_EVENTS).max(-1);
        let mut turns: Vec<EarlierTurn> = Vec::new();
        while since < last {
            let page = log.read(&self.env.session, since, PAGE).await?;
            let Some(end) = page.last().map(|event| event.index) else {
                break;
            };
            since = end;
            for event in &page {
                collect(event, &mut turns);
            }
        }
        // Each turn logs one message of the user, so the turns can be counted from the last. That of the present turn is
        // logged already.
        let mut kept = VecDeque::new();
        let mut bytes = 0;
        for (back, turn) in turns.into_iter().rev().enumerate() {
            let number = before.saturating_sub(u64::try_from(back).unwrap_or(u64::MAX));
            if number == before || self.agent_of_turn(number) != Some(agent) {
                continue;
            }
            bytes += turn.message.len() + turn.answer.len();
            if bytes > MAX_BYTES {
                break;
            }
            kept.push_front(turn);
        }
        Ok(kept.into())
    }

    /// The agent whose turn this was.
    fn agent_of_turn(&self, turn: u64) -> Option<&Slug> {
        let since = |(agent, conversation)| {
            let starts: &Vec<u64> = conversation;
            let since = starts.iter().rev().find(|since| **since <= turn)?;
            Some((*since, agent))
        };
        let conversations = self.conversations.iter();
        let starts = conversations.map(|(agent, conversation)| (agent, &conversation.active_since));
        starts
            .filter_map(since)
            .max_by_key(|(since, _)| *since)
            .map(|(_, agent)| agent)
    }

    /// The turn at which another agent than this last became the session's.
    pub(super) fn others_since(&self, agent: &Slug) -> Option<u64> {
        let others = self.conversations.iter().filter(|(other, _)| *other != agent);
        others
            .filter_map(|(_, conversation)| conversation.active_since.last().copied())
            .max()
    }
}

fn collect(event: &Arc<SessionEvent>, turns: &mut Vec<EarlierTurn>) {
    match &event.body {
        EventBody::Message {
            role: MessageRole::User,
            text,
        } => turns.push(EarlierTurn::new(text)),
        EventBody::TurnCompleted { text, .. } => {
            if let Some(turn) = turns.last_mut() {
                turn.set_answer(text);
            }
        }
        _ => {}
    }
}
