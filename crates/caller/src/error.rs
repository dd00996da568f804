//! What can go wrong.

/// What can go wrong.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server refused, with its code (`permission_denied`, `not_found`, …).
    #[error("{message} ({code})")]
    Refused {
        /// For programs.
        code: String,
        /// For people.
        message: String,
    },
    /// The server could not be reached, or the connection broke.
    #[error("the server cannot be reached: {0}")]
    Unreachable(String),
    /// The server answered with something else than its contract says.
    #[error("unexpected answer: {0}")]
    Unexpected(String),
    /// The session ended before what was waited for.
    #[error("the session has ended: {0}")]
    Ended(String),
    /// This program's own mistake: a bad address, token or schema.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    /// Whether trying again later may help.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Error::Unreachable(_) => true,
            Error::Refused { code, .. } => {
                matches!(code.as_str(), "unavailable" | "internal" | "limit_exceeded")
            }
            Error::Unexpected(_) | Error::Ended(_) | Error::Invalid(_) => false,
        }
    }
}
