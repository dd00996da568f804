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
//! - `group`: limits that several sandboxes share; `process_table`: counts processes; `nameless_files`: finds what is
//!   on disk and in no directory.
//! - `launch`: starts a process; `supervise`: runs it until it is reaped;
//!   `handle`: controls it.
//! - `socket_peers`: which processes may use a sandbox's sockets where no namespace decides it.
//! - `control_protocol`: the messages between the driver and the inner stage.
//! - [`inner`]: the inner stage, the first process (pid 1) of every sandbox; part of `oubliette-client`.
//! - `docker`: the driver for a container engine; `kubernetes`: the one for a cluster; `container`: what they share.
//! - `stage`: the connection between a container and the server.
//! - `stop`: ends a tool server gracefully.
//!
//! Without the feature `driver` only the inner stage is built, and with `remote-stage` the container's end of that
//! connection.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod control_protocol;
pub mod inner;
pub mod level;
pub mod spec;
#[cfg(feature = "remote-stage")]
pub mod stage;

#[cfg(feature = "driver")]
mod container;
#[cfg(feature = "driver")]
mod docker;
#[cfg(feature = "driver")]
mod driver;
#[cfg(feature = "driver")]
mod group;
#[cfg(feature = "driver")]
mod handle;
#[cfg(feature = "driver")]
mod host;
#[cfg(feature = "driver")]
mod kubernetes;
#[cfg(feature = "driver")]
mod launch;
#[cfg(feature = "driver")]
mod local;
#[cfg(feature = "driver")]
mod nameless_files;
#[cfg(feature = "driver")]
pub mod paths;
#[cfg(feature = "driver")]
mod process_table;
#[cfg(feature = "driver")]
mod socket_peers;
#[cfg(feature = "driver")]
mod stop;
#[cfg(feature = "driver")]
mod supervise;

pub use level::IsolationLevel;
pub use spec::{
    BindMount, MountAccess, PortForward, ResourceLimits, SandboxNetwork, SandboxSpec, SocketMount,
};

#[cfg(feature = "driver")]
pub use docker::{DockerDriver, DockerDriverConfig};
#[cfg(feature = "driver")]
pub use driver::{PinnedImage, SandboxCheck, SandboxDriver, SandboxError, SandboxReport};
#[cfg(feature = "driver")]
pub use group::SandboxGroup;
#[cfg(feature = "driver")]
pub use handle::{ExitCause, KillOnDrop, RunningSandbox, SandboxExit, SandboxHandle};
#[cfg(feature = "driver")]
pub use host::HostDriver;
#[cfg(feature = "driver")]
pub use kubernetes::{KubernetesDriver, KubernetesDriverConfig, NetworkPolicyUse};
#[cfg(feature = "driver")]
pub use local::{LocalDriver, LocalDriverConfig, TotalLimits};
#[cfg(feature = "driver")]
pub use paths::SandboxPaths;
#[cfg(feature = "driver")]
pub use stop::{StopTimeouts, stop};
