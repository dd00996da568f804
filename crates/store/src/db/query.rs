//! Statements with their values, for either database.

use std::borrow::Cow;

use futures::{StreamExt, TryStreamExt, stream::BoxStream};
use sqlx::{Arguments, AssertSqlSafe, Postgres, Sqlite, postgres::PgArguments, sqlite::SqliteArguments};

use super::{
    connection::DbExecutor,
    postgres::text,
    row::{DbRow, FromColumn},
    value::DbValue,
};

type SqliteQuery = sqlx::query::Query<'static, Sqlite, SqliteArguments>;
type PostgresQuery = sqlx::query::Query<'static, Postgres, PgArguments>;

/// A statement with numbered parameters (`$1`), which both databases take.
pub(crate) fn query<'q>(sql: &'static str) -> DbQuery<'q> {
    DbQuery {
        sql: Cow::Borrowed(sql),
        marks: Vec::new(),
        values: Vec::new(),
    }
}

/// A statement whose rows have one column.
pub(crate) fn query_scalar<'q>(sql: &'static str) -> ScalarQuery<'q> {
    ScalarQuery(query(sql))
}

/// A statement and its values.
pub(crate) struct DbQuery<'q> {
    sql: Cow<'static, str>,
    /// Where the text has `?` for a value that was pushed: for PostgreSQL they become numbers.
    marks: Vec<usize>,
    values: Vec<DbValue<'q>>,
}

/// How many rows a statement changed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AffectedRows(u64);

impl AffectedRows {
    pub(crate) fn rows_affected(self) -> u64 {
        self.0
    }
}

impl<'q> DbQuery<'q> {
    /// Binds the next value.
    pub(crate) fn bind(mut self, value: impl Into<DbValue<'q>>) -> Self {
        self.values.push(value.into());
        self
    }

    /// Its values.
    pub(crate) fn into_values(self) -> Vec<DbValue<'q>> {
        self.values
    }

    fn into_sqlite(self) -> Result<SqliteQuery, sqlx::Error> {
        let mut arguments = SqliteArguments::default();
        for value in self.values {
            match value {
                DbValue::Number(number) => arguments.add(number),
                DbValue::Text(text) => arguments.add(text),
            }
            .map_err(sqlx::Error::Encode)?;
        }
        Ok(match self.sql {
            Cow::Borrowed(sql) => sqlx::query_with(sql, arguments),
            Cow::Owned(sql) => sqlx::query_with(AssertSqlSafe(sql), arguments),
        })
    }

    fn into_postgres(self) -> Result<PostgresQuery, sqlx::Error> {
        let mut arguments = PgArguments::default();
        for value in self.values {
            match value {
                DbValue::Number(number) => arguments.add(number),
                DbValue::Text(stored) => arguments.add(stored.map(text::encode)),
            }
            .map_err(sqlx::Error::Encode)?;
        }
        Ok(match self.sql {
            Cow::Borrowed(sql) => sqlx::query_with(sql, arguments),
            Cow::Owned(sql) => sqlx::query_with(AssertSqlSafe(number_marks(&sql, &self.marks)), arguments),
        })
    }

    /// Executes it.
    pub(crate) async fn execute<'c>(
        self,
        on: impl Into<DbExecutor<'c>>,
    ) -> Result<AffectedRows, sqlx::Error> {
        let affected = match on.into() {
            DbExecutor::SqlitePool(pool) => self.into_sqlite()?.execute(pool).await?.rows_affected(),
            DbExecutor::Sqlite(db) => self.into_sqlite()?.execute(db).await?.rows_affected(),
            DbExecutor::PostgresPool(pool) => self.into_postgres()?.execute(pool).await?.rows_affected(),
            DbExecutor::Postgres(db) => self.into_postgres()?.execute(db).await?.rows_affected(),
        };
        Ok(AffectedRows(affected))
    }

    /// All its rows.
    pub(crate) async fn fetch_all<'c>(
        self,
        on: impl Into<DbExecutor<'c>>,
    ) -> Result<Vec<DbRow>, sqlx::Error> {
        fn rows<T>(rows: Vec<T>, row: fn(T) -> DbRow) -> Vec<DbRow> {
            rows.into_iter().map(row).collect()
        }
        Ok(match on.into() {
            DbExecutor::SqlitePool(pool) => rows(self.into_sqlite()?.fetch_all(pool).await?, DbRow::Sqlite),
            DbExecutor::Sqlite(db) => rows(self.into_sqlite()?.fetch_all(db).await?, DbRow::Sqlite),
            DbExecutor::PostgresPool(pool) => {
                rows(self.into_postgres()?.fetch_all(pool).await?, DbRow::Postgres)
            }
            DbExecutor::Postgres(db) => rows(self.into_postgres()?.fetch_all(db).await?, DbRow::Postgres),
        })
    }

    /// Its first row, if it has one.
    pub(crate) async fn fetch_optional<'c>(
        self,
        on: impl Into<DbExecutor<'c>>,
    ) -> Result<Option<DbRow>, sqlx::Error> {
        Ok(match on.into() {
            DbExecutor::SqlitePool(pool) => {
                self.into_sqlite()?.fetch_optional(pool).await?.map(DbRow::Sqlite)
            }
            DbExecutor::Sqlite(db) => self.into_sqlite()?.fetch_optional(db).await?.map(DbRow::Sqlite),
            DbExecutor::PostgresPool(pool) => self
                .into_postgres()?
                .fetch_optional(pool)
                .await?
                .map(DbRow::Postgres),
            DbExecutor::Postgres(db) => self
                .into_postgres()?
                .fetch_optional(db)
                .await?
                .map(DbRow::Postgres),
        })
    }

    /// Its first row; an error if it has none.
    pub(crate) async fn fetch_one<'c>(self, on: impl Into<DbExecutor<'c>>) -> Result<DbRow, sqlx::Error> {
        self.fetch_optional(on).await?.ok_or(sqlx::Error::RowNotFound)
    }

    /// Its rows, one after the other.
    pub(crate) fn fetch<'c>(
        self,
        on: impl Into<DbExecutor<'c>>,
    ) -> BoxStream<'c, Result<DbRow, sqlx::Error>> {
        fn failed<'c>(error: sqlx::Error) -> BoxStream<'c, Result<DbRow, sqlx::Error>> {
            futures::stream::once(async move { Err(error) }).boxed()
        }
        match on.into() {
            on @ (DbExecutor::SqlitePool(_) | DbExecutor::Sqlite(_)) => match (self.into_sqlite(), on) {
                (Ok(query), DbExecutor::SqlitePool(pool)) => query.fetch(pool).map_ok(DbRow::Sqlite).boxed(),
                (Ok(query), DbExecutor::Sqlite(db)) => query.fetch(db).map_ok(DbRow::Sqlite).boxed(),
                (Ok(_), _) => futures::stream::empty().boxed(),
                (Err(error), _) => failed(error),
            },
            DbExecutor::PostgresPool(pool) => match self.into_postgres() {
                Ok(query) => query.fetch(pool).map_ok(DbRow::Postgres).boxed(),
                Err(error) => failed(error),
            },
            DbExecutor::Postgres(db) => match self.into_postgres() {
                Ok(query) => query.fetch(db).map_ok(DbRow::Postgres).boxed(),
                Err(error) => failed(error),
            },
        }
    }
}

/// A statement whose rows have one column.
pub(crate) struct ScalarQuery<'q>(DbQuery<'q>);

impl<'q> ScalarQuery<'q> {
    /// Binds the next value.
    pub(crate) fn bind(self, value: impl Into<DbValue<'q>>) -> Self {
        Self(self.0.bind(value))
    }

    /// The value of its first row.
    pub(crate) async fn fetch_one<'c, T>(self, on: impl Into<DbExecutor<'c>>) -> Result<T, sqlx::Error>
    where
        T: for<'r> FromColumn<'r>,
    {
        self.0.fetch_one(on).await?.try_get(0)
    }

    /// The value of its first row, if it has one.
    pub(crate) async fn fetch_optional<'c, T>(
        self,
        on: impl Into<DbExecutor<'c>>,
    ) -> Result<Option<T>, sqlx::Error>
    where
        T: for<'r> FromColumn<'r>,
    {
        let row = self.0.fetch_optional(on).await?;
        row.map(|row| row.try_get(0)).transpose()
    }

    /// The values of all its rows.
    pub(crate) async fn fetch_all<'c, T>(self, on: impl Into<DbExecutor<'c>>) -> Result<Vec<T>, sqlx::Error>
    where
        T: for<'r> FromColumn<'r>,
    {
        let rows = self.0.fetch_all(on).await?;
        rows.iter().map(|row| row.try_get(0)).collect()
    }
}

/// A statement that is put together from parts.
pub(crate) struct QueryBuilder<'q> {
    sql: String,
    marks: Vec<usize>,
    values: Vec<DbValue<'q>>,
}

impl<'q> QueryBuilder<'q> {
    /// A statement that begins with this text.
    pub(crate) fn new(sql: impl Into<String>) -> Self {
        Self {
            sql: sql.into(),
            marks: Vec::new(),
            values: Vec::new(),
        }
    }

    /// Appends text. Never anything that came from outside: values are bound.
    pub(crate) fn push(&mut self, sql: &str) -> &mut Self {
        self.sql.push_str(sql);
        self
    }

    /// Appends a parameter and binds its value.
    pub(crate) fn push_bind(&mut self, value: impl Into<DbValue<'q>>) -> &mut Self {
        self.marks.push(self.sql.len());
        self.sql.push('?');
        self.values.push(value.into());
        self
    }

    /// The statement.
    pub(crate) fn build(self) -> DbQuery<'q> {
        DbQuery {
            sql: Cow::Owned(self.sql),
            marks: self.marks,
            values: self.values,
        }
    }

    /// The statement, if its rows have one column.
    pub(crate) fn build_query_scalar(self) -> ScalarQuery<'q> {
        ScalarQuery(self.build())
    }
}

/// The text with its marks numbered: `?` becomes `$1`.
fn number_marks(sql: &str, marks: &[usize]) -> String {
    let mut numbered = String::with_capacity(sql.len() + 2 * marks.len());
    let mut from = 0;
    for (number, at) in marks.iter().enumerate() {
        numbered.push_str(&sql[from..*at]);
        numbered.push('$');
        numbered.push_str(&(number + 1).to_string());
        from = at + 1;
    }
    numbered.push_str(&sql[from..]);
    numbered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_marks_are_numbered() {
        let mut query = QueryBuilder::new("SELECT '?' FROM t WHERE a = ");
        query.push_bind(1_i64).push(" AND b = ").push_bind("x");
        let numbered = number_marks(&query.sql, &query.marks);
        assert_eq!(numbered, "SELECT '?' FROM t WHERE a = $1 AND b = $2");
    }
}
