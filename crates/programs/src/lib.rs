//! Programs: pinned npm and PyPI packages that Oubliette installs itself, for agents and tool servers.
//!
//! A package is installed once, in a sandbox that reaches the operator's package registries only; every file of it is
//! hashed; and sandboxes see it read-only. This crate runs nothing of a package outside a sandbox, and does not decide
//! who may install one.
//!
//! In the order data flows:
//!
//! - [`package_request`]: a package that may not be pinned yet; [`manifest`]: ids, and what an installed program is.
//! - [`store`]: [`ProgramStore`] installs, checks, lists and removes, and says how a program is run.
//! - [`registries`]: the registries that npm's and pip's configuration name, with their credentials.
//! - [`sandboxed`]: runs one step of an installation, within its limits; [`progress`]: how far it is.
//! - [`npm`], [`pypi`]: the steps for each registry; [`tree_file`]: reads files that a package made;
//!   [`python_interpreter`]: the host's interpreters; [`version_range`]: whether an interpreter is new enough.
//! - [`lock`]: the hash of every file, and whether one changed.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod lock;
mod manifest;
mod npm;
mod package_request;
mod progress;
mod pypi;
mod python_interpreter;
mod registries;
mod sandboxed;
mod store;
mod tree_file;
mod version_range;

pub use manifest::{BinCommand, Interpreter, PROGRAMS_INSIDE, ProgramId, ProgramManifest};
pub use package_request::PackageRequest;
pub use progress::InstallProgress;
pub use sandboxed::InstallLimits;
pub use store::{ProgramLaunch, ProgramStore};
