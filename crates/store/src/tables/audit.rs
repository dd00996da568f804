//! Who did what. The audit log only grows: the database itself refuses to change or delete an entry,
//! and an entry survives a power cut.

use jiff::Timestamp;
use oubliette_protocol::{ProjectId, Result, SessionId, TokenId};
use serde_json::Value;
use sqlx::{QueryBuilder, Sqlite, sqlite::SqliteRow};

use super::row::{maybe, maybe_json, maybe_text, number, text, time, to_json};
use crate::{
    fault::{Fault, read_error},
    page::{Page, Paged},
    store::Store,
    writer::{Counter, Survives, Tx, Write, batch},
};

const LIST: &str = "audit";

/// Something that was done, or refused.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditEntry {
    /// Who; none: the home's owner.
    pub token_id: Option<TokenId>,
    /// From inside this session.
    pub session_id: Option<SessionId>,
    /// In this project.
    pub project_id: Option<ProjectId>,
    /// What.
    pub action: String,
    /// To what.
    pub target: Option<String>,
    /// `ok`, or the code of the error.
    pub outcome: String,
    /// More of it, without secrets.
    pub detail: Option<Value>,
}

/// An entry with its place.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditRow {
    /// Its place in the log.
    pub index: i64,
    /// When it was written.
    pub ts: Timestamp,
    /// What it says.
    pub entry: AuditEntry,
}

/// Which entries to list.
#[derive(Debug, Clone, Default)]
pub struct AuditFilter {
    /// In this project.
    pub project: Option<ProjectId>,
    /// By this token.
    pub token: Option<TokenId>,
    /// From inside this session.
    pub session: Option<SessionId>,
    /// Of this action.
    pub action: Option<String>,
    /// With this outcome.
    pub outcome: Option<String>,
}

impl Store {
    /// Adds an entry. Gives its index.
    pub async fn audit_append(&self, entry: AuditEntry) -> Result<i64> {
        self.write(Append(vec![entry])).await
    }

    /// Adds entries, all or none. Gives the first one's index.
    pub async fn audit_append_all(&self, entries: Vec<AuditEntry>) -> Result<i64> {
        self.write(Append(entries)).await
    }

    /// Entries, newest first.
    pub async fn audit_list(&self, filter: AuditFilter, page: Page) -> Result<Paged<AuditRow>> {
        let (limit, after) = (page.rows()?, page.after::<i64>(LIST)?);
        let mut query = QueryBuilder::<Sqlite>::new("SELECT * FROM audit WHERE 1 = 1");
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
        if let Some(after) = after {
            query.push(" AND idx < ").push_bind(after);
        }
        query
            .push(" ORDER BY idx DESC LIMIT ")
            .push_bind(limit as i64 + 1);
        let rows = query
            .build()
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        let entries = rows.iter().map(entry).collect::<Result<Vec<_>>>()?;
        Ok(Paged::cut(entries, limit, LIST, |row| row.index.to_string()))
    }
}

fn entry(row: &SqliteRow) -> Result<AuditRow> {
    Ok(AuditRow {
        index: number(row, "idx")?,
        ts: time(row, "ts")?,
        entry: AuditEntry {
            token_id: maybe(row, "token_id")?,
            session_id: maybe(row, "session_id")?,
            project_id: maybe(row, "project_id")?,
            action: text(row, "action")?,
            target: maybe_text(row, "target")?,
            outcome: text(row, "outcome")?,
            detail: maybe_json(row, "detail")?,
        },
    })
}

struct Append(Vec<AuditEntry>);

impl Write for Append {
    type Out = i64;
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut Tx) -> Result<i64, Fault> {
        let (entries, now) = (&self.0, tx.millis());
        let first = tx.next(Counter::Audit, entries.len()).await?;
        let details = entries
            .iter()
            .map(|entry| entry.detail.as_ref().map(to_json).transpose());
        let details = details.collect::<Result<Vec<_>, _>>()?;
        let rows: Vec<_> = entries.iter().zip(details).zip(first..).collect();
        batch::AUDIT
            .rows(&mut tx.db, &rows, |query, ((entry, detail), index)| {
                query
                    .bind(*index)
                    .bind(now)
                    .bind(entry.token_id.as_ref().map(TokenId::as_str))
                    .bind(entry.session_id.as_ref().map(SessionId::as_str))
                    .bind(entry.project_id.as_ref().map(ProjectId::as_str))
                    .bind(entry.action.as_str())
                    .bind(entry.target.as_deref())
                    .bind(entry.outcome.as_str())
                    .bind(detail.as_deref())
            })
            .await?;
        Ok(first)
    }
}
