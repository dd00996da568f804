//! Git commands on workspaces, run so that neither a URL nor a workspace's content can make git execute anything.
//!
//! - [`remote`]: the URL and ref to clone, checked.
//! - [`run`]: git without any configuration of the machine or user, limited in time and output.
//! - [`mod@clone`]: cloning a remote into a workspace.
//! - [`mod@diff`]: the diff of a workspace against what it held when it was created.

mod clone;
mod diff;
mod remote;
mod run;
#[cfg(test)]
mod tests;

pub(crate) use clone::clone_remote;
pub(crate) use diff::{diff, record_baseline};
pub(crate) use remote::{GitRemote, without_password};
