//! The words on the wire, shared by every Oubliette program.
//!
//! This crate is data and its rules: what an id looks like, what an event carries, which fields an
//! `agent.json` may have. It does no I/O, spawns nothing and knows no transport.
//!
//! In the order data flows:
//!
//! - [`id`]: session, project, workspace, token and request ids; slugs and catalog ids.
//! - [`scope`]: read < write < admin; [`principal`]: who is behind a request.
//! - [`error`]: the error codes every door answers with, and their HTTP and JSON-RPC forms.
//! - [`duration`]: durations as people write them (`"500ms"`, `"30d"`).
//! - [`size`]: how many bytes a value is as JSON.
//! - [`strict`]: JSON read strictly, the error naming field and reason.
//! - [`agent`], [`catalog`]: `agent.json` and `tool.json`; `blame`: which field of the latter is at fault.
//! - [`caller`]: what a caller declares and what it may be called.
//! - [`tool`]: a tool as it is listed, a call's result.
//! - [`relay`]: methods and frames of the relay socket.
//! - [`event`]: what a session says; [`debug`]: what the debugger records.

pub mod agent;
mod blame;
pub mod caller;
pub mod catalog;
pub mod debug;
pub mod duration;
pub mod error;
pub mod event;
pub mod id;
pub mod principal;
pub mod relay;
pub mod scope;
pub mod size;
pub mod strict;
pub mod tool;

pub use error::{Error, ErrorCode, Result};
pub use id::{CallerId, CatalogId, ProjectId, RequestId, SessionId, Slug, TokenId, WorkspaceId};
pub use principal::Principal;
pub use scope::Scope;

/// A JSON object, keys in the order they came.
pub type Object = serde_json::Map<String, serde_json::Value>;
