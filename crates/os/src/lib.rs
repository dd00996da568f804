//! Small Linux helpers that several crates need.
//!
//! Each is one system call, or a few, used in the one right way. Nothing here knows of sessions, tools or sandboxes.
//!
//! - [`beneath`]: opens a path that cannot lead out of a directory.
//! - [`socket`]: a Unix socket that only its owner can connect to.
//! - [`disk_usage`](mod@disk_usage): measures the size of directories, once or until they exceed a limit.
//! - [`time_slice`]: requests a scheduler time slice for a thread.
//! - [`hash`]: a hash that is the same in every process and version.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod beneath;
pub mod disk_usage;
pub mod hash;
pub mod socket;
pub mod time_slice;

pub use beneath::{SymlinkPolicy, open_beneath};
pub use disk_usage::{DiskUsage, DiskWatch, disk_usage};
pub use hash::fnv1a;
pub use socket::bind_private_socket;
pub use time_slice::request_time_slice;
