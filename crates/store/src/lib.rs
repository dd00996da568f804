//! The database: tokens, projects, workspaces, sessions, the event log, the debugger, memory, audit.
//!
//! The only crate that opens it. It stores what it is given and does not decide who may see or change it;
//! the only checks made here are those that must hold in the same transaction as the write.
//!
//! In the order data flows:
//!
//! - [`open`]: creates, migrates and locks the database; errors say why it cannot be opened and what to do.
//! - [`store`]: [`Store`], the handle the rest of the program uses.
//! - `writer`: one task owns the one connection that writes. It takes every queued write, commits
//!   them as one group and only then answers, so that concurrent writes share one commit.
//! - [`log`]: the event log and the debugger's log: appended by the writer, replayed from the database, then
//!   followed live from a small ring of recent entries.
//! - [`tables`]: everything else, one file per table. Reads go through a small pool and never wait for the writer.
//! - `row_cache`: rows that every request reads, cached until a commit changes their table.
//! - [`page`]: paged lists with opaque cursors.
//! - `db_error`: database errors translated into errors for the caller.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]
#![allow(
    clippy::disallowed_types,
    reason = "this is the crate that opens the database"
)]

mod db_error;
pub mod log;
pub mod open;
pub mod page;
mod row_cache;
pub mod store;
pub mod tables;
mod writer;

pub use log::{
    debugger::{DebugFilter, DebugLog},
    events::EventLog,
    follow::LogFollower,
};
pub use open::{OpenError, StoreOptions};
pub use oubliette_protocol::now;
pub use page::{ListPage, PageRequest};
pub use store::Store;
pub use tables::{
    audit::{AuditEntry, AuditFilter, AuditPrincipal, AuditRow},
    projects::{ProjectFilter, ProjectRow},
    queue::QueuedMessage,
    sessions::{SessionFilter, SessionPatch, SessionRow},
    tokens::{NewToken, TokenFilter, TokenRow},
    workspaces::WorkspaceRow,
};
