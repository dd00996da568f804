//! One event of a session's log.

use serde::Deserialize;
use serde_json::{Map, Value};

/// One event of a session's log.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Event {
    /// Its index in the session's log: 0, 1, 2, … without gaps.
    pub index: i64,
    /// Its type: `message`, `tool_call`, `turn_completed`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// All other fields.
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

impl Event {
    /// The value of a field, if it is a string.
    pub fn text(&self, field: &str) -> Option<&str> {
        self.fields.get(field).and_then(Value::as_str)
    }
}
