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

pub use clone::clone_remote;
pub use diff::{GitDiff, diff, record_baseline};
pub use remote::{GitRemote, without_password};
