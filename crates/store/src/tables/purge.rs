//! Deferred deletion of large logs. The events of a deleted project or session are removed in small chunks while the
//! writer is idle, so that no write waits for the deletion of a million events. What has expired is removed in
//! chunks too, each a write of its own, with other writes between them.

use jiff::Timestamp;
use oubliette_protocol::Result;

use crate::{
    db::query,
    db_error::WriteError,
    store::Store,
    writer::{StoreWrite, WriteTx},
};

/// Rows deleted per chunk.
const PURGE_ROWS: i64 = 1000;

/// Deletes one chunk of the rows of a deleted project or session. Returns whether there may be more.
pub(crate) async fn delete_chunk(tx: &mut WriteTx) -> Result<bool, WriteError> {
    if let Some(row) = query("SELECT log FROM purge_events LIMIT 1")
        .fetch_optional(&mut tx.db)
        .await?
    {
        let log: i64 = row.try_get(0)?;
        let gone = query(
            "DELETE FROM events WHERE log = $1
             AND idx IN (SELECT idx FROM events WHERE log = $1 ORDER BY idx LIMIT $2)",
        )
        .bind(log)
        .bind(PURGE_ROWS)
        .execute(&mut tx.db)
        .await?;
        if gone.rows_affected() == 0 {
            query("DELETE FROM purge_events WHERE log = $1")
                .bind(log)
                .execute(&mut tx.db)
                .await?;
        }
        return Ok(true);
    }
    let found = query("SELECT session_id FROM purge_session_debug LIMIT 1")
        .fetch_optional(&mut tx.db)
        .await?;
    if let Some(row) = found {
        let session = row.text(0)?;
        let gone = query(
            "DELETE FROM debug_events WHERE idx IN
             (SELECT idx FROM debug_events WHERE session_id = $1 ORDER BY idx LIMIT $2)",
        )
        .bind(&*session)
        .bind(PURGE_ROWS)
        .execute(&mut tx.db)
        .await?;
        if gone.rows_affected() == 0 {
            query("DELETE FROM purge_session_debug WHERE session_id = $1")
                .bind(&*session)
                .execute(&mut tx.db)
                .await?;
        }
        return Ok(true);
    }
    let found = query("SELECT project_id FROM purge_debug LIMIT 1")
        .fetch_optional(&mut tx.db)
        .await?;
    let Some(row) = found else { return Ok(false) };
    let project = row.text(0)?;
    let gone = query(
        "DELETE FROM debug_events WHERE idx IN
         (SELECT idx FROM debug_events WHERE project_id = $1 ORDER BY idx LIMIT $2)",
    )
    .bind(&*project)
    .bind(PURGE_ROWS)
    .execute(&mut tx.db)
    .await?;
    if gone.rows_affected() == 0 {
        query("DELETE FROM purge_debug WHERE project_id = $1")
            .bind(&*project)
            .execute(&mut tx.db)
            .await?;
    }
    Ok(true)
}

impl Store {
    /// Deletes debugger events recorded before a time. Returns how many there were.
    pub async fn debugger_delete_before(&self, before: Timestamp) -> Result<u64> {
        self.delete_expired(ExpiringLog::Debugger, before).await
    }

    /// Deletes audit entries written before a time. Returns how many there were.
    pub async fn audit_delete_before(&self, before: Timestamp) -> Result<u64> {
        self.delete_expired(ExpiringLog::Audit, before).await
    }

    /// Deletes usage records of before a time; the sums of sessions stay. Returns how many there were.
    pub async fn usage_delete_before(&self, before: Timestamp) -> Result<u64> {
        self.delete_expired(ExpiringLog::Usage, before).await
    }

    async fn delete_expired(&self, log: ExpiringLog, before: Timestamp) -> Result<u64> {
        let mut all = 0;
        loop {
            let gone = self.write(DeleteExpired { log, before }).await?;
            all += gone;
            if gone == 0 {
                return Ok(all);
            }
        }
    }
}

/// A log whose old rows can be deleted.
#[derive(Debug, Clone, Copy)]
enum ExpiringLog {
    Debugger,
    Audit,
    Usage,
}

/// Deletes one chunk from the beginning of a log, as far as it is older than `before`.
struct DeleteExpired {
    log: ExpiringLog,
    before: Timestamp,
}

impl StoreWrite for DeleteExpired {
    type Out = u64;

    async fn apply(&self, tx: &mut WriteTx) -> Result<u64, WriteError> {
        let before = self.before.as_millisecond();
        let delete = match self.log {
            ExpiringLog::Debugger => {
                "DELETE FROM debug_events WHERE ts < $1
                 AND idx IN (SELECT idx FROM debug_events ORDER BY idx LIMIT $2)"
            }
            ExpiringLog::Audit => {
                "DELETE FROM audit WHERE ts < $1 AND idx IN (SELECT idx FROM audit ORDER BY idx LIMIT $2)"
            }
            ExpiringLog::Usage => {
                "DELETE FROM usage WHERE usage_id IN (SELECT usage_id FROM usage WHERE ts < $1 ORDER BY ts LIMIT $2)"
            }
        };
        // The trigger that keeps the audit log from shrinking lets pass what is older than the row here.
        if matches!(self.log, ExpiringLog::Audit) {
            query("INSERT INTO audit_expiry (before) VALUES ($1)")
                .bind(before)
                .execute(&mut tx.db)
                .await?;
        }
        let gone = query(delete)
            .bind(before)
            .bind(PURGE_ROWS)
            .execute(&mut tx.db)
            .await?;
        if matches!(self.log, ExpiringLog::Audit) {
            query("DELETE FROM audit_expiry").execute(&mut tx.db).await?;
        }
        Ok(gone.rows_affected())
    }
}
