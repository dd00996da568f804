//! Sandboxes for agents and tool servers.
//!
//! This crate starts a program with limited access to the host, and ends it together with every process it
//! started. It knows nothing of agents, tools or sessions: those are known to the code that builds the
//! [`SandboxSpec`].
//!
//! In the order data flows:
//!
//! - [`spec`]: what to run and what it may access: mounts, sockets, port forwards, environment, limits.
//! - [`level`]: the isolation levels.
//! - `driver`: the [`SandboxDriver`] trait, its errors and its [`SandboxReport`]; [`paths`]: where a spec's
//!   paths are from the program's view.
//! - `local`: the driver that needs no daemon: bubblewrap for namespaces, else Landlock alone; cgroups.
//! - `host`: the driver without isolation, for tool servers the operator trusts.
//! - `launch`: starts a process, from a thread that never ends; `supervise`: runs it until it is reaped;
//!   `handle`: controls it.
//! - `control_protocol`: the messages between the driver and the inner stage.
//! - [`inner`]: the inner stage, the first process (pid 1) of every sandbox; part of `oubliette-client`.
//! - `stop`: ends a tool server gracefully.
//!
//! Without the feature `driver` only the inner stage is built.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod control_protocol;
pub mod inner;
pub mod level;
pub mod spec;

#[cfg(feature = "driver")]
mod driver;
#[cfg(feature = "driver")]
mod handle;
#[cfg(feature = "driver")]
mod host;
#[cfg(feature = "driver")]
mod launch;
#[cfg(feature = "driver")]
mod local;
#[cfg(feature = "driver")]
pub mod paths;
#[cfg(feature = "driver")]
mod stop;
#[cfg(feature = "driver")]
mod supervise;

pub use level::IsolationLevel;
pub use spec::{
    BindMount, MountAccess, PortForward, ResourceLimits, SandboxNetwork, SandboxSpec, SocketMount,
};

#[cfg(feature = "driver")]
pub use driver::{SandboxCheck, SandboxDriver, SandboxError, SandboxReport};
#[cfg(feature = "driver")]
pub use handle::{RunningSandbox, SandboxExit, SandboxHandle};
#[cfg(feature = "driver")]
pub use host::HostDriver;
#[cfg(feature = "driver")]
pub use local::{LocalDriver, LocalDriverConfig};
#[cfg(feature = "driver")]
pub use paths::SandboxPaths;
#[cfg(feature = "driver")]
pub use stop::{StopTimeouts, stop};
