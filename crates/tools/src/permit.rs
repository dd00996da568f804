//! The value without which no source can be dispatched to.
//!
//! A [`Permit`] is made in one place, the gate in this crate's plane, after the name was resolved and the
//! agent's rules were asked. Dispatching takes it by value, so one permit is one call. Outside this crate
//! nobody can make one: its fields are private and it is neither `Clone` nor `Default`.

use std::sync::Arc;

use oubliette_protocol::tool::Source;

/// Leave to call one tool once.
#[derive(Debug)]
#[must_use = "a permit that is not used was asked for in vain"]
pub struct Permit {
    canonical: Arc<str>,
    source: Source,
}

impl Permit {
    /// Made by the gate alone.
    pub(crate) fn grant(canonical: Arc<str>, source: Source) -> Self {
        Self { canonical, source }
    }

    /// The tool it is for: `@<id>/<tool>`, or the full name of any other.
    pub fn canonical(&self) -> &str {
        &self.canonical
    }

    /// Where that tool comes from.
    pub fn source(&self) -> Source {
        self.source
    }
}
