//! The audit log: who did what. It is append-only: triggers in the database refuse to change or delete an entry.
//! An entry survives a power cut; that of a frequent action a moment after it is written.

use jiff::Timestamp;
use oubliette_protocol::{Error, ProjectId, Result, SessionId, TokenId};
use serde_json::Value;
use tokio::sync::oneshot;

use super::row::{number, optional_json, optional_parsed, optional_text, text, time, to_json};
use crate::{
    db::{DbRow, QueryBuilder},
    page::{ListPage, PageRequest, PagedList},
    store::Store,
    writer::{AuditJob, Survives, WriterTask},
};

static LIST: PagedList<AuditRow, i64> = PagedList {
    name: "audit",
    order: "idx DESC",
    after: "idx < ",
    key: |row| row.index,
    read: audit_from_row,
};
/// Columns are named: one that a newer version adds while this one runs would change the type of a prepared statement's rows.
const SELECT_AUDIT: &str =
    "SELECT idx, ts, token_id, session_id, project_id, action, target, outcome, detail FROM audit";

/// How [`AuditPrincipal::Anonymous`] is stored, in the place of a token's id.
const ANONYMOUS: &str = "anonymous";

/// Who performed an action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AuditPrincipal {
    /// The owner of the home directory, who needs no token.
    Owner,
    /// A token.
    Token(TokenId),
    /// Somebody whose token, or connection, was refused.
    Anonymous,
}

impl AuditPrincipal {
    /// The principal of a grant: its token, or the owner if it has none.
    pub fn of_grant(token: Option<&TokenId>) -> Self {
        token.map_or(Self::Owner, |token| Self::Token(token.clone()))
    }

    /// The token's id, if it is a token.
    pub fn token_id(&self) -> Option<&TokenId> {
        match self {
            Self::Token(token) => Some(token),
            Self::Owner | Self::Anonymous => None,
        }
    }

    /// The token's id, `owner` or `anonymous`.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Owner => "owner",
            Self::Token(token) => token.as_str(),
            Self::Anonymous => ANONYMOUS,
        }
    }
}

/// One action that was performed or refused.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditEntry {
    /// Who performed it.
    pub principal: AuditPrincipal,
    /// The session it was performed from, if from inside one.
    pub session_id: Option<SessionId>,
    /// The project it concerns, if one.
    pub project_id: Option<ProjectId>,
    /// Name of the action.
    pub action: String,
    /// Id or name of what it was performed on.
    pub target: Option<String>,
    /// `ok`, or the error code.
    pub outcome: String,
    /// Further details, without secrets.
    pub detail: Option<Value>,
}

/// A stored entry.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditRow {
    /// Its index in the log.
    pub index: i64,
    /// When it was written.
    pub ts: Timestamp,
    /// The entry.
    pub entry: AuditEntry,
}

/// Selects entries to list. Absent fields match all.
#[derive(Debug, Clone, Default)]
pub struct AuditFilter {
    /// Only entries of this project.
    pub project: Option<ProjectId>,
    /// Only entries by this token.
    pub token: Option<TokenId>,
    /// Only entries from inside this session.
    pub session: Option<SessionId>,
    /// Only entries of this action.
    pub action: Option<String>,
    /// Only entries with this outcome.
    pub outcome: Option<String>,
}

impl Store {
    /// Appends an entry. Returns its index. It survives a power cut when this returns.
    pub async fn audit_append(&self, entry: AuditEntry) -> Result<i64> {
        self.append_audit(vec![entry], Survives::PowerCut).await
    }

    /// Appends entries in one transaction. Returns the first one's index.
    pub async fn audit_append_all(&self, entries: Vec<AuditEntry>) -> Result<i64> {
        self.append_audit(entries, Survives::PowerCut).await
    }

    /// Appends the entry of a frequent action. It survives a kill of the server when this returns, and a power cut
    /// a fifth of a second later: waiting for the disk would cost more than the action. Everything this task has sent
    /// to be written before is written when this returns.
    pub async fn audit_append_soon(&self, entry: AuditEntry) -> Result<i64> {
        self.append_audit(vec![entry], Survives::Crash).await
    }

    async fn append_audit(&self, entries: Vec<AuditEntry>, survives: Survives) -> Result<i64> {
        let entries = entries.into_iter().map(|entry| {
            let detail = entry.detail.as_ref().map(to_json).transpose()?;
            Ok((entry, detail))
        });
        let (reply, answer) = oneshot::channel();
        let job = AuditJob {
            entries: entries.collect::<Result<_>>()?,
            survives,
            reply,
        };
        self.writer().send(WriterTask::Audit(job)).await?;
        answer
            .await
            .map_err(|_| Error::unavailable("the database was closed before the entry was written"))?
    }

    /// Entries, newest first.
    pub async fn audit_list(&self, filter: AuditFilter, page: PageRequest) -> Result<ListPage<AuditRow>> {
        let mut query = QueryBuilder::new(SELECT_AUDIT);
        query.push(" WHERE 1 = 1");
        for (column, value) in [
            (
                " AND project_id = ",
                filter.project.as_ref().map(ProjectId::as_str),
            ),
            (" AND token_id = ", filter.token.as_ref().map(TokenId::as_str)),
            (
                " AND session_id = ",
                filter.session.as_ref().map(SessionId::as_str),
            ),
            (" AND action = ", filter.action.as_deref()),
            (" AND outcome = ", filter.outcome.as_deref()),
        ] {
            if let Some(value) = value {
                query.push(column).push_bind(value);
            }
        }
        self.fetch_page(query, &LIST, &page).await
    }
}

fn audit_from_row(row: &DbRow) -> Result<AuditRow> {
    let principal = match optional_text(row, "token_id")?.as_deref() {
        // Only a token can log in: older versions stored a refused login without one.
        None if text(row, "action")? == "login" => AuditPrincipal::Anonymous,
        None => AuditPrincipal::Owner,
        Some(ANONYMOUS) => AuditPrincipal::Anonymous,
        Some(token) => AuditPrincipal::Token(token.parse()?),
    };
    Ok(AuditRow {
        index: number(row, "idx")?,
        ts: time(row, "ts")?,
        entry: AuditEntry {
            principal,
            session_id: optional_parsed(row, "session_id")?,
            project_id: optional_parsed(row, "project_id")?,
            action: text(row, "action")?,
            target: optional_text(row, "target")?,
            outcome: text(row, "outcome")?,
            detail: optional_json(row, "detail")?,
        },
    })
}
