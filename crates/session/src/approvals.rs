//! Approvals: calls of a session that wait for a person to allow them.
//!
//! An approval is a row in the database and two events in the session's log. Whoever decides first wins, because the row
//! is changed only while it is pending. What waits in memory is a channel for each call: no thread, no lock. The files
//! beside this one: `decide` (a person's decision, the list, and what a restart left over).

mod decide;

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Weak},
    time::Duration,
};

use async_trait::async_trait;
use oubliette_protocol::{
    ApprovalId, Error, ErrorCode, ProjectId, Result, SessionId, Slug,
    approval::{ApprovalDecision, ApprovalReach, ApprovalRequest, ApprovalStatus},
    debug::DebugBody,
    event::EventBody,
    relay::ProgressReport,
};
use oubliette_store::{ApprovalChange, ApprovalRow, Store};
use oubliette_tools::{Approver, CallContext, CallToApprove, DebugSink};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::{sync::oneshot, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::callers::run_to_completion;

pub use self::decide::{ApprovalChoice, ApprovalQuery, ApprovalVerdict};

/// Maximum number of pending approvals of one session.
const MAX_PENDING: usize = 10_000;
/// How often a waiting call reports progress. An agent must hear of it at least every 15 s.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// The approvals of one session in memory.
pub(crate) struct SessionApprovals {
    weak_self: Weak<Self>,
    session: SessionId,
    project: ProjectId,
    store: Store,
    debug: Arc<dyn DebugSink>,
    timeout: Duration,
    state: Mutex<ApprovalState>,
}

#[derive(Default)]
struct ApprovalState {
    waiting: HashMap<ApprovalId, WaitingCall>,
    /// Whether the server stops: nobody is asked any more.
    closed: bool,
    /// Rules that were allowed for all of the session; `None` until they are read from the database.
    remembered: Option<HashSet<(Slug, String)>>,
}

/// A call that waits for a decision.
struct WaitingCall {
    agent: Slug,
    decided: oneshot::Sender<ApprovalDecision>,
}

impl SessionApprovals {
    pub(crate) fn new(
        session: SessionId,
        project: ProjectId,
        store: Store,
        debug: Arc<dyn DebugSink>,
        timeout: Duration,
    ) -> Arc<Self> {
        Arc::new_cyclic(|weak_self| Self {
            weak_self: weak_self.clone(),
            session,
            project,
            store,
            debug,
            timeout,
            state: Mutex::default(),
        })
    }

    /// Cancels every approval that waits, for this reason, and refuses further ones: an agent that is told that its call was
    /// cancelled may make the next one.
    pub(crate) async fn close(&self, reason: &str) {
        self.state.lock().closed = true;
        self.cancel_all(reason).await;
    }

    /// Cancels every approval that waits, for this reason.
    pub(crate) async fn cancel_all(&self, reason: &str) {
        let waiting = |(id, call): (&ApprovalId, &WaitingCall)| (id.clone(), call.agent.clone());
        let waiting: Vec<(ApprovalId, Slug)> = self.state.lock().waiting.iter().map(waiting).collect();
        let cancelled = waiting.into_iter().map(|(id, agent)| async move {
            let decision = undecided(id, ApprovalStatus::Cancelled, reason);
            self.end(&agent, decision).await;
        });
        futures::future::join_all(cancelled).await;
    }

    /// Asks a person and waits for the decision. `None`: all of these rules were allowed for the whole session.
    pub(crate) async fn ask(
        &self,
        call: CallToApprove,
        cancel: &CancellationToken,
        report: impl Fn(ProgressReport),
    ) -> Result<Option<ApprovalDecision>> {
        self.load_remembered().await?;
        let Some(rule) = self.first_not_remembered(&call) else {
            return Ok(None);
        };
        let now = oubliette_store::now();
        let expires_at = now.checked_add(self.timeout).map_err(Error::internal)?;
        let request = ApprovalRequest {
            approval_id: ApprovalId::generate(),
            tool: call.tool,
            canonical: call.canonical,
            source: call.source,
            arguments: call.arguments,
            rule,
            expires_at,
        };
        let (waiting, decided) = self.register(&call.agent, &request.approval_id)?;
        self.request(&call.agent, request, now).await?;
        let decision = self.wait(&waiting, decided, cancel, report).await;
        decision.map(Some)
    }

    fn register(
        &self,
        agent: &Slug,
        id: &ApprovalId,
    ) -> Result<(WaitingApproval, oneshot::Receiver<ApprovalDecision>)> {
        let (sender, decided) = oneshot::channel();
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::unavailable(
                "the server is stopping: nobody is asked for approval",
            ));
        }
        if state.waiting.len() >= MAX_PENDING {
            return Err(Error::limit_exceeded(format!(
                "{MAX_PENDING} calls of this session wait for approval already; decide some of them"
            )));
        }
        let call = WaitingCall {
            agent: agent.clone(),
            decided: sender,
        };
        state.waiting.insert(id.clone(), call);
        let waiting = WaitingApproval {
            approvals: self.weak_self.clone(),
            id: id.clone(),
            agent: agent.clone(),
        };
        Ok((waiting, decided))
    }

    /// Stores the request and logs it, to the end even if the call is given up meanwhile. Then it is cancelled here: when
    /// the call was given up there was nothing to cancel yet.
    async fn request(&self, agent: &Slug, request: ApprovalRequest, now: jiff::Timestamp) -> Result<()> {
        let row = ApprovalRow {
            session_id: self.session.clone(),
            project_id: self.project.clone(),
            agent: agent.clone(),
            request: request.clone(),
            status: ApprovalStatus::Pending,
            requested_at: now,
            decided_at: None,
            decided_by: None,
            reason: None,
        };
        let Some(me) = self.weak_self.upgrade() else {
            return Err(Error::unavailable("the session is over"));
        };
        let agent = agent.clone();
        let logged = run_to_completion(async move {
            let id = request.approval_id.clone();
            let events = vec![EventBody::ApprovalRequested(request.clone())];
            let change = ApprovalChange::Request(Box::new(row));
            let log = me.store.events();
            log.append_with_approval(&me.session, events, change).await?;
            me.debug
                .record(Some(&agent), DebugBody::ApprovalRequested(request));
            if !me.state.lock().waiting.contains_key(&id) {
                me.end(&agent, left(id)).await;
            }
            Ok(())
        });
        logged.await?
    }

    async fn wait(
        &self,
        waiting: &WaitingApproval,
        mut decided: oneshot::Receiver<ApprovalDecision>,
        cancel: &CancellationToken,
        report: impl Fn(ProgressReport),
    ) -> Result<ApprovalDecision> {
        let id = &waiting.id;
        let deadline = Instant::now() + self.timeout;
        let mut reported = 0_u32;
        let (status, reason) = loop {
            reported = reported.saturating_add(1);
            report(ProgressReport {
                progress: f64::from(reported),
                total: None,
                message: Some(format!("waiting for approval {id}")),
            });
            tokio::select! {
                biased;
                decision = &mut decided => return decision.map_err(Error::internal),
                () = cancel.cancelled() => break (ApprovalStatus::Cancelled, "the call was cancelled"),
                () = tokio::time::sleep_until(deadline.min(Instant::now() + PROGRESS_INTERVAL)) => {}
            }
            if Instant::now() >= deadline {
                break (ApprovalStatus::Expired, "nobody decided in time");
            }
        };
        self.end(&waiting.agent, undecided(id.clone(), status, reason))
            .await;
        // Whoever decided at the same moment may have won; then that decision is the one in the log.
        match decided.try_recv() {
            Ok(decision) => Ok(decision),
            Err(_) => self.decision_of(id).await,
        }
    }

    /// Ends an approval that nobody decided, and tells who waits. Does nothing if it was decided.
    async fn end(&self, agent: &Slug, decision: ApprovalDecision) {
        let (session, id) = (&self.session, &decision.approval_id);
        match log_decision(&self.store, &self.debug, session, agent, decision.clone(), None).await {
            Ok(()) => self.deliver(decision),
            // Decided at the same moment, or never stored.
            Err(error) if error.code == ErrorCode::Conflict => {}
            Err(error) => {
                tracing::error!(%session, approval = %id, error = %error.for_log(), "ending an approval failed");
                self.deliver(decision);
            }
        }
    }

    /// Gives a decision to the call that waits for it.
    pub(crate) fn deliver(&self, decision: ApprovalDecision) {
        let waiting = self.state.lock().waiting.remove(&decision.approval_id);
        if let Some(call) = waiting {
            // The call may have been given up.
            let _ = call.decided.send(decision);
        }
    }

    /// The decision of an approval that is not pending.
    async fn decision_of(&self, id: &ApprovalId) -> Result<ApprovalDecision> {
        let row = self.store.approval_get(id).await?;
        let row = row.ok_or_else(|| Error::unavailable(format!("approval {id} is gone")))?;
        Ok(ApprovalDecision {
            approval_id: id.clone(),
            decision: row.status,
            by: row.decided_by,
            reason: row.reason,
        })
    }

    /// Lets later calls pass that meet this rule.
    pub(crate) fn remember(&self, agent: &Slug, rule: &Value) {
        if let Some(remembered) = &mut self.state.lock().remembered {
            remembered.insert((agent.clone(), rule.to_string()));
        }
    }

    async fn load_remembered(&self) -> Result<()> {
        if self.state.lock().remembered.is_some() {
            return Ok(());
        }
        let stored = self.store.approvals_remembered(&self.session).await?;
        let stored = stored.into_iter().map(|(agent, rule)| (agent, rule.to_string()));
        self.state
            .lock()
            .remembered
            .get_or_insert_with(|| stored.collect());
        Ok(())
    }

    fn first_not_remembered(&self, call: &CallToApprove) -> Option<Value> {
        let state = self.state.lock();
        let remembered = state.remembered.as_ref();
        call.rules
            .iter()
            .find(|rule| !remembered.is_some_and(|r| r.contains(&(call.agent.clone(), rule.to_string()))))
            .cloned()
    }
}

/// Changes an approval's row, logs the decision and records it in the debugger, to the end even if the caller's future is
/// dropped. `conflict` if it was decided already.
async fn log_decision(
    store: &Store,
    debug: &Arc<dyn DebugSink>,
    session: &SessionId,
    agent: &Slug,
    decision: ApprovalDecision,
    reach: Option<ApprovalReach>,
) -> Result<()> {
    let (store, debug) = (store.clone(), debug.clone());
    let (session, agent) = (session.clone(), agent.clone());
    let logged = run_to_completion(async move {
        let change = ApprovalChange::Decide(decision.clone(), reach);
        let events = vec![EventBody::ApprovalDecided(decision.clone())];
        let log = store.events();
        log.append_with_approval(&session, events, change).await?;
        debug.record(Some(&agent), DebugBody::ApprovalDecided(decision));
        Ok(())
    });
    logged.await?
}

/// The end of an approval that nobody decided.
fn undecided(approval_id: ApprovalId, decision: ApprovalStatus, reason: &str) -> ApprovalDecision {
    ApprovalDecision {
        approval_id,
        decision,
        by: None,
        reason: Some(reason.to_owned()),
    }
}

/// The end of an approval whose call was given up without being cancelled.
fn left(id: ApprovalId) -> ApprovalDecision {
    undecided(id, ApprovalStatus::Cancelled, "whoever made the call has left")
}

/// A registered call. If the future that waits is dropped, its approval is cancelled.
struct WaitingApproval {
    approvals: Weak<SessionApprovals>,
    id: ApprovalId,
    agent: Slug,
}

impl Drop for WaitingApproval {
    fn drop(&mut self) {
        let Some(approvals) = self.approvals.upgrade() else {
            return;
        };
        if approvals.state.lock().waiting.remove(&self.id).is_none() {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (agent, decision) = (self.agent.clone(), left(self.id.clone()));
            runtime.spawn(async move { approvals.end(&agent, decision).await });
        }
    }
}

#[async_trait]
impl Approver for SessionApprovals {
    async fn approve(&self, call: CallToApprove, ctx: &CallContext) -> Result<()> {
        let what = format!("agent {} may not call {}", call.agent, call.tool);
        let report = |report| {
            if let Some(progress) = &ctx.progress {
                progress(report);
            }
        };
        match self.ask(call, &ctx.cancel, report).await? {
            None => Ok(()),
            Some(decision) => check_allowed(&what, decision),
        }
    }
}

/// The error for a call that was not allowed.
fn check_allowed(what: &str, decision: ApprovalDecision) -> Result<()> {
    let why = |standard: &str| match decision.reason.as_deref() {
        Some(reason) if !reason.is_empty() => format!("{what}: {standard}: {reason}"),
        _ => format!("{what}: {standard}"),
    };
    match decision.decision {
        ApprovalStatus::Allowed => Ok(()),
        ApprovalStatus::Denied => Err(Error::not_allowed(why("a person denied it"))),
        ApprovalStatus::Expired => Err(Error::timeout(why("its approval has expired"))),
        ApprovalStatus::Cancelled => Err(Error::unavailable(why("its approval was cancelled"))),
        ApprovalStatus::Pending => Err(Error::unavailable(why("its approval is not decided"))),
    }
}
