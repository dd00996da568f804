//! Many rows in few statements. A statement of many rows costs little more than one of one row, so rows
//! go in by the largest of a few fixed sizes: few enough statements to keep them all prepared.

use std::sync::LazyLock;

use sqlx::{Sqlite, SqliteConnection, query::Query, sqlite::SqliteArguments};

use crate::fault::Fault;

type Bound = Query<'static, Sqlite, SqliteArguments>;

/// Rows of one statement.
const SIZES: [usize; 4] = [256, 64, 8, 1];

/// `INSERT` statements for every size.
pub(crate) struct Insert([String; SIZES.len()]);

/// Whether so many rows go in by one statement.
pub(super) fn is_one(rows: usize) -> bool {
    SIZES.contains(&rows)
}

impl Insert {
    fn new(into: &str, columns: usize) -> Self {
        // Not numbered: SQLite finds a numbered one's name by walking the list of all of them, each time.
        let placeholders = vec!["?"; columns].join(",");
        Self(SIZES.map(|rows| {
            let mut sql = format!("INSERT INTO {into} VALUES ");
            for row in 0..rows {
                sql.push_str(if row == 0 { "(" } else { ",(" });
                sql.push_str(&placeholders);
                sql.push(')');
            }
            sql
        }))
    }

    /// Writes all rows; `bind` adds one row's values to a statement.
    pub(crate) async fn rows<R>(
        &'static self,
        db: &mut SqliteConnection,
        rows: &[R],
        bind: impl Fn(Bound, &R) -> Bound,
    ) -> Result<(), Fault> {
        let mut left = rows;
        for (sql, size) in self.0.iter().zip(SIZES) {
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

pub(super) static EVENTS: LazyLock<Insert> = LazyLock::new(|| Insert::new("events (log, idx, ts, body)", 4));
pub(super) static DEBUG_EVENTS: LazyLock<Insert> = LazyLock::new(|| {
    Insert::new(
        "debug_events (idx, ts, session_id, agent, project_id, kind, body)",
        7,
    )
});

pub(crate) static AUDIT: LazyLock<Insert> = LazyLock::new(|| {
    Insert::new(
        "audit (idx, ts, token_id, session_id, project_id, action, target, outcome, detail)",
        9,
    )
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_its_placeholders() {
        let insert = Insert::new("t (a, b)", 2);
        assert_eq!(insert.0[3], "INSERT INTO t (a, b) VALUES (?,?)");
        assert_eq!(insert.0[2].matches("(?,?)").count(), 8, "{}", insert.0[2]);
    }
}
