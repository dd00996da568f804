//! Approvals: calls that wait, or waited, for a person to allow them. A row changes only together with the session's
//! log: it is inserted with the event `approval_requested` and decided, once, with `approval_decided`
//! ([`EventLog::append_with_approval`](crate::EventLog::append_with_approval)).

use jiff::Timestamp;
use oubliette_protocol::{
    ApprovalId, Error, ProjectId, Result, SessionId, Slug,
    approval::{ApprovalDecision, ApprovalReach, ApprovalRequest, ApprovalSource, ApprovalStatus},
};
use serde_json::Value;

use super::row::{json, optional_text, optional_time, parsed, text, time, to_json};
use crate::{
    db::{DbRow, QueryBuilder, query, query_scalar},
    db_error::{WriteError, read_error},
    page::{ListPage, PageRequest, PagedList},
    store::Store,
    writer::WriteTx,
};

static LIST: PagedList<ApprovalRow, ApprovalId> = PagedList {
    name: "approvals",
    order: "approval_id DESC",
    after: "approval_id < ",
    key: |row| row.request.approval_id.clone(),
    read: approval_from_row,
};
/// Columns are named: one that a newer version adds while this one runs would change the type of a prepared statement's rows.
const SELECT_APPROVALS: &str = "SELECT session_id, project_id, agent, approval_id, tool, canonical, source, arguments, rule, expires_at, \
     status, requested_at, decided_at, decided_by, reason FROM approvals";

/// The condition of the partial index of pending approvals. SQLite uses that index only if a query contains
/// exactly this expression.
const PENDING_CONDITION: &str = "status = 'pending'";

/// An approval.
#[derive(Debug, Clone, PartialEq)]
pub struct ApprovalRow {
    /// The session whose call waits.
    pub session_id: SessionId,
    /// The session's project.
    pub project_id: ProjectId,
    /// The agent whose rules ask.
    pub agent: Slug,
    /// What it is for.
    pub request: ApprovalRequest,
    /// Its state.
    pub status: ApprovalStatus,
    /// When it was requested.
    pub requested_at: Timestamp,
    /// When it was decided or ended.
    pub decided_at: Option<Timestamp>,
    /// Who decided: a token's id, or `owner`.
    pub decided_by: Option<String>,
    /// Why.
    pub reason: Option<String>,
}

/// A change of an approval's row.
#[derive(Debug, Clone, PartialEq)]
pub enum ApprovalChange {
    /// It is requested.
    Request(Box<ApprovalRow>),
    /// It is decided, or ends undecided; `conflict` if it was decided already.
    Decide(ApprovalDecision, Option<ApprovalReach>),
    /// Pending approvals of the session are cancelled.
    CancelPending {
        /// The last one.
        upto: ApprovalId,
        /// Why.
        reason: String,
    },
}

/// Selects approvals to list. Absent fields match all.
#[derive(Debug, Clone, Default)]
pub struct ApprovalFilter {
    /// Only those of this project.
    pub project: Option<ProjectId>,
    /// Only those of this session.
    pub session: Option<SessionId>,
    /// Only those with this status.
    pub status: Option<ApprovalStatus>,
}

impl Store {
    /// One approval.
    pub async fn approval_get(&self, id: &ApprovalId) -> Result<Option<ApprovalRow>> {
        let mut query = QueryBuilder::new(SELECT_APPROVALS);
        query.push(" WHERE approval_id = ").push_bind(id.as_str());
        let row = query.build().fetch_optional(self.readers()).await;
        row.map_err(read_error)?
            .map(|row| approval_from_row(&row))
            .transpose()
    }

    /// Approvals, newest first.
    pub async fn approval_list(
        &self,
        filter: ApprovalFilter,
        page: PageRequest,
    ) -> Result<ListPage<ApprovalRow>> {
        let mut query = QueryBuilder::new(SELECT_APPROVALS);
        query.push(" WHERE 1 = 1");
        if let Some(project) = &filter.project {
            query.push(" AND project_id = ").push_bind(project.as_str());
        }
        if let Some(session) = &filter.session {
            query.push(" AND session_id = ").push_bind(session.as_str());
        }
        match filter.status {
            Some(ApprovalStatus::Pending) if filter.session.is_some() => {
                query.push(" AND ").push(PENDING_CONDITION);
            }
            Some(status) => {
                query.push(" AND status = ").push_bind(status.as_str());
            }
            None => {}
        }
        self.fetch_page(query, &LIST, &page).await
    }

    /// The ids of a session's pending approvals, oldest first, at most `limit`.
    pub async fn approvals_pending(&self, session: &SessionId, limit: u32) -> Result<Vec<ApprovalId>> {
        let mut query = QueryBuilder::new("SELECT approval_id FROM approvals WHERE session_id = ");
        query.push_bind(session.as_str());
        query.push(" AND ").push(PENDING_CONDITION);
        query.push(" ORDER BY approval_id LIMIT ").push_bind(limit);
        let ids: Vec<String> = query
            .build_query_scalar()
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        ids.iter().map(|id| id.parse().map_err(Error::internal)).collect()
    }

    /// The sessions that have pending approvals. Right after a start, their calls are gone.
    pub async fn approvals_pending_sessions(&self) -> Result<Vec<SessionId>> {
        let ids: Vec<String> = query_scalar(
            "SELECT DISTINCT session_id FROM approvals WHERE status = 'pending' ORDER BY session_id",
        )
        .fetch_all(self.readers())
        .await
        .map_err(read_error)?;
        ids.iter().map(|id| id.parse().map_err(Error::internal)).collect()
    }

    /// The rules that were allowed for all of a session, each with its agent.
    pub async fn approvals_remembered(&self, session: &SessionId) -> Result<Vec<(Slug, Value)>> {
        let rows = query(
            "SELECT DISTINCT agent, rule FROM approvals WHERE session_id = $1 AND remember IS NOT NULL",
        )
        .bind(session.as_str())
        .fetch_all(self.readers())
        .await
        .map_err(read_error)?;
        rows.iter()
            .map(|row| Ok((parsed(row, "agent")?, json(row, "rule")?)))
            .collect()
    }
}

impl ApprovalChange {
    /// Applies the change to the approvals of a session.
    pub(crate) async fn apply(&self, session: &SessionId, tx: &mut WriteTx) -> Result<(), WriteError> {
        match self {
            Self::Request(row) => insert(row, tx).await,
            Self::Decide(decision, remember) => {
                let changed = query(
                    "UPDATE approvals SET status = $2, decided_at = $3, decided_by = $4, reason = $5, remember = $6
                     WHERE approval_id = $1 AND status = 'pending'",
                )
                .bind(decision.approval_id.as_str())
                .bind(decision.decision.as_str())
                .bind(tx.now_millis())
                .bind(decision.by.as_deref())
                .bind(decision.reason.as_deref())
                .bind(remember.map(|ApprovalReach::Session| "session"))
                .execute(&mut tx.db)
                .await?;
                match changed.rows_affected() {
                    0 => Err(Error::conflict("the approval was decided already").into()),
                    _ => Ok(()),
                }
            }
            Self::CancelPending { upto, reason } => {
                query(
                    "UPDATE approvals SET status = 'cancelled', decided_at = $2, reason = $3
                     WHERE session_id = $1 AND status = 'pending' AND approval_id <= $4",
                )
                .bind(session.as_str())
                .bind(tx.now_millis())
                .bind(reason)
                .bind(upto.as_str())
                .execute(&mut tx.db)
                .await?;
                Ok(())
            }
        }
    }
}

async fn insert(row: &ApprovalRow, tx: &mut WriteTx) -> Result<(), WriteError> {
    let ApprovalRequest {
        approval_id,
        tool,
        canonical,
        source,
        arguments,
        rule,
        expires_at,
    } = &row.request;
    query(
        "INSERT INTO approvals (approval_id, session_id, project_id, agent, tool, canonical, source, arguments, rule,
                                status, requested_at, expires_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
    )
    .bind(approval_id.as_str())
    .bind(row.session_id.as_str())
    .bind(row.project_id.as_str())
    .bind(row.agent.as_str())
    .bind(tool)
    .bind(canonical)
    .bind(source.as_str())
    .bind(to_json(arguments)?)
    .bind(to_json(rule)?)
    .bind(row.status.as_str())
    .bind(row.requested_at.as_millisecond())
    .bind(expires_at.as_millisecond())
    .execute(&mut tx.db)
    .await?;
    Ok(())
}

fn approval_from_row(row: &DbRow) -> Result<ApprovalRow> {
    let source: ApprovalSource = parsed(row, "source")?;
    Ok(ApprovalRow {
        session_id: parsed(row, "session_id")?,
        project_id: parsed(row, "project_id")?,
        agent: parsed(row, "agent")?,
        request: ApprovalRequest {
            approval_id: parsed(row, "approval_id")?,
            tool: text(row, "tool")?,
            canonical: text(row, "canonical")?,
            source,
            arguments: json(row, "arguments")?,
            rule: json(row, "rule")?,
            expires_at: time(row, "expires_at")?,
        },
        status: parsed(row, "status")?,
        requested_at: time(row, "requested_at")?,
        decided_at: optional_time(row, "decided_at")?,
        decided_by: optional_text(row, "decided_by")?,
        reason: optional_text(row, "reason")?,
    })
}
