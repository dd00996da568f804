//! The live end of a log.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Weak},
};

use oubliette_protocol::{SessionId, event::Event};
use parking_lot::Mutex;
use tokio::sync::watch;

/// Most a ring holds, in bytes of JSON.
const RING_BYTES: usize = 128 * 1024;
/// Most entries a ring holds.
const RING_ITEMS: usize = 1024;
/// Most entries a reader takes at once.
const TAKEN: usize = 64;

/// Something with a place in a log.
pub(crate) trait Indexed: Clone + Send + Sync + 'static {
    fn index(&self) -> i64;
}

impl Indexed for Arc<Event> {
    fn index(&self) -> i64 {
        self.index
    }
}

/// How far a log goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mark {
    /// The last index known to be committed; -1: none.
    pub(crate) last: i64,
    /// Nothing more will come.
    pub(crate) closed: bool,
}

/// The live end of one log, there while somebody follows it.
pub(crate) struct Tail<T> {
    mark: watch::Sender<Mark>,
    ring: Mutex<Ring<T>>,
}

struct Ring<T> {
    items: VecDeque<(T, usize)>,
    bytes: usize,
    /// Every reader, and the index it wants next.
    readers: Vec<(u64, i64)>,
    next_reader: u64,
}

impl<T: Indexed> Default for Tail<T> {
    fn default() -> Self {
        let ring = Ring {
            items: VecDeque::new(),
            bytes: 0,
            readers: Vec::new(),
            next_reader: 0,
        };
        Self {
            mark: watch::Sender::new(Mark {
                last: -1,
                closed: false,
            }),
            ring: Mutex::new(ring),
        }
    }
}

impl<T: Indexed> Tail<T> {
    /// What was just committed. Only the writer calls this, in the order of the log.
    pub(crate) fn publish(&self, items: impl Iterator<Item = (T, usize)>) {
        let mut last = None;
        let mut ring = self.ring.lock();
        for (item, bytes) in items {
            last = Some(item.index());
            if !ring.readers.is_empty() {
                ring.items.push_back((item, bytes));
                ring.bytes += bytes;
            }
            while ring.bytes > RING_BYTES || ring.items.len() > RING_ITEMS {
                ring.drop_first();
            }
        }
        drop(ring);
        // After the ring: whoever this wakes finds it there.
        if let Some(last) = last {
            self.reached(last);
        }
    }

    /// Whether anybody wants to be shown what is committed.
    pub(crate) fn is_followed(&self) -> bool {
        !self.ring.lock().readers.is_empty()
    }

    /// Nothing is held any more: readers find it in the database.
    pub(crate) fn empty(&self) {
        let mut ring = self.ring.lock();
        ring.items.clear();
        ring.bytes = 0;
    }

    /// That the log goes at least this far.
    pub(crate) fn reached(&self, last: i64) {
        self.mark.send_if_modified(|mark| {
            let further = last > mark.last;
            mark.last = mark.last.max(last);
            further
        });
    }

    /// That nothing more will come.
    pub(crate) fn close(&self) {
        self.mark.send_modify(|mark| mark.closed = true);
    }

    pub(crate) fn marks(&self) -> watch::Receiver<Mark> {
        self.mark.subscribe()
    }

    /// A new reader that wants `next` first.
    pub(crate) fn sit(&self, next: i64) -> u64 {
        let mut ring = self.ring.lock();
        let reader = ring.next_reader;
        ring.next_reader += 1;
        ring.readers.push((reader, next));
        reader
    }

    /// A reader has gone.
    pub(crate) fn rise(&self, reader: u64) {
        let mut ring = self.ring.lock();
        ring.readers.retain(|(id, _)| *id != reader);
        ring.trim();
    }

    /// Says how far a reader is, and gives it what the ring has from there on. Empty: the ring does not
    /// reach back that far, or there is nothing new.
    pub(crate) fn take(&self, reader: u64, next: i64) -> Vec<T> {
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
                    .take(TAKEN)
                    .map(|(item, _)| item.clone())
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    #[cfg(test)]
    fn held(&self) -> usize {
        self.ring.lock().items.len()
    }
}

impl<T: Indexed> Ring<T> {
    /// Lets go of what every reader has had.
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

/// The live ends of all sessions' logs that somebody follows.
#[derive(Default)]
pub(crate) struct Hub {
    tails: Mutex<Tails>,
}

#[derive(Default)]
struct Tails {
    by_session: HashMap<SessionId, Weak<Tail<Arc<Event>>>>,
    closed: bool,
}

impl Hub {
    /// The live end of a session's log, for as long as the answer is held.
    pub(crate) fn attach(self: &Arc<Self>, session: &SessionId) -> Attached {
        let mut tails = self.tails.lock();
        let known = tails.by_session.get(session).and_then(Weak::upgrade);
        let tail = known.unwrap_or_else(|| {
            let tail = Arc::new(Tail::default());
            if tails.closed {
                tail.close();
            } else {
                tails.by_session.insert(session.clone(), Arc::downgrade(&tail));
            }
            tail
        });
        Attached {
            hub: self.clone(),
            session: session.clone(),
            tail: Some(tail),
        }
    }

    pub(crate) fn publish(&self, session: &SessionId, items: impl Iterator<Item = (Arc<Event>, usize)>) {
        // Under the lock: the last reader must not go meanwhile and leave an empty place in the map.
        let tails = self.tails.lock();
        if let Some(tail) = tails.by_session.get(session).and_then(Weak::upgrade) {
            tail.publish(items);
        }
    }

    /// A session's log is gone.
    pub(crate) fn forget(&self, session: &SessionId) {
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

    /// Nothing more will come, in any log.
    pub(crate) fn close(&self) {
        let mut tails = self.tails.lock();
        tails.closed = true;
        for tail in tails.by_session.drain().filter_map(|(_, tail)| tail.upgrade()) {
            tail.close();
        }
    }

    #[cfg(test)]
    pub(crate) fn followed(&self) -> usize {
        self.tails.lock().by_session.len()
    }
}

/// Holds the live end of a session's log open.
pub(crate) struct Attached {
    hub: Arc<Hub>,
    session: SessionId,
    tail: Option<Arc<Tail<Arc<Event>>>>,
}

impl Attached {
    /// The live end.
    pub(crate) fn tail(&self) -> Option<&Arc<Tail<Arc<Event>>>> {
        self.tail.as_ref()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let mut tails = self.hub.tails.lock();
        // Under the lock, so that nobody takes hold of it between the two.
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

    fn event(index: i64) -> (Arc<Event>, usize) {
        let body = EventBody::Delta { text: "x".into() };
        let session_id = SessionId::generate();
        (
            Arc::new(Event {
                index,
                ts: crate::now(),
                session_id,
                body,
            }),
            1000,
        )
    }

    fn indexes(items: &[Arc<Event>]) -> Vec<i64> {
        items.iter().map(|e| e.index).collect()
    }

    #[test]
    fn a_ring_lets_go_of_what_everybody_has_had() {
        let tail = Tail::default();
        tail.publish([event(0)].into_iter());
        assert_eq!(tail.held(), 0, "nobody reads");
        let (a, b) = (tail.sit(1), tail.sit(1));
        tail.publish((1..4).map(event));
        assert_eq!(indexes(&tail.take(a, 1)), [1, 2, 3]);
        assert_eq!(indexes(&tail.take(a, 4)), [] as [i64; 0]);
        assert_eq!(tail.held(), 3, "b has had nothing");
        assert_eq!(indexes(&tail.take(b, 3)), [3]);
        assert_eq!(tail.held(), 1);
        tail.rise(b);
        assert_eq!(tail.held(), 0);
    }

    #[test]
    fn a_reader_that_stands_still_holds_no_more_than_the_ring() {
        let tail = Tail::default();
        let reader = tail.sit(0);
        tail.publish((0..10_000).map(event));
        assert!(tail.held() * 1000 <= RING_BYTES);
        assert!(tail.take(reader, 0).is_empty(), "it has to read the database");
        let first = 10_000 - tail.held() as i64;
        assert_eq!(tail.take(reader, first).first().unwrap().index, first);
    }

    #[test]
    fn a_tail_nobody_follows_is_gone() {
        let hub = Arc::new(Hub::default());
        let session = SessionId::generate();
        let (one, two) = (hub.attach(&session), hub.attach(&session));
        assert_eq!(hub.followed(), 1);
        drop(one);
        assert_eq!(hub.followed(), 1);
        drop(two);
        assert_eq!(hub.followed(), 0);
        hub.publish(&session, [event(0)].into_iter());
    }
}
