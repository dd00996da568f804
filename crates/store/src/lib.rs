//! The database: tokens, projects, workspaces, sessions, approvals, the event log, the debugger, memory, audit, and the
//! definitions that servers share.
//!
//! The only crate that opens it. It stores what it is given and does not decide who may see or change it;
//! the only checks made here are those that must hold in the same transaction as the write.
//!
//! In the order data flows:
//!
//! - [`open`]: where the database is; errors say why it cannot be opened and what to do.
//! - `db`: SQLite and PostgreSQL behind one interface: opening, statements, rows, transactions. Nothing else knows which
//!   of them it is.
//! - [`cluster`]: several servers on one PostgreSQL database, and which of them runs a session.
//! - [`store`]: [`Store`], the handle the rest of the program uses.
//! - `writer`: one task owns the one connection that writes. It takes every queued write, commits
//!   them as one group and only then answers, so that concurrent writes share one commit.
//! - [`log`]: the event log and the debugger's log: appended by the writer, replayed from the database, then
//!   followed live from a small ring of recent entries.
//! - [`tables`]: everything else, one file per table. Reads go through a small pool and never wait for the writer.
//! - `row_cache`: rows that every request reads, cached until a commit changes their table.
//! - [`page`]: paged lists with opaque cursors.
//! - [`transfer`]: all rows out of a database and into an empty one, for backups and for moving.
//! - `db_error`: database errors translated into errors for the caller.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]
#![allow(
    clippy::disallowed_types,
    reason = "this is the crate that opens the database"
)]

pub mod cluster;
mod db;
mod db_error;
pub mod log;
pub mod open;
pub mod page;
mod row_cache;
pub mod store;
pub mod tables;
pub mod transfer;
mod writer;

pub use cluster::{
    ClusterHealth, ClusterMember, ClusterOptions, MemberState, PeerServer, ServerHealth, ServerRow,
    SessionOwner,
};
pub use log::{
    debug_size::CountedSession,
    debugger::{DebugFilter, DebugLog},
    events::{EventLog, READ_BYTES},
    follow::LogFollower,
};
pub use open::{DatabaseUrl, LeaseHolder, OpenError, PostgresOpenError, StoreLocation, StoreOptions};
pub use oubliette_protocol::now;
pub use page::{ListPage, PageRequest};
pub use store::Store;
pub use tables::{
    approvals::{ApprovalChange, ApprovalFilter, ApprovalRow},
    audit::{AuditEntry, AuditFilter, AuditPrincipal, AuditRow},
    definitions::{DefinitionVersion, LibraryChangeOutcome},
    memory::MEMORY_ENTRY_OVERHEAD,
    projects::{ProjectFilter, ProjectRow},
    queue::QueuedMessage,
    sessions::{SessionFilter, SessionPatch, SessionRow, session_limit_error},
    tokens::{NewToken, TokenFilter, TokenRow},
    usage::{ChargedSum, UsageRecord},
    usage_report::{UsageFilter, UsageGroup, UsageReport, UsageSum},
    webhooks::{DeliveryOutcome, OutboxEvent, WebhookStatus},
    workspaces::WorkspaceRow,
};
pub use transfer::{DatabaseLock, RowChunk, StoreLoader, StoreSnapshot, TableDigest};
pub use writer::WebhookSubscription;
