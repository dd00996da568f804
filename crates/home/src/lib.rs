//! The home directory: where everything Oubliette keeps lives, and the definitions people write there.
//!
//! This crate knows the layout of the home and reads, writes and watches `agents/<slug>/agent.json` and
//! `tools/<id>/tool.json`. It does not open the database and decides nothing about who may change what.
//!
//! In the order data flows:
//!
//! - [`layout`]: which path is what ([`Home`]), short enough for sockets.
//! - [`disk`]: files written so that a crash leaves the old or the new one, and read without being led
//!   out of the home.
//! - [`library`]: agents and catalog in memory, following the files ([`Library`]).

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod disk;
pub mod layout;
pub mod library;

pub use layout::Home;
pub use library::{AgentEntry, Library, ToolEntry};
