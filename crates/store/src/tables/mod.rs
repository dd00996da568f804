//! The tables, one file each, with its row type, its reads and its writes.

pub mod approvals;
pub mod audit;
pub mod definitions;
pub mod logins;
pub mod memory;
pub mod projects;
pub(crate) mod purge;
pub mod queue;
mod row;
pub mod session_delete;
pub mod sessions;
pub mod tokens;
pub mod usage;
pub mod usage_report;
pub mod webhooks;
pub mod workspaces;
