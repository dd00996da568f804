//! Where agents and tool servers run.
//!
//! This crate starts a program in a place it cannot leave, and ends it with everything it started. It
//! knows no agent, no tool and no session: whoever builds the [`Spec`] does.
//!
//! In the order data flows:
//!
//! - [`spec`]: what to run and what it may see: mounts, sockets, forwards, environment, limits.
//! - [`level`]: how strong the walls are.
//! - `driver`: the [`Sandbox`] trait, its errors and its [`Report`]; [`paths`]: what is where inside.
//! - `local`: the driver without a daemon: bubblewrap for namespaces, else Landlock alone; cgroups.
//! - `host`: the driver without walls, for tool servers the operator trusts.
//! - `launch`: one process started from a thread that never ends; `life`: from then until it is reaped;
//!   `handle`: a hold on it.
//! - `wire`: what the driver and the inner stage say to each other.
//! - [`inner`]: the inner stage, pid 1 of every sandbox; part of `oubliette-client`.
//! - `stop`, `disk`: ending a tool server politely; watching how much a workspace holds.
//! - `slice`: how long a thread has the processor at once; here because it takes unsafe code to ask.
//!
//! Without the feature `driver` only the inner stage is built.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod inner;
pub mod level;
pub mod spec;
mod wire;

#[cfg(feature = "driver")]
mod disk;
#[cfg(feature = "driver")]
mod driver;
#[cfg(feature = "driver")]
mod handle;
#[cfg(feature = "driver")]
mod host;
#[cfg(feature = "driver")]
mod launch;
#[cfg(feature = "driver")]
mod life;
#[cfg(feature = "driver")]
mod local;
#[cfg(feature = "driver")]
pub mod paths;
#[cfg(feature = "driver")]
mod slice;
#[cfg(feature = "driver")]
mod stop;

pub use level::Level;
pub use spec::{Access, Forward, Limits, Mount, Network, Socket, Spec};

#[cfg(feature = "driver")]
pub use disk::{DiskWatch, Usage, disk_usage};
#[cfg(feature = "driver")]
pub use driver::{Check, Report, Sandbox, SandboxError};
#[cfg(feature = "driver")]
pub use handle::{Exit, Handle, Running};
#[cfg(feature = "driver")]
pub use host::Host;
#[cfg(feature = "driver")]
pub use local::{Local, LocalConfig};
#[cfg(feature = "driver")]
pub use paths::Paths;
#[cfg(feature = "driver")]
pub use slice::ask_slices;
#[cfg(feature = "driver")]
pub use stop::{Grace, stop};
