//! [`AnswerRefusal`]: why a caller's answer was not taken.

use oubliette_protocol::Error;

/// Why an answer was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerRefusal {
    /// There is no such request, or it ended unanswered.
    NotFound,
    /// The request was answered already.
    AlreadyAnswered,
    /// The request belongs to a caller that another principal declared.
    OtherPrincipal,
}

impl AnswerRefusal {
    /// The refusal as text for the debugger.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            AnswerRefusal::NotFound => "no such request is open: it is unknown, or its answer came too late",
            AnswerRefusal::AlreadyAnswered => "the request was answered already",
            AnswerRefusal::OtherPrincipal => "the request belongs to another principal",
        }
    }

    /// The refusal as an error for the client.
    pub(crate) fn error(self) -> Error {
        match self {
            AnswerRefusal::NotFound => Error::not_found(self.reason()),
            AnswerRefusal::AlreadyAnswered => Error::conflict(self.reason()),
            AnswerRefusal::OtherPrincipal => Error::permission_denied(self.reason()),
        }
    }
}
