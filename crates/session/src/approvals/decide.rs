//! What people do with approvals: list and decide them. And what a server that was killed left pending.

use std::sync::Arc;

use oubliette_protocol::{
    ApprovalId, Error, ErrorCode, Principal, ProjectId, Result, SessionId,
    approval::{ApprovalDecision, ApprovalReach, ApprovalStatus},
    debug::DebugBody,
    event::EventBody,
};
use oubliette_store::{ApprovalChange, ApprovalFilter, ApprovalRow, AuditPrincipal, ListPage, PageRequest};
use oubliette_tools::DebugSink;

use super::{log_decision, undecided};
use crate::{Sessions, callers::run_to_completion, debug::SessionDebugSink, ports::no_project};

/// How many approvals of one session are cancelled in one transaction.
const CANCEL_BATCH: u32 = 1_000;

/// Which approvals to list. Absent fields match all that the principal may see.
#[derive(Debug, Clone, Default)]
pub struct ApprovalQuery {
    /// Only those of this project.
    pub project_id: Option<ProjectId>,
    /// Only those of this session.
    pub session_id: Option<SessionId>,
    /// Only those with this status.
    pub status: Option<ApprovalStatus>,
}

/// What a person chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApprovalChoice {
    /// The call may be made.
    Allow,
    /// The call is refused.
    Deny,
}

/// A person's decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApprovalVerdict {
    /// What was chosen.
    pub choice: ApprovalChoice,
    /// The reason given with the decision.
    pub reason: Option<String>,
    /// How far it reaches; `None`: this call alone.
    pub reach: Option<ApprovalReach>,
}

impl Sessions {
    /// Lists the approvals a principal may see, newest first.
    pub async fn approval_list(
        &self,
        principal: &Principal,
        query: ApprovalQuery,
        page: PageRequest,
    ) -> Result<ListPage<ApprovalRow>> {
        if let Some(project) = query.project_id.as_ref().filter(|id| !principal.sees(id)) {
            return Err(no_project(project));
        }
        if let Some(session) = &query.session_id {
            self.visible_row(principal, session).await?;
        }
        let filter = ApprovalFilter {
            project: query.project_id.or_else(|| principal.project.clone()),
            session: query.session_id,
            status: query.status,
        };
        self.deps.store.approval_list(filter, page).await
    }

    /// An approval; `not_found` when this principal may not see it.
    pub async fn approval(&self, principal: &Principal, id: &ApprovalId) -> Result<ApprovalRow> {
        let row = self.deps.store.approval_get(id).await?;
        row.filter(|row| principal.sees(&row.project_id))
            .ok_or_else(|| Error::not_found(format!("there is no approval {id}")))
    }

    /// Decides an approval. Of several who decide at once one wins; the others get `conflict`.
    pub async fn approval_decide(
        &self,
        principal: &Principal,
        id: &ApprovalId,
        verdict: ApprovalVerdict,
    ) -> Result<ApprovalRow> {
        let row = self.approval(principal, id).await?;
        check_pending(&row)?;
        let decision = ApprovalDecision {
            approval_id: id.clone(),
            decision: match verdict.choice {
                ApprovalChoice::Allow => ApprovalStatus::Allowed,
                ApprovalChoice::Deny => ApprovalStatus::Denied,
            },
            by: Some(
                AuditPrincipal::of_grant(principal.token_id.as_ref())
                    .as_str()
                    .to_owned(),
            ),
            reason: verdict.reason,
        };
        let reach = verdict.reach.filter(|_| verdict.choice == ApprovalChoice::Allow);
        let Some(me) = self.weak_self.upgrade() else {
            return Err(Error::unavailable("the server is stopping"));
        };
        let decided = row.clone();
        // To the end even if the client leaves: what is logged is also told to the call that waits.
        let logged = run_to_completion(async move {
            let ApprovalRow {
                session_id, agent, ..
            } = &decided;
            let store = &me.deps.store;
            let debug: Arc<dyn DebugSink> = SessionDebugSink::new(store.clone(), session_id.clone());
            log_decision(store, &debug, session_id, agent, decision.clone(), reach).await?;
            if let Some(live) = me.in_memory(session_id) {
                if reach.is_some() {
                    live.approvals.remember(agent, &decided.request.rule);
                }
                live.approvals.deliver(decision);
            }
            Ok::<(), Error>(())
        });
        match logged.await? {
            Err(error) if error.code == ErrorCode::Conflict => {
                check_pending(&self.approval(principal, id).await?)?;
                Err(error)
            }
            Err(error) => Err(error),
            Ok(()) => self.approval(principal, id).await,
        }
    }

    /// Cancels the approvals that a server left pending when it was killed or stopped: the calls they were for are gone.
    pub(crate) async fn cancel_left_approvals(&self, session: &SessionId) -> Result<()> {
        let reason = "the server restarted while it was pending";
        let store = &self.deps.store;
        let debug = SessionDebugSink::new(store.clone(), session.clone());
        loop {
            let ids = store.approvals_pending(session, CANCEL_BATCH).await?;
            let decision = |id: &ApprovalId| undecided(id.clone(), ApprovalStatus::Cancelled, reason);
            let Some(last) = ids.last() else { return Ok(()) };
            let bodies = ids.iter().map(|id| EventBody::ApprovalDecided(decision(id)));
            let change = ApprovalChange::CancelPending {
                upto: last.clone(),
                reason: reason.to_owned(),
            };
            store
                .events()
                .append_with_approval(session, bodies.collect(), change)
                .await?;
            for id in &ids {
                debug.record(None, DebugBody::ApprovalDecided(decision(id)));
            }
        }
    }
}
fn check_pending(row: &ApprovalRow) -> Result<()> {
    let by = match (&row.decided_by, &row.reason) {
        (Some(by), _) => format!(" by {by}"),
        (None, Some(reason)) => format!(": {reason}"),
        (None, None) => String::new(),
    };
    match row.status {
        ApprovalStatus::Pending => Ok(()),
        status => Err(Error::conflict(format!(
            "approval {} is decided already: {}{by}",
            row.request.approval_id,
            status.as_str()
        ))),
    }
}
