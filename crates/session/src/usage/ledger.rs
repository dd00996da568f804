//! [`UsageLedger`]: charges what sessions use at once, in memory, and writes it to the database.

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use jiff::Timestamp;
use oubliette_protocol::{Error, ProjectId, Result, usage::UsageTotals};
use oubliette_store::{Store, UsageRecord};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::{LiveConfig, SessionConfig};

use super::{
    DayBudget, SessionMeter,
    budget::{BudgetBook, BudgetOwner, ModelRefusal, bounds_of, day_of},
};

/// Records that may wait to be written. Beyond it no model is asked: what could not be recorded must not be used.
const MAX_PENDING: usize = 10_000;
/// How long tool calls gather before their number is written.
const CALLS_WAIT: Duration = Duration::from_secs(1);
/// How old sums may be that other servers of a cluster add to.
const SHARED_SUMS_AGE: Duration = Duration::from_secs(1);
/// How long to wait before a failed write is repeated.
const WRITE_RETRY: Duration = Duration::from_millis(500);

/// What all sessions use.
pub struct UsageLedger {
    store: Store,
    /// `[prices]` and `[budget]` are read of it.
    config: LiveConfig,
    /// The time; a function so that tests can set it.
    clock: fn() -> Timestamp,
    state: Mutex<LedgerState>,
    /// Held while records are written, so that each is written by one and in order.
    writing: tokio::sync::Mutex<()>,
    signals: Arc<LedgerSignals>,
}

/// What wakes the task that writes.
#[derive(Default)]
struct LedgerSignals {
    /// Records wait to be written.
    records_pending: Notify,
    /// Tool calls were counted that are in no record yet.
    calls_pending: Notify,
    /// The ledger is gone.
    dropped: CancellationToken,
}

impl Drop for UsageLedger {
    fn drop(&mut self) {
        self.signals.dropped.cancel();
    }
}

#[derive(Default)]
struct LedgerState {
    pending: Vec<UsageRecord>,
    book: BudgetBook,
    /// When the database was last asked for the sums of a day.
    loaded_at: Option<Instant>,
    meters: Vec<Weak<SessionMeter>>,
    providers: BTreeMap<String, UsageTotals>,
}

/// What was used of one provider since the server started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderUsage {
    /// The provider's name.
    pub provider: String,
    /// Requests, tokens and cost.
    pub totals: UsageTotals,
}

impl UsageLedger {
    /// A ledger on this database.
    pub(crate) fn new(store: Store, config: LiveConfig) -> Arc<Self> {
        Self::with_clock(store, config, oubliette_protocol::now)
    }

    fn with_clock(store: Store, config: LiveConfig, clock: fn() -> Timestamp) -> Arc<Self> {
        Arc::new(Self {
            store,
            config,
            clock,
            state: Mutex::default(),
            writing: tokio::sync::Mutex::default(),
            signals: Arc::default(),
        })
    }

    /// The configuration as it is now.
    pub(super) fn config(&self) -> Arc<SessionConfig> {
        self.config.load()
    }

    pub(super) fn now(&self) -> Timestamp {
        (self.clock)()
    }

    /// Counts a session's tool calls from now on, as long as its meter lives.
    pub(super) fn add_meter(&self, meter: &Arc<SessionMeter>) {
        let mut state = self.state.lock();
        state.meters.retain(|meter| meter.strong_count() > 0);
        state.meters.push(Arc::downgrade(meter));
    }

    pub(super) fn notify_calls(&self) {
        self.signals.calls_pending.notify_one();
    }

    /// Charges what was used. It counts for budgets from now on and is written soon.
    pub(super) fn charge(&self, provider: Option<&str>, record: UsageRecord) {
        let mut state = self.state.lock();
        state.book.charge(
            record.ts,
            &record.project_id,
            &record.charged_above,
            &record.totals,
        );
        if let Some(provider) = provider {
            *state.providers.entry(provider.to_owned()).or_default() += &record.totals;
        }
        state.pending.push(record);
        drop(state);
        self.signals.records_pending.notify_one();
    }

    /// Checks that something is left of the server's budget and of these projects', today. Requests that are under way
    /// count when they end, so what is spent beyond a budget is at most those.
    pub(super) async fn check(&self, projects: &[(ProjectId, DayBudget)]) -> Result<(), ModelRefusal> {
        if self.state.lock().pending.len() >= MAX_PENDING {
            let unwritten = "what was used cannot be written to the database; no model is asked until it can";
            return Err(Error::unavailable(unwritten).into());
        }
        let config = self.config();
        let server = (&BudgetOwner::Server, &config.budget.day);
        let owners: Vec<_> = projects
            .iter()
            .map(|(project, budget)| (BudgetOwner::Project(project.clone()), budget))
            .collect();
        let limited: Vec<_> = owners
            .iter()
            .map(|(owner, budget)| (owner, *budget))
            .chain([server])
            .filter(|(_, budget)| !budget.is_unlimited())
            .collect();
        if limited.is_empty() {
            return Ok(());
        }
        let today = day_of(self.now());
        if !self.is_current(&self.state.lock(), today) {
            self.load_day(today).await?;
        }
        let state = self.state.lock();
        limited
            .into_iter()
            .try_for_each(|(owner, budget)| state.book.check(today, owner, budget))
    }

    /// Whether a day's sums are known. In a cluster other servers charge too, so they are read again after a second.
    fn is_current(&self, state: &LedgerState, day: jiff::civil::Date) -> bool {
        let is_fresh = self.store.cluster().is_none()
            || state.loaded_at.is_some_and(|at| at.elapsed() < SHARED_SUMS_AGE);
        state.book.is_loaded(day) && is_fresh
    }

    /// Adds up what the database has of a day. Nothing else is written meanwhile: what is charged before this begins is in
    /// the database when it is read, and what is charged after it is not, so each is counted once.
    async fn load_day(&self, day: jiff::civil::Date) -> Result<()> {
        let _writing = self.writing.lock().await;
        let pending = {
            let mut state = self.state.lock();
            if self.is_current(&state, day) {
                return Ok(());
            }
            if state.book.is_loaded(day) {
                // What other servers have charged since is in the database alone.
                state.book.abandon_loading(day);
            }
            state.book.begin_loading(day);
            state.loaded_at = Some(Instant::now());
            state.pending.clone()
        };
        let load = async {
            self.write(pending).await?;
            let (from, before) = bounds_of(day)?;
            self.store.usage_charged(from, before).await
        };
        let loaded = load.await;
        let mut state = self.state.lock();
        match loaded {
            Ok(sums) => {
                state.book.finish_loading(day, &sums);
                Ok(())
            }
            Err(error) => {
                state.book.abandon_loading(day);
                Err(error)
            }
        }
    }

    /// Writes everything charged so far. It is durable when this returns.
    pub(crate) async fn flush(&self) -> Result<()> {
        let _writing = self.writing.lock().await;
        let pending = self.state.lock().pending.clone();
        self.write(pending).await
    }

    /// Writes the oldest of the pending records; `writing` is held.
    async fn write(&self, records: Vec<UsageRecord>) -> Result<()> {
        let count = records.len();
        self.store.usage_append(records).await?;
        self.state.lock().pending.drain(..count);
        Ok(())
    }

    /// Counts all tool calls made so far and writes everything.
    pub async fn settle(&self) -> Result<()> {
        let meters = self.state.lock().meters.clone();
        for meter in meters.iter().filter_map(Weak::upgrade) {
            meter.charge_calls().await?;
        }
        self.flush().await
    }

    /// What was used since the server started, by provider.
    pub fn by_provider(&self) -> Vec<ProviderUsage> {
        let state = self.state.lock();
        let usage = |(provider, totals): (&String, &UsageTotals)| ProviderUsage {
            provider: provider.clone(),
            totals: *totals,
        };
        state.providers.iter().map(usage).collect()
    }
}

/// Writes what is charged, until the server stops or the ledger is dropped.
pub(crate) fn write_pending(
    ledger: &Arc<UsageLedger>,
    stopping: CancellationToken,
) -> impl Future<Output = ()> + use<> {
    let (signals, ledger) = (ledger.signals.clone(), Arc::downgrade(ledger));
    async move {
        loop {
            tokio::select! {
                () = stopping.cancelled() => return,
                () = signals.dropped.cancelled() => return,
                () = signals.records_pending.notified() => {}
                () = async {
                    signals.calls_pending.notified().await;
                    tokio::time::sleep(CALLS_WAIT).await;
                } => {}
            }
            // Held only while it writes, so that this task alone keeps no database open.
            while let Some(ledger) = ledger.upgrade()
                && let Err(error) = ledger.settle().await
            {
                tracing::warn!(error = %error.for_log(), "writing what sessions used failed; tried again");
                drop(ledger);
                tokio::select! {
                    () = stopping.cancelled() => return,
                    () = tokio::time::sleep(WRITE_RETRY) => {}
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
