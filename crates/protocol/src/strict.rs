//! JSON read strictly: an unknown or wrong field is refused, and the refusal names field and reason.

use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// Why a definition was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{reason}", match .field.as_str() { "" => String::new(), f => format!("{f}: ") })]
pub struct Refusal {
    /// Where, as a dotted path (`tools.use[1]`); empty for the document itself.
    pub field: String,
    /// Why.
    pub reason: String,
}

impl Refusal {
    /// A refusal at a field.
    pub fn at(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            reason: reason.into(),
        }
    }

    /// The refusal as an error that names the file.
    pub fn in_file(&self, file: &str) -> Error {
        Error::invalid(format!("{file}: {self}"))
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Error::invalid(refusal.to_string())
    }
}

/// Reads one JSON document from text.
pub fn from_str<T: DeserializeOwned>(text: &str) -> std::result::Result<T, Refusal> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(refusal)?;
    reader.end().map_err(|e| Refusal::at("", e.to_string()))?;
    Ok(value)
}

/// Reads a value that is JSON already.
pub fn from_value<T: DeserializeOwned>(value: serde_json::Value) -> std::result::Result<T, Refusal> {
    serde_path_to_error::deserialize(value).map_err(refusal)
}

/// Reads a tool's arguments.
pub fn arguments<T: DeserializeOwned>(value: serde_json::Value) -> Result<T> {
    Ok(from_value(value)?)
}

fn refusal(error: serde_path_to_error::Error<serde_json::Error>) -> Refusal {
    let path = error.path().to_string();
    // A document that breaks off has no place to speak of.
    let field = match path.as_str() {
        "." | "?" => String::new(),
        _ => path,
    };
    Refusal {
        field,
        reason: error.into_inner().to_string(),
    }
}
