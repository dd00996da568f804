//! Types and validation of everything Oubliette's programs send each other or read from files.
//!
//! This crate is data and its rules: the form of an id, the fields of an event, the fields an `agent.json` may
//! have. It does no I/O and knows no transport, and spawns nothing but a thread with more stack, for which it waits.
//!
//! In the order data flows:
//!
//! - [`id`]: session, project, workspace, token and request ids; slugs and catalog ids.
//! - [`scope`]: a token's scope, read < write < admin; [`principal`]: the token behind a request.
//! - [`error`]: the error type and codes of every door, with their HTTP status and JSON-RPC code.
//! - [`duration`]: durations written as a number and a unit (`"500ms"`, `"30d"`).
//! - [`size`]: the length of a value's JSON in bytes.
//! - [`budget`]: how many bytes may be kept on behalf of somebody else.
//! - [`strict`]: strict JSON parsing, with errors that name field and reason.
//! - [`agent`], [`catalog`]: `agent.json` and `tool.json`; `error_field`: finds the field a `tool.json` error is about;
//!   [`egress`]: the hosts a sandbox may reach.
//! - [`library`]: definitions as their files, to be stored and exchanged.
//! - [`program`]: a pinned package that both may name as the program to run.
//! - [`argument_schema`]: a tool's argument schema, and the check of arguments in bounded time, memory and stack.
//! - [`rule_entry`]: an entry of an agent's `allowed`, `denied` or `ask`, with its condition on a call's arguments.
//! - [`caller`]: the tools a caller lends, and their checks.
//! - [`tool`]: a tool as it is listed, and the result of a call.
//! - [`relay`]: methods, parameters and error codes of the relay socket.
//! - [`usage`]: tokens and cost of model requests.
//! - [`approval`]: calls that wait for a person to allow them.
//! - [`event`]: events of a session's log; [`debug`]: events of the debugger's log.

pub mod agent;
pub mod approval;
pub mod argument_schema;
pub mod budget;
pub mod caller;
pub mod catalog;
pub mod debug;
pub mod duration;
pub mod egress;
pub mod error;
mod error_field;
pub mod event;
pub mod id;
pub mod library;
pub mod principal;
pub mod program;
pub mod relay;
pub mod rule_entry;
pub mod scope;
pub mod size;
pub mod strict;
pub mod tool;
pub mod usage;
pub mod workspace_policy;

pub use budget::{ByteBudget, ByteCharge, OverBudget};
pub use error::{Error, ErrorCode, Result};
pub use id::{
    ApprovalId, CallerId, CatalogId, ProjectId, RequestId, ServerId, SessionId, Slug, TokenId, WorkspaceId,
};
pub use principal::Principal;
pub use scope::Scope;
pub use workspace_policy::WorkspacePolicy;

/// The current time, rounded down to the millisecond, which is the precision timestamps are stored with:
/// a value read back equals the one that was returned when it was written.
pub fn now() -> jiff::Timestamp {
    let now = jiff::Timestamp::now();
    jiff::Timestamp::from_millisecond(now.as_millisecond()).unwrap_or(now)
}

/// A JSON object that keeps its keys in the order they were read.
pub type JsonObject = serde_json::Map<String, serde_json::Value>;
