//! The tables, one file each, with its row type, its reads and its writes.

pub mod audit;
pub mod logins;
pub mod memory;
pub mod projects;
pub(crate) mod purge;
pub mod queue;
mod row;
pub mod sessions;
pub mod tokens;
pub mod workspaces;
