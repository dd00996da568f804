//! Multi-row `INSERT` statements. A statement with many rows costs little more than one with one row, so rows
//! are inserted in the largest of a few fixed batch sizes: few enough that all statements stay prepared.

use std::sync::LazyLock;

use sqlx::{Sqlite, SqliteConnection, query::Query, sqlite::SqliteArguments};

use crate::db_error::WriteError;

type BoundQuery = Query<'static, Sqlite, SqliteArguments>;

/// Possible numbers of rows of one statement, largest first.
const BATCH_ROWS: [usize; 4] = [256, 64, 8, 1];

/// The `INSERT` statements of one table, one for each of [`BATCH_ROWS`].
pub(crate) struct BatchInsert([String; BATCH_ROWS.len()]);

/// Whether this many rows are inserted by a single statement.
pub(super) fn is_single_statement(rows: usize) -> bool {
    BATCH_ROWS.contains(&rows)
}

impl BatchInsert {
    fn new(into: &str, columns: usize) -> Self {
        // `?`, not `?1`: SQLite looks up the name of a numbered parameter by a linear search, each time.
        let placeholders = vec!["?"; columns].join(",");
        Self(BATCH_ROWS.map(|rows| {
            let mut sql = format!("INSERT INTO {into} VALUES ");
            for row in 0..rows {
                sql.push_str(if row == 0 { "(" } else { ",(" });
                sql.push_str(&placeholders);
                sql.push(')');
            }
            sql
        }))
    }

    /// Inserts all rows; `bind` binds one row's values to a statement.
    pub(crate) async fn insert_rows<R>(
        &'static self,
        db: &mut SqliteConnection,
        rows: &[R],
        bind: impl Fn(BoundQuery, &R) -> BoundQuery,
    ) -> Result<(), WriteError> {
        let mut left = rows;
        for (sql, size) in self.0.iter().zip(BATCH_ROWS) {
            while left.len() >= size {
                let (now, later) = left.split_at(size);
                let query = now.iter().fold(sqlx::query(sql.as_str()), &bind);
                query.execute(&mut *db).await?;
                left = later;
            }
        }
        Ok(())
    }
}

pub(super) static EVENTS: LazyLock<BatchInsert> =
    LazyLock::new(|| BatchInsert::new("events (log, idx, ts, body)", 4));
pub(super) static DEBUG_EVENTS: LazyLock<BatchInsert> = LazyLock::new(|| {
    BatchInsert::new(
        "debug_events (idx, ts, session_id, agent, project_id, kind, body)",
        7,
    )
});

pub(crate) static AUDIT: LazyLock<BatchInsert> = LazyLock::new(|| {
    BatchInsert::new(
        "audit (idx, ts, token_id, session_id, project_id, action, target, outcome, detail)",
        9,
    )
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_its_placeholders() {
        let insert = BatchInsert::new("t (a, b)", 2);
        assert_eq!(insert.0[3], "INSERT INTO t (a, b) VALUES (?,?)");
        assert_eq!(insert.0[2].matches("(?,?)").count(), 8, "{}", insert.0[2]);
    }
}
