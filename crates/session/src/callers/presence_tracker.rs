//! `PresenceTracker`: the open streams, polls and waiting messages of callers, of all sessions.
//!
//! A caller's GET stream is not bound to one session: it counts as presence for everything its MCP session
//! declared, in any session, before or after it was opened. So holds are kept here, across sessions, and
//! passed to the caller relays they concern.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Instant,
};

use oubliette_protocol::{CallerId, SessionId, TokenId};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{
    CallerRelay,
    book::{DeclarationOrigin, PrincipalId},
    presence::{HoldEnd, HoldId},
};

/// Determines for which callers a stream, poll or waiting message counts as presence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PresenceKey {
    /// The token it was opened with; `None` is the owner of the home directory.
    pub principal: Option<TokenId>,
    /// The caller id it names (`?caller_id=`).
    pub caller_id: Option<CallerId>,
    /// The session it is bound to; `None` for a GET stream, which is bound to none.
    pub session: Option<SessionId>,
    /// The stateful MCP session it was opened in, if any.
    pub mcp_session: Option<String>,
}

impl PresenceKey {
    /// Whether it counts as presence of this caller in this session.
    fn counts_for(&self, session: &SessionId, caller_id: &CallerId, declarer: &DeclarationOrigin) -> bool {
        if declarer.principal != PrincipalId(self.principal.clone())
            || self.session.as_ref().is_some_and(|s| s != session)
        {
            return false;
        }
        match (&self.caller_id, &declarer.mcp_session) {
            (Some(named), _) => named == caller_id,
            // Tools declared over stateful MCP need a hold of the same MCP session.
            (None, Some(declared)) => self.mcp_session.as_ref() == Some(declared),
            (None, None) => self.session.is_some(),
        }
    }
}

/// What a caller holds open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HoldKind {
    /// A stream of events (SSE or an MCP GET stream).
    Stream,
    /// A `session_events` request.
    Poll,
    /// A `session_message` request.
    Wait,
}

/// Counts of what callers hold open and of calls that wait for them, over all sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallerLoad {
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
struct PresenceTrackerState {
    next_hold: u64,
    holds: HashMap<HoldId, (PresenceKey, HoldKind)>,
    relays: HashMap<SessionId, Weak<CallerRelay>>,
}

/// Keeps all holds and informs the caller relays of sessions when one is opened or ends.
#[derive(Default)]
pub(crate) struct PresenceTracker {
    state: Mutex<PresenceTrackerState>,
}

impl PresenceTracker {
    pub(crate) fn add_relay(&self, relay: &Arc<CallerRelay>) {
        self.state
            .lock()
            .relays
            .insert(relay.session().clone(), Arc::downgrade(relay));
    }

    pub(crate) fn remove_relay(&self, session: &SessionId) {
        self.state.lock().relays.remove(session);
    }

    /// Registers a stream, poll or waiting message; it ends when the returned hold is dropped.
    pub(crate) fn register_hold(self: &Arc<Self>, key: PresenceKey, kind: HoldKind) -> PresenceHold {
        let mut state = self.state.lock();
        let id = HoldId(state.next_hold);
        state.next_hold += 1;
        tracing::trace!(?key, ?kind, hold = id.0, "presence hold registered");
        for relay in state.relays_for(&key) {
            let session = relay.session().clone();
            relay.add_hold(id, |caller, declarer| key.counts_for(&session, caller, declarer));
        }
        state.holds.insert(id, (key, kind));
        PresenceHold {
            id,
            tracker: self.clone(),
            end: HoldEnd::Aborted,
        }
    }

    /// Calls `declare` with the open holds that count for a declaration. The tracker is locked meanwhile, so
    /// that no hold is opened or ends between the lookup and the declaration.
    pub(crate) fn with_holds_of<T>(
        &self,
        session: &SessionId,
        caller_id: &CallerId,
        declarer: &DeclarationOrigin,
        declare: impl FnOnce(Vec<HoldId>) -> T,
    ) -> T {
        let state = self.state.lock();
        let counting = state
            .holds
            .iter()
            .filter(|(_, (key, _))| key.counts_for(session, caller_id, declarer));
        declare(counting.map(|(id, _)| *id).collect())
    }

    /// Marks the callers for which `matches` is true as absent, whatever they still hold open.
    pub(crate) fn mark_left(&self, matches: impl Fn(&DeclarationOrigin) -> bool) {
        let state = self.state.lock();
        for relay in state.relays.values().filter_map(Weak::upgrade) {
            relay.mark_left(|_, declarer| matches(declarer));
        }
    }

    /// Counts what is open now.
    pub(crate) fn load(&self) -> CallerLoad {
        let state = self.state.lock();
        let mut load = CallerLoad::default();
        for (_, kind) in state.holds.values() {
            *match kind {
                HoldKind::Stream => &mut load.streams,
                HoldKind::Poll => &mut load.polls,
                HoldKind::Wait => &mut load.waits,
            } += 1;
        }
        let relays = state.relays.values().filter_map(Weak::upgrade);
        load.calls = relays.map(|relay| relay.open_calls()).sum();
        load
    }

    fn end_hold(&self, id: HoldId, how: HoldEnd) {
        let mut state = self.state.lock();
        let Some((key, _)) = state.holds.remove(&id) else {
            return;
        };
        for relay in state.relays_for(&key) {
            relay.end_hold(id, how, Instant::now());
        }
    }
}

impl PresenceTrackerState {
    fn relays_for(&self, key: &PresenceKey) -> Vec<Arc<CallerRelay>> {
        match &key.session {
            Some(session) => self
                .relays
                .get(session)
                .and_then(Weak::upgrade)
                .into_iter()
                .collect(),
            None => self.relays.values().filter_map(Weak::upgrade).collect(),
        }
    }
}

/// A registered stream, poll or waiting message. Dropping it means that the caller aborted it and is absent,
/// unless it holds something else open.
#[must_use = "dropping a hold means that the caller has left"]
pub struct PresenceHold {
    id: HoldId,
    tracker: Arc<PresenceTracker>,
    end: HoldEnd,
}

impl PresenceHold {
    /// Ends the hold as answered: the caller counts as present for the linger time.
    pub fn answered(mut self) {
        self.end = HoldEnd::Answered;
    }
}

impl Drop for PresenceHold {
    fn drop(&mut self) {
        self.tracker.end_hold(self.id, self.end);
    }
}
