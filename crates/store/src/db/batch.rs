//! Statements that insert many rows, which cost little more than one with a single row. On SQLite rows are inserted in the
//! largest of a few fixed batch sizes: few enough that all statements stay prepared. On PostgreSQL one statement takes
//! any number of rows, as an array for each column.

use sqlx::{Arguments, postgres::PgArguments};

use super::{
    connection::DbConnection,
    postgres::text,
    query::{DbQuery, query},
    value::{ColumnType, DbValue},
};
use crate::db_error::WriteError;

/// Possible numbers of rows of one statement on SQLite, largest first.
const BATCH_ROWS: [usize; 4] = [256, 64, 8, 1];

/// Which ends of a transaction a statement has with it, on SQLite. Every statement sent by itself is two switches between
/// threads: without this a call of a caller's tool takes 0.44 ms instead of 0.32 ms.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TransactionEnds {
    /// `BEGIN` before it.
    pub(crate) begin: bool,
    /// `COMMIT` after it.
    pub(crate) commit: bool,
}

impl TransactionEnds {
    fn number(self) -> usize {
        usize::from(self.begin) + 2 * usize::from(self.commit)
    }
}

/// The `INSERT` statements of one table.
pub(crate) struct BatchInsert {
    columns: &'static [ColumnType],
    /// For each of [`TransactionEnds`] one for each of [`BATCH_ROWS`].
    sqlite: [[String; BATCH_ROWS.len()]; 4],
    postgres: String,
}

/// Whether this many rows are inserted by a single statement on SQLite.
pub(crate) fn is_single_statement(rows: usize) -> bool {
    BATCH_ROWS.contains(&rows)
}

impl BatchInsert {
    /// Statements that insert into this table; `into` is its name and its columns in parentheses.
    pub(crate) fn new(into: &str, columns: &'static [ColumnType]) -> Self {
        // `?`, not `?1`: SQLite looks up the name of a numbered parameter by a linear search, each time.
        let placeholders = vec!["?"; columns.len()].join(",");
        let insert = |begin: &str, rows: usize, commit: &str| {
            let mut sql = format!("{begin}INSERT INTO {into} VALUES ");
            for row in 0..rows {
                sql.push_str(if row == 0 { "(" } else { ",(" });
                sql.push_str(&placeholders);
                sql.push(')');
            }
            sql + commit
        };
        let arrays = columns.iter().zip(1..).map(|(column, number)| match column {
            ColumnType::Number => format!("${number}::bigint[]"),
            ColumnType::Text => format!("${number}::text[]"),
        });
        let arrays = arrays.collect::<Vec<_>>().join(", ");
        Self {
            columns,
            // In the order of `TransactionEnds::number`.
            sqlite: [
                ("", ""),
                ("BEGIN IMMEDIATE;", ""),
                ("", ";COMMIT"),
                ("BEGIN IMMEDIATE;", ";COMMIT"),
            ]
            .map(|(begin, commit)| BATCH_ROWS.map(|rows| insert(begin, rows, commit))),
            postgres: format!("INSERT INTO {into} SELECT * FROM UNNEST({arrays})"),
        }
    }

    /// Inserts all rows, on SQLite with `ends` around them; `bind` binds one row's values to a statement. With no rows
    /// it does nothing.
    pub(crate) async fn insert_rows<'r, R>(
        &'static self,
        db: &mut DbConnection,
        rows: &'r [R],
        ends: TransactionEnds,
        bind: impl Fn(DbQuery<'r>, &'r R) -> DbQuery<'r>,
    ) -> Result<(), WriteError> {
        match db {
            DbConnection::Postgres(_) if rows.is_empty() => return Ok(()),
            DbConnection::Postgres(db) => {
                let values = rows.iter().fold(query(""), &bind).into_values();
                let arguments = self.arrays(&values).map_err(sqlx::Error::Encode)?;
                sqlx::query_with(self.postgres.as_str(), arguments)
                    .execute(&mut **db)
                    .await?;
                return Ok(());
            }
            DbConnection::Sqlite(_) => {}
        }
        let mut left = rows;
        for (number, size) in BATCH_ROWS.into_iter().enumerate() {
            while left.len() >= size {
                let (now, later) = left.split_at(size);
                let ends = TransactionEnds {
                    begin: ends.begin && left.len() == rows.len(),
                    commit: ends.commit && later.is_empty(),
                };
                let sql = self.sqlite[ends.number()][number].as_str();
                now.iter().fold(query(sql), &bind).execute(&mut *db).await?;
                left = later;
            }
        }
        Ok(())
    }

    /// The values of rows, as an array for each column.
    fn arrays(&self, values: &[DbValue<'_>]) -> Result<PgArguments, sqlx::error::BoxDynError> {
        let mut arguments = PgArguments::default();
        for (number, column) in self.columns.iter().enumerate() {
            let values = values.iter().skip(number).step_by(self.columns.len());
            match column {
                ColumnType::Number => arguments.add(
                    values
                        .map(|value| match value {
                            DbValue::Number(number) => *number,
                            DbValue::Text(_) => None,
                        })
                        .collect::<Vec<_>>(),
                )?,
                ColumnType::Text => {
                    let stored = values.map(|value| match value {
                        DbValue::Text(text) => text.as_deref().map(|text| text::encode(text.into())),
                        DbValue::Number(_) => None,
                    });
                    let stored: Vec<_> = stored.collect();
                    arguments.add(stored.iter().map(Option::as_deref).collect::<Vec<_>>())?;
                }
            }
        }
        Ok(arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_its_placeholders() {
        let insert = BatchInsert::new("t (a, b)", &[ColumnType::Number, ColumnType::Text]);
        assert_eq!(insert.sqlite[0][3], "INSERT INTO t (a, b) VALUES (?,?)");
        let eight = &insert.sqlite[0][2];
        assert_eq!(eight.matches("(?,?)").count(), 8, "{eight}");
        let whole = "BEGIN IMMEDIATE;INSERT INTO t (a, b) VALUES (?,?);COMMIT";
        assert_eq!(insert.sqlite[3][3], whole);
        let arrays = "INSERT INTO t (a, b) SELECT * FROM UNNEST($1::bigint[], $2::text[])";
        assert_eq!(insert.postgres, arrays);
    }
}
