//! What a session says.

use serde::Deserialize;
use serde_json::{Map, Value};

/// One event of a session.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Event {
    /// Its place in the session's log, from 0, without holes.
    pub index: i64,
    /// Its type: `message`, `tool_call`, `turn_completed`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// Everything else it carries.
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

impl Event {
    /// A field that is text.
    pub fn text(&self, field: &str) -> Option<&str> {
        self.fields.get(field).and_then(Value::as_str)
    }
}
