//! Columns into types and back.

use std::str::FromStr;

use jiff::Timestamp;
use oubliette_protocol::{Error, Result};
use serde::{Serialize, de::DeserializeOwned};
use sqlx::{Row, sqlite::SqliteRow};

use crate::fault::read_error;

/// A column that does not hold what was once written there.
fn odd(column: &str, why: impl std::fmt::Display) -> Error {
    Error::internal(format!("column {column} of a stored row: {why}"))
}

/// A text.
pub(super) fn text(row: &SqliteRow, column: &str) -> Result<String> {
    row.try_get(column).map_err(read_error)
}

/// A text that may be missing.
pub(super) fn maybe_text(row: &SqliteRow, column: &str) -> Result<Option<String>> {
    row.try_get(column).map_err(read_error)
}

/// A number.
pub(super) fn number<T: TryFrom<i64>>(row: &SqliteRow, column: &str) -> Result<T> {
    let number: i64 = row.try_get(column).map_err(read_error)?;
    T::try_from(number).map_err(|_| odd(column, number))
}

/// Anything with a text form, such as an id.
pub(super) fn parsed<T: FromStr<Err = Error>>(row: &SqliteRow, column: &str) -> Result<T> {
    let text: &str = row.try_get(column).map_err(read_error)?;
    text.parse().map_err(|e| odd(column, e))
}

/// The same, where it may be missing.
pub(super) fn maybe<T: FromStr<Err = Error>>(row: &SqliteRow, column: &str) -> Result<Option<T>> {
    let text: Option<&str> = row.try_get(column).map_err(read_error)?;
    text.map(str::parse).transpose().map_err(|e| odd(column, e))
}

/// A time.
pub(super) fn time(row: &SqliteRow, column: &str) -> Result<Timestamp> {
    let millis: i64 = row.try_get(column).map_err(read_error)?;
    Timestamp::from_millisecond(millis).map_err(|e| odd(column, e))
}

/// A time that may be missing.
pub(super) fn maybe_time(row: &SqliteRow, column: &str) -> Result<Option<Timestamp>> {
    let millis: Option<i64> = row.try_get(column).map_err(read_error)?;
    millis
        .map(Timestamp::from_millisecond)
        .transpose()
        .map_err(|e| odd(column, e))
}

/// JSON kept as text.
pub(super) fn json<T: DeserializeOwned>(row: &SqliteRow, column: &str) -> Result<T> {
    let text: &str = row.try_get(column).map_err(read_error)?;
    serde_json::from_str(text).map_err(|e| odd(column, e))
}

/// JSON kept as text that may be missing.
pub(super) fn maybe_json<T: DeserializeOwned>(row: &SqliteRow, column: &str) -> Result<Option<T>> {
    let text: Option<&str> = row.try_get(column).map_err(read_error)?;
    text.map(serde_json::from_str)
        .transpose()
        .map_err(|e| odd(column, e))
}

/// JSON to be kept as text.
pub(super) fn to_json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(Error::internal)
}
