//! The error type every door answers with: its codes, their HTTP status and their JSON-RPC code.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// Error code for programs; its snake_case name is part of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
/// detail of the host; `log` goes to the server's log only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// Error code, for programs.
    pub code: ErrorCode,
    /// Text for the client: what is wrong and what to do next.
    pub message: String,
    /// Cause, for the server's log only; never serialized.
    #[serde(skip)]
    pub log: Option<String>,
}

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
    /// An error with this code and message, without a cause for the log.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            log: None,
        }
    }

    /// An internal error: the client gets a fixed text, the log gets `cause`.
    pub fn internal(cause: impl std::fmt::Display) -> Self {
        Self {
            code: ErrorCode::Internal,
            message: "an internal error; the server's log has the details".into(),
            log: Some(cause.to_string()),
        }
    }

    /// Sets the cause that goes to the server's log only.
    #[must_use]
    pub fn with_log(mut self, cause: impl std::fmt::Display) -> Self {
        self.log = Some(cause.to_string());
        self
    }

    /// The text for the server's log: the message, with the cause if there is one.
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
