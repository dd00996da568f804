//! The relay's truth about one session: who lends which tools, who is there, and which calls are open.
//!
//! A pure state machine: time comes in as an argument, and what has to be told to whom comes out as
//! [`Ended`]. It takes no lock, sends nothing and reads no clock, so that every interleaving of
//! declaring, calling, answering, leaving, returning and cancelling can be played through in a test.
//!
//! `W` is whoever waits for a call: the shell keeps a channel there, the tests a number.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use indexmap::IndexMap;
use oubliette_protocol::{CallerId, Error, RequestId, Result, TokenId, caller::Declaration, event::Outcome};
use serde_json::Value;

use super::{
    finished::{Fate, Finished},
    presence::{Departure, HoldId, Presence},
};

/// The token behind a declaration; `None` is the home's owner.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owner(pub Option<TokenId>);

/// How long things may take and how many there may be.
#[derive(Debug, Clone)]
pub struct Rules {
    /// An unanswered call fails after this.
    pub timeout: Duration,
    /// Calls survive an absence this long.
    pub grace: Duration,
    /// How long a caller counts as present after an answered poll.
    pub linger: Duration,
    /// Most calls open at once.
    pub most_open: usize,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            grace: Duration::from_millis(500),
            linger: Duration::from_secs(30),
            most_open: 20_000,
        }
    }
}

/// How a call ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Ending {
    /// With the caller's value.
    Answered(Value),
    /// With the caller's error.
    Failed(String),
    /// Unanswered in time.
    Timeout,
    /// The caller left and did not come back.
    Disconnected,
    /// Nobody waits any more.
    Cancelled,
}

impl Ending {
    /// The ending as the event log says it.
    pub fn outcome(&self) -> Outcome {
        match self {
            Ending::Answered(_) => Outcome::Answered,
            Ending::Failed(_) => Outcome::Error,
            Ending::Timeout => Outcome::Timeout,
            Ending::Disconnected => Outcome::Disconnected,
            Ending::Cancelled => Outcome::Cancelled,
        }
    }
}

/// A call that is over: tell `waiter`, and the log.
#[derive(Debug)]
pub struct Ended<W> {
    /// Which.
    pub request_id: RequestId,
    /// Whose tool.
    pub caller_id: CallerId,
    /// Who waits.
    pub waiter: W,
    /// How it ended.
    pub ending: Ending,
}

/// Why an answer was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// No such request, or it ended without this answer.
    NotFound,
    /// It was answered already.
    Repeated,
    /// Another principal's.
    Foreign,
}

impl Refusal {
    /// The refusal as the debugger says it.
    pub fn reason(self) -> &'static str {
        match self {
            Refusal::NotFound => "no such request is open: it is unknown, or its answer came too late",
            Refusal::Repeated => "the request was answered already",
            Refusal::Foreign => "the request belongs to another principal",
        }
    }

    /// The refusal as an error.
    pub fn error(self) -> Error {
        match self {
            Refusal::NotFound => Error::not_found(self.reason()),
            Refusal::Repeated => Error::conflict(self.reason()),
            Refusal::Foreign => Error::permission_denied(self.reason()),
        }
    }
}

/// Who declares, and over which connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declarer {
    /// The principal.
    pub owner: Owner,
    /// The stateful MCP session it came over, if it did.
    pub mcp_session: Option<String>,
}

#[derive(Debug)]
struct Caller {
    declarer: Declarer,
    lent: Arc<Declaration>,
    presence: Presence,
    /// Its owner's token was revoked or has expired.
    disowned: bool,
    /// Its open calls, oldest first.
    open: BTreeSet<u64>,
}

#[derive(Debug)]
struct Open<W> {
    request_id: RequestId,
    caller_id: CallerId,
    owner: Owner,
    asked: Instant,
    index: Option<i64>,
    waiter: W,
}

/// See the module.
#[derive(Debug)]
pub struct Book<W> {
    rules: Rules,
    callers: IndexMap<CallerId, Caller>,
    /// Numbered as they were asked. The timeout is one for all, so this is also the order in which
    /// they time out, and no other queue of deadlines is needed.
    open: BTreeMap<u64, Open<W>>,
    numbers: HashMap<RequestId, u64>,
    next: u64,
    finished: Finished,
    closed: bool,
}

impl<W> Book<W> {
    /// An empty book.
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            callers: IndexMap::new(),
            open: BTreeMap::new(),
            numbers: HashMap::new(),
            next: 0,
            finished: Finished::default(),
            closed: false,
        }
    }

    /// The principal that owns a caller id now: the one whose declaration stands and who is there, or
    /// was a grace ago. `None`: anyone may take it.
    pub fn live_owner(&self, caller_id: &CallerId, now: Instant) -> Option<&Owner> {
        let caller = self.callers.get(caller_id)?;
        let lent = !caller.lent.tools.is_empty() || !caller.open.is_empty();
        let there = caller
            .presence
            .absent_since(now)
            .is_none_or(|since| now < since + self.rules.grace);
        (lent && there && !caller.disowned).then_some(&caller.declarer.owner)
    }

    /// Replaces what a caller lends; an empty declaration withdraws it. `holds` are the streams and
    /// polls that already speak for it. Returns calls that end because another principal took the id.
    pub fn declare(
        &mut self,
        declarer: Declarer,
        declaration: Declaration,
        holds: impl IntoIterator<Item = HoldId>,
        now: Instant,
    ) -> Result<Vec<Ended<W>>> {
        let caller_id = declaration.caller_id.clone();
        if self.closed {
            return Err(Error::conflict("the session is over"));
        }
        if self
            .live_owner(&caller_id, now)
            .is_some_and(|owner| *owner != declarer.owner)
        {
            return Err(Error::conflict(format!(
                "caller_id {caller_id} belongs to another token in this session; choose another caller_id"
            )));
        }
        let taken_over = self
            .callers
            .get(&caller_id)
            .is_some_and(|c| c.declarer.owner != declarer.owner);
        let ended = match taken_over {
            true => self.end_all_of(&caller_id, &Ending::Disconnected),
            false => Vec::new(),
        };
        // Declaring is a sign of life: it counts like a poll that was just answered.
        let presence = Presence::new(holds, now + self.rules.linger);
        match self.callers.get_mut(&caller_id) {
            Some(caller) => {
                caller.declarer = declarer;
                caller.lent = declaration.into();
                caller.presence = presence;
                caller.disowned = false;
                self.forget_if_done(&caller_id);
            }
            None if declaration.tools.is_empty() => {}
            None => {
                let lent = declaration.into();
                self.callers.insert(
                    caller_id,
                    Caller {
                        declarer,
                        lent,
                        presence,
                        disowned: false,
                        open: BTreeSet::new(),
                    },
                );
            }
        }
        Ok(ended)
    }

    /// The owner's token is dead: another principal may take the id.
    pub fn disown(&mut self, caller_id: &CallerId) {
        if let Some(caller) = self.callers.get_mut(caller_id) {
            caller.disowned = true;
        }
    }

    /// What is lent now, in the order it was first declared.
    pub fn declarations(&self) -> Vec<Arc<Declaration>> {
        self.callers
            .values()
            .filter(|c| !c.lent.tools.is_empty())
            .map(|c| c.lent.clone())
            .collect()
    }

    /// The principal behind a caller's declaration.
    pub fn owner(&self, caller_id: &CallerId) -> Option<&Owner> {
        self.callers.get(caller_id).map(|c| &c.declarer.owner)
    }

    /// Opens a call of a lent tool.
    pub fn call(
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
        if self.open.len() >= self.rules.most_open {
            return Err(Error::limit_exceeded(format!(
                "{} calls of caller tools are open in this session; wait for some to end",
                self.open.len()
            )));
        }
        let lends = |c: &&mut Caller| c.lent.tools.iter().any(|t| t.name == tool);
        let Some(caller) = self.callers.get_mut(caller_id).filter(lends) else {
            return Err(Error::not_found(format!(
                "caller {caller_id} does not lend a tool {tool:?}"
            )));
        };
        let number = self.next;
        self.next += 1;
        caller.open.insert(number);
        self.numbers.insert(request_id.clone(), number);
        let owner = caller.declarer.owner.clone();
        let open = Open {
            request_id,
            caller_id: caller_id.clone(),
            owner,
            asked: now,
            index: None,
            waiter,
        };
        self.open.insert(number, open);
        Ok(())
    }

    /// Notes where the log has a call's request.
    pub fn logged(&mut self, request_id: &RequestId, index: i64) {
        if let Some(open) = self.numbers.get(request_id).and_then(|n| self.open.get_mut(n)) {
            open.index = Some(index);
        }
    }

    /// Ends a call with the answer of `who`, if it is theirs to give.
    pub fn answer(
        &mut self,
        request_id: &RequestId,
        who: &Owner,
        ending: Ending,
    ) -> std::result::Result<Ended<W>, Refusal> {
        match self.numbers.get(request_id) {
            Some(&number) => match self.open.get(&number).is_some_and(|o| o.owner == *who) {
                true => self.end(number, ending).ok_or(Refusal::NotFound),
                false => Err(Refusal::Foreign),
            },
            None => Err(match self.finished.get(request_id) {
                None => Refusal::NotFound,
                Some((owner, _)) if owner != who => Refusal::Foreign,
                Some((_, Fate::Answered)) => Refusal::Repeated,
                Some((_, Fate::Lost)) => Refusal::NotFound,
            }),
        }
    }

    /// Nobody waits for this call any more.
    pub fn cancel(&mut self, request_id: &RequestId) -> Option<Ended<W>> {
        let number = *self.numbers.get(request_id)?;
        self.end(number, Ending::Cancelled)
    }

    /// A stream, poll or waiting message was opened for the callers that `matches` says.
    pub fn arrive(&mut self, hold: HoldId, matches: impl Fn(&CallerId, &Declarer) -> bool) {
        for (id, caller) in &mut self.callers {
            if matches(id, &caller.declarer) {
                caller.presence.arrive(hold);
            }
        }
    }

    /// It ended.
    pub fn depart(&mut self, hold: HoldId, how: Departure, now: Instant) {
        for caller in self.callers.values_mut() {
            caller.presence.depart(hold, how, now, self.rules.linger);
        }
    }

    /// Everyone `matches` says has left, whatever streams still look open.
    pub fn leave(&mut self, now: Instant, matches: impl Fn(&CallerId, &Declarer) -> bool) {
        for (id, caller) in &mut self.callers {
            if matches(id, &caller.declarer) {
                caller.presence.leave(now);
            }
        }
    }

    /// Whether a caller is present.
    pub fn is_present(&self, caller_id: &CallerId, now: Instant) -> bool {
        self.callers
            .get(caller_id)
            .is_some_and(|c| c.presence.absent_since(now).is_none())
    }

    /// Ends what is due.
    pub fn tick(&mut self, now: Instant) -> Vec<Ended<W>> {
        let mut due: Vec<(u64, Ending)> = Vec::new();
        for caller in self.callers.values() {
            let Some(since) = caller.presence.absent_since(now) else {
                continue;
            };
            let lost = caller
                .open
                .iter()
                .copied()
                .take_while(|n| self.lost_at(*n, since) <= now);
            due.extend(lost.map(|n| (n, Ending::Disconnected)));
        }
        let timed_out = self
            .open
            .iter()
            .take_while(|(_, o)| o.asked + self.rules.timeout <= now);
        due.extend(timed_out.map(|(n, _)| (*n, Ending::Timeout)));
        due.into_iter()
            .filter_map(|(number, ending)| self.end(number, ending))
            .collect()
    }

    /// When [`tick`](Self::tick) next has something to do, if nothing else happens.
    pub fn next_deadline(&self) -> Option<Instant> {
        let timeout = self.open.values().next().map(|o| o.asked + self.rules.timeout);
        let lost = self.callers.values().filter_map(|caller| {
            let first = caller.open.first()?;
            Some(self.lost_at(*first, caller.presence.leaves_at()?))
        });
        lost.chain(timeout).min()
    }

    /// Ends every call; nothing can be opened or declared after.
    pub fn close(&mut self) -> Vec<Ended<W>> {
        self.closed = true;
        let numbers: Vec<u64> = self.open.keys().copied().collect();
        let ended = numbers
            .into_iter()
            .filter_map(|n| self.end(n, Ending::Cancelled))
            .collect();
        self.callers.clear();
        ended
    }

    /// Where the log has the open requests of the callers that `matches` says, oldest first.
    pub fn open_indexes(&self, matches: impl Fn(&CallerId, &Declarer) -> bool) -> Vec<i64> {
        let callers = self.callers.iter().filter(|(id, c)| matches(id, &c.declarer));
        let numbers: BTreeSet<u64> = callers.flat_map(|(_, c)| c.open.iter().copied()).collect();
        numbers.iter().filter_map(|n| self.open.get(n)?.index).collect()
    }

    /// How many ended calls are remembered.
    #[cfg(test)]
    pub(super) fn remembered(&self) -> usize {
        self.finished.len()
    }

    /// How many calls are open.
    pub fn open_calls(&self) -> usize {
        self.open.len()
    }

    /// A call made while nobody is there waits as long for a return as one that was open before.
    fn lost_at(&self, number: u64, absent_since: Instant) -> Instant {
        let asked = self.open.get(&number).map_or(absent_since, |o| o.asked);
        absent_since.max(asked) + self.rules.grace
    }

    fn end_all_of(&mut self, caller_id: &CallerId, ending: &Ending) -> Vec<Ended<W>> {
        let open = self
            .callers
            .get(caller_id)
            .map(|c| c.open.clone())
            .unwrap_or_default();
        open.into_iter()
            .filter_map(|n| self.end(n, ending.clone()))
            .collect()
    }

    fn end(&mut self, number: u64, ending: Ending) -> Option<Ended<W>> {
        let open = self.open.remove(&number)?;
        self.numbers.remove(&open.request_id);
        if let Some(caller) = self.callers.get_mut(&open.caller_id) {
            caller.open.remove(&number);
        }
        self.forget_if_done(&open.caller_id);
        let fate = match ending {
            Ending::Answered(_) | Ending::Failed(_) => Fate::Answered,
            Ending::Timeout | Ending::Disconnected | Ending::Cancelled => Fate::Lost,
        };
        self.finished.remember(&open.request_id, open.owner, fate);
        Some(Ended {
            request_id: open.request_id,
            caller_id: open.caller_id,
            waiter: open.waiter,
            ending,
        })
    }

    /// A caller that lends nothing and waits for nothing has no claim on its id.
    fn forget_if_done(&mut self, caller_id: &CallerId) {
        if self
            .callers
            .get(caller_id)
            .is_some_and(|c| c.lent.tools.is_empty() && c.open.is_empty())
        {
            self.callers.shift_remove(caller_id);
        }
    }
}
