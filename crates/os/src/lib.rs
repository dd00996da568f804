//! Small Linux helpers that several crates need.
//!
//! Each is one system call, or a few, used in the one right way. Nothing here knows of sessions, tools or sandboxes.
//!
//! - [`beneath`]: opens a path that cannot lead out of a directory; writes a file in a directory that a program can write to.
//! - [`descriptor_worker`]: a thread for what may block on descriptors that came from another process.
//! - [`untrusted_socket`], [`untrusted_stream`]: Unix sockets that only their owner can connect to, and whose other end is
//!   treated as hostile all the same.
//! - [`disk_usage`](mod@disk_usage): measures the size of directories; [`disk_watch`]: waits until they exceed a limit;
//!   [`disk_writers`]: stops those who write into them meanwhile; [`disk_quota`]: admits what is written into them by the caller.
//! - [`process`]: whether a process still runs.
//! - [`remove_tree`](mod@remove_tree): removes a directory and everything in it, whatever a program made of it.
//! - [`worker_threads`]: a bounded number of threads for one kind of work.
//! - [`memory`]: settings of the C library's allocator.
//! - [`hash`]: a hash that is the same in every process and version.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod beneath;
pub mod descriptor_worker;
pub mod disk_quota;
pub mod disk_usage;
pub mod disk_watch;
pub mod disk_writers;
pub mod hash;
pub mod memory;
pub mod process;
pub mod remove_tree;
pub mod untrusted_socket;
pub mod untrusted_stream;
pub mod worker_threads;

pub use beneath::{SymlinkPolicy, give_to_owner_of, open_beneath, replace_file};
pub use descriptor_worker::{DescriptorWorker, UntrustedDescriptor};
pub use disk_quota::{AdmittedWrite, DiskQuota};
pub use disk_usage::{DiskUsage, disk_usage};
pub use disk_watch::DiskWatch;
pub use disk_writers::{DiskWriters, StoppedWriters};
pub use hash::fnv1a;
pub use memory::return_large_buffers;
pub use process::process_runs;
pub use remove_tree::{remove_tree, remove_tree_blocking};
pub use untrusted_socket::{PassedDescriptors, UntrustedListener, UntrustedSocket};
pub use untrusted_stream::{SharedSocket, UntrustedReader, UntrustedStream, UntrustedWriter};
pub use worker_threads::WorkerThreads;
