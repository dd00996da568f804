//! Budgets: what may be used in a day, and what has been.
//!
//! Days are those of UTC. What was used counts for the day on which it was used, so a clock that jumps over midnight and
//! back finds each day as it left it.

use std::collections::{BTreeMap, HashMap};

use jiff::{Timestamp, civil::Date, tz::TimeZone};
use oubliette_protocol::{
    Error, ProjectId,
    usage::{BudgetName, UsageTotals, UsdNanos},
};
use oubliette_store::ChargedSum;
use serde_json::Value;

/// Days that are remembered; others are read from the database again.
const MAX_DAYS: usize = 3;

/// What may be used in a day.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DayBudget {
    /// `tokens_per_day`: input and output tokens; none: any number.
    pub tokens: Option<u64>,
    /// `cost_usd_per_day`; none: any amount. What has no price does not count.
    pub cost_usd: Option<f64>,
}

impl DayBudget {
    /// The budget in a project's `limits`.
    pub(super) fn of_limits(limits: &Value) -> Self {
        Self {
            tokens: limits["tokens_per_day"].as_u64(),
            cost_usd: limits["cost_usd_per_day"].as_f64(),
        }
    }

    pub(super) fn is_unlimited(&self) -> bool {
        self.tokens.is_none() && self.cost_usd.is_none()
    }
}

/// `[budget]`: what the whole server may use in a day, and any agent in a turn.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ServerBudget {
    /// Of all sessions together.
    pub day: DayBudget,
    /// Tool calls an agent may make in one turn; none: any number.
    pub tool_calls_per_turn: Option<u64>,
}

/// Whose budget it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum BudgetOwner {
    Server,
    Project(ProjectId),
}

/// A budget of which nothing is left.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct UsedUpBudget {
    /// Whose it is; none for a budget of the session's own turn.
    pub(super) owner: Option<BudgetOwner>,
    pub(super) name: BudgetName,
}

/// Why a model request is refused.
#[derive(Debug)]
pub(super) struct ModelRefusal {
    /// The budget that is used up; none if the budgets could not be checked.
    pub(super) budget: Option<UsedUpBudget>,
    pub(super) error: Error,
}

impl From<Error> for ModelRefusal {
    fn from(error: Error) -> Self {
        Self { budget: None, error }
    }
}

/// What was spent on one day.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct SpentSum {
    tokens: u64,
    cost: UsdNanos,
}

/// The sums of one day.
#[derive(Debug, Default)]
struct DaySums {
    /// Whether what the database has of this day is in the sums.
    loaded: bool,
    spent: HashMap<BudgetOwner, SpentSum>,
}

/// What was spent on the last days, by owner of a budget.
#[derive(Debug, Default)]
pub(super) struct BudgetBook {
    days: BTreeMap<Date, DaySums>,
}

/// The day of a time.
pub(super) fn day_of(at: Timestamp) -> Date {
    at.to_zoned(TimeZone::UTC).date()
}

/// When a day begins, and when the next one does.
pub(super) fn bounds_of(day: Date) -> Result<(Timestamp, Timestamp), Error> {
    let begin = |day: Date| day.to_zoned(TimeZone::UTC).map(|midnight| midnight.timestamp());
    let next = day.tomorrow().and_then(begin).map_err(Error::internal)?;
    Ok((begin(day).map_err(Error::internal)?, next))
}

impl BudgetBook {
    pub(super) fn is_loaded(&self, day: Date) -> bool {
        self.days.get(&day).is_some_and(|sums| sums.loaded)
    }

    /// Begins a day: from now on its charges are counted, and [`finish_loading`](Self::finish_loading) is to add what was
    /// charged before.
    pub(super) fn begin_loading(&mut self, day: Date) {
        self.days.insert(day, DaySums::default());
        while self.days.len() > MAX_DAYS {
            // The day furthest from this one; at the front or at the back.
            let (first, last) = (
                self.days.keys().next().copied(),
                self.days.keys().next_back().copied(),
            );
            match (first, last) {
                (Some(first), Some(_)) if first != day => self.days.remove(&first),
                (_, Some(last)) => self.days.remove(&last),
                (_, None) => return,
            };
        }
    }

    /// Adds what was charged on a day before its loading began.
    pub(super) fn finish_loading(&mut self, day: Date, before: &[ChargedSum]) {
        for sum in before {
            let spent = SpentSum {
                tokens: sum.tokens,
                cost: sum.cost,
            };
            self.add(day, &sum.project_id, &sum.charged_above, spent);
        }
        if let Some(sums) = self.days.get_mut(&day) {
            sums.loaded = true;
        }
    }

    /// Forgets a day that could not be loaded.
    pub(super) fn abandon_loading(&mut self, day: Date) {
        self.days.remove(&day);
    }

    /// Charges what was used. A day that is not loaded needs no sum: it is read from the database when it is asked for.
    pub(super) fn charge(
        &mut self,
        at: Timestamp,
        project: &ProjectId,
        above: &[ProjectId],
        used: &UsageTotals,
    ) {
        let spent = SpentSum {
            tokens: used.tokens(),
            cost: used.cost_usd.unwrap_or_default(),
        };
        self.add(day_of(at), project, above, spent);
    }

    fn add(&mut self, day: Date, project: &ProjectId, above: &[ProjectId], spent: SpentSum) {
        let Some(sums) = self.days.get_mut(&day) else {
            return;
        };
        let projects = std::iter::once(project)
            .chain(above)
            .cloned()
            .map(BudgetOwner::Project);
        for owner in projects.chain([BudgetOwner::Server]) {
            let sum = sums.spent.entry(owner).or_default();
            sum.tokens = sum.tokens.saturating_add(spent.tokens);
            sum.cost += spent.cost;
        }
    }

    /// An error if nothing of a budget is left on a day: which budget, how much, and when it opens again.
    pub(super) fn check(
        &self,
        day: Date,
        owner: &BudgetOwner,
        budget: &DayBudget,
    ) -> Result<(), ModelRefusal> {
        let spent = self.days.get(&day).and_then(|sums| sums.spent.get(owner));
        let spent = spent.copied().unwrap_or_default();
        let whose = match owner {
            BudgetOwner::Server => "of the server ([budget] in oubliette.toml)".to_owned(),
            BudgetOwner::Project(id) => format!("of project {id}"),
        };
        let used_up = |name: BudgetName, used: String| {
            let setting = name.as_str();
            let opens = bounds_of(day)?.1;
            Err(ModelRefusal {
                budget: Some(UsedUpBudget {
                    owner: Some(owner.clone()),
                    name,
                }),
                error: Error::limit_exceeded(format!(
                    "the budget {setting} {whose} is used up: {used} today; it opens again at {opens}"
                )),
            })
        };
        if let Some(most) = budget.tokens.filter(|most| spent.tokens >= *most) {
            return used_up(
                BudgetName::TokensPerDay,
                format!("{} of {most} tokens", spent.tokens),
            );
        }
        if let Some(most) = budget.cost_usd.filter(|most| spent.cost.as_usd() >= *most) {
            return used_up(
                BudgetName::CostUsdPerDay,
                format!("{:.6} of {most} USD", spent.cost.as_usd()),
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(tokens: u64, usd: f64) -> UsageTotals {
        UsageTotals {
            requests: 1,
            input_tokens: tokens,
            cost_usd: Some(UsdNanos::from_usd(usd)),
            ..UsageTotals::default()
        }
    }

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn tokens(most: u64) -> DayBudget {
        DayBudget {
            tokens: Some(most),
            cost_usd: None,
        }
    }

    #[test]
    fn a_refusal_says_which_budget_how_much_and_when_it_opens() {
        let (mut book, project) = (BudgetBook::default(), ProjectId::generate());
        let now = at("2026-02-28T23:59:59Z");
        book.begin_loading(day_of(now));
        book.finish_loading(day_of(now), &[]);
        let owner = BudgetOwner::Project(project.clone());
        let check = |book: &BudgetBook, budget: &DayBudget| book.check(day_of(now), &owner, budget);
        book.charge(now, &project, &[], &used(999, 0.5));
        assert!(check(&book, &tokens(1000)).is_ok());
        book.charge(now, &project, &[], &used(500, 0.5));
        let error = check(&book, &tokens(1000)).unwrap_err().error.message;
        for part in [
            "tokens_per_day",
            project.as_str(),
            "1499 of 1000",
            "2026-03-01T00:00:00Z",
        ] {
            assert!(error.contains(part), "{error}");
        }
        let cost = DayBudget {
            tokens: None,
            cost_usd: Some(1.0),
        };
        assert!(
            check(&book, &cost)
                .unwrap_err()
                .error
                .message
                .contains("cost_usd_per_day")
        );
        assert!(
            book.check(day_of(now), &BudgetOwner::Server, &tokens(1000))
                .unwrap_err()
                .error
                .message
                .contains("[budget]")
        );
        assert!(
            check(&book, &tokens(0)).is_err(),
            "a budget of nothing is used up"
        );
    }

    #[test]
    fn each_day_has_its_own_sum_wherever_the_clock_jumps() {
        let (mut book, project) = (BudgetBook::default(), ProjectId::generate());
        let owner = BudgetOwner::Project(project.clone());
        let (today, tomorrow) = (at("2026-06-01T23:59:59.999Z"), at("2026-06-02T00:00:00Z"));
        book.begin_loading(day_of(today));
        // Charged while what the database has is being read.
        book.charge(today, &project, &[], &used(60, 0.0));
        let before = ChargedSum {
            project_id: project.clone(),
            charged_above: Vec::new(),
            tokens: 50,
            cost: UsdNanos(0),
        };
        book.finish_loading(day_of(today), &[before]);
        assert!(book.check(day_of(today), &owner, &tokens(110)).is_err());
        assert!(book.check(day_of(today), &owner, &tokens(111)).is_ok());
        assert!(!book.is_loaded(day_of(tomorrow)));
        book.begin_loading(day_of(tomorrow));
        book.finish_loading(day_of(tomorrow), &[]);
        book.charge(tomorrow, &project, &[], &used(5, 0.0));
        assert!(book.check(day_of(tomorrow), &owner, &tokens(6)).is_ok());
        // Back over midnight: as it was.
        book.charge(today, &project, &[], &used(1, 0.0));
        assert!(book.check(day_of(today), &owner, &tokens(111)).is_err());
        assert!(book.check(day_of(tomorrow), &owner, &tokens(6)).is_ok());
        // A clock that runs wild does not fill the memory.
        for day in 1..=28 {
            let day = Date::constant(2027, 1, day);
            book.begin_loading(day);
            book.finish_loading(day, &[]);
            assert!(book.is_loaded(day) && book.days.len() <= MAX_DAYS);
        }
    }

    #[test]
    fn a_session_below_another_projects_is_charged_to_both() {
        let (mut book, own, above) = (
            BudgetBook::default(),
            ProjectId::generate(),
            ProjectId::generate(),
        );
        let now = at("2026-06-01T12:00:00Z");
        book.begin_loading(day_of(now));
        let before = ChargedSum {
            project_id: own.clone(),
            charged_above: vec![above.clone()],
            tokens: 10,
            cost: UsdNanos(0),
        };
        book.finish_loading(day_of(now), &[before]);
        book.charge(now, &own, std::slice::from_ref(&above), &used(10, 0.0));
        for owner in [
            BudgetOwner::Project(own),
            BudgetOwner::Project(above),
            BudgetOwner::Server,
        ] {
            assert!(book.check(day_of(now), &owner, &tokens(20)).is_err(), "{owner:?}");
            assert!(book.check(day_of(now), &owner, &tokens(21)).is_ok(), "{owner:?}");
        }
    }
}
