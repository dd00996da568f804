//! [`ReplayFilter`]: keeps history that an agent replays late, after its answer to `session/load`, out of the next turn.

use std::collections::HashSet;

use agent_client_protocol::v1::schema::{ContentBlock, ContentChunk, SessionUpdate};

/// One earlier turn of a conversation, from the session's own log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EarlierTurn {
    pub(crate) message: String,
    pub(crate) answer: String,
}

/// Recognises a replay by its user messages: only a replay has one of an earlier turn.
#[derive(Debug)]
pub(crate) struct ReplayFilter {
    /// The user messages of earlier turns that are not part of the present prompt.
    messages: HashSet<String>,
    last: EarlierTurn,
    state: ReplayState,
}

#[derive(Debug)]
enum ReplayState {
    /// No replay has been seen, or it is over.
    Live,
    Replaying {
        /// How many bytes of answer have come since the last earlier message; `None` before that message.
        answer_bytes: Option<usize>,
    },
}

impl ReplayFilter {
    /// For a turn with this prompt; `None` when there are no earlier turns, and so nothing to replay.
    pub(crate) fn new(earlier: &[EarlierTurn], prompt: &[&str]) -> Option<Self> {
        let last = earlier.last()?.clone();
        let messages = earlier.iter().map(|turn| turn.message.clone());
        let messages = messages.filter(|message| !prompt.contains(&message.as_str()));
        Some(Self {
            messages: messages.collect(),
            last,
            state: ReplayState::Live,
        })
    }

    /// Whether an update belongs to the present turn.
    pub(crate) fn is_live(&mut self, update: &SessionUpdate) -> bool {
        if let SessionUpdate::UserMessageChunk(chunk) = update {
            let text = text_of(chunk);
            self.state = match self.messages.contains(text) {
                true => ReplayState::Replaying {
                    answer_bytes: (self.last.message == text).then_some(0),
                },
                false => ReplayState::Live,
            };
            return true;
        }
        let ReplayState::Replaying { answer_bytes } = &mut self.state else {
            return true;
        };
        if let (SessionUpdate::AgentMessageChunk(chunk), Some(bytes)) = (update, answer_bytes) {
            *bytes += text_of(chunk).len();
            if *bytes >= self.last.answer.len() {
                self.state = ReplayState::Live;
            }
        }
        false
    }
}

fn text_of(chunk: &ContentChunk) -> &str {
    match &chunk.content {
        ContentBlock::Text(text) => &text.text,
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn chunk(kind: &str, text: &str) -> SessionUpdate {
        let chunk = json!({"sessionUpdate": kind, "content": {"type": "text", "text": text}});
        serde_json::from_value(chunk).unwrap()
    }

    #[test]
    fn a_late_replay_is_dropped_and_the_answer_after_it_is_not() {
        let turn = |message: &str, answer: &str| EarlierTurn {
            message: message.into(),
            answer: answer.into(),
        };
        let earlier = [turn("one", "first"), turn("two", "second")];
        let mut filter = ReplayFilter::new(&earlier, &["three"]).unwrap();
        let mut passed = String::new();
        for (kind, text) in [
            ("user_message_chunk", "one"),
            ("agent_message_chunk", "first"),
            ("user_message_chunk", "two"),
            ("agent_message_chunk", "sec"),
            ("agent_message_chunk", "ond"),
            ("agent_message_chunk", "third"),
        ] {
            let update = chunk(kind, text);
            if filter.is_live(&update) && kind == "agent_message_chunk" {
                passed.push_str(text);
            }
        }
        assert_eq!(passed, "third");
        let mut echoing = ReplayFilter::new(&earlier, &["two"]).unwrap();
        assert!(echoing.is_live(&chunk("user_message_chunk", "two")));
        assert!(echoing.is_live(&chunk("agent_message_chunk", "again")));
    }
}
