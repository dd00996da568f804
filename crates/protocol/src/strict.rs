//! Strict JSON parsing: an unknown or wrong field is an error that names field and reason.

use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// What is wrong with which field of a JSON document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{reason}", match .field.as_str() { "" => String::new(), f => format!("{f}: ") })]
pub struct FieldError {
    /// Path of the field (`tools.use[1]`); empty for the document itself.
    pub field: String,
    /// What is wrong with it.
    pub reason: String,
}

impl FieldError {
    /// An error about the field at this path.
    pub fn at(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            reason: reason.into(),
        }
    }

    /// The same as an `invalid_argument` error that names the file.
    pub fn in_file(&self, file: &str) -> Error {
        Error::invalid(format!("{file}: {self}"))
    }
}

impl From<FieldError> for Error {
    fn from(field_error: FieldError) -> Self {
        Error::invalid(field_error.to_string())
    }
}

/// Parses a text that must be exactly one JSON document.
pub fn from_str<T: DeserializeOwned>(text: &str) -> std::result::Result<T, FieldError> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(field_error)?;
    reader.end().map_err(|e| FieldError::at("", e.to_string()))?;
    Ok(value)
}

/// Parses a JSON value.
pub fn from_value<T: DeserializeOwned>(value: serde_json::Value) -> std::result::Result<T, FieldError> {
    serde_path_to_error::deserialize(value).map_err(field_error)
}

/// Parses a tool's arguments; an error is `invalid_argument`.
pub fn parse_arguments<T: DeserializeOwned>(value: serde_json::Value) -> Result<T> {
    Ok(from_value(value)?)
}

fn field_error(error: serde_path_to_error::Error<serde_json::Error>) -> FieldError {
    let path = error.path().to_string();
    // serde_path_to_error gives these for the document itself and for one that ends early.
    let field = match path.as_str() {
        "." | "?" => String::new(),
        _ => path,
    };
    FieldError {
        field,
        reason: error.into_inner().to_string(),
    }
}
