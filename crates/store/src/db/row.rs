//! A row of either database, and its columns.

use std::borrow::Cow;

use sqlx::{Row, postgres::PgRow, sqlite::SqliteRow};

use super::postgres::text;

/// A row that was read.
pub(crate) enum DbRow {
    Sqlite(SqliteRow),
    Postgres(PgRow),
}

/// A column, by its number or its name.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ColumnRef<'n> {
    Number(usize),
    Name(&'n str),
}

impl From<usize> for ColumnRef<'_> {
    fn from(number: usize) -> Self {
        ColumnRef::Number(number)
    }
}

impl<'n> From<&'n str> for ColumnRef<'n> {
    fn from(name: &'n str) -> Self {
        ColumnRef::Name(name)
    }
}

/// A type that a column can be read as.
pub(crate) trait FromColumn<'r>: Sized {
    fn from_column(row: &'r DbRow, column: ColumnRef<'_>) -> Result<Self, sqlx::Error>;
}

impl DbRow {
    /// The value of a column.
    pub(crate) fn try_get<'r, T: FromColumn<'r>>(
        &'r self,
        column: impl Into<ColumnRef<'r>>,
    ) -> Result<T, sqlx::Error> {
        T::from_column(self, column.into())
    }

    /// The value of a text column, borrowed where possible.
    pub(crate) fn text<'r>(&'r self, column: impl Into<ColumnRef<'r>>) -> Result<Cow<'r, str>, sqlx::Error> {
        self.try_get(column)
    }
}

macro_rules! get {
    ($row:expr, $column:expr, $type:ty) => {
        match $column {
            ColumnRef::Number(number) => $row.try_get::<$type, _>(number),
            ColumnRef::Name(name) => $row.try_get::<$type, _>(name),
        }
    };
}

impl<'r> FromColumn<'r> for i64 {
    fn from_column(row: &'r DbRow, column: ColumnRef<'_>) -> Result<Self, sqlx::Error> {
        match row {
            DbRow::Sqlite(row) => get!(row, column, i64),
            DbRow::Postgres(row) => get!(row, column, i64),
        }
    }
}

impl<'r> FromColumn<'r> for Option<i64> {
    fn from_column(row: &'r DbRow, column: ColumnRef<'_>) -> Result<Self, sqlx::Error> {
        match row {
            DbRow::Sqlite(row) => get!(row, column, Option<i64>),
            DbRow::Postgres(row) => get!(row, column, Option<i64>),
        }
    }
}

impl<'r> FromColumn<'r> for Cow<'r, str> {
    fn from_column(row: &'r DbRow, column: ColumnRef<'_>) -> Result<Self, sqlx::Error> {
        match row {
            DbRow::Sqlite(row) => get!(row, column, &str).map(Cow::Borrowed),
            DbRow::Postgres(row) => get!(row, column, &str).map(text::decode),
        }
    }
}

impl<'r> FromColumn<'r> for Option<Cow<'r, str>> {
    fn from_column(row: &'r DbRow, column: ColumnRef<'_>) -> Result<Self, sqlx::Error> {
        match row {
            DbRow::Sqlite(row) => Ok(get!(row, column, Option<&str>)?.map(Cow::Borrowed)),
            DbRow::Postgres(row) => Ok(get!(row, column, Option<&str>)?.map(text::decode)),
        }
    }
}

impl<'r> FromColumn<'r> for String {
    fn from_column(row: &'r DbRow, column: ColumnRef<'_>) -> Result<Self, sqlx::Error> {
        Cow::<str>::from_column(row, column).map(Cow::into_owned)
    }
}

impl<'r> FromColumn<'r> for Option<String> {
    fn from_column(row: &'r DbRow, column: ColumnRef<'_>) -> Result<Self, sqlx::Error> {
        Ok(Option::<Cow<'r, str>>::from_column(row, column)?.map(Cow::into_owned))
    }
}
