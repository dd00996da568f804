//! Git on workspaces, always in a sandbox that holds that workspace alone.
//!
//! - [`remote`]: the URL and ref to clone, checked.
//! - [`sandboxed`]: one run of git: its sandbox, its settings, its limits.
//! - [`output`]: reads what it prints.
//! - [`mod@clone`]: cloning a remote into a workspace.
//! - [`mod@diff`]: the diff of a workspace against what it held when it was created.

mod clone;
mod diff;
mod output;
pub(crate) mod remote;
mod sandboxed;

pub(crate) use diff::diff;
pub use diff::{GitDiff, MAX_DIFF_BYTES};
pub use remote::GitRemote;
pub use sandboxed::GitSandboxes;
