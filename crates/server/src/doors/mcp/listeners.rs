//! Stateful MCP sessions: whose each is, which Oubliette sessions it hears, and when it was last used.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use oubliette_protocol::{SessionId, TokenId};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::auth::Grant;

/// Every stateful MCP session.
#[derive(Debug, Default)]
pub struct Listeners {
    all: Mutex<HashMap<Arc<str>, Arc<Listener>>>,
}

/// One stateful MCP session.
#[derive(Debug)]
pub struct Listener {
    /// Its `Mcp-Session-Id`.
    pub id: Arc<str>,
    /// The negotiated revision.
    pub version: OnceLock<String>,
    owner: OnceLock<Grant>,
    used: Mutex<Instant>,
    open: AtomicUsize,
    heard: Mutex<Heard>,
    changes: watch::Sender<u64>,
}

/// What a listener hears, and through which of its streams.
#[derive(Debug, Default)]
struct Heard {
    logs: Vec<Log>,
    streams: BTreeSet<u64>,
    next_stream: u64,
}

/// One session's log, as a listener hears it.
#[derive(Debug, Clone)]
pub struct Log {
    /// Whose.
    pub session: SessionId,
    /// Heard from after this index by a stream that does not say where it was.
    pub from: i64,
    /// The last index given to a stream.
    pub given: i64,
    /// Whether its events are sent.
    pub events: bool,
    /// Whether a sign is sent that there are new ones (`resources/subscribe`).
    pub signs: bool,
}

/// Most MCP sessions of one token; the one idle longest goes first.
const MOST_OF_A_TOKEN: usize = 1000;

impl Listeners {
    /// A session was made.
    pub fn open(&self, id: &Arc<str>) -> Arc<Listener> {
        let listener = Arc::new(Listener {
            id: id.clone(),
            version: OnceLock::new(),
            owner: OnceLock::new(),
            used: Mutex::new(Instant::now()),
            open: AtomicUsize::new(0),
            heard: Mutex::default(),
            changes: watch::channel(0).0,
        });
        self.all.lock().insert(id.clone(), listener.clone());
        listener
    }

    /// A session is over.
    pub fn close(&self, id: &str) -> Option<Arc<Listener>> {
        self.all.lock().remove(id)
    }

    /// One session.
    pub fn get(&self, id: &str) -> Option<Arc<Listener>> {
        self.all.lock().get(id).cloned()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.all.lock().len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many streams are open.
    pub fn streams(&self) -> usize {
        self.all
            .lock()
            .values()
            .map(|l| l.heard.lock().streams.len())
            .sum()
    }

    /// Whose a session is from now on. Names the sessions that have to go for it.
    pub fn own(&self, id: &str, grant: &Grant) -> Vec<Arc<str>> {
        let all = self.all.lock();
        let Some(listener) = all.get(id) else {
            return Vec::new();
        };
        let _ = listener.owner.set(grant.clone());
        let owner = grant.token_id();
        let mut idle: Vec<_> = all
            .values()
            .filter(|l| l.token() == owner && l.id != listener.id)
            .collect();
        let over = (idle.len() + 1).saturating_sub(MOST_OF_A_TOKEN);
        idle.retain(|l| !l.is_open());
        idle.sort_by_key(|l| *l.used.lock());
        idle.into_iter().take(over).map(|l| l.id.clone()).collect()
    }

    /// Sessions with nothing open that were not used for this long.
    pub fn idle(&self, longer_than: Duration) -> Vec<Arc<str>> {
        let all = self.all.lock();
        let idle = all
            .values()
            .filter(|l| !l.is_open() && l.used.lock().elapsed() > longer_than);
        idle.map(|l| l.id.clone()).collect()
    }
}

impl Listener {
    /// Who opened it.
    pub fn owner(&self) -> Option<&Grant> {
        self.owner.get()
    }

    fn token(&self) -> Option<&TokenId> {
        self.owner().and_then(Grant::token_id)
    }

    /// Whether it is this principal's.
    pub fn belongs_to(&self, grant: &Grant) -> bool {
        self.owner()
            .is_some_and(|owner| owner.token_id() == grant.token_id())
    }

    /// It is being used.
    pub fn touch(&self) {
        *self.used.lock() = Instant::now();
    }

    /// A request or stream of it is open until the guard is dropped.
    pub fn hold(self: &Arc<Self>) -> Open {
        self.open.fetch_add(1, Ordering::AcqRel);
        Open(self.clone())
    }

    fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0
    }

    /// Whether its revision has events without data that only carry an id.
    pub fn knows_priming(&self) -> bool {
        self.version.get().is_some_and(|v| v.as_str() >= "2025-11-25")
    }

    /// It messaged a session whose log ended at `last` before that.
    pub fn messaged(&self, session: &SessionId, last: i64) {
        let mut heard = self.heard.lock();
        let listening = !heard.streams.is_empty();
        match heard.logs.iter_mut().find(|l| l.session == *session) {
            Some(log) => {
                // With no stream open nobody can say what was received: the old place stays.
                if listening && log.events {
                    log.from = log.from.max(last.min(log.given));
                }
                log.events = true;
            }
            None => heard.logs.push(Log {
                session: session.clone(),
                from: last,
                given: last,
                events: true,
                signs: false,
            }),
        }
        drop(heard);
        self.changes.send_modify(|n| *n += 1);
    }

    /// It wants to be told of changes of a session's log, or no longer.
    pub fn subscribe(&self, session: &SessionId, last: i64, wanted: bool) {
        let mut heard = self.heard.lock();
        match heard.logs.iter_mut().find(|l| l.session == *session) {
            Some(log) => log.signs = wanted,
            None if wanted => {
                heard.logs.push(Log {
                    session: session.clone(),
                    from: last,
                    given: last,
                    events: false,
                    signs: true,
                });
            }
            None => {}
        }
        drop(heard);
        self.changes.send_modify(|n| *n += 1);
    }

    /// Counts changes of what is heard and through which stream.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// What is heard.
    pub fn logs(&self) -> Vec<Log> {
        self.heard.lock().logs.clone()
    }

    /// An event of a log is given to a stream.
    pub fn give(&self, log: usize, index: i64) -> Option<Log> {
        let mut heard = self.heard.lock();
        let log = heard.logs.get_mut(log)?;
        log.given = log.given.max(index);
        Some(log.clone())
    }

    /// A stream was opened; it is the one that is spoken to until a newer one is.
    pub fn stream_opened(&self) -> u64 {
        let mut heard = self.heard.lock();
        let stream = heard.next_stream;
        heard.next_stream += 1;
        heard.streams.insert(stream);
        drop(heard);
        self.changes.send_modify(|n| *n += 1);
        stream
    }

    /// A stream was closed.
    pub fn stream_closed(&self, stream: u64) {
        self.heard.lock().streams.remove(&stream);
        self.changes.send_modify(|n| *n += 1);
    }

    /// Whether a stream is the newest: each message goes to one stream only.
    pub fn is_newest(&self, stream: u64) -> bool {
        self.heard.lock().streams.last() == Some(&stream)
    }
}

/// Something of a listener is open.
#[derive(Debug)]
pub struct Open(Arc<Listener>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::AcqRel);
        self.0.touch();
    }
}
