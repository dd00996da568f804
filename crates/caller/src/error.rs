//! The library's error type.

/// Why a call, a turn or a session failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server refused the request, or the turn failed.
    #[error("{message} ({code})")]
    Refused {
        /// The error code, for programs: `permission_denied`, `not_found`, …
        code: String,
        /// The error text, for people.
        message: String,
    },
    /// The server could not be reached, or the connection broke.
    #[error("the server cannot be reached: {0}")]
    Unreachable(String),
    /// The server's answer does not have the expected form.
    #[error("unexpected answer: {0}")]
    Unexpected(String),
    /// The session ended, or its stream was lost, before the awaited turn completed.
    #[error("the session has ended: {0}")]
    Ended(String),
    /// The program gave an invalid address, token or name.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    /// Whether the same request may succeed later.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Error::Unreachable(_) => true,
            Error::Refused { code, .. } => {
                matches!(code.as_str(), "unavailable" | "internal" | "limit_exceeded")
            }
            Error::Unexpected(_) | Error::Ended(_) | Error::Invalid(_) => false,
        }
    }
}
