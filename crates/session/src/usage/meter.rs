//! [`SessionMeter`]: what one session uses. It decides about the session's model requests and tool calls, and tells whoever
//! follows the session when a budget is used up.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use oubliette_egress::{ModelRequest, ModelSink};
use oubliette_protocol::{
    Error, ErrorCode, ProjectId, Result, SessionId, Slug, TokenId,
    debug::DebugBody,
    event::EventBody,
    usage::{BudgetName, UsageTotals},
};
use oubliette_store::{SessionRow, Store, UsageRecord};
use oubliette_tools::{CallMeter, CallOrigin, DebugSink};
use parking_lot::Mutex;
use tokio::sync::{OnceCell, watch};

use super::{
    DayBudget, UsageLedger,
    budget::{ModelRefusal, UsedUpBudget},
};

/// How long the end of a turn waits for what is [unfinished](SessionMeter::unfinished).
const UNFINISHED_WAIT: Duration = Duration::from_secs(1);
/// How many requests of a turn are refused for good, one after the other, before the turn is cancelled: some agents ask
/// again for ever.
const MAX_REFUSED: u32 = 5;

/// How many models a turn is counted for: an agent may make up names.
const MAX_TURN_MODELS: usize = 64;

/// What one session uses.
pub(crate) struct SessionMeter {
    ledger: Arc<UsageLedger>,
    store: Store,
    session: SessionId,
    runtime: tokio::runtime::Handle,
    /// The agent that runs.
    agent: Mutex<Slug>,
    account: OnceCell<SessionAccount>,
    /// Model requests under way, which belong in the turn's sum, and refusals of tool calls that are being logged, which come
    /// before the turn's end.
    unfinished: watch::Sender<usize>,
    turn: Mutex<TurnUsage>,
    /// The error for which the turn is to be cancelled.
    exhausted: watch::Sender<Option<Error>>,
    /// Tool calls of the agent that are in no record yet. They are the last model's, so they are taken only while `turn` is
    /// locked.
    agent_calls: AtomicU64,
    /// Tool calls from outside that are in no record yet.
    outside_calls: AtomicU64,
    /// Tool calls the agent began in this turn, those that a person denied included.
    turn_calls: AtomicU64,
    /// `tool_calls_per_turn`; the largest number: any.
    max_turn_calls: AtomicU64,
}

/// Who is charged.
struct SessionAccount {
    project: ProjectId,
    /// The other projects of the sessions above.
    above: Vec<ProjectId>,
    token: Option<TokenId>,
}

/// What was used since the last turn ended.
#[derive(Default)]
struct TurnUsage {
    totals: UsageTotals,
    /// The models that answered, at most [`MAX_TURN_MODELS`]; `provider/model`.
    models: Vec<String>,
    /// The one that answered last: the agent's tool calls are its.
    last_model: Option<String>,
    /// Requests that were refused for good since a model last answered.
    refused: u32,
    /// The last refusal for a budget.
    refusal: Option<Error>,
    /// The budgets whose refusals are in the session's log.
    reported: HashSet<UsedUpBudget>,
}

impl SessionMeter {
    pub(crate) fn new(ledger: Arc<UsageLedger>, store: Store, row: &SessionRow) -> Arc<Self> {
        let meter = Arc::new(Self {
            ledger,
            store,
            session: row.session_id.clone(),
            runtime: tokio::runtime::Handle::current(),
            agent: Mutex::new(row.agent.clone()),
            account: OnceCell::new(),
            unfinished: watch::Sender::new(0),
            turn: Mutex::default(),
            exhausted: watch::Sender::new(None),
            agent_calls: AtomicU64::new(0),
            outside_calls: AtomicU64::new(0),
            turn_calls: AtomicU64::new(0),
            max_turn_calls: AtomicU64::new(u64::MAX),
        });
        meter.ledger.add_meter(&meter);
        meter
    }

    /// Sets the agent that runs from now on.
    pub(crate) fn set_agent(&self, agent: &Slug) {
        *self.agent.lock() = agent.clone();
    }

    /// Who is charged for this session: its project and those of the sessions above it, so that an agent that starts
    /// another in a project of its own making spends its own budget.
    async fn account(&self) -> Result<&SessionAccount> {
        let find = async || {
            let mut ancestry = self.store.session_ancestry(&self.session).await?.into_iter();
            let own = ancestry
                .next()
                .ok_or_else(|| Error::not_found("the session does not exist any more"))?;
            let mut account = SessionAccount {
                project: own.project_id,
                above: Vec::new(),
                token: own.created_by,
            };
            for row in ancestry {
                if row.project_id != account.project && !account.above.contains(&row.project_id) {
                    account.above.push(row.project_id);
                }
                account.token = row.created_by;
            }
            Ok::<_, Error>(account)
        };
        self.account.get_or_try_init(find).await
    }

    /// The `limits` of the session's project and of those above it.
    async fn project_limits(&self) -> Result<Vec<(ProjectId, serde_json::Value)>> {
        let account = self.account().await?;
        let mut limits = Vec::with_capacity(1 + account.above.len());
        for id in std::iter::once(&account.project).chain(&account.above) {
            // One that was deleted has no budget left to hold to.
            if let Some(project) = self.store.project_get(id).await? {
                limits.push((id.clone(), project.limits));
            }
        }
        Ok(limits)
    }

    /// Begins a turn: reads how many tool calls it may have.
    pub(crate) async fn begin_turn(&self) -> Result<()> {
        let limits = self.project_limits().await?;
        let of_projects = limits
            .iter()
            .filter_map(|(_, limits)| limits["tool_calls_per_turn"].as_u64());
        let most = of_projects
            .chain(self.ledger.config().budget.tool_calls_per_turn)
            .min();
        self.max_turn_calls
            .store(most.unwrap_or(u64::MAX), Ordering::Relaxed);
        self.turn_calls.store(0, Ordering::Relaxed);
        let mut turn = self.turn.lock();
        (turn.refused, turn.refusal) = (0, None);
        turn.reported.clear();
        drop(turn);
        self.exhausted.send_replace(None);
        Ok(())
    }

    /// Ends a turn: waits a moment for its last model requests, charges its calls, and returns what was used since the last
    /// turn ended. [`flush`](Self::flush) makes it durable.
    pub(crate) async fn end_turn(&self) -> Result<UsageTotals> {
        let mut unfinished = self.unfinished.subscribe();
        let _ = tokio::time::timeout(UNFINISHED_WAIT, unfinished.wait_for(|count| *count == 0)).await;
        let account = self.account().await?;
        let mut turn = self.turn.lock();
        let used = std::mem::take(&mut turn.totals);
        let (models, last_model) = (std::mem::take(&mut turn.models), turn.last_model.take());
        let calls = self.agent_calls.swap(0, Ordering::Relaxed);
        drop(turn);
        for model in models
            .into_iter()
            .filter(|model| Some(model) != last_model.as_ref())
        {
            let answered = UsageRecord {
                model_turns: 1,
                ..self.record(account, Some(model))
            };
            self.ledger.charge(None, answered);
        }
        let ended = UsageRecord {
            tool_calls: calls,
            turns: 1,
            model_turns: u64::from(last_model.is_some()),
            ..self.record(account, last_model)
        };
        self.ledger.charge(None, ended);
        self.charge_outside_calls(account);
        Ok(used)
    }

    /// Makes everything charged so far durable.
    pub(crate) async fn flush(&self) -> Result<()> {
        self.ledger.flush().await
    }

    /// Charges the tool calls that are in no record yet.
    pub(super) async fn charge_calls(&self) -> Result<()> {
        let counts = [&self.agent_calls, &self.outside_calls];
        if counts.iter().all(|count| count.load(Ordering::Relaxed) == 0) {
            return Ok(());
        }
        let account = match self.account().await {
            // The session was deleted with its project.
            Err(error) if error.code == ErrorCode::NotFound => return Ok(()),
            account => account?,
        };
        self.charge_agent_calls(account, &self.turn.lock());
        self.charge_outside_calls(account);
        Ok(())
    }

    /// Charges the agent's tool calls so far to the model that answered last.
    fn charge_agent_calls(&self, account: &SessionAccount, turn: &TurnUsage) {
        let calls = self.agent_calls.swap(0, Ordering::Relaxed);
        self.charge_call_count(account, turn.last_model.clone(), calls);
    }

    /// Charges the tool calls from outside, which no model made.
    fn charge_outside_calls(&self, account: &SessionAccount) {
        let calls = self.outside_calls.swap(0, Ordering::Relaxed);
        self.charge_call_count(account, None, calls);
    }

    fn charge_call_count(&self, account: &SessionAccount, model: Option<String>, tool_calls: u64) {
        if tool_calls > 0 {
            let called = UsageRecord {
                tool_calls,
                ..self.record(account, model)
            };
            self.ledger.charge(None, called);
        }
    }

    /// Notes that a model has answered: the tool calls from now on are its. So are those before the turn's first answer,
    /// because an agent may call a tool while the answer is still being streamed.
    fn note_answer(&self, account: &SessionAccount, model: &str) {
        let mut turn = self.turn.lock();
        turn.refused = 0;
        if turn.last_model.as_deref() == Some(model) {
            return;
        }
        if turn.last_model.is_some() {
            self.charge_agent_calls(account, &turn);
        }
        turn.last_model = Some(model.to_owned());
        if turn.models.len() < MAX_TURN_MODELS && !turn.models.iter().any(|known| known == model) {
            turn.models.push(model.to_owned());
        }
    }

    /// Why a model request of this turn was refused, if one was.
    pub(crate) fn refusal(&self) -> Option<Error> {
        self.turn.lock().refusal.clone()
    }

    /// Returns once so many requests of the turn were refused that it is to be cancelled.
    pub(crate) async fn exhausted(&self) -> Error {
        let mut exhausted = self.exhausted.subscribe();
        loop {
            if let Some(error) = exhausted.borrow_and_update().clone() {
                return error;
            }
            if exhausted.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// A record of nothing, to be filled in.
    fn record(&self, account: &SessionAccount, model: Option<String>) -> UsageRecord {
        UsageRecord {
            usage_id: uuid::Uuid::new_v4().simple().to_string(),
            ts: self.ledger.now(),
            session_id: self.session.clone(),
            project_id: account.project.clone(),
            charged_above: account.above.clone(),
            agent: self.agent.lock().clone(),
            token_id: account.token.clone(),
            model,
            totals: UsageTotals::default(),
            tool_calls: 0,
            turns: 0,
            model_turns: 0,
        }
    }

    /// Says in the session's log that a budget refused a model request, once for each budget and turn.
    async fn note_used_up(&self, budget: UsedUpBudget, error: &Error) {
        let name = budget.name;
        let is_new = {
            let mut turn = self.turn.lock();
            turn.refusal = Some(error.clone());
            turn.reported.insert(budget)
        };
        if is_new {
            self.log_error(Some(name), error).await;
        }
    }

    /// Counts a model request that was refused for good, and has the turn cancelled when there were too many.
    async fn count_refused(&self, error: &Error) -> u32 {
        let (refused, is_unsaid) = {
            let mut turn = self.turn.lock();
            turn.refused += 1;
            // A used up budget is in the log since its first refusal.
            (turn.refused, turn.refusal.is_none())
        };
        if refused == MAX_REFUSED && is_unsaid {
            self.log_error(None, error).await;
        }
        if refused >= MAX_REFUSED {
            self.exhausted.send_replace(Some(error.clone()));
        }
        refused
    }

    fn begin_unfinished(&self) {
        self.unfinished.send_modify(|count| *count += 1);
    }

    fn end_unfinished(&self) {
        self.unfinished
            .send_modify(|count| *count = count.saturating_sub(1));
    }

    async fn log_error(&self, budget: Option<BudgetName>, error: &Error) {
        let event = EventBody::Error {
            code: error.code,
            message: error.message.clone(),
            skipped_turn: None,
            budget,
        };
        if let Err(failed) = self.store.events().append(&self.session, vec![event]).await {
            tracing::warn!(session = %self.session, error = %failed.for_log(), "logging refused model requests or tool calls failed");
        }
    }
}

impl CallMeter for SessionMeter {
    fn reserve_call(self: Arc<Self>, origin: &CallOrigin) -> Result<()> {
        if matches!(origin, CallOrigin::Inside { .. }) {
            let most = self.max_turn_calls.load(Ordering::Relaxed);
            if self.turn_calls.fetch_add(1, Ordering::Relaxed) >= most {
                let calls = if most == 1 { "call" } else { "calls" };
                let name = BudgetName::ToolCallsPerTurn;
                let error = Error::limit_exceeded(format!(
                    "the budget {} is used up: {most} {calls} in this turn; it opens again with the next turn",
                    name.as_str()
                ));
                let budget = UsedUpBudget { owner: None, name };
                if self.turn.lock().reported.insert(budget) {
                    let (meter, error) = (self.clone(), error.clone());
                    self.begin_unfinished();
                    self.runtime.spawn(async move {
                        meter.log_error(Some(name), &error).await;
                        meter.end_unfinished();
                    });
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn count_call(&self, origin: &CallOrigin) {
        let counted = match origin {
            CallOrigin::Inside { .. } => &self.agent_calls,
            CallOrigin::Outside(_) => &self.outside_calls,
        };
        if counted.fetch_add(1, Ordering::Relaxed) == 0 {
            self.ledger.notify_calls();
        }
    }
}

/// Decides about the model requests of one agent, charges them and records them as debugger events.
pub(crate) struct SessionModelSink {
    pub(crate) meter: Arc<SessionMeter>,
    pub(crate) debug: Arc<dyn DebugSink>,
    pub(crate) agent: Slug,
}

#[async_trait]
impl ModelSink for SessionModelSink {
    async fn admit(&self) -> Result<()> {
        let meter = &self.meter;
        let limits = meter.project_limits().await?;
        let budgets: Vec<_> = limits
            .into_iter()
            .map(|(project, limits)| (project, DayBudget::of_limits(&limits)))
            .collect();
        if let Err(ModelRefusal { budget, error }) = meter.ledger.check(&budgets).await {
            if let Some(budget) = budget {
                meter.note_used_up(budget, &error).await;
            }
            return Err(error);
        }
        meter.begin_unfinished();
        Ok(())
    }

    async fn count_refused(&self, error: &Error) -> u32 {
        self.meter.count_refused(error).await
    }

    fn model_request(&self, request: ModelRequest) {
        let (meter, mut usage) = (&self.meter, request.usage);
        if let Some(usage) = &mut usage {
            usage.cost_usd = meter.ledger.config().prices.cost(&request.provider, usage);
            let totals = UsageTotals::from(&*usage);
            // `admit` has found it.
            if let Some(account) = meter.account.get() {
                let model = format!("{}/{}", request.provider, usage.model);
                if (200..300).contains(&request.status) {
                    meter.note_answer(account, &model);
                }
                let record = UsageRecord {
                    agent: self.agent.clone(),
                    totals,
                    ..meter.record(account, Some(model))
                };
                meter.ledger.charge(Some(&request.provider), record);
                meter.turn.lock().totals += &totals;
            }
        }
        self.debug.record(
            Some(&self.agent),
            DebugBody::ModelRequest {
                provider: request.provider,
                path: request.path,
                status: request.status,
                duration_ms: request.duration.as_secs_f64() * 1e3,
                started: Some(request.started),
                usage,
            },
        );
        // Last: whoever waits for it reads what was charged.
        if request.admitted {
            meter.end_unfinished();
        }
    }
}

#[cfg(test)]
#[path = "meter_tests.rs"]
mod tests;
