//! The value that dispatching a call to a tool source requires.
//!
//! A [`Permit`] is made in one place, the gate in this crate's plane, after the name was resolved and the
//! agent's rules were checked. Dispatching takes it by value, so one permit is one call. Outside this crate
//! none can be made: its fields are private and it is neither `Clone` nor `Default`.

use std::sync::Arc;

use oubliette_protocol::tool::ToolSource;

/// Permission to call one tool once.
#[derive(Debug)]
#[must_use = "a permit is for exactly one call: dispatch it"]
pub struct Permit {
    canonical: Arc<str>,
    source: ToolSource,
}

impl Permit {
    /// Creates a permit; only the gate calls this.
    pub(crate) fn grant(canonical: Arc<str>, source: ToolSource) -> Self {
        Self { canonical, source }
    }

    /// The permitted tool: `@<id>/<tool>` for a catalog tool, otherwise its full name.
    pub fn canonical(&self) -> &str {
        &self.canonical
    }

    /// The source of that tool.
    pub fn source(&self) -> ToolSource {
        self.source
    }
}
