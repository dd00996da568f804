//! The home directory: the paths of everything Oubliette stores, and the definitions people write there.
//!
//! This crate knows the layout of the home and reads, writes and watches `agents/<slug>/agent.json` and
//! `tools/<id>/tool.json`. It does not open the database, and does not decide who may change what.
//!
//! In the order data flows:
//!
//! - [`layout`]: [`HomeDir`], the paths of all files in the home, with socket paths that are short enough.
//! - [`safe_fs`]: atomic writes (a crash leaves the old or the new file), and reads that follow no symbolic link
//!   out of the home.
//! - [`discard`]: removes directories that agents wrote to, in the background and across restarts.
//! - [`library`]: [`DefinitionLibrary`], the agents and the tool catalog in memory, kept up to date with
//!   their files.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod discard;
mod layout;
mod library;
pub mod safe_fs;

pub use layout::HomeDir;
pub use library::{AgentEntry, DefinitionLibrary, HomeFile, LibraryDir, StagedDefinition, ToolEntry};
