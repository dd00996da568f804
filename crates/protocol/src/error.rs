//! The one error every door answers with.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// What went wrong, as a program reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request itself is wrong.
    InvalidArgument,
    /// No token, or one that is not (or no longer) good.
    Unauthenticated,
    /// The token does not reach this far.
    PermissionDenied,
    /// No such thing, or not visible to this token.
    NotFound,
    /// It clashes with what is there.
    Conflict,
    /// A limit on size, count or rate.
    LimitExceeded,
    /// No answer in time.
    Timeout,
    /// The caller whose tool was called has gone.
    CallerDisconnected,
    /// The agent may not use this tool.
    NotAllowed,
    /// Something this needs is down for now.
    Unavailable,
    /// The tool itself answered with an error.
    ToolError,
    /// A fault of Oubliette's own.
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

    /// The code as it stands on the wire.
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

    /// The HTTP status of the REST door.
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

    /// The JSON-RPC code of the relay socket.
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

/// An error with its two audiences: `message` goes to whoever asked and holds no secret and no host
/// detail; `log` is for the server's log alone and never leaves it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// For programs.
    pub code: ErrorCode,
    /// For the person who asked: what is wrong and what to do next.
    pub message: String,
    /// For the log.
    #[serde(skip)]
    pub log: Option<String>,
}

/// What most of Oubliette returns.
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
    /// The request itself is wrong.
    invalid => InvalidArgument,
    /// No good token.
    unauthenticated => Unauthenticated,
    /// The token does not reach this far.
    permission_denied => PermissionDenied,
    /// No such thing, or not visible.
    not_found => NotFound,
    /// It clashes with what is there.
    conflict => Conflict,
    /// Too big, too many, too fast.
    limit_exceeded => LimitExceeded,
    /// No answer in time.
    timeout => Timeout,
    /// The caller has gone.
    caller_disconnected => CallerDisconnected,
    /// The agent may not use this tool.
    not_allowed => NotAllowed,
    /// Down for now.
    unavailable => Unavailable,
    /// The tool's own error.
    tool_error => ToolError,
}

impl Error {
    /// An error with this code.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            log: None,
        }
    }

    /// A fault of our own: the caller learns only that, the log learns `cause`.
    pub fn internal(cause: impl std::fmt::Display) -> Self {
        Self {
            code: ErrorCode::Internal,
            message: "an internal error; the server's log has the details".into(),
            log: Some(cause.to_string()),
        }
    }

    /// Adds what only the log may know.
    #[must_use]
    pub fn with_log(mut self, cause: impl std::fmt::Display) -> Self {
        self.log = Some(cause.to_string());
        self
    }

    /// What the log should say.
    pub fn for_log(&self) -> Cow<'_, str> {
        match &self.log {
            Some(log) => Cow::Owned(format!("{}: {log}", self.message)),
            None => Cow::Borrowed(&self.message),
        }
    }

    /// `{"error":{"code","message"}}`: the body of a REST error and of a tool's error result.
    pub fn body(&self) -> serde_json::Value {
        serde_json::json!({ "error": { "code": self.code, "message": self.message } })
    }
}
