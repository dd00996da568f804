//! PostgreSQL: one server writes, holding a lease, or the servers of a cluster do, each with its own; others may read and
//! follow.
//!
//! - [`url`]: the address of a database, whose password is never shown.
//! - [`open`]: connects, checks what it finds, migrates; [`open_error`]: why that failed, and what to do.
//! - [`lease`]: who may write, and the number that every transaction checks; [`lease_holder`]: who that is.
//! - [`membership`]: joining a cluster, being heard of, declaring others dead.
//! - [`notice`]: what a commit tells other servers; [`listener`]: hearing it, and catching up with what was not heard.
//! - [`text`]: text as PostgreSQL can store it.

pub(crate) mod lease;
pub(crate) mod lease_holder;
pub(crate) mod listener;
pub(crate) mod membership;
pub(crate) mod notice;
pub(crate) mod open;
pub(crate) mod open_error;
pub(crate) mod text;
pub(crate) mod url;
