//! [`DroppedMessage`]: what is left of a message that the budget had no room for, enough to find the call it answers.

use oubliette_protocol::OverBudget;

/// A message for which there was no room: its two ends, in one of which its id stands.
pub(super) struct DroppedMessage {
    start: Vec<u8>,
    end: Vec<u8>,
    bytes: usize,
    why: OverBudget,
}

impl DroppedMessage {
    /// How much of each end is kept.
    const END_BYTES: usize = 256;

    /// Nothing of it has been read yet.
    pub(super) fn new(why: OverBudget) -> Self {
        Self {
            start: Vec::new(),
            end: Vec::new(),
            bytes: 0,
            why,
        }
    }

    /// Notes the next piece of it, of which only the ends are kept.
    pub(super) fn note(&mut self, piece: &[u8]) {
        self.bytes += piece.len();
        let room = Self::END_BYTES - self.start.len();
        self.start.extend_from_slice(&piece[..room.min(piece.len())]);
        self.end
            .extend_from_slice(&piece[piece.len().saturating_sub(Self::END_BYTES)..]);
        let surplus = self.end.len().saturating_sub(Self::END_BYTES);
        self.end.drain(..surplus);
    }

    /// The numbers that may be its id.
    pub(super) fn ids(&self) -> impl Iterator<Item = i64> {
        [first_id(&self.start), last_id(&self.end)].into_iter().flatten()
    }

    /// How much of it has been read.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Why it was dropped.
    pub(super) fn why(&self) -> OverBudget {
        self.why
    }
}

const ID_KEY: &[u8] = b"\"id\"";

fn first_id(text: &[u8]) -> Option<i64> {
    id_after(text, memchr::memmem::find(text, ID_KEY)?)
}

fn last_id(text: &[u8]) -> Option<i64> {
    id_after(text, memchr::memmem::rfind(text, ID_KEY)?)
}

/// The number that follows the key at `at`, in quotes or not.
fn id_after(text: &[u8], at: usize) -> Option<i64> {
    let rest = text[at + ID_KEY.len()..].trim_ascii_start().strip_prefix(b":")?;
    let rest = rest.trim_ascii_start();
    let rest = rest.strip_prefix(b"\"").unwrap_or(rest);
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
}
