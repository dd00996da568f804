//! Property test of the caller book against a slow and obvious model, over random interleavings: every call
//! ends exactly once, with its own answer or the right error.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use oubliette_protocol::{CallerId, RequestId, caller::CallerContext};
use proptest::prelude::*;
use serde_json::json;

use super::{
    answer_refusal::AnswerRefusal,
    book::{CallEnding, CallerBook, DeclarationOrigin, EndedCall, PrincipalId, RelayLimits},
    presence::{HoldEnd, HoldId},
};

const LIMITS: RelayLimits = RelayLimits {
    call_timeout: Duration::from_secs(60),
    reconnect_grace: Duration::from_secs(5),
    linger: Duration::from_secs(30),
    max_open_calls: 1_000,
};

fn owner(n: u8) -> PrincipalId {
    let digit = char::from(b'0' + n);
    PrincipalId(Some(
        format!("tok_{}", digit.to_string().repeat(26)).parse().unwrap(),
    ))
}

fn caller(n: u8) -> CallerId {
    ["ant", "bee"][usize::from(n)].parse().unwrap()
}

fn declaration(n: u8, tools: &[&str]) -> oubliette_protocol::caller::CallerDeclaration {
    let tools: Vec<_> = tools.iter().map(|t| json!({ "name": t })).collect();
    let context = json!({ "caller_id": caller(n).as_str(), "caller_tools": tools });
    serde_json::from_value::<CallerContext>(context)
        .unwrap()
        .check()
        .unwrap()
}

fn declarer(n: u8) -> DeclarationOrigin {
    DeclarationOrigin {
        principal: owner(n),
        mcp_session: None,
    }
}

#[derive(Debug, Clone)]
enum ModelStep {
    Declare { caller: u8, owner: u8 },
    Withdraw { caller: u8, owner: u8 },
    Call { caller: u8 },
    Answer { call: usize, owner: u8, fails: bool },
    Cancel { call: usize },
    Arrive { owner: u8 },
    Depart { hold: usize, broken: bool },
    Leave { caller: u8 },
    Wait { ms: u64 },
}

fn step() -> impl Strategy<Value = ModelStep> {
    prop_oneof![
        3 => (0..2u8, 0..2u8).prop_map(|(caller, owner)| ModelStep::Declare { caller, owner }),
        1 => (0..2u8, 0..2u8).prop_map(|(caller, owner)| ModelStep::Withdraw { caller, owner }),
        8 => (0..2u8).prop_map(|caller| ModelStep::Call { caller }),
        6 => (0..60usize, 0..2u8, any::<bool>()).prop_map(|(call, owner, fails)| ModelStep::Answer { call, owner, fails }),
        2 => (0..60usize).prop_map(|call| ModelStep::Cancel { call }),
        3 => (0..2u8).prop_map(|owner| ModelStep::Arrive { owner }),
        3 => (0..20usize, any::<bool>()).prop_map(|(hold, broken)| ModelStep::Depart { hold, broken }),
        1 => (0..2u8).prop_map(|caller| ModelStep::Leave { caller }),
        5 => prop_oneof![0..4_000u64, 4_900..5_100u64, 25_000..70_000u64].prop_map(|ms| ModelStep::Wait { ms }),
    ]
}

/// A call as the model sees it.
#[derive(Debug)]
struct ModelCall {
    id: RequestId,
    caller: u8,
    owner: u8,
    asked: Instant,
    ended: Option<CallEnding>,
}

/// A caller as the model sees it.
#[derive(Debug, Default)]
struct ModelCaller {
    owner: Option<u8>,
    lends: bool,
    holds: Vec<u64>,
    until: Option<Instant>,
}

impl ModelCaller {
    fn absent_since(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| self.holds.is_empty() && *until <= now)
    }
}

struct BookModel {
    book: CallerBook<usize>,
    now: Instant,
    calls: Vec<ModelCall>,
    callers: [ModelCaller; 2],
    holds: HashMap<u64, u8>,
    next_hold: u64,
}

impl BookModel {
    fn new() -> Self {
        Self {
            book: CallerBook::new(LIMITS),
            now: Instant::now(),
            calls: Vec::new(),
            callers: Default::default(),
            holds: HashMap::new(),
            next_hold: 0,
        }
    }

    fn open(&self) -> impl Iterator<Item = usize> {
        (0..self.calls.len()).filter(|n| self.calls[*n].ended.is_none())
    }

    /// Checks that the calls the book ended are those the model allows to end, and that none ends twice.
    fn check_ended(&mut self, ended: Vec<EndedCall<usize>>, due: impl Fn(&ModelCall) -> Vec<CallEnding>) {
        let ended: HashMap<usize, CallEnding> = ended.into_iter().map(|e| (e.waiter, e.ending)).collect();
        for n in 0..self.calls.len() {
            let may = due(&self.calls[n]);
            let call = &mut self.calls[n];
            match ended.get(&n) {
                None => assert!(
                    call.ended.is_some() || may.is_empty(),
                    "{call:?} should have ended: {may:?}"
                ),
                Some(ending) => {
                    assert!(call.ended.is_none(), "{call:?} ended twice");
                    assert!(may.contains(ending), "{call:?} ended as {ending:?}, not {may:?}");
                    call.ended = Some(ending.clone());
                }
            }
        }
    }

    fn declare(&mut self, c: u8, o: u8, lends: bool) {
        let model = &self.callers[usize::from(c)];
        let open = self.open().any(|n| self.calls[n].caller == c);
        let there = model
            .absent_since(self.now)
            .is_none_or(|since| self.now < since + LIMITS.reconnect_grace);
        let taken = model.owner.is_some_and(|other| other != o) && (model.lends || open) && there;
        let changed = model.owner.is_some_and(|other| other != o);
        let mut holds: Vec<u64> = self
            .holds
            .iter()
            .filter(|(_, owner)| **owner == o)
            .map(|(h, _)| *h)
            .collect();
        holds.sort_unstable();
        let tools: &[&str] = if lends { &["t"] } else { &[] };
        let result = self.book.declare(
            declarer(o),
            declaration(c, tools),
            holds.iter().map(|h| HoldId(*h)),
            self.now,
        );
        if taken {
            assert_eq!(result.unwrap_err().code, oubliette_protocol::ErrorCode::Conflict);
            return;
        }
        self.check_ended(result.unwrap(), |call| {
            match changed && call.caller == c && call.ended.is_none() {
                true => vec![CallEnding::Disconnected],
                false => vec![],
            }
        });
        let open = self.open().any(|n| self.calls[n].caller == c);
        self.callers[usize::from(c)] = match lends || open {
            true => ModelCaller {
                owner: Some(o),
                lends,
                holds,
                until: Some(self.now + LIMITS.linger),
            },
            false => ModelCaller::default(),
        };
    }

    fn call(&mut self, c: u8) {
        let id = RequestId::generate();
        let result = self
            .book
            .open_call(id.clone(), &caller(c), "t", self.calls.len(), self.now);
        let model = &self.callers[usize::from(c)];
        assert_eq!(result.is_ok(), model.lends);
        if let (Ok(()), Some(owner)) = (result, model.owner) {
            self.calls.push(ModelCall {
                id,
                caller: c,
                owner,
                asked: self.now,
                ended: None,
            });
        }
    }

    fn answer(&mut self, n: usize, o: u8, fails: bool) {
        let Some(call) = self.calls.get(n) else { return };
        let ending = match fails {
            true => CallEnding::Failed(format!("no {n}")),
            false => CallEnding::Answered(json!(n)),
        };
        let result = self.book.answer(&call.id, &owner(o), ending.clone());
        let expected = match &call.ended {
            _ if call.owner != o => Err(AnswerRefusal::OtherPrincipal),
            None => Ok(()),
            Some(CallEnding::Answered(_) | CallEnding::Failed(_)) => Err(AnswerRefusal::AlreadyAnswered),
            Some(_) => Err(AnswerRefusal::NotFound),
        };
        match (result, expected) {
            (Ok(ended), Ok(())) => {
                assert_eq!(
                    (ended.waiter, &ended.ending),
                    (n, &ending),
                    "somebody else's answer"
                );
                self.calls[n].ended = Some(ending);
            }
            (Err(refusal), Err(expected)) => assert_eq!(refusal, expected),
            (result, expected) => panic!("{result:?}, not {expected:?}"),
        }
        self.forget();
    }

    /// Forgets callers that lend nothing and have no open calls, as the book does.
    fn forget(&mut self) {
        for c in 0..2u8 {
            if !self.callers[usize::from(c)].lends && !self.open().any(|n| self.calls[n].caller == c) {
                self.callers[usize::from(c)] = ModelCaller::default();
            }
        }
    }

    fn tick(&mut self) {
        let due: Vec<Vec<CallEnding>> = self
            .calls
            .iter()
            .map(|call| {
                let mut may = Vec::new();
                if call.ended.is_none() && call.asked + LIMITS.call_timeout <= self.now {
                    may.push(CallEnding::Timeout);
                }
                let since = self.callers[usize::from(call.caller)].absent_since(self.now);
                if call.ended.is_none()
                    && since.is_some_and(|s| s.max(call.asked) + LIMITS.reconnect_grace <= self.now)
                {
                    may.push(CallEnding::Disconnected);
                }
                may
            })
            .collect();
        let quiet = self.book.next_deadline().is_none_or(|at| at > self.now);
        let ended = self.book.tick(self.now);
        assert!(
            !quiet || ended.is_empty(),
            "something was due before the deadline the book gave"
        );
        let ids: HashMap<RequestId, Vec<CallEnding>> =
            self.calls.iter().map(|c| c.id.clone()).zip(due).collect();
        self.check_ended(ended, |call| ids[&call.id].clone());
        self.forget();
    }

    fn step(&mut self, step: &ModelStep) {
        match *step {
            ModelStep::Declare { caller, owner } => self.declare(caller, owner, true),
            ModelStep::Withdraw { caller, owner } => self.declare(caller, owner, false),
            ModelStep::Call { caller } => self.call(caller),
            ModelStep::Answer { call, owner, fails } => self.answer(call, owner, fails),
            ModelStep::Cancel { call } => {
                let Some(known) = self.calls.get_mut(call) else {
                    return;
                };
                let ended = self.book.cancel(&known.id);
                assert_eq!(ended.is_some(), known.ended.is_none());
                known.ended.get_or_insert(CallEnding::Cancelled);
                self.forget();
            }
            ModelStep::Arrive { owner: o } => {
                let hold = self.next_hold;
                self.next_hold += 1;
                self.holds.insert(hold, o);
                self.book
                    .add_hold(HoldId(hold), |_, declarer| declarer.principal == owner(o));
                for model in self.callers.iter_mut().filter(|l| l.owner == Some(o)) {
                    model.holds.push(hold);
                }
            }
            ModelStep::Depart { hold, broken } => {
                let hold = hold as u64;
                if self.holds.remove(&hold).is_none() {
                    return;
                }
                let how = if broken {
                    HoldEnd::Aborted
                } else {
                    HoldEnd::Answered
                };
                self.book.end_hold(HoldId(hold), how, self.now);
                for model in self.callers.iter_mut().filter(|l| l.holds.contains(&hold)) {
                    model.holds.retain(|h| *h != hold);
                    model.until = Some(self.now + if broken { Duration::ZERO } else { LIMITS.linger });
                }
            }
            ModelStep::Leave { caller: c } => {
                self.book.mark_left(self.now, |id, _| *id == caller(c));
                let model = &mut self.callers[usize::from(c)];
                model.holds.clear();
                model.until = model.until.map(|_| self.now);
            }
            ModelStep::Wait { ms } => {
                self.now += Duration::from_millis(ms);
                self.tick();
            }
        }
        for n in 0..2u8 {
            let model = &self.callers[usize::from(n)];
            let there = model.owner.is_some() && model.absent_since(self.now).is_none();
            assert_eq!(self.book.is_present(&caller(n), self.now), there);
        }
        assert_eq!(self.book.open_calls(), self.open().count());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn every_call_ends_exactly_once_with_its_own_answer_or_a_true_error(
        steps in proptest::collection::vec(step(), 1..80)
    ) {
        let mut model = BookModel::new();
        for step in &steps {
            model.step(step);
        }
        model.step(&ModelStep::Wait { ms: 61_000 });
        prop_assert_eq!(model.open().count(), 0);
        prop_assert_eq!(model.book.next_deadline(), None);
    }
}

#[test]
fn an_aborted_poll_makes_the_caller_absent_and_a_reconnect_within_the_grace_keeps_the_call() {
    let mut model = BookModel::new();
    for step in [
        ModelStep::Declare { caller: 0, owner: 0 },
        ModelStep::Arrive { owner: 0 },
        ModelStep::Call { caller: 0 },
        ModelStep::Depart {
            hold: 0,
            broken: true,
        },
        ModelStep::Wait { ms: 4_000 },
        ModelStep::Arrive { owner: 0 },
        ModelStep::Wait { ms: 20_000 },
        ModelStep::Answer {
            call: 0,
            owner: 0,
            fails: false,
        },
    ] {
        model.step(&step);
    }
    assert_eq!(model.calls[0].ended, Some(CallEnding::Answered(json!(0))));
}

#[test]
fn closing_the_book_ends_every_call_and_refuses_new_ones() {
    let mut book: CallerBook<u32> = CallerBook::new(LIMITS);
    let now = Instant::now();
    book.declare(declarer(0), declaration(0, &["t"]), [], now)
        .unwrap();
    book.open_call(RequestId::generate(), &caller(0), "t", 7, now)
        .unwrap();
    let ended = book.close();
    assert_eq!((ended[0].waiter, &ended[0].ending), (7, &CallEnding::Cancelled));
    assert!(
        book.open_call(RequestId::generate(), &caller(0), "t", 8, now)
            .is_err()
    );
    assert!(
        book.declare(declarer(0), declaration(0, &["t"]), [], now)
            .is_err()
    );
}

#[test]
fn a_million_calls_leave_nothing_behind() {
    let mut book: CallerBook<()> = CallerBook::new(LIMITS);
    let now = Instant::now();
    book.declare(declarer(0), declaration(0, &["t"]), [], now)
        .unwrap();
    for _ in 0..1_000_000 {
        let id = RequestId::generate();
        book.open_call(id.clone(), &caller(0), "t", (), now).unwrap();
        book.answer(&id, &owner(0), CallEnding::Answered(json!(1)))
            .unwrap();
    }
    assert_eq!(book.open_calls(), 0);
    assert_eq!(book.remembered(), 256);
}
