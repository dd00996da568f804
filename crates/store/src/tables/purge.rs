//! What a deleted project leaves behind is taken away in small pieces, while the writer has nothing
//! else to do: nobody waits for a log of a million events to go. So are debugger events past their time.

use jiff::Timestamp;
use oubliette_protocol::Result as Answer;
use sqlx::Row;

use crate::{
    fault::Fault,
    store::Store,
    writer::{Tx, Write},
};

/// Rows of one piece.
const PIECE: i64 = 1000;

/// Takes away one piece. Says whether there may be more.
pub(crate) async fn some(tx: &mut Tx) -> Result<bool, Fault> {
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
        .bind(PIECE)
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
    .bind(PIECE)
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
    /// Takes away the debugger's events from before a time, and says how many they were.
    pub async fn debugger_forget(&self, before: Timestamp) -> Answer<u64> {
        let mut all = 0;
        loop {
            let gone = self.write(Forget { before }).await?;
            all += gone;
            if gone == 0 {
                return Ok(all);
            }
        }
    }
}

/// A piece of the log's beginning, as far as it is old.
struct Forget {
    before: Timestamp,
}

impl Write for Forget {
    type Out = u64;

    async fn apply(&self, tx: &mut Tx) -> Result<u64, Fault> {
        let gone = sqlx::query(
            "DELETE FROM debug_events WHERE ts < $1
             AND idx IN (SELECT idx FROM debug_events ORDER BY idx LIMIT $2)",
        )
        .bind(self.before.as_millisecond())
        .bind(PIECE)
        .execute(&mut tx.db)
        .await?;
        Ok(gone.rows_affected())
    }
}
