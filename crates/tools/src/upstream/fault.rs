//! Why a server is down, and bounded error texts.

use std::sync::Arc;

use oubliette_protocol::Error;

use super::limits;

/// What could bring a server back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FaultRemedy {
    /// Another start: after a crash, a refused connection, a slow start.
    Restart,
    /// Only a change of its definition or of the trust settings: it asks for something it does not get.
    EditDefinition,
}

/// Why a server is down. Users see its texts, so whoever makes one masks secrets in them.
#[derive(Debug, Clone)]
pub(super) struct UpstreamFault {
    /// The reason.
    pub(super) reason: Arc<str>,
    /// The tail of its stderr, if there is any.
    pub(super) stderr: Option<String>,
    /// What could bring it back.
    pub(super) remedy: FaultRemedy,
}

impl UpstreamFault {
    /// A fault that another start may resolve.
    pub(super) fn new(reason: impl AsRef<str>) -> Self {
        Self {
            reason: truncate_error(reason.as_ref()).into(),
            stderr: None,
            remedy: FaultRemedy::Restart,
        }
    }

    /// A fault of the definition, or a refusal by the trust settings: not retried.
    pub(super) fn refused(error: Error) -> Self {
        Self {
            remedy: FaultRemedy::EditDefinition,
            ..Self::new(error.message)
        }
    }

    /// The reason with the tail of stderr, as `tool_list` shows it.
    pub(super) fn with_stderr(&self) -> String {
        match &self.stderr {
            Some(tail) => format!("{}\nstderr: {tail}", self.reason),
            None => self.reason.to_string(),
        }
    }
}

/// `text`, cut at a character boundary to at most [`limits::MAX_ERROR_BYTES`].
pub(super) fn truncate_error(text: &str) -> &str {
    let mut end = limits::MAX_ERROR_BYTES.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// An error followed by its sources; one whose text is already contained is left out.
pub(super) fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
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
