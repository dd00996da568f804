//! Stateful MCP sessions: the owner of each, the Oubliette sessions whose events it gets, and when it was last used.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use oubliette_protocol::{ServerId, SessionId, TokenId};
use oubliette_store::PeerServer;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::auth::Grant;

/// All stateful MCP sessions.
#[derive(Debug)]
pub struct McpSessions {
    /// How many there may be; one holder may have a quarter.
    most: usize,
    by_id: Mutex<HashMap<Arc<str>, Arc<McpSession>>>,
}

/// One stateful MCP session.
#[derive(Debug)]
pub struct McpSession {
    /// Its `Mcp-Session-Id`.
    pub id: Arc<str>,
    /// The negotiated revision of MCP.
    pub version: OnceLock<String>,
    owner: OnceLock<Grant>,
    last_used: Mutex<Instant>,
    open_count: AtomicUsize,
    state: Mutex<SubscriptionState>,
    changes: watch::Sender<u64>,
    /// The other servers of the cluster that run sessions it sent messages to.
    peers: Mutex<HashMap<ServerId, PeerServer>>,
}

/// The logs an MCP session subscribes to, and its open GET streams.
#[derive(Debug, Default)]
struct SubscriptionState {
    subscriptions: Vec<LogSubscription>,
    streams: BTreeSet<u64>,
    next_stream: u64,
}

/// An MCP session's subscription to the log of one Oubliette session.
#[derive(Debug, Clone)]
pub(crate) struct LogSubscription {
    /// The Oubliette session.
    pub session: SessionId,
    /// A GET stream that is not resumed starts after this index.
    pub replay_after: i64,
    /// The highest index sent on a GET stream.
    pub last_sent: i64,
    /// Whether events are pushed as `notifications/message`.
    pub push_events: bool,
    /// Whether new events are signalled by `notifications/resources/updated` (`resources/subscribe`).
    pub notify_updates: bool,
}

/// Who has MCP sessions: a token, or all the tokens of one agent together, which can make more of them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum SessionHolder {
    Token(Option<TokenId>),
    Agent(SessionId),
}

impl SessionHolder {
    fn of(grant: &Grant) -> Self {
        match grant.inside() {
            Some(session) => Self::Agent(session.clone()),
            None => Self::Token(grant.token_id().cloned()),
        }
    }
}

impl McpSessions {
    /// No MCP sessions yet, and at most `most` at a time.
    pub(crate) fn new(most: u32) -> Self {
        Self {
            most: most as usize,
            by_id: Mutex::default(),
        }
    }

    /// Adds a new MCP session, which has no owner yet.
    pub(crate) fn register(&self, id: &Arc<str>) -> Arc<McpSession> {
        let session = Arc::new(McpSession {
            id: id.clone(),
            version: OnceLock::new(),
            owner: OnceLock::new(),
            last_used: Mutex::new(Instant::now()),
            open_count: AtomicUsize::new(0),
            state: Mutex::default(),
            changes: watch::channel(0).0,
            peers: Mutex::default(),
        });
        self.by_id.lock().insert(id.clone(), session.clone());
        session
    }

    /// Removes an MCP session.
    pub(crate) fn remove(&self, id: &str) -> Option<Arc<McpSession>> {
        self.by_id.lock().remove(id)
    }

    /// Finds an MCP session.
    pub fn get(&self, id: &str) -> Option<Arc<McpSession>> {
        self.by_id.lock().get(id).cloned()
    }

    /// The number of MCP sessions.
    pub(crate) fn len(&self) -> usize {
        self.by_id.lock().len()
    }

    /// The number of open GET streams.
    pub(crate) fn stream_count(&self) -> usize {
        self.by_id
            .lock()
            .values()
            .map(|l| l.state.lock().streams.len())
            .sum()
    }

    /// Sets the owner of a new MCP session. Returns the idle ones that have to be closed to stay within the maximum:
    /// the longest idle of the same holder, and past the maximum of all, of the holder that has most.
    pub(crate) fn set_owner(&self, id: &str, grant: &Grant) -> Vec<Arc<str>> {
        let all = self.by_id.lock();
        let Some(session) = all.get(id) else {
            return Vec::new();
        };
        let most_of_one = (self.most / 4).max(1);
        if session.owner.set(grant.clone()).is_err() || all.len() <= most_of_one {
            return Vec::new();
        }
        let own = SessionHolder::of(grant);
        let mut counts: HashMap<SessionHolder, usize> = HashMap::new();
        for holder in all.values().filter_map(|l| l.holder()) {
            *counts.entry(holder).or_default() += 1;
        }
        let mut idle: Vec<_> = all
            .values()
            .filter(|l| l.id != session.id && !l.is_open())
            .filter_map(|l| Some((*l.last_used.lock(), l.holder()?, l.id.clone())))
            .collect();
        idle.sort_by_key(|(last_used, ..)| *last_used);
        let mut closed = Vec::new();
        if counts.get(&own).is_some_and(|count| *count > most_of_one)
            && let Some(at) = idle.iter().position(|(_, holder, _)| *holder == own)
        {
            closed.push(idle.remove(at).2);
            counts.entry(own).and_modify(|count| *count -= 1);
        }
        // If none is idle, each has a connection open, and those are bounded.
        if counts.values().sum::<usize>() > self.most
            && let Some((.., id)) = idle
                .iter()
                .min_by_key(|(_, holder, _)| Reverse(counts.get(holder)))
        {
            closed.push(id.clone());
        }
        closed
    }

    /// MCP sessions without an open request or stream that were not used for this long.
    pub(crate) fn idle_longer_than(&self, longer_than: Duration) -> Vec<Arc<str>> {
        let all = self.by_id.lock();
        let idle = all
            .values()
            .filter(|l| !l.is_open() && l.last_used.lock().elapsed() > longer_than);
        idle.map(|l| l.id.clone()).collect()
    }
}

impl McpSession {
    /// The grant it was opened with; `None` while it is being initialized.
    pub(crate) fn owner(&self) -> Option<&Grant> {
        self.owner.get()
    }

    fn holder(&self) -> Option<SessionHolder> {
        self.owner().map(SessionHolder::of)
    }

    /// Whether it was opened with the same token.
    pub(crate) fn belongs_to(&self, grant: &Grant) -> bool {
        self.owner()
            .is_some_and(|owner| owner.token_id() == grant.token_id())
    }

    /// Sets its time of last use to now.
    pub(crate) fn touch(&self) {
        *self.last_used.lock() = Instant::now();
    }

    /// Counts a request or stream as open until the guard is dropped; meanwhile the MCP session is not idle.
    pub(crate) fn keep_open(self: &Arc<Self>) -> McpSessionGuard {
        self.open_count.fetch_add(1, Ordering::AcqRel);
        McpSessionGuard(self.clone())
    }

    fn is_open(&self) -> bool {
        self.open_count.load(Ordering::Acquire) > 0
    }

    /// Whether its revision has priming events: SSE events with an id and no data.
    pub(crate) fn supports_priming(&self) -> bool {
        self.version.get().is_some_and(|v| v.as_str() >= "2025-11-25")
    }

    /// Pushes a session's events from now on, because the client sent it a message. `last` is the last index of the
    /// log before that message.
    pub fn record_message(&self, session: &SessionId, last: i64) {
        let mut state = self.state.lock();
        let stream_open = !state.streams.is_empty();
        match state.subscriptions.iter_mut().find(|l| l.session == *session) {
            Some(log) => {
                // With no stream open it is unknown what the client received, so `replay_after` stays.
                if stream_open && log.push_events {
                    log.replay_after = log.replay_after.max(last.min(log.last_sent));
                }
                log.push_events = true;
            }
            None => state.subscriptions.push(LogSubscription {
                session: session.clone(),
                replay_after: last,
                last_sent: last,
                push_events: true,
                notify_updates: false,
            }),
        }
        drop(state);
        self.changes.send_modify(|n| *n += 1);
    }

    /// Notes that another server of the cluster runs a session it sends messages to, where its callers are present.
    pub(crate) fn record_peer(&self, peer: &PeerServer) {
        self.peers
            .lock()
            .entry(peer.server_id.clone())
            .or_insert_with(|| peer.clone());
        self.changes.send_modify(|n| *n += 1);
    }

    /// The other servers that run sessions it sent messages to.
    pub(crate) fn peers(&self) -> Vec<PeerServer> {
        self.peers.lock().values().cloned().collect()
    }

    /// Notifies of new events in a session's log from now on. `last` is the log's last index.
    pub(crate) fn subscribe_updates(&self, session: &SessionId, last: i64) {
        let mut state = self.state.lock();
        match state.subscriptions.iter_mut().find(|l| l.session == *session) {
            Some(log) => log.notify_updates = true,
            None => state.subscriptions.push(LogSubscription {
                session: session.clone(),
                replay_after: last,
                last_sent: last,
                push_events: false,
                notify_updates: true,
            }),
        }
        drop(state);
        self.changes.send_modify(|n| *n += 1);
    }

    /// Notifies no longer of new events in a session's log.
    pub(crate) fn unsubscribe_updates(&self, session: &SessionId) {
        let mut state = self.state.lock();
        if let Some(log) = state.subscriptions.iter_mut().find(|l| l.session == *session) {
            log.notify_updates = false;
        }
        drop(state);
        self.changes.send_modify(|n| *n += 1);
    }

    /// A counter that changes with every subscription and with every GET stream opened or closed.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The subscriptions. Their positions in this list never change: event ids refer to them.
    pub(crate) fn subscriptions(&self) -> Vec<LogSubscription> {
        self.state.lock().subscriptions.clone()
    }

    /// Records that the event at `index` of the subscription numbered `log` is sent, and returns that subscription.
    pub(crate) fn record_sent(&self, log: usize, index: i64) -> Option<LogSubscription> {
        let mut state = self.state.lock();
        let log = state.subscriptions.get_mut(log)?;
        log.last_sent = log.last_sent.max(index);
        Some(log.clone())
    }

    /// Adds a GET stream and returns its number. Messages go to this stream until a newer one is opened.
    pub(crate) fn register_stream(&self) -> u64 {
        let mut state = self.state.lock();
        let stream = state.next_stream;
        state.next_stream += 1;
        state.streams.insert(stream);
        drop(state);
        self.changes.send_modify(|n| *n += 1);
        stream
    }

    /// Removes a GET stream.
    pub(crate) fn unregister_stream(&self, stream: u64) {
        self.state.lock().streams.remove(&stream);
        self.changes.send_modify(|n| *n += 1);
    }

    /// Whether a GET stream is the newest: MCP demands that each message goes to one stream only.
    pub(crate) fn is_newest_stream(&self, stream: u64) -> bool {
        self.state.lock().streams.last() == Some(&stream)
    }
}

/// Counts one open request or stream of an MCP session; dropped, it counts as closed.
#[derive(Debug)]
pub(crate) struct McpSessionGuard(Arc<McpSession>);

impl Drop for McpSessionGuard {
    fn drop(&mut self) {
        self.0.open_count.fetch_sub(1, Ordering::AcqRel);
        self.0.touch();
    }
}
