//! The book against a slow, obvious model of it, over random interleavings: every call ends exactly
//! once, with its own answer or a true error.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use oubliette_protocol::{CallerId, RequestId, caller::Context};
use proptest::prelude::*;
use serde_json::json;

use super::{
    book::{Book, Declarer, Ended, Ending, Owner, Refusal, Rules},
    presence::{Departure, HoldId},
};

const RULES: Rules = Rules {
    timeout: Duration::from_secs(60),
    grace: Duration::from_secs(5),
    linger: Duration::from_secs(30),
    most_open: 1_000,
};

fn owner(n: u8) -> Owner {
    let digit = char::from(b'0' + n);
    Owner(Some(
        format!("tok_{}", digit.to_string().repeat(26)).parse().unwrap(),
    ))
}

fn caller(n: u8) -> CallerId {
    ["ant", "bee"][usize::from(n)].parse().unwrap()
}

fn declaration(n: u8, tools: &[&str]) -> oubliette_protocol::caller::Declaration {
    let tools: Vec<_> = tools.iter().map(|t| json!({ "name": t })).collect();
    let context = json!({ "caller_id": caller(n).as_str(), "caller_tools": tools });
    serde_json::from_value::<Context>(context)
        .unwrap()
        .check()
        .unwrap()
}

fn declarer(n: u8) -> Declarer {
    Declarer {
        owner: owner(n),
        mcp_session: None,
    }
}

#[derive(Debug, Clone)]
enum Step {
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

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..2u8, 0..2u8).prop_map(|(caller, owner)| Step::Declare { caller, owner }),
        1 => (0..2u8, 0..2u8).prop_map(|(caller, owner)| Step::Withdraw { caller, owner }),
        8 => (0..2u8).prop_map(|caller| Step::Call { caller }),
        6 => (0..60usize, 0..2u8, any::<bool>()).prop_map(|(call, owner, fails)| Step::Answer { call, owner, fails }),
        2 => (0..60usize).prop_map(|call| Step::Cancel { call }),
        3 => (0..2u8).prop_map(|owner| Step::Arrive { owner }),
        3 => (0..20usize, any::<bool>()).prop_map(|(hold, broken)| Step::Depart { hold, broken }),
        1 => (0..2u8).prop_map(|caller| Step::Leave { caller }),
        5 => prop_oneof![0..4_000u64, 4_900..5_100u64, 25_000..70_000u64].prop_map(|ms| Step::Wait { ms }),
    ]
}

/// A call as the model sees it.
#[derive(Debug)]
struct Call {
    id: RequestId,
    caller: u8,
    owner: u8,
    asked: Instant,
    ended: Option<Ending>,
}

/// A caller as the model sees it.
#[derive(Debug, Default)]
struct Lender {
    owner: Option<u8>,
    lends: bool,
    holds: Vec<u64>,
    until: Option<Instant>,
}

impl Lender {
    fn absent_since(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| self.holds.is_empty() && *until <= now)
    }
}

struct Model {
    book: Book<usize>,
    now: Instant,
    calls: Vec<Call>,
    lenders: [Lender; 2],
    holds: HashMap<u64, u8>,
    next_hold: u64,
}

impl Model {
    fn new() -> Self {
        Self {
            book: Book::new(RULES),
            now: Instant::now(),
            calls: Vec::new(),
            lenders: Default::default(),
            holds: HashMap::new(),
            next_hold: 0,
        }
    }

    fn open(&self) -> impl Iterator<Item = usize> {
        (0..self.calls.len()).filter(|n| self.calls[*n].ended.is_none())
    }

    /// What the book says ended must be what the model says may have ended, once.
    fn settle(&mut self, ended: Vec<Ended<usize>>, due: impl Fn(&Call) -> Vec<Ending>) {
        let told: HashMap<usize, Ending> = ended.into_iter().map(|e| (e.waiter, e.ending)).collect();
        for n in 0..self.calls.len() {
            let may = due(&self.calls[n]);
            let call = &mut self.calls[n];
            match told.get(&n) {
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
        let lender = &self.lenders[usize::from(c)];
        let open = self.open().any(|n| self.calls[n].caller == c);
        let there = lender
            .absent_since(self.now)
            .is_none_or(|since| self.now < since + RULES.grace);
        let taken = lender.owner.is_some_and(|other| other != o) && (lender.lends || open) && there;
        let changed = lender.owner.is_some_and(|other| other != o);
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
        self.settle(result.unwrap(), |call| {
            match changed && call.caller == c && call.ended.is_none() {
                true => vec![Ending::Disconnected],
                false => vec![],
            }
        });
        let open = self.open().any(|n| self.calls[n].caller == c);
        self.lenders[usize::from(c)] = match lends || open {
            true => Lender {
                owner: Some(o),
                lends,
                holds,
                until: Some(self.now + RULES.linger),
            },
            false => Lender::default(),
        };
    }

    fn call(&mut self, c: u8) {
        let id = RequestId::generate();
        let result = self
            .book
            .call(id.clone(), &caller(c), "t", self.calls.len(), self.now);
        let lender = &self.lenders[usize::from(c)];
        assert_eq!(result.is_ok(), lender.lends);
        if let (Ok(()), Some(owner)) = (result, lender.owner) {
            self.calls.push(Call {
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
            true => Ending::Failed(format!("no {n}")),
            false => Ending::Answered(json!(n)),
        };
        let result = self.book.answer(&call.id, &owner(o), ending.clone());
        let expected = match &call.ended {
            _ if call.owner != o => Err(Refusal::Foreign),
            None => Ok(()),
            Some(Ending::Answered(_) | Ending::Failed(_)) => Err(Refusal::Repeated),
            Some(_) => Err(Refusal::NotFound),
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

    /// A caller that lends nothing and waits for nothing is forgotten.
    fn forget(&mut self) {
        for c in 0..2u8 {
            if !self.lenders[usize::from(c)].lends && !self.open().any(|n| self.calls[n].caller == c) {
                self.lenders[usize::from(c)] = Lender::default();
            }
        }
    }

    fn tick(&mut self) {
        let due: Vec<Vec<Ending>> = self
            .calls
            .iter()
            .map(|call| {
                let mut may = Vec::new();
                if call.ended.is_none() && call.asked + RULES.timeout <= self.now {
                    may.push(Ending::Timeout);
                }
                let since = self.lenders[usize::from(call.caller)].absent_since(self.now);
                if call.ended.is_none() && since.is_some_and(|s| s.max(call.asked) + RULES.grace <= self.now)
                {
                    may.push(Ending::Disconnected);
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
        let ids: HashMap<RequestId, Vec<Ending>> = self.calls.iter().map(|c| c.id.clone()).zip(due).collect();
        self.settle(ended, |call| ids[&call.id].clone());
        self.forget();
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Declare { caller, owner } => self.declare(caller, owner, true),
            Step::Withdraw { caller, owner } => self.declare(caller, owner, false),
            Step::Call { caller } => self.call(caller),
            Step::Answer { call, owner, fails } => self.answer(call, owner, fails),
            Step::Cancel { call } => {
                let Some(known) = self.calls.get_mut(call) else {
                    return;
                };
                let ended = self.book.cancel(&known.id);
                assert_eq!(ended.is_some(), known.ended.is_none());
                known.ended.get_or_insert(Ending::Cancelled);
                self.forget();
            }
            Step::Arrive { owner: o } => {
                let hold = self.next_hold;
                self.next_hold += 1;
                self.holds.insert(hold, o);
                self.book
                    .arrive(HoldId(hold), |_, declarer| declarer.owner == owner(o));
                for lender in self.lenders.iter_mut().filter(|l| l.owner == Some(o)) {
                    lender.holds.push(hold);
                }
            }
            Step::Depart { hold, broken } => {
                let hold = hold as u64;
                if self.holds.remove(&hold).is_none() {
                    return;
                }
                let how = if broken {
                    Departure::BrokenOff
                } else {
                    Departure::Answered
                };
                self.book.depart(HoldId(hold), how, self.now);
                for lender in self.lenders.iter_mut().filter(|l| l.holds.contains(&hold)) {
                    lender.holds.retain(|h| *h != hold);
                    lender.until = Some(self.now + if broken { Duration::ZERO } else { RULES.linger });
                }
            }
            Step::Leave { caller: c } => {
                self.book.leave(self.now, |id, _| *id == caller(c));
                let lender = &mut self.lenders[usize::from(c)];
                lender.holds.clear();
                lender.until = lender.until.map(|_| self.now);
            }
            Step::Wait { ms } => {
                self.now += Duration::from_millis(ms);
                self.tick();
            }
        }
        for n in 0..2u8 {
            let lender = &self.lenders[usize::from(n)];
            let there = lender.owner.is_some() && lender.absent_since(self.now).is_none();
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
        let mut model = Model::new();
        for step in &steps {
            model.step(step);
        }
        model.step(&Step::Wait { ms: 61_000 });
        prop_assert_eq!(model.open().count(), 0);
        prop_assert_eq!(model.book.next_deadline(), None);
    }
}

#[test]
fn a_poll_broken_off_is_leaving_at_once_and_a_return_within_the_grace_saves_the_call() {
    let mut model = Model::new();
    for step in [
        Step::Declare { caller: 0, owner: 0 },
        Step::Arrive { owner: 0 },
        Step::Call { caller: 0 },
        Step::Depart {
            hold: 0,
            broken: true,
        },
        Step::Wait { ms: 4_000 },
        Step::Arrive { owner: 0 },
        Step::Wait { ms: 20_000 },
        Step::Answer {
            call: 0,
            owner: 0,
            fails: false,
        },
    ] {
        model.step(&step);
    }
    assert_eq!(model.calls[0].ended, Some(Ending::Answered(json!(0))));
}

#[test]
fn a_closed_book_ends_everything_and_opens_nothing() {
    let mut book: Book<u32> = Book::new(RULES);
    let now = Instant::now();
    book.declare(declarer(0), declaration(0, &["t"]), [], now)
        .unwrap();
    book.call(RequestId::generate(), &caller(0), "t", 7, now).unwrap();
    let ended = book.close();
    assert_eq!((ended[0].waiter, &ended[0].ending), (7, &Ending::Cancelled));
    assert!(book.call(RequestId::generate(), &caller(0), "t", 8, now).is_err());
    assert!(
        book.declare(declarer(0), declaration(0, &["t"]), [], now)
            .is_err()
    );
}

#[test]
fn a_million_calls_leave_nothing_behind() {
    let mut book: Book<()> = Book::new(RULES);
    let now = Instant::now();
    book.declare(declarer(0), declaration(0, &["t"]), [], now)
        .unwrap();
    for _ in 0..1_000_000 {
        let id = RequestId::generate();
        book.call(id.clone(), &caller(0), "t", (), now).unwrap();
        book.answer(&id, &owner(0), Ending::Answered(json!(1))).unwrap();
    }
    assert_eq!(book.open_calls(), 0);
    assert_eq!(book.remembered(), 256);
}
