//! Conversion between columns and Rust types.

use std::{borrow::Cow, str::FromStr};

use jiff::Timestamp;
use oubliette_protocol::{Error, Result, error::BoxedCause};
use serde::{Serialize, de::DeserializeOwned};

use crate::db::DbRow;
use crate::db_error::read_error;

/// The error for a column whose value cannot be decoded.
fn corrupt_column(column: &str, cause: impl Into<BoxedCause>) -> Error {
    Error::internal_during(format!("reading column {column} of a stored row"), cause)
}

/// A text column.
pub(super) fn text(row: &DbRow, column: &str) -> Result<String> {
    row.try_get(column).map_err(read_error)
}

/// A nullable text column.
pub(super) fn optional_text(row: &DbRow, column: &str) -> Result<Option<String>> {
    row.try_get(column).map_err(read_error)
}

/// An integer column.
pub(super) fn number<T: TryFrom<i64>>(row: &DbRow, column: &str) -> Result<T> {
    let number: i64 = row.try_get(column).map_err(read_error)?;
    T::try_from(number).map_err(|_| corrupt_column(column, format!("{number} is out of range")))
}

/// A text column parsed into a type such as an id.
pub(super) fn parsed<T: FromStr<Err = Error>>(row: &DbRow, column: &str) -> Result<T> {
    row.text(column)
        .map_err(read_error)?
        .parse()
        .map_err(|e| corrupt_column(column, e))
}

/// A nullable text column parsed into a type such as an id.
pub(super) fn optional_parsed<T: FromStr<Err = Error>>(row: &DbRow, column: &str) -> Result<Option<T>> {
    let text: Option<Cow<'_, str>> = row.try_get(column).map_err(read_error)?;
    text.map(|text| text.parse())
        .transpose()
        .map_err(|e| corrupt_column(column, e))
}

/// A timestamp column, in milliseconds since the epoch.
pub(super) fn time(row: &DbRow, column: &str) -> Result<Timestamp> {
    let millis: i64 = row.try_get(column).map_err(read_error)?;
    Timestamp::from_millisecond(millis).map_err(|e| corrupt_column(column, e))
}

/// A nullable timestamp column.
pub(super) fn optional_time(row: &DbRow, column: &str) -> Result<Option<Timestamp>> {
    let millis: Option<i64> = row.try_get(column).map_err(read_error)?;
    millis
        .map(Timestamp::from_millisecond)
        .transpose()
        .map_err(|e| corrupt_column(column, e))
}

/// A JSON column, stored as text.
pub(super) fn json<T: DeserializeOwned>(row: &DbRow, column: &str) -> Result<T> {
    let text = row.text(column).map_err(read_error)?;
    serde_json::from_str(&text).map_err(|e| corrupt_column(column, e))
}

/// A nullable JSON column.
pub(super) fn optional_json<T: DeserializeOwned>(row: &DbRow, column: &str) -> Result<Option<T>> {
    let text: Option<Cow<'_, str>> = row.try_get(column).map_err(read_error)?;
    text.map(|text| serde_json::from_str(&text))
        .transpose()
        .map_err(|e| corrupt_column(column, e))
}

/// Encodes a value for a JSON column.
pub(super) fn to_json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(Error::internal)
}
