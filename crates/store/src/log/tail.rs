//! The live end of a log: its last committed index, and a ring of recent entries for its followers.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Weak},
};

use oubliette_protocol::{SessionId, event::SessionEvent};
use parking_lot::Mutex;
use tokio::sync::watch;

/// Maximum size of a ring, in bytes of JSON.
const RING_BYTES: usize = 128 * 1024;
/// Maximum entries of a ring.
const RING_ITEMS: usize = 1024;
/// Maximum entries a reader takes from the ring at once.
const MAX_TAKE: usize = 64;

/// An entry that knows its index in its log.
pub(crate) trait HasLogIndex: Clone + Send + Sync + 'static {
    fn index(&self) -> i64;
}

impl HasLogIndex for Arc<SessionEvent> {
    fn index(&self) -> i64 {
        self.index
    }
}

/// How far a log is committed, and whether it is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogExtent {
    /// The last index known to be committed; -1 if there is none.
    pub(crate) last: i64,
    /// No more entries will be appended.
    pub(crate) closed: bool,
}

/// The live end of one log. A session's exists only while somebody follows it.
pub(crate) struct LogTail<T> {
    extent: watch::Sender<LogExtent>,
    ring: Mutex<TailRing<T>>,
}

struct TailRing<T> {
    items: VecDeque<(T, usize)>,
    bytes: usize,
    /// Each subscribed reader's id, and the index it reads next.
    readers: Vec<(u64, i64)>,
    next_reader: u64,
}

impl<T: HasLogIndex> Default for LogTail<T> {
    fn default() -> Self {
        let ring = TailRing {
            items: VecDeque::new(),
            bytes: 0,
            readers: Vec::new(),
            next_reader: 0,
        };
        Self {
            extent: watch::Sender::new(LogExtent {
                last: -1,
                closed: false,
            }),
            ring: Mutex::new(ring),
        }
    }
}

impl<T: HasLogIndex> LogTail<T> {
    /// Publishes entries, with their sizes, that were just committed. Called only by the writer, in log order.
    pub(crate) fn publish(&self, items: impl Iterator<Item = (T, usize)>) {
        let mut last = None;
        let mut ring = self.ring.lock();
        for (item, bytes) in items {
            last = Some(item.index());
            if ring
                .items
                .back()
                .is_some_and(|(before, _)| before.index() + 1 != item.index())
            {
                // Another server has appended meanwhile; readers find what is between in the database.
                ring.items.clear();
                ring.bytes = 0;
            }
            if !ring.readers.is_empty() {
                ring.items.push_back((item, bytes));
                ring.bytes += bytes;
            }
            while ring.bytes > RING_BYTES || ring.items.len() > RING_ITEMS {
                ring.drop_first();
            }
        }
        drop(ring);
        // After the ring is filled, so that a reader woken by this finds the entries there.
        if let Some(last) = last {
            self.advance_to(last);
        }
    }

    /// Whether the log has any reader.
    pub(crate) fn is_followed(&self) -> bool {
        !self.ring.lock().readers.is_empty()
    }

    /// Empties the ring; readers then read from the database.
    pub(crate) fn clear_ring(&self) {
        let mut ring = self.ring.lock();
        ring.items.clear();
        ring.bytes = 0;
    }

    /// Records that the log is committed at least up to `last`, and wakes waiting readers.
    pub(crate) fn advance_to(&self, last: i64) {
        self.extent.send_if_modified(|extent| {
            let further = last > extent.last;
            extent.last = extent.last.max(last);
            further
        });
    }

    /// Records that no more entries will be appended, and wakes waiting readers.
    pub(crate) fn close(&self) {
        self.extent.send_modify(|extent| extent.closed = true);
    }

    /// A receiver that is notified when the extent changes.
    pub(crate) fn watch_extent(&self) -> watch::Receiver<LogExtent> {
        self.extent.subscribe()
    }

    /// Registers a reader that starts at index `next`, and returns its id.
    pub(crate) fn subscribe(&self, next: i64) -> u64 {
        let mut ring = self.ring.lock();
        let reader = ring.next_reader;
        ring.next_reader += 1;
        ring.readers.push((reader, next));
        reader
    }

    /// Unregisters a reader.
    pub(crate) fn unsubscribe(&self, reader: u64) {
        let mut ring = self.ring.lock();
        ring.readers.retain(|(id, _)| *id != reader);
        ring.trim();
    }

    /// Records that a reader is at index `next`, and returns the ring's entries from there on. Empty if the
    /// ring does not reach back that far, or if there is nothing new.
    pub(crate) fn take_from(&self, reader: u64, next: i64) -> Vec<T> {
        let mut ring = self.ring.lock();
        if let Some(place) = ring.readers.iter_mut().find(|(id, _)| *id == reader) {
            place.1 = next;
        }
        ring.trim();
        match ring.items.front() {
            Some((first, _)) if first.index() <= next => {
                let from = ring.items.partition_point(|(item, _)| item.index() < next);
                ring.items
                    .range(from..)
                    .take(MAX_TAKE)
                    .map(|(item, _)| item.clone())
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    #[cfg(test)]
    fn ring_len(&self) -> usize {
        self.ring.lock().items.len()
    }
}

impl<T: HasLogIndex> TailRing<T> {
    /// Drops the entries that every reader has passed.
    fn trim(&mut self) {
        let wanted = self
            .readers
            .iter()
            .map(|(_, next)| *next)
            .min()
            .unwrap_or(i64::MAX);
        while self.items.front().is_some_and(|(item, _)| item.index() < wanted) {
            self.drop_first();
        }
        if self.items.is_empty() {
            self.items = VecDeque::new();
        }
    }

    fn drop_first(&mut self) {
        if let Some((_, bytes)) = self.items.pop_front() {
            self.bytes -= bytes;
        }
    }
}

/// The live ends of the session logs that are being followed.
#[derive(Default)]
pub(crate) struct SessionTails {
    tails: Mutex<SessionTailMap>,
}

#[derive(Default)]
struct SessionTailMap {
    by_session: HashMap<SessionId, Weak<LogTail<Arc<SessionEvent>>>>,
    closed: bool,
}

impl SessionTails {
    /// The live end of a session's log; it exists as long as any handle to it is held.
    pub(crate) fn handle_for(self: &Arc<Self>, session: &SessionId) -> SessionTailHandle {
        let mut tails = self.tails.lock();
        let known = tails.by_session.get(session).and_then(Weak::upgrade);
        let tail = known.unwrap_or_else(|| {
            let tail = Arc::new(LogTail::default());
            if tails.closed {
                tail.close();
            } else {
                tails.by_session.insert(session.clone(), Arc::downgrade(&tail));
            }
            tail
        });
        SessionTailHandle {
            tails: self.clone(),
            session: session.clone(),
            tail: Some(tail),
        }
    }

    /// Publishes committed events to the followers of a session, if it has any.
    pub(crate) fn publish(
        &self,
        session: &SessionId,
        items: impl Iterator<Item = (Arc<SessionEvent>, usize)>,
    ) {
        // Under the lock, so that a reader being dropped meanwhile does not leave a dead entry in the map.
        let tails = self.tails.lock();
        if let Some(tail) = tails.by_session.get(session).and_then(Weak::upgrade) {
            tail.publish(items);
        }
    }

    /// Records that a session's log is committed at least up to `last`, and wakes its followers.
    pub(crate) fn advance(&self, session: &SessionId, last: i64) {
        let tail = self.tails.lock().by_session.get(session).and_then(Weak::upgrade);
        if let Some(tail) = tail {
            tail.advance_to(last);
        }
    }

    /// The sessions whose logs are followed.
    pub(crate) fn followed(&self) -> Vec<SessionId> {
        self.tails.lock().by_session.keys().cloned().collect()
    }

    /// Closes a deleted session's log for its followers.
    pub(crate) fn close_session(&self, session: &SessionId) {
        if let Some(tail) = self
            .tails
            .lock()
            .by_session
            .remove(session)
            .and_then(|tail| tail.upgrade())
        {
            tail.close();
        }
    }

    /// Closes every log, present and future: the store is closing.
    pub(crate) fn close(&self) {
        let mut tails = self.tails.lock();
        tails.closed = true;
        for tail in tails.by_session.drain().filter_map(|(_, tail)| tail.upgrade()) {
            tail.close();
        }
    }

    #[cfg(test)]
    pub(crate) fn followed_sessions(&self) -> usize {
        self.tails.lock().by_session.len()
    }
}

/// Keeps the live end of a session's log alive. Dropping the last one removes it from [`SessionTails`].
pub(crate) struct SessionTailHandle {
    tails: Arc<SessionTails>,
    session: SessionId,
    tail: Option<Arc<LogTail<Arc<SessionEvent>>>>,
}

impl SessionTailHandle {
    /// The live end itself.
    pub(crate) fn tail(&self) -> Option<&Arc<LogTail<Arc<SessionEvent>>>> {
        self.tail.as_ref()
    }
}

impl Drop for SessionTailHandle {
    fn drop(&mut self) {
        let mut tails = self.tails.tails.lock();
        // Under the lock, so that nobody can obtain a new handle between dropping ours and the check.
        self.tail = None;
        if tails
            .by_session
            .get(&self.session)
            .is_some_and(|tail| tail.strong_count() == 0)
        {
            tails.by_session.remove(&self.session);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oubliette_protocol::event::EventBody;

    fn event(index: i64) -> (Arc<SessionEvent>, usize) {
        let body = EventBody::Delta { text: "x".into() };
        let session_id = SessionId::generate();
        (
            Arc::new(SessionEvent {
                index,
                ts: crate::now(),
                session_id,
                body,
            }),
            1000,
        )
    }

    fn indexes(items: &[Arc<SessionEvent>]) -> Vec<i64> {
        items.iter().map(|e| e.index).collect()
    }

    #[test]
    fn a_ring_drops_entries_that_every_reader_has_passed() {
        let tail = LogTail::default();
        tail.publish([event(0)].into_iter());
        assert_eq!(tail.ring_len(), 0, "nobody reads");
        let (a, b) = (tail.subscribe(1), tail.subscribe(1));
        tail.publish((1..4).map(event));
        assert_eq!(indexes(&tail.take_from(a, 1)), [1, 2, 3]);
        assert_eq!(indexes(&tail.take_from(a, 4)), [] as [i64; 0]);
        assert_eq!(tail.ring_len(), 3, "b has had nothing");
        assert_eq!(indexes(&tail.take_from(b, 3)), [3]);
        assert_eq!(tail.ring_len(), 1);
        tail.unsubscribe(b);
        assert_eq!(tail.ring_len(), 0);
    }

    #[test]
    fn a_ring_never_has_a_hole() {
        let tail = LogTail::default();
        let reader = tail.subscribe(0);
        tail.publish((0..3).map(event));
        tail.publish((5..7).map(event));
        assert!(
            tail.take_from(reader, 3).is_empty(),
            "3 and 4 are in the database"
        );
        assert_eq!(indexes(&tail.take_from(reader, 5)), [5, 6]);
    }

    #[test]
    fn a_stalled_reader_does_not_grow_the_ring_past_its_limit() {
        let tail = LogTail::default();
        let reader = tail.subscribe(0);
        tail.publish((0..10_000).map(event));
        assert!(tail.ring_len() * 1000 <= RING_BYTES);
        assert!(
            tail.take_from(reader, 0).is_empty(),
            "it has to read the database"
        );
        let first = 10_000 - tail.ring_len() as i64;
        assert_eq!(tail.take_from(reader, first).first().unwrap().index, first);
    }

    #[test]
    fn a_tail_is_removed_with_its_last_follower() {
        let session_tails = Arc::new(SessionTails::default());
        let session = SessionId::generate();
        let (one, two) = (
            session_tails.handle_for(&session),
            session_tails.handle_for(&session),
        );
        assert_eq!(session_tails.followed_sessions(), 1);
        drop(one);
        assert_eq!(session_tails.followed_sessions(), 1);
        drop(two);
        assert_eq!(session_tails.followed_sessions(), 0);
        session_tails.publish(&session, [event(0)].into_iter());
    }
}
