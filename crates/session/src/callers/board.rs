//! Every open stream, poll and waiting message, of all sessions, and whom each speaks for.
//!
//! A caller's GET stream is not about one session: it speaks for whatever its MCP session declared, in
//! any session, before or after it was opened. So holds are kept here, and told to the books they concern.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Instant,
};

use oubliette_protocol::{CallerId, SessionId, TokenId};
use parking_lot::Mutex;

use super::{
    CallerBook,
    book::{Declarer, Owner},
    presence::{Departure, HoldId},
};

/// Whom a stream, poll or waiting message speaks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresenceKey {
    /// The token behind it; `None` is the home's owner.
    pub principal: Option<TokenId>,
    /// The caller it names itself (`?caller_id=`).
    pub caller_id: Option<CallerId>,
    /// The one session it is about; `None` for a GET stream.
    pub session: Option<SessionId>,
    /// The stateful MCP session it came over, if it did.
    pub mcp_session: Option<String>,
}

impl PresenceKey {
    /// Whether it speaks for a caller of a session.
    fn speaks_for(&self, session: &SessionId, caller_id: &CallerId, declarer: &Declarer) -> bool {
        if declarer.owner != Owner(self.principal.clone())
            || self.session.as_ref().is_some_and(|s| s != session)
        {
            return false;
        }
        match (&self.caller_id, &declarer.mcp_session) {
            (Some(named), _) => named == caller_id,
            // On stateful MCP only the declaring MCP session counts.
            (None, Some(declared)) => self.mcp_session.as_ref() == Some(declared),
            (None, None) => self.session.is_some(),
        }
    }
}

/// What is held open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A stream of events.
    Stream,
    /// A `session_events` request.
    Poll,
    /// A `session_message` request.
    Wait,
}

/// How much callers hold open and wait for, of all sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Calls that wait for an answer.
    pub calls: usize,
    /// Streams held open.
    pub streams: usize,
    /// `session_events` requests held open.
    pub polls: usize,
    /// `session_message` requests held open.
    pub waits: usize,
}

#[derive(Default)]
struct State {
    next: u64,
    holds: HashMap<HoldId, (PresenceKey, Kind)>,
    books: HashMap<SessionId, Weak<CallerBook>>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Board {
    state: Mutex<State>,
}

impl Board {
    pub(crate) fn add(&self, book: &Arc<CallerBook>) {
        self.state
            .lock()
            .books
            .insert(book.session().clone(), Arc::downgrade(book));
    }

    pub(crate) fn remove(&self, session: &SessionId) {
        self.state.lock().books.remove(session);
    }

    /// Takes note of something held open.
    pub(crate) fn hold(self: &Arc<Self>, key: PresenceKey, kind: Kind) -> Hold {
        let mut state = self.state.lock();
        let id = HoldId(state.next);
        state.next += 1;
        tracing::trace!(?key, ?kind, hold = id.0, "held open");
        for book in state.concerned(&key) {
            let session = book.session().clone();
            book.arrive(id, |caller, declarer| key.speaks_for(&session, caller, declarer));
        }
        state.holds.insert(id, (key, kind));
        Hold {
            id,
            board: self.clone(),
            how: Departure::BrokenOff,
        }
    }

    /// What is open that speaks for a declaration, with the board locked while `declare` uses it, so that
    /// no hold comes or goes in between.
    pub(crate) fn with_holds_of<T>(
        &self,
        session: &SessionId,
        caller_id: &CallerId,
        declarer: &Declarer,
        declare: impl FnOnce(Vec<HoldId>) -> T,
    ) -> T {
        let state = self.state.lock();
        let speaking = state
            .holds
            .iter()
            .filter(|(_, (key, _))| key.speaks_for(session, caller_id, declarer));
        declare(speaking.map(|(id, _)| *id).collect())
    }

    /// Whatever these callers still hold open, they have left.
    pub(crate) fn leave(&self, matches: impl Fn(&Declarer) -> bool) {
        let state = self.state.lock();
        for book in state.books.values().filter_map(Weak::upgrade) {
            book.leave(|_, declarer| matches(declarer));
        }
    }

    /// What is open now.
    pub(crate) fn load(&self) -> Load {
        let state = self.state.lock();
        let mut load = Load::default();
        for (_, kind) in state.holds.values() {
            *match kind {
                Kind::Stream => &mut load.streams,
                Kind::Poll => &mut load.polls,
                Kind::Wait => &mut load.waits,
            } += 1;
        }
        let books = state.books.values().filter_map(Weak::upgrade);
        load.calls = books.map(|book| book.open_calls()).sum();
        load
    }

    fn depart(&self, id: HoldId, how: Departure) {
        let mut state = self.state.lock();
        let Some((key, _)) = state.holds.remove(&id) else {
            return;
        };
        for book in state.concerned(&key) {
            book.depart(id, how, Instant::now());
        }
    }
}

impl State {
    fn concerned(&self, key: &PresenceKey) -> Vec<Arc<CallerBook>> {
        match &key.session {
            Some(session) => self
                .books
                .get(session)
                .and_then(Weak::upgrade)
                .into_iter()
                .collect(),
            None => self.books.values().filter_map(Weak::upgrade).collect(),
        }
    }
}

/// Something held open. Dropping it means that the caller broke it off, which is leaving.
#[must_use = "dropping a hold means that the caller has left"]
pub struct Hold {
    id: HoldId,
    board: Arc<Board>,
    how: Departure,
}

impl Hold {
    /// It was answered: the caller counts as present for a while yet.
    pub fn answered(mut self) {
        self.how = Departure::Answered;
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.board.depart(self.id, self.how);
    }
}
