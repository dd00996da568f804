//! How a call fails, and why a connection ended.

use oubliette_protocol::{Error, ErrorCode, OverBudget, relay};
use relay::RpcError;
use serde_json::json;

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// The other side closed it.
    #[error("the other side closed the connection")]
    ByPeer,
    /// This side closed it.
    #[error("the connection was closed")]
    ByUs,
    /// A line was longer than allowed.
    #[error("a line was longer than {0} bytes")]
    LineTooLong(usize),
    /// The other side kept sending lines that were refused, and did not read the refusals.
    #[error("the other side does not read its answers")]
    NotReading,
    /// What it takes to serve the connection does not fit into the budget.
    #[error("{0}")]
    OverBudget(#[from] OverBudget),
    /// Reading or writing the stream failed.
    #[error("the connection broke: {0}")]
    Broken(String),
}

/// How a call fails.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CallError {
    /// The other side answered with an error.
    #[error("{}", .0.message)]
    Remote(RpcError),
    /// The connection ended before the answer came.
    #[error("{0}")]
    Closed(#[from] CloseReason),
    /// No answer in time. The other side has been sent a `cancel`.
    #[error("no answer in time")]
    Timeout,
    /// Cancelled on this side. The other side has been sent a `cancel`.
    #[error("the call was cancelled")]
    Cancelled,
    /// The maximum number of calls is pending already.
    #[error("too many calls are waiting ({0})")]
    TooManyCalls(usize),
    /// The message does not fit into the budget.
    #[error("{0}")]
    OverBudget(#[from] OverBudget),
    /// The encoded message is longer than the maximum line.
    #[error("the message is longer than a line may be ({0} bytes)")]
    MessageTooLong(usize),
    /// The other side's answer is neither a result nor an error.
    #[error("the answer is not JSON-RPC: {0}")]
    BadAnswer(String),
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Self {
        let code = match error {
            CallError::Remote(error) => return error.into(),
            CallError::Closed(_) => ErrorCode::Unavailable,
            CallError::Timeout => ErrorCode::Timeout,
            CallError::Cancelled => ErrorCode::ToolError,
            CallError::TooManyCalls(_) | CallError::MessageTooLong(_) | CallError::OverBudget(_) => {
                ErrorCode::LimitExceeded
            }
            CallError::BadAnswer(_) => ErrorCode::Internal,
        };
        Error::new(code, error.to_string())
    }
}

/// An error object with both codes: JSON-RPC's number and, in `data`, Oubliette's [`ErrorCode`].
pub fn rpc_error(rpc: i64, code: ErrorCode, message: impl Into<String>) -> RpcError {
    RpcError {
        code: rpc,
        message: message.into(),
        data: Some(json!({ "code": code })),
    }
}

/// The error for a method that does not exist, JSON-RPC code `-32601`.
pub fn method_not_found(method: &str) -> RpcError {
    let name = oubliette_protocol::id::quoted(method);
    rpc_error(
        relay::METHOD_NOT_FOUND,
        ErrorCode::NotFound,
        format!("no such method: {name}"),
    )
}

/// The error for params of the wrong shape, JSON-RPC code `-32602`.
pub fn invalid_params(why: impl std::fmt::Display) -> RpcError {
    rpc_error(
        relay::INVALID_PARAMS,
        ErrorCode::InvalidArgument,
        format!("wrong params: {why}"),
    )
}

pub(crate) fn too_many_in_flight(limit: usize) -> RpcError {
    let text = format!("{limit} requests are in flight on this connection; wait for answers");
    (&Error::limit_exceeded(text)).into()
}

pub(crate) fn answer_too_long(limit: usize) -> RpcError {
    (&Error::limit_exceeded(format!("the answer is longer than a line may be ({limit} bytes)"))).into()
}
