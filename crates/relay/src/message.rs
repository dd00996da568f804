//! Parses a line into a JSON-RPC message and encodes a message into a line. Pure functions.
//!
//! The reader parses only the envelope ([`RawValue`] fields borrowed from the line). Params and results stay
//! text, so that a handler can pass them on unparsed, or parse them in its own task rather than in the reader.

use std::fmt;

use oubliette_protocol::{
    ErrorCode,
    relay::{INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR, RpcError},
};
use serde::{Deserialize, Serialize, de::IgnoredAny};
use serde_json::{Number, Value, value::RawValue};

use crate::{CallError, error::rpc_error};

/// Maximum length of an id in JSON text, in bytes: an id is kept in memory for as long as its request runs.
pub const MAX_ID_BYTES: usize = 1024;

/// A request's id: a number or a string. `null` is not a valid id.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum RpcId {
    /// A number.
    Number(Number),
    /// A string.
    Text(Box<str>),
}

impl From<u64> for RpcId {
    fn from(id: u64) -> Self {
        RpcId::Number(id.into())
    }
}

impl fmt::Display for RpcId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RpcId::Number(number) => number.fmt(f),
            RpcId::Text(text) => fmt::Debug::fmt(text, f),
        }
    }
}

/// One JSON-RPC message with its params or result parsed.
#[derive(Debug, Clone, PartialEq)]
pub enum RpcMessage {
    /// A call that expects an answer.
    Request {
        /// The id its answer will carry.
        id: RpcId,
        /// The method's name.
        method: String,
        /// The params; null when absent.
        params: Value,
    },
    /// A message without an id, which is not answered.
    Notification {
        /// The method's name.
        method: String,
        /// The params; null when absent.
        params: Value,
    },
    /// An answer. It is never answered itself, however malformed: otherwise two peers could exchange errors
    /// without end.
    Response {
        /// The request it answers; `None` when the other side could not read the id.
        id: Option<RpcId>,
        /// The result or the error.
        outcome: Result<Value, AnswerError>,
    },
}

/// The outcome of a response that carries no result.
#[derive(Debug, Clone, PartialEq)]
pub enum AnswerError {
    /// An error object.
    Remote(RpcError),
    /// Neither a result nor a valid error object.
    Malformed(String),
}

/// A parsed line whose request params or response result are still JSON text.
pub(crate) enum IncomingMessage<'a> {
    Request {
        id: RpcId,
        method: String,
        params: Option<&'a RawValue>,
    },
    Notification {
        method: String,
        params: Value,
    },
    Response {
        id: Option<RpcId>,
        outcome: Result<&'a RawValue, AnswerError>,
    },
}

/// A line that is not a valid message, with the error to answer.
#[derive(Debug, Clone, PartialEq)]
pub struct RejectedLine {
    /// The id, if one could be read.
    pub id: Option<RpcId>,
    /// The error to send.
    pub error: Box<RpcError>,
}

/// The top-level fields of a message. Unknown fields are ignored: our own notifications carry `type` beside
/// `method`.
#[derive(Deserialize)]
struct RpcEnvelope<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    jsonrpc: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    method: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    params: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    result: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    error: Option<&'a RawValue>,
}

/// Deserializes a field so that `null` counts as present; a plain `Option` would make it absent.
fn present<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(d).map(Some)
}

/// Parses one line, its newline removed.
pub fn parse_line(line: &[u8]) -> Result<RpcMessage, RejectedLine> {
    Ok(match parse_envelope(line)? {
        IncomingMessage::Request { id, method, params } => match params_value(params) {
            Ok(params) => RpcMessage::Request { id, method, params },
            Err(error) => return Err(RejectedLine { id: Some(id), error }),
        },
        IncomingMessage::Notification { method, params } => RpcMessage::Notification { method, params },
        IncomingMessage::Response { id, outcome } => RpcMessage::Response {
            id,
            outcome: outcome.and_then(|raw| serde_json::from_str(raw.get()).map_err(malformed)),
        },
    })
}

/// Parses one line, its newline removed, and leaves a request's params and a response's result as text.
pub(crate) fn parse_envelope(line: &[u8]) -> Result<IncomingMessage<'_>, RejectedLine> {
    let text = std::str::from_utf8(line).map_err(|e| bad_json(format!("not UTF-8: {e}")))?;
    let envelope: RpcEnvelope<'_> = serde_json::from_str(text).map_err(|why| {
        // A wrong shape stops the parser before the end of the line, so the rest may still be invalid JSON.
        match serde_json::from_str::<IgnoredAny>(text) {
            Err(why) => bad_json(format!("not JSON: {why}")),
            Ok(_) if text.trim_start().starts_with('[') => {
                not_a_request(None, "batches are not supported; send one object a line")
            }
            Ok(_) => not_a_request(None, &format!("not a request object: {why}")),
        }
    })?;
    let id = envelope.id.map(|raw| parse_id(raw.get()));
    let Some(method) = envelope.method else {
        return match envelope.result.is_some() || envelope.error.is_some() {
            true => Ok(IncomingMessage::Response {
                outcome: response_outcome(&envelope),
                id: id.and_then(Result::ok),
            }),
            false => Err(not_a_request(id.and_then(Result::ok), "a request needs a method")),
        };
    };
    let id = id.transpose().map_err(|why| not_a_request(None, why))?;
    if envelope.jsonrpc.is_none_or(|v| v.get() != r#""2.0""#) {
        return Err(not_a_request(id, r#"jsonrpc must be "2.0""#));
    }
    let Ok(method) = serde_json::from_str::<String>(method.get()) else {
        return Err(not_a_request(id, "method must be a string"));
    };
    let Some(id) = id else {
        let params = params_value(envelope.params).map_err(|error| RejectedLine { id: None, error })?;
        return Ok(IncomingMessage::Notification { method, params });
    };
    let params = envelope.params;
    Ok(IncomingMessage::Request { id, method, params })
}

/// Params as a value; null when absent.
pub(crate) fn params_value(params: Option<&RawValue>) -> Result<Value, Box<RpcError>> {
    let read = params.map(|raw| serde_json::from_str(raw.get())).transpose();
    // The envelope was valid JSON: the remaining causes are too deep a nesting and too large a number.
    let refused = |why| {
        rpc_error(
            INVALID_PARAMS,
            ErrorCode::InvalidArgument,
            format!("params: {why}"),
        )
    };
    match read {
        Ok(params) => Ok(params.unwrap_or(Value::Null)),
        Err(why) => Err(Box::new(refused(why))),
    }
}

fn parse_id(raw: &str) -> Result<RpcId, &'static str> {
    if raw == "null" {
        return Err("id must not be null; leave it out to notify");
    }
    if raw.len() > MAX_ID_BYTES {
        return Err("id is too long");
    }
    // The common case without serde: answers to our own calls carry the integers we sent.
    if let Ok(number) = raw.parse::<u64>() {
        return Ok(number.into());
    }
    serde_json::from_str(raw).map_err(|_| "id must be a number or a string")
}

fn response_outcome<'a>(envelope: &RpcEnvelope<'a>) -> Result<&'a RawValue, AnswerError> {
    match (envelope.result, envelope.error) {
        (Some(result), None) => Ok(result),
        // Some libraries send both fields always, one of them null.
        (Some(result), Some(error)) if error.get() == "null" => Ok(result),
        (_, Some(error)) => match serde_json::from_str(error.get()) {
            Ok(error) => Err(AnswerError::Remote(error)),
            Err(why) => Err(malformed(why)),
        },
        (None, None) => Err(malformed("neither result nor error")),
    }
}

fn malformed(why: impl fmt::Display) -> AnswerError {
    AnswerError::Malformed(why.to_string())
}

fn bad_json(why: String) -> RejectedLine {
    RejectedLine {
        id: None,
        error: Box::new(rpc_error(PARSE_ERROR, ErrorCode::InvalidArgument, why)),
    }
}

fn not_a_request(id: Option<RpcId>, why: &str) -> RejectedLine {
    RejectedLine {
        id,
        error: Box::new(rpc_error(INVALID_REQUEST, ErrorCode::InvalidArgument, why)),
    }
}

impl RpcMessage {
    /// The message as a line, newline included, unless it is longer than `limit`.
    pub fn to_line(&self, limit: usize) -> Result<Vec<u8>, CallError> {
        match self {
            RpcMessage::Request { id, method, params } => {
                request_line(id, method, unless_null(params), limit)
            }
            RpcMessage::Notification { method, params } => notification_line(method, params, limit),
            RpcMessage::Response {
                id,
                outcome: Ok(result),
            } => result_line(id.as_ref(), result, limit),
            RpcMessage::Response {
                id,
                outcome: Err(AnswerError::Remote(error)),
            } => error_line(id.as_ref(), error, limit),
            RpcMessage::Response {
                outcome: Err(AnswerError::Malformed(why)),
                ..
            } => Err(CallError::BadAnswer(why.clone())),
        }
    }
}

/// A message as it is serialized; absent fields are left out.
#[derive(Serialize)]
struct OutgoingMessage<'a, P: ?Sized = Value> {
    jsonrpc: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Option<&'a RpcId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    params: Option<&'a P>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<&'a P>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a RpcError>,
}

const EMPTY_MESSAGE: OutgoingMessage<'static> = OutgoingMessage {
    jsonrpc: "2.0",
    id: None,
    method: None,
    params: None,
    result: None,
    error: None,
};

pub(crate) fn request_line<P: Serialize + ?Sized>(
    id: &RpcId,
    method: &str,
    params: Option<&P>,
    limit: usize,
) -> Result<Vec<u8>, CallError> {
    encode_line(
        &OutgoingMessage {
            jsonrpc: EMPTY_MESSAGE.jsonrpc,
            id: Some(Some(id)),
            method: Some(method),
            params,
            result: None,
            error: None,
        },
        limit,
    )
}

/// The params to send: null ones are left out of the message.
pub(crate) fn unless_null(params: &Value) -> Option<&Value> {
    Some(params).filter(|params| !params.is_null())
}

pub(crate) fn notification_line(method: &str, params: &Value, limit: usize) -> Result<Vec<u8>, CallError> {
    encode_line(
        &OutgoingMessage {
            method: Some(method),
            params: unless_null(params),
            ..EMPTY_MESSAGE
        },
        limit,
    )
}

pub(crate) fn result_line<P: Serialize + ?Sized>(
    id: Option<&RpcId>,
    result: &P,
    limit: usize,
) -> Result<Vec<u8>, CallError> {
    encode_line(
        &OutgoingMessage {
            jsonrpc: EMPTY_MESSAGE.jsonrpc,
            id: Some(id),
            method: None,
            params: None,
            result: Some(result),
            error: None,
        },
        limit,
    )
}

pub(crate) fn error_line(id: Option<&RpcId>, error: &RpcError, limit: usize) -> Result<Vec<u8>, CallError> {
    encode_line(
        &OutgoingMessage {
            id: Some(id),
            error: Some(error),
            ..EMPTY_MESSAGE
        },
        limit,
    )
}

/// Encodes any value as a line, newline included.
pub(crate) fn encode_line(value: &impl Serialize, limit: usize) -> Result<Vec<u8>, CallError> {
    // JSON as serde writes it holds no raw newline: strings escape it.
    let mut line = serde_json::to_vec(value).map_err(|e| CallError::BadAnswer(e.to_string()))?;
    if line.len() > limit {
        return Err(CallError::MessageTooLong(limit));
    }
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests;
