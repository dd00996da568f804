//! [`ReplayFilter`]: keeps history that an agent replays late, after its answer to `session/load`, out of the next turn.

use agent_client_protocol::v1::schema::{ContentBlock, ContentChunk, SessionUpdate};

use super::{event_bounds::truncate_text, terminal_escapes::strip_escapes};

/// The longest message or answer of an earlier turn that is kept, in bytes.
const MAX_TURN_BYTES: usize = 16 * 1024;

/// One earlier turn of a conversation, from the session's own log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EarlierTurn {
    pub(crate) message: String,
    pub(crate) answer: String,
    /// The length of the whole answer, by [`text_length`].
    answer_length: usize,
}

impl EarlierTurn {
    /// A turn that is not answered yet.
    pub(crate) fn new(message: &str) -> Self {
        Self {
            message: truncate_text(message.to_owned(), MAX_TURN_BYTES),
            answer: String::new(),
            answer_length: 0,
        }
    }

    /// Sets its answer.
    pub(crate) fn set_answer(&mut self, answer: &str) {
        self.answer = truncate_text(answer.to_owned(), MAX_TURN_BYTES);
        self.answer_length = text_length(answer);
    }
}

/// Recognises a replay by its user messages: only a replay has one of an earlier turn.
#[derive(Debug)]
pub(crate) struct ReplayFilter {
    earlier: Vec<EarlierTurn>,
    /// The parts of the present prompt, which an agent may repeat.
    prompt: Vec<String>,
    /// How many of the earlier turns the replay has reached.
    reached: usize,
    state: ReplayState,
}

#[derive(Debug)]
enum ReplayState {
    /// No replay has been seen, or it is over.
    Live,
    Replaying {
        /// How much of the last answer has yet to come; `None` before the last earlier message.
        answer_left: Option<usize>,
    },
}

impl ReplayFilter {
    /// For a turn with this prompt; `None` when there are no earlier turns, and so nothing to replay.
    pub(crate) fn new(earlier: &[EarlierTurn], prompt: &[&str]) -> Option<Self> {
        let short = |part: &&str| truncate_text((*part).to_owned(), MAX_TURN_BYTES);
        (!earlier.is_empty()).then(|| Self {
            earlier: earlier.to_vec(),
            prompt: prompt.iter().map(short).collect(),
            reached: 0,
            state: ReplayState::Live,
        })
    }

    /// Whether an update belongs to the present turn.
    pub(crate) fn is_live(&mut self, update: &SessionUpdate) -> bool {
        if let SessionUpdate::UserMessageChunk(chunk) = update {
            self.note_user_message(text_of(chunk));
            return true;
        }
        let ReplayState::Replaying { answer_left } = &mut self.state else {
            return true;
        };
        if let (SessionUpdate::AgentMessageChunk(chunk), Some(left)) = (update, answer_left) {
            // The last turn had no text: this is the present turn's.
            let is_live = *left == 0;
            *left = left.saturating_sub(text_length(text_of(chunk)));
            if *left == 0 {
                self.state = ReplayState::Live;
            }
            return is_live;
        }
        false
    }

    fn note_user_message(&mut self, text: &str) {
        let text = truncate_text(text.to_owned(), MAX_TURN_BYTES);
        // A message that was sent before and is sent again now: the agent repeats the prompt, unless it is replaying.
        let repeats_prompt = self.reached == 0 && self.prompt.contains(&text);
        let mut left = self.earlier[self.reached..].iter();
        let found = left.position(|turn| turn.message == text);
        self.state = match found.filter(|_| !repeats_prompt) {
            Some(at) => {
                self.reached += at + 1;
                let last = self.earlier.last().filter(|_| self.reached == self.earlier.len());
                ReplayState::Replaying {
                    answer_left: last.map(|turn| turn.answer_length),
                }
            }
            None => ReplayState::Live,
        };
    }
}

/// How long a text is without white space and escape sequences: the log has an answer as one text, with a line break
/// between its messages, and the agent has it in pieces.
fn text_length(text: &str) -> usize {
    let stripped = strip_escapes(text);
    stripped.chars().filter(|c| !c.is_whitespace()).count()
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

    fn turn(message: &str, answer: &str) -> EarlierTurn {
        let mut turn = EarlierTurn::new(message);
        turn.set_answer(answer);
        turn
    }

    /// The texts that pass the filter, of a user's and the agent's chunks in turns of `(user, [agent])`.
    fn passed(earlier: &[EarlierTurn], prompt: &str, replayed: &[(&str, &[&str])]) -> String {
        let mut filter = ReplayFilter::new(earlier, &[prompt]).unwrap();
        let mut passed = String::new();
        for (message, answers) in replayed {
            if !message.is_empty() {
                filter.is_live(&chunk("user_message_chunk", message));
            }
            for answer in *answers {
                if filter.is_live(&chunk("agent_message_chunk", answer)) {
                    passed.push_str(answer);
                }
            }
        }
        passed
    }

    #[test]
    fn a_late_replay_is_dropped_and_the_answer_after_it_is_not() {
        let earlier = [turn("one", "first"), turn("two", "second")];
        let replay: [(&str, &[&str]); 2] = [("one", &["first"]), ("two", &["sec", "ond", "third"])];
        assert_eq!(passed(&earlier, "three", &replay), "third");
        assert_eq!(passed(&earlier, "two", &[("two", &["again"])]), "again");
    }

    #[test]
    fn a_message_that_was_sent_before_is_replayed_and_then_answered() {
        let earlier = [
            turn("one", "first"),
            turn("go on", "second"),
            turn("go on", "third"),
        ];
        let replay: [(&str, &[&str]); 4] = [
            ("one", &["first"]),
            ("go on", &["second"]),
            ("go on", &["third"]),
            ("go on", &["fourth"]),
        ];
        assert_eq!(passed(&earlier, "go on", &replay), "fourth");
        // Without a repetition of the prompt.
        let replay = [replay[0], replay[1], replay[2], ("", &["fourth"][..])];
        assert_eq!(passed(&earlier, "go on", &replay), "fourth");
    }

    #[test]
    fn the_end_of_a_replay_is_found_whatever_the_last_answer_was() {
        // Two messages, as before and after a tool call.
        let earlier = [turn("one", "before\nafter")];
        assert_eq!(
            passed(&earlier, "two", &[("one", &["before", "after", "live"])]),
            "live"
        );
        let earlier = [turn("one", "")];
        assert_eq!(passed(&earlier, "two", &[("one", &["live"])]), "live");
        let long = "x".repeat(3 * MAX_TURN_BYTES);
        let earlier = [turn(&long, &long)];
        let half = &long[..long.len() / 2];
        assert_eq!(
            passed(&earlier, "two", &[(long.as_str(), &[half, half, "live"])]),
            "live"
        );
    }
}
