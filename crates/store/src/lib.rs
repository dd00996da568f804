//! The durable truth: tokens, projects, workspaces, sessions, the event log, the debugger, memory, audit.
//!
//! The only crate that opens the database. It keeps what it is given and decides nothing about who may
//! see or change it; the checks it makes are those that must hold in the same transaction.
//!
//! In the order data flows:
//!
//! - [`open`]: creating, migrating and locking the database; why it cannot be opened, with the remedy.
//! - [`store`]: [`Store`], which everything hangs on.
//! - `writer`: one task owns the one connection that writes. It takes all that waits, commits it as one
//!   group and only then answers, so that a commit is shared by everybody who asked meanwhile.
//! - [`log`]: the event log and the debugger: appended by the writer, replayed from the database, then
//!   followed live from a small ring.
//! - [`tables`]: the rest, a file a noun. Reads go through a small pool and never wait for the writer.
//! - `known`: what every request asks for, remembered until a commit touches it.
//! - [`page`]: lists in pages, by opaque cursors.
//! - `fault`: what a database error means to whoever asked.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]
#![allow(
    clippy::disallowed_types,
    reason = "this is the crate that opens the database"
)]

mod fault;
mod known;
pub mod log;
pub mod open;
pub mod page;
pub mod store;
pub mod tables;
mod writer;

pub use log::{
    debugger::{DebugFilter, DebugLog},
    events::EventLog,
    follow::Follow,
};
pub use open::{OpenError, Options};
pub use page::{Page, Paged};
pub use store::Store;
pub use tables::{
    audit::{AuditEntry, AuditFilter, AuditRow},
    projects::{ProjectFilter, ProjectRow},
    queue::QueuedMessage,
    sessions::{SessionFilter, SessionPatch, SessionRow},
    tokens::{NewToken, TokenFilter, TokenRow},
    workspaces::WorkspaceRow,
};

/// Now, to the millisecond: what is stored is what was shown.
pub fn now() -> jiff::Timestamp {
    let now = jiff::Timestamp::now();
    jiff::Timestamp::from_millisecond(now.as_millisecond()).unwrap_or(now)
}
