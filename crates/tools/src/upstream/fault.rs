//! Why a server is down.

use std::sync::Arc;

use oubliette_protocol::Error;

use super::limits;

/// Whether starting again could help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cure {
    /// It could: a crash, a refused connection, a slow start.
    Restart,
    /// It could not: the definition asks for something it does not get.
    Edit,
}

/// Why a server is down, in words that hold no secret.
#[derive(Debug, Clone)]
pub(super) struct Fault {
    /// The reason.
    pub(super) reason: Arc<str>,
    /// The end of its stderr, if it has one.
    pub(super) stderr: Option<String>,
    /// What would help.
    pub(super) cure: Cure,
}

impl Fault {
    /// A fault that a restart may cure.
    pub(super) fn new(reason: impl AsRef<str>) -> Self {
        Self {
            reason: bounded(reason.as_ref()).into(),
            stderr: None,
            cure: Cure::Restart,
        }
    }

    /// A fault of the definition or of what it is trusted with.
    pub(super) fn refused(error: Error) -> Self {
        Self {
            cure: Cure::Edit,
            ..Self::new(error.message)
        }
    }

    /// The reason with the tail of stderr, as `tool_list` shows it.
    pub(super) fn with_tail(&self) -> String {
        match &self.stderr {
            Some(tail) => format!("{}\nstderr: {tail}", self.reason),
            None => self.reason.to_string(),
        }
    }
}

/// `text`, cut at a character boundary when it is longer than an error may be.
pub(super) fn bounded(text: &str) -> &str {
    let mut end = limits::ERROR_BYTES.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// An error with everything behind it, each cause once.
pub(super) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
