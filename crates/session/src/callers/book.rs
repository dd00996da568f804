//! [`CallerBook`]: which callers lend which tools to one session, which are present, and which calls are open.
//!
//! A pure state machine: time is passed in as an argument, and calls that end are returned as [`EndedCall`].
//! It takes no lock, sends nothing and reads no clock, so that every interleaving of declaring, calling,
//! answering, disconnecting, reconnecting and cancelling can be played through in a test.
//!
//! `W` identifies what waits for a call: a channel in [`CallerRelay`](super::CallerRelay), a number in tests.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use indexmap::IndexMap;
use oubliette_protocol::{
    CallerId, Error, RequestId, Result, TokenId, caller::CallerDeclaration, event::CallerToolOutcome,
};
use serde_json::Value;

use super::{
    answer_refusal::AnswerRefusal,
    presence::{CallerPresence, HoldEnd, HoldId},
    recently_ended::{RecentEnding, RecentlyEnded},
};

/// The principal behind a declaration, by its token; `None` is the owner of the home directory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct PrincipalId(pub Option<TokenId>);

/// Timeouts and limits of caller tool calls.
#[derive(Debug, Clone)]
pub struct RelayLimits {
    /// How long a call waits for an answer before it times out.
    pub call_timeout: Duration,
    /// How long a caller may be absent before its open calls end as disconnected.
    pub reconnect_grace: Duration,
    /// How long a caller counts as present after a declaration or an answered poll.
    pub linger: Duration,
    /// The most calls of one session open at once.
    pub max_open_calls: usize,
}

impl Default for RelayLimits {
    fn default() -> Self {
        Self {
            call_timeout: Duration::from_secs(60),
            reconnect_grace: Duration::from_millis(500),
            linger: Duration::from_secs(30),
            max_open_calls: 20_000,
        }
    }
}

/// How a call ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum CallEnding {
    /// The caller answered with this result.
    Answered(Value),
    /// The caller answered with this error.
    Failed(String),
    /// The caller did not answer in time.
    Timeout,
    /// The caller was absent for longer than the grace, or its id was taken over.
    Disconnected,
    /// Nothing waits for the result any more.
    Cancelled,
}

impl CallEnding {
    /// The ending as it is written to the event log.
    pub(crate) fn outcome(&self) -> CallerToolOutcome {
        match self {
            CallEnding::Answered(_) => CallerToolOutcome::Answered,
            CallEnding::Failed(_) => CallerToolOutcome::Error,
            CallEnding::Timeout => CallerToolOutcome::Timeout,
            CallEnding::Disconnected => CallerToolOutcome::Disconnected,
            CallEnding::Cancelled => CallerToolOutcome::Cancelled,
        }
    }
}

/// A call that has ended, and what waits for it. Whoever receives it has to log the end and inform `waiter`.
#[derive(Debug)]
pub(crate) struct EndedCall<W> {
    /// The call's request.
    pub request_id: RequestId,
    /// What waits for the result.
    pub waiter: W,
    /// How it ended.
    pub ending: CallEnding,
}

/// Who declared a caller's tools, and over which connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeclarationOrigin {
    /// The declaring principal.
    pub principal: PrincipalId,
    /// The stateful MCP session the declaration came over, if it came over one.
    pub mcp_session: Option<String>,
}

/// A caller with declared tools or open calls.
#[derive(Debug)]
struct DeclaredCaller {
    declarer: DeclarationOrigin,
    declaration: Arc<CallerDeclaration>,
    presence: CallerPresence,
    /// The declaring token was revoked or has expired.
    token_revoked: bool,
    /// The numbers of its open calls, oldest first.
    open: BTreeSet<u64>,
}

/// A call that waits for the caller's answer.
#[derive(Debug)]
struct OpenCall<W> {
    request_id: RequestId,
    caller_id: CallerId,
    /// The principal that may answer: the one that had declared the caller when the call was opened.
    owner: PrincipalId,
    opened_at: Instant,
    log_index: Option<i64>,
    waiter: W,
}

/// The callers and open calls of one session.
#[derive(Debug)]
pub(crate) struct CallerBook<W> {
    limits: RelayLimits,
    callers: IndexMap<CallerId, DeclaredCaller>,
    /// Open calls by number, in the order they were opened. All have the same timeout, so this is also the
    /// order in which they time out, and no other queue of deadlines is needed.
    open: BTreeMap<u64, OpenCall<W>>,
    /// The number of each open call, by its request id.
    numbers: HashMap<RequestId, u64>,
    next_number: u64,
    recently_ended: RecentlyEnded,
    closed: bool,
}

impl<W> CallerBook<W> {
    /// A book without callers and calls.
    pub(crate) fn new(limits: RelayLimits) -> Self {
        Self {
            limits,
            callers: IndexMap::new(),
            open: BTreeMap::new(),
            numbers: HashMap::new(),
            next_number: 0,
            recently_ended: RecentlyEnded::default(),
            closed: false,
        }
    }

    /// The principal that owns a caller id now: it lends tools or has open calls under the id, and is present
    /// or absent for less than the grace. `None` when any principal may declare the id.
    pub(crate) fn live_owner(&self, caller_id: &CallerId, now: Instant) -> Option<&PrincipalId> {
        let caller = self.callers.get(caller_id)?;
        let lent = !caller.declaration.tools.is_empty() || !caller.open.is_empty();
        let there = caller
            .presence
            .absent_since(now)
            .is_none_or(|since| now < since + self.limits.reconnect_grace);
        (lent && there && !caller.token_revoked).then_some(&caller.declarer.principal)
    }

    /// Replaces what a caller lends; an empty declaration withdraws it. `holds` are the streams and polls the
    /// caller already has open. Returns the calls that end because another principal took the id over.
    pub(crate) fn declare(
        &mut self,
        declarer: DeclarationOrigin,
        declaration: CallerDeclaration,
        holds: impl IntoIterator<Item = HoldId>,
        now: Instant,
    ) -> Result<Vec<EndedCall<W>>> {
        let caller_id = declaration.caller_id.clone();
        if self.closed {
            return Err(Error::conflict("the session is over"));
        }
        if self
            .live_owner(&caller_id, now)
            .is_some_and(|owner| *owner != declarer.principal)
        {
            return Err(Error::conflict(format!(
                "caller_id {caller_id} belongs to another token in this session; choose another caller_id"
            )));
        }
        let taken_over = self
            .callers
            .get(&caller_id)
            .is_some_and(|c| c.declarer.principal != declarer.principal);
        let ended = match taken_over {
            true => self.end_all_of(&caller_id, &CallEnding::Disconnected),
            false => Vec::new(),
        };
        // A declaration proves presence, like a poll that was just answered.
        let presence = CallerPresence::new(holds, now + self.limits.linger);
        match self.callers.get_mut(&caller_id) {
            Some(caller) => {
                caller.declarer = declarer;
                caller.declaration = declaration.into();
                caller.presence = presence;
                caller.token_revoked = false;
                self.forget_if_done(&caller_id);
            }
            None if declaration.tools.is_empty() => {}
            None => {
                let lent = declaration.into();
                self.callers.insert(
                    caller_id,
                    DeclaredCaller {
                        declarer,
                        declaration: lent,
                        presence,
                        token_revoked: false,
                        open: BTreeSet::new(),
                    },
                );
            }
        }
        Ok(ended)
    }

    /// Notes that the declaring token was revoked or has expired, so that another principal may take the id.
    pub(crate) fn mark_token_revoked(&mut self, caller_id: &CallerId) {
        if let Some(caller) = self.callers.get_mut(caller_id) {
            caller.token_revoked = true;
        }
    }

    /// The declarations with at least one tool, in the order they were first made.
    pub(crate) fn declarations(&self) -> Vec<Arc<CallerDeclaration>> {
        self.callers
            .values()
            .filter(|c| !c.declaration.tools.is_empty())
            .map(|c| c.declaration.clone())
            .collect()
    }

    /// The principal behind a caller's declaration.
    pub(crate) fn owner(&self, caller_id: &CallerId) -> Option<&PrincipalId> {
        self.callers.get(caller_id).map(|c| &c.declarer.principal)
    }

    /// Opens a call of a lent tool. Fails when the caller does not lend it or too many calls are open.
    pub(crate) fn open_call(
        &mut self,
        request_id: RequestId,
        caller_id: &CallerId,
        tool: &str,
        waiter: W,
        now: Instant,
    ) -> Result<()> {
        if self.closed {
            return Err(Error::unavailable("the session is over"));
        }
        if self.open.len() >= self.limits.max_open_calls {
            return Err(Error::limit_exceeded(format!(
                "{} calls of caller tools are open in this session; wait for some to end",
                self.open.len()
            )));
        }
        let lends = |c: &&mut DeclaredCaller| c.declaration.tools.iter().any(|t| t.name == tool);
        let Some(caller) = self.callers.get_mut(caller_id).filter(lends) else {
            return Err(Error::not_found(format!(
                "caller {caller_id} does not lend a tool {tool:?}"
            )));
        };
        let number = self.next_number;
        self.next_number += 1;
        caller.open.insert(number);
        self.numbers.insert(request_id.clone(), number);
        let owner = caller.declarer.principal.clone();
        let open = OpenCall {
            request_id,
            caller_id: caller_id.clone(),
            owner,
            opened_at: now,
            log_index: None,
            waiter,
        };
        self.open.insert(number, open);
        Ok(())
    }

    /// Notes the log index of a call's request event.
    pub(crate) fn set_log_index(&mut self, request_id: &RequestId, index: i64) {
        if let Some(open) = self.numbers.get(request_id).and_then(|n| self.open.get_mut(n)) {
            open.log_index = Some(index);
        }
    }

    /// Ends a call with an answer, if `who` is the principal that declared the caller.
    pub(crate) fn answer(
        &mut self,
        request_id: &RequestId,
        who: &PrincipalId,
        ending: CallEnding,
    ) -> std::result::Result<EndedCall<W>, AnswerRefusal> {
        match self.numbers.get(request_id) {
            Some(&number) => match self.open.get(&number).is_some_and(|o| o.owner == *who) {
                true => self.end(number, ending).ok_or(AnswerRefusal::NotFound),
                false => Err(AnswerRefusal::OtherPrincipal),
            },
            None => Err(match self.recently_ended.get(request_id) {
                None => AnswerRefusal::NotFound,
                Some((owner, _)) if owner != who => AnswerRefusal::OtherPrincipal,
                Some((_, RecentEnding::Answered)) => AnswerRefusal::AlreadyAnswered,
                Some((_, RecentEnding::Unanswered)) => AnswerRefusal::NotFound,
            }),
        }
    }

    /// Ends a call as cancelled; `None` when it is not open.
    pub(crate) fn cancel(&mut self, request_id: &RequestId) -> Option<EndedCall<W>> {
        let number = *self.numbers.get(request_id)?;
        self.end(number, CallEnding::Cancelled)
    }

    /// Notes a stream, poll or waiting message opened by the callers for which `matches` is true.
    pub(crate) fn add_hold(&mut self, hold: HoldId, matches: impl Fn(&CallerId, &DeclarationOrigin) -> bool) {
        for (id, caller) in &mut self.callers {
            if matches(id, &caller.declarer) {
                caller.presence.add_hold(hold);
            }
        }
    }

    /// Notes the end of a stream, poll or waiting message.
    pub(crate) fn end_hold(&mut self, hold: HoldId, how: HoldEnd, now: Instant) {
        for caller in self.callers.values_mut() {
            caller.presence.end_hold(hold, how, now, self.limits.linger);
        }
    }

    /// Marks the callers for which `matches` is true as absent, even if they seem to have streams open.
    pub(crate) fn mark_left(
        &mut self,
        now: Instant,
        matches: impl Fn(&CallerId, &DeclarationOrigin) -> bool,
    ) {
        for (id, caller) in &mut self.callers {
            if matches(id, &caller.declarer) {
                caller.presence.mark_left(now);
            }
        }
    }

    /// Whether a caller is present.
    pub(crate) fn is_present(&self, caller_id: &CallerId, now: Instant) -> bool {
        self.callers
            .get(caller_id)
            .is_some_and(|c| c.presence.absent_since(now).is_none())
    }

    /// Ends the calls that have timed out or whose caller has been absent for too long.
    pub(crate) fn tick(&mut self, now: Instant) -> Vec<EndedCall<W>> {
        let mut due: Vec<(u64, CallEnding)> = Vec::new();
        for caller in self.callers.values() {
            let Some(since) = caller.presence.absent_since(now) else {
                continue;
            };
            let lost = caller
                .open
                .iter()
                .copied()
                .take_while(|n| self.disconnect_deadline(*n, since) <= now);
            due.extend(lost.map(|n| (n, CallEnding::Disconnected)));
        }
        let timed_out = self
            .open
            .iter()
            .take_while(|(_, o)| o.opened_at + self.limits.call_timeout <= now);
        due.extend(timed_out.map(|(n, _)| (*n, CallEnding::Timeout)));
        due.into_iter()
            .filter_map(|(number, ending)| self.end(number, ending))
            .collect()
    }

    /// When [`tick`](Self::tick) next has something to do, if nothing else happens.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let timeout = self
            .open
            .values()
            .next()
            .map(|o| o.opened_at + self.limits.call_timeout);
        let lost = self.callers.values().filter_map(|caller| {
            let first = caller.open.first()?;
            Some(self.disconnect_deadline(*first, caller.presence.absent_at()?))
        });
        lost.chain(timeout).min()
    }

    /// Ends every call. Nothing can be opened or declared afterwards.
    pub(crate) fn close(&mut self) -> Vec<EndedCall<W>> {
        self.closed = true;
        let numbers: Vec<u64> = self.open.keys().copied().collect();
        let ended = numbers
            .into_iter()
            .filter_map(|n| self.end(n, CallEnding::Cancelled))
            .collect();
        self.callers.clear();
        ended
    }

    /// The log indexes of the open requests of the callers for which `matches` is true, oldest call first.
    pub(crate) fn open_request_indexes(
        &self,
        matches: impl Fn(&CallerId, &DeclarationOrigin) -> bool,
    ) -> Vec<i64> {
        let callers = self.callers.iter().filter(|(id, c)| matches(id, &c.declarer));
        let numbers: BTreeSet<u64> = callers.flat_map(|(_, c)| c.open.iter().copied()).collect();
        numbers
            .iter()
            .filter_map(|n| self.open.get(n)?.log_index)
            .collect()
    }

    /// How many ended calls are remembered.
    #[cfg(test)]
    pub(super) fn remembered(&self) -> usize {
        self.recently_ended.len()
    }

    /// How many calls are open.
    pub(crate) fn open_calls(&self) -> usize {
        self.open.len()
    }

    /// When an open call of an absent caller ends as disconnected. A call opened during the absence waits for
    /// the full grace too, so the later of the two moments counts.
    fn disconnect_deadline(&self, number: u64, absent_since: Instant) -> Instant {
        let asked = self.open.get(&number).map_or(absent_since, |o| o.opened_at);
        absent_since.max(asked) + self.limits.reconnect_grace
    }

    fn end_all_of(&mut self, caller_id: &CallerId, ending: &CallEnding) -> Vec<EndedCall<W>> {
        let open = self
            .callers
            .get(caller_id)
            .map(|c| c.open.clone())
            .unwrap_or_default();
        open.into_iter()
            .filter_map(|n| self.end(n, ending.clone()))
            .collect()
    }

    fn end(&mut self, number: u64, ending: CallEnding) -> Option<EndedCall<W>> {
        let open = self.open.remove(&number)?;
        self.numbers.remove(&open.request_id);
        if let Some(caller) = self.callers.get_mut(&open.caller_id) {
            caller.open.remove(&number);
        }
        self.forget_if_done(&open.caller_id);
        let recent = match ending {
            CallEnding::Answered(_) | CallEnding::Failed(_) => RecentEnding::Answered,
            CallEnding::Timeout | CallEnding::Disconnected | CallEnding::Cancelled => {
                RecentEnding::Unanswered
            }
        };
        self.recently_ended.remember(&open.request_id, open.owner, recent);
        Some(EndedCall {
            request_id: open.request_id,
            waiter: open.waiter,
            ending,
        })
    }

    /// Removes a caller that lends no tools and has no open calls: it no longer owns its id.
    fn forget_if_done(&mut self, caller_id: &CallerId) {
        if self
            .callers
            .get(caller_id)
            .is_some_and(|c| c.declaration.tools.is_empty() && c.open.is_empty())
        {
            self.callers.shift_remove(caller_id);
        }
    }
}
