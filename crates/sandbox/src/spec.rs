//! What to run in a sandbox, and what it may access.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The workspace's path inside.
pub const WORKSPACE: &str = "/workspace";
/// The private home's path inside.
pub const HOME: &str = "/home/agent";
/// The path inside of `oubliette-client`, which is also the inner stage.
pub const CLIENT: &str = "/opt/oubliette/oubliette-client";
/// PATH inside, unless the spec's environment sets it.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// One program in one sandbox. Its stdin, stdout and stderr are always pipes.
///
/// Paths other than the `host` fields are as seen inside. A driver without a mount namespace rewrites them in
/// `argv`, `env` and `cwd` to host paths (see [`crate::SandboxPaths`]).
#[derive(Clone)]
pub struct SandboxSpec {
    /// Name for logs: a session id or a tool server's id.
    pub label: String,
    /// Host directory mounted writable at `/workspace`.
    pub workspace: Option<PathBuf>,
    /// Host directory mounted writable at `/home/agent`; without it, the home is an empty temporary directory.
    pub home: Option<PathBuf>,
    /// Further files and directories of the host.
    pub mounts: Vec<BindMount>,
    /// Unix sockets of the host.
    pub sockets: Vec<SocketMount>,
    /// TCP ports inside that are forwarded to such sockets.
    pub forwards: Vec<PortForward>,
    /// Environment variables, in addition to PATH, HOME, TMPDIR, LANG and USER, which they override. Nothing
    /// else is inherited.
    pub env: Vec<(String, String)>,
    /// Network access.
    pub network: SandboxNetwork,
    /// Resource limits.
    pub limits: ResourceLimits,
    /// The group with which it shares further limits: its session's. None: it has only its own.
    #[cfg(feature = "driver")]
    pub group: Option<crate::SandboxGroup>,
    /// The program and its arguments; the program is searched in PATH.
    pub argv: Vec<String>,
    /// The working directory.
    pub cwd: PathBuf,
}

impl SandboxSpec {
    /// A program with no mounts, no network and the default limits, started in `/workspace`.
    pub fn new(label: impl Into<String>, argv: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            label: label.into(),
            workspace: None,
            home: None,
            mounts: Vec::new(),
            sockets: Vec::new(),
            forwards: Vec::new(),
            env: Vec::new(),
            network: SandboxNetwork::None,
            limits: ResourceLimits::default(),
            #[cfg(feature = "driver")]
            group: None,
            argv: argv.into_iter().map(Into::into).collect(),
            cwd: PathBuf::from(WORKSPACE),
        }
    }
}

// The environment and the arguments may hold secrets: only variable names and the program are shown.
impl std::fmt::Debug for SandboxSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SandboxSpec")
            .field("label", &self.label)
            .field("workspace", &self.workspace)
            .field("home", &self.home)
            .field("mounts", &self.mounts)
            .field("sockets", &self.sockets)
            .field("forwards", &self.forwards)
            .field("env", &self.env.iter().map(|(name, _)| name).collect::<Vec<_>>())
            .field("network", &self.network)
            .field("limits", &self.limits)
            .field("program", &self.argv.first())
            .field("cwd", &self.cwd)
            .finish()
    }
}

/// Access to a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountAccess {
    /// Read and execute.
    ReadOnly,
    /// Read, execute and write.
    ReadWrite,
}

/// A file or directory of the host that is visible inside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindMount {
    /// Its path on the host. It must exist.
    pub host: PathBuf,
    /// Its path inside; missing parent directories are created.
    pub inside: PathBuf,
    /// Whether it is writable.
    pub access: MountAccess,
}

impl BindMount {
    /// A read-only mount.
    pub fn read_only(host: impl Into<PathBuf>, inside: impl Into<PathBuf>) -> Self {
        Self {
            host: host.into(),
            inside: inside.into(),
            access: MountAccess::ReadOnly,
        }
    }

    /// A writable mount.
    pub fn read_write(host: impl Into<PathBuf>, inside: impl Into<PathBuf>) -> Self {
        Self {
            host: host.into(),
            inside: inside.into(),
            access: MountAccess::ReadWrite,
        }
    }
}

/// A Unix socket of the host that programs inside can connect to. It must exist already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketMount {
    /// Its path on the host.
    pub host: PathBuf,
    /// Its path inside.
    pub inside: PathBuf,
}

impl SocketMount {
    /// A socket at `inside` that leads to `host`.
    pub fn new(host: impl Into<PathBuf>, inside: impl Into<PathBuf>) -> Self {
        Self {
            host: host.into(),
            inside: inside.into(),
        }
    }
}

/// Forwards connections to `127.0.0.1:port` inside to a Unix socket.
///
/// With [`SandboxNetwork::Host`] the port is opened on the host: it must be free there, and only processes
/// of the server's own user may connect. At
/// [`crate::IsolationLevel::Landlock`] inet sockets are forbidden, so forwards are not served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortForward {
    /// The TCP port.
    pub port: u16,
    /// The socket, as seen inside: the `inside` of a [`SocketMount`].
    pub socket: PathBuf,
}

/// Network access of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SandboxNetwork {
    /// Only a loopback interface of its own.
    #[default]
    None,
    /// The host's network.
    Host,
}

/// Resource limits of a sandbox, or of a group of sandboxes together. `None` means unlimited.
#[derive(Debug, Clone, PartialEq)]
pub struct ResourceLimits {
    /// Memory of the whole process tree, in MiB; of each process where there are no cgroups. Default 4096.
    pub memory_mb: Option<u64>,
    /// Number of processors, fractions allowed; not enforced without cgroups. Default unlimited.
    pub cpus: Option<f64>,
    /// Processes and threads of the whole tree. Default 1024.
    pub pids: Option<u64>,
    /// What may be on disk, in MiB. A sandbox is kept from writing a single file that is larger; the sum is watched by
    /// whoever runs it (`oubliette_os::DiskWatch`). Default unlimited.
    pub workspace_mb: Option<u64>,
    /// Open files of each process. Default 65536.
    pub open_files: Option<u64>,
}

impl Default for ResourceLimits {
    fn default() -> Self {
        Self {
            memory_mb: Some(4096),
            cpus: None,
            pids: Some(1024),
            workspace_mb: None,
            open_files: Some(65_536),
        }
    }
}
