//! Deferred deletion of large logs. The events of a deleted project are removed in small chunks while the
//! writer is idle, so that no write waits for the deletion of a million events. Expired debugger events are
//! removed in chunks too, each a write of its own.

use jiff::Timestamp;
use oubliette_protocol::Result;
use sqlx::Row;

use crate::{
    db_error::WriteError,
    store::Store,
    writer::{StoreWrite, WriteTx},
};

/// Rows deleted per chunk.
const PURGE_ROWS: i64 = 1000;

/// Deletes one chunk of a deleted project's rows. Returns whether there may be more.
pub(crate) async fn delete_chunk(tx: &mut WriteTx) -> Result<bool, WriteError> {
    if let Some(row) = sqlx::query("SELECT log FROM purge_events LIMIT 1")
        .fetch_optional(&mut tx.db)
        .await?
    {
        let log: i64 = row.try_get(0)?;
        let gone = sqlx::query(
            "DELETE FROM events WHERE log = $1
             AND idx IN (SELECT idx FROM events WHERE log = $1 ORDER BY idx LIMIT $2)",
        )
        .bind(log)
        .bind(PURGE_ROWS)
        .execute(&mut tx.db)
        .await?;
        if gone.rows_affected() == 0 {
            sqlx::query("DELETE FROM purge_events WHERE log = $1")
                .bind(log)
                .execute(&mut tx.db)
                .await?;
        }
        return Ok(true);
    }
    let found = sqlx::query("SELECT project_id FROM purge_debug LIMIT 1")
        .fetch_optional(&mut tx.db)
        .await?;
    let Some(row) = found else { return Ok(false) };
    let project: &str = row.try_get(0)?;
    let gone = sqlx::query(
        "DELETE FROM debug_events WHERE idx IN
         (SELECT idx FROM debug_events WHERE project_id = $1 ORDER BY idx LIMIT $2)",
    )
    .bind(project)
    .bind(PURGE_ROWS)
    .execute(&mut tx.db)
    .await?;
    if gone.rows_affected() == 0 {
        sqlx::query("DELETE FROM purge_debug WHERE project_id = $1")
            .bind(project)
            .execute(&mut tx.db)
            .await?;
    }
    Ok(true)
}

impl Store {
    /// Deletes debugger events recorded before a time. Returns how many there were.
    pub async fn debugger_delete_before(&self, before: Timestamp) -> Result<u64> {
        let mut all = 0;
        loop {
            let gone = self.write(DeleteOldDebugEvents { before }).await?;
            all += gone;
            if gone == 0 {
                return Ok(all);
            }
        }
    }
}

/// Deletes one chunk from the beginning of the debugger's log, as far as it is older than `before`.
struct DeleteOldDebugEvents {
    before: Timestamp,
}

impl StoreWrite for DeleteOldDebugEvents {
    type Out = u64;

    async fn apply(&self, tx: &mut WriteTx) -> Result<u64, WriteError> {
        let gone = sqlx::query(
            "DELETE FROM debug_events WHERE ts < $1
             AND idx IN (SELECT idx FROM debug_events ORDER BY idx LIMIT $2)",
        )
        .bind(self.before.as_millisecond())
        .bind(PURGE_ROWS)
        .execute(&mut tx.db)
        .await?;
        Ok(gone.rows_affected())
    }
}
