//! The error type every door answers with: its codes, their HTTP status and their JSON-RPC code.

use std::{borrow::Cow, error::Error as StdError, sync::Arc};

use serde::{Deserialize, Serialize};

/// Error code for programs; its snake_case name is part of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// An argument is missing, unknown or invalid.
    InvalidArgument,
    /// The token is missing, unknown, expired or revoked.
    Unauthenticated,
    /// The token's scope or project binding does not allow the action.
    PermissionDenied,
    /// The target does not exist, or this token cannot see it.
    NotFound,
    /// The present state does not allow it, for example a project with active sessions.
    Conflict,
    /// A limit on size, count or rate is reached.
    LimitExceeded,
    /// It took longer than its timeout.
    Timeout,
    /// The caller that lent the tool is not connected.
    CallerDisconnected,
    /// The agent's definition does not allow this tool or child agent.
    NotAllowed,
    /// Something the action needs is not available at the moment.
    Unavailable,
    /// The tool was called and answered with an error.
    ToolError,
    /// An error of Oubliette itself; the server's log has the cause.
    Internal,
}

impl ErrorCode {
    /// Every code.
    pub const ALL: [ErrorCode; 12] = [
        ErrorCode::InvalidArgument,
        ErrorCode::Unauthenticated,
        ErrorCode::PermissionDenied,
        ErrorCode::NotFound,
        ErrorCode::Conflict,
        ErrorCode::LimitExceeded,
        ErrorCode::Timeout,
        ErrorCode::CallerDisconnected,
        ErrorCode::NotAllowed,
        ErrorCode::Unavailable,
        ErrorCode::ToolError,
        ErrorCode::Internal,
    ];

    /// The code's name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorCode::InvalidArgument => "invalid_argument",
            ErrorCode::Unauthenticated => "unauthenticated",
            ErrorCode::PermissionDenied => "permission_denied",
            ErrorCode::NotFound => "not_found",
            ErrorCode::Conflict => "conflict",
            ErrorCode::LimitExceeded => "limit_exceeded",
            ErrorCode::Timeout => "timeout",
            ErrorCode::CallerDisconnected => "caller_disconnected",
            ErrorCode::NotAllowed => "not_allowed",
            ErrorCode::Unavailable => "unavailable",
            ErrorCode::ToolError => "tool_error",
            ErrorCode::Internal => "internal",
        }
    }

    /// The HTTP status of a REST response with this error.
    pub fn http_status(self) -> u16 {
        match self {
            ErrorCode::InvalidArgument => 400,
            ErrorCode::Unauthenticated => 401,
            ErrorCode::PermissionDenied | ErrorCode::NotAllowed => 403,
            ErrorCode::NotFound => 404,
            ErrorCode::Conflict => 409,
            ErrorCode::ToolError => 422,
            ErrorCode::LimitExceeded => 429,
            ErrorCode::Internal => 500,
            ErrorCode::CallerDisconnected => 502,
            ErrorCode::Unavailable => 503,
            ErrorCode::Timeout => 504,
        }
    }

    /// The JSON-RPC error code on the relay socket.
    pub fn rpc_code(self) -> i64 {
        match self {
            ErrorCode::InvalidArgument => -32602,
            ErrorCode::Unauthenticated => -32001,
            ErrorCode::PermissionDenied => -32002,
            ErrorCode::NotAllowed => -32003,
            ErrorCode::Timeout => -32004,
            ErrorCode::CallerDisconnected => -32005,
            ErrorCode::NotFound
            | ErrorCode::Conflict
            | ErrorCode::LimitExceeded
            | ErrorCode::Unavailable
            | ErrorCode::ToolError
            | ErrorCode::Internal => -32000,
        }
    }
}

impl std::fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An error with a text for each of its two audiences: `message` goes to the client and holds no secret and no
/// detail of the host; the cause goes to the server's log only.
///
/// The cause is the error's [`source`](std::error::Error::source), with its own causes behind it. It is never
/// serialized.
#[derive(Clone, Serialize, Deserialize)]
pub struct Error {
    /// Error code, for programs.
    pub code: ErrorCode,
    /// Text for the client: what is wrong and what to do next.
    pub message: String,
    /// Shared, because the writes of one group fail together with one cause.
    #[serde(skip)]
    cause: Option<Arc<dyn StdError + Send + Sync>>,
}

/// What can be the cause of an [`Error`]: another error, or a text.
pub type BoxedCause = Box<dyn StdError + Send + Sync>;

/// `Result` with [`Error`] as the default error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $code:ident,)*) => {
        impl Error {
            $($(#[$doc])*
            pub fn $name(message: impl Into<String>) -> Self {
                Self::new(ErrorCode::$code, message)
            })*
        }
    };
}

constructors! {
    /// An argument is missing, unknown or invalid.
    invalid => InvalidArgument,
    /// The token is missing, unknown, expired or revoked.
    unauthenticated => Unauthenticated,
    /// The token's scope or project binding does not allow it.
    permission_denied => PermissionDenied,
    /// The target does not exist, or the token cannot see it.
    not_found => NotFound,
    /// The present state does not allow it.
    conflict => Conflict,
    /// A limit on size, count or rate is reached.
    limit_exceeded => LimitExceeded,
    /// It took longer than its timeout.
    timeout => Timeout,
    /// The caller that lent the tool is not connected.
    caller_disconnected => CallerDisconnected,
    /// The agent's definition does not allow it.
    not_allowed => NotAllowed,
    /// Something it needs is not available at the moment.
    unavailable => Unavailable,
    /// The tool was called and answered with an error.
    tool_error => ToolError,
}

impl Error {
    /// An error with this code and message, without a cause.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            cause: None,
        }
    }

    /// An internal error: the client gets a fixed text, the log gets `cause`. A full disk is not the program's fault:
    /// the client is told of it, wherever it was met.
    pub fn internal(cause: impl Into<BoxedCause>) -> Self {
        let cause = cause.into();
        let error = match is_disk_full(&*cause) {
            true => Self::unavailable("the server's disk is full: free some space and try again"),
            false => Self::new(
                ErrorCode::Internal,
                "an internal error; the server's log has the details",
            ),
        };
        error.with_cause(cause)
    }

    /// An internal error whose cause does not say what failed: the log gets `operation`, then `cause`.
    pub fn internal_during(operation: impl Into<String>, cause: impl Into<BoxedCause>) -> Self {
        Self::internal(FailedOperation {
            operation: operation.into(),
            cause: cause.into(),
        })
    }

    /// Sets the cause, which goes to the server's log only.
    #[must_use]
    pub fn with_cause(mut self, cause: impl Into<BoxedCause>) -> Self {
        self.cause = Some(Arc::from(cause.into()));
        self
    }

    /// The same error with another text for the client.
    #[must_use]
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.message = message.into();
        self
    }

    /// Whether there is a cause for the log.
    pub fn has_cause(&self) -> bool {
        self.cause.is_some()
    }

    /// The text for the server's log: the message, then the causes one after the other, joined with `: `. Many
    /// libraries repeat the text of a cause in their own, so a text that is there already is left out.
    pub fn for_log(&self) -> Cow<'_, str> {
        let mut text = Cow::Borrowed(self.message.as_str());
        let mut next = self.source();
        while let Some(cause) = next {
            let cause_text = cause.to_string();
            if !text.contains(&cause_text) {
                let text = text.to_mut();
                text.push_str(": ");
                text.push_str(&cause_text);
            }
            next = cause.source();
        }
        text
    }

    /// `{"error":{"code","message"}}`: the body of a REST error and of a tool's error result.
    pub fn body(&self) -> serde_json::Value {
        serde_json::json!({ "error": { "code": self.code, "message": self.message } })
    }
}

/// Whether an error comes of a disk, or this user's share of it, that has no space left.
fn is_disk_full(error: &(dyn StdError + 'static)) -> bool {
    std::iter::successors(Some(error), |&cause| cause.source())
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|cause| {
            matches!(
                cause.kind(),
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded
            )
        })
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

/// Prints the causes as text. Their own `Debug` is for their library's authors: it may print fields, such as an
/// address with a password in it, that their text leaves out.
impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Error")
            .field("code", &self.code)
            .field("text", &self.for_log())
            .finish()
    }
}

/// Two errors are equal if a client is told the same; causes cannot be compared.
impl PartialEq for Error {
    fn eq(&self, other: &Self) -> bool {
        self.code == other.code && self.message == other.message
    }
}

impl Eq for Error {}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let cause: &(dyn StdError + 'static) = self.cause.as_deref()?;
        Some(cause)
    }
}

/// What failed, as the text of a cause that would not say it.
#[derive(Debug)]
struct FailedOperation {
    operation: String,
    cause: BoxedCause,
}

impl std::fmt::Display for FailedOperation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.operation)
    }
}

impl StdError for FailedOperation {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&*self.cause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk_full() -> std::io::Error {
        std::io::Error::other("the disk is full")
    }

    #[test]
    fn the_log_gets_every_cause_and_the_client_none() {
        let error =
            Error::unavailable("try again").with_cause(Error::internal_during("writing a row", disk_full()));
        assert_eq!(
            error.for_log(),
            "try again: an internal error; the server's log has the details: writing a row: the disk is full"
        );
        assert_eq!(error.to_string(), "try again");
        assert_eq!(error.body()["error"]["message"], "try again");
        let wire = serde_json::to_string(&error).unwrap();
        assert_eq!(wire, r#"{"code":"unavailable","message":"try again"}"#);
    }

    #[test]
    fn a_full_disk_is_told_wherever_it_was_met() {
        for full in [std::io::ErrorKind::StorageFull, std::io::ErrorKind::QuotaExceeded] {
            let error = Error::internal_during("making a directory", std::io::Error::from(full));
            assert_eq!(error.code, ErrorCode::Unavailable);
            assert!(error.message.contains("disk is full"), "{error}");
        }
    }

    #[test]
    fn an_error_keeps_its_cause_as_a_typed_source() {
        let error = Error::internal(disk_full());
        let source = error.source().unwrap();
        assert!(source.downcast_ref::<std::io::Error>().is_some());
        assert!(error.clone().source().is_some(), "a copy has the cause too");
        assert!(Error::invalid("no").source().is_none());
    }

    #[test]
    fn a_text_that_is_there_already_is_not_logged_twice() {
        let error =
            Error::unavailable("cannot write: the disk is full; free some space").with_cause(disk_full());
        assert_eq!(error.for_log(), "cannot write: the disk is full; free some space");
    }

    #[test]
    fn debug_output_has_a_cause_s_text_and_none_of_its_fields() {
        #[derive(Debug)]
        struct Refused {
            #[expect(dead_code, reason = "only Debug reads it")]
            password: &'static str,
        }
        impl std::fmt::Display for Refused {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("refused")
            }
        }
        impl StdError for Refused {}
        let error = Error::unavailable("no connection").with_cause(Refused { password: "hunter2" });
        let shown = format!("{error:?}");
        assert!(shown.contains("refused") && !shown.contains("hunter2"), "{shown}");
    }
}
