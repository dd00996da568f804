//! What to run, and what it may see.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where the workspace is inside.
pub const WORKSPACE: &str = "/workspace";
/// Where the private home is inside.
pub const HOME: &str = "/home/agent";
/// Where every sandbox has `oubliette-client`, which is also its inner stage.
pub const CLIENT: &str = "/opt/oubliette/oubliette-client";
/// The search path inside, unless the spec's environment sets another.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// One program in one sandbox. Its stdin, stdout and stderr are always pipes.
///
/// Paths other than `host` fields are as seen inside. A driver that cannot give them (see
/// [`crate::Paths`]) rewrites them in `argv`, `env` and `cwd` to what is there.
#[derive(Clone)]
pub struct Spec {
    /// For logs and cgroup names: a session id, a tool server's id.
    pub label: String,
    /// Host directory at `/workspace`, writable.
    pub workspace: Option<PathBuf>,
    /// Host directory at `/home/agent`, writable; without it the home is empty and forgotten at the end.
    pub home: Option<PathBuf>,
    /// More of the host.
    pub mounts: Vec<Mount>,
    /// Unix sockets of the server.
    pub sockets: Vec<Socket>,
    /// TCP ports inside that lead to such sockets.
    pub forwards: Vec<Forward>,
    /// The whole environment, beside PATH, HOME, TMPDIR, LANG and USER, which it may override.
    pub env: Vec<(String, String)>,
    /// The network.
    pub network: Network,
    /// How much of the machine it may use.
    pub limits: Limits,
    /// The program and its arguments; the program is searched in PATH.
    pub argv: Vec<String>,
    /// The working directory.
    pub cwd: PathBuf,
}

impl Spec {
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
            network: Network::None,
            limits: Limits::default(),
            argv: argv.into_iter().map(Into::into).collect(),
            cwd: PathBuf::from(WORKSPACE),
        }
    }
}

// The environment holds secrets: only its names are shown.
impl std::fmt::Debug for Spec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Spec")
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

/// What may be done with a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Read and execute.
    ReadOnly,
    /// Everything.
    ReadWrite,
}

/// A file or directory of the host, seen inside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Where it is on the host. It must exist.
    pub host: PathBuf,
    /// Where it is inside; parents are made.
    pub inside: PathBuf,
    /// What may be done with it.
    pub access: Access,
}

impl Mount {
    /// A read-only mount.
    pub fn read_only(host: impl Into<PathBuf>, inside: impl Into<PathBuf>) -> Self {
        Self {
            host: host.into(),
            inside: inside.into(),
            access: Access::ReadOnly,
        }
    }

    /// A writable mount.
    pub fn read_write(host: impl Into<PathBuf>, inside: impl Into<PathBuf>) -> Self {
        Self {
            host: host.into(),
            inside: inside.into(),
            access: Access::ReadWrite,
        }
    }
}

/// A Unix socket of the host, connectable inside. It must be listening already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Socket {
    /// Where it is on the host.
    pub host: PathBuf,
    /// Where it is inside.
    pub inside: PathBuf,
}

impl Socket {
    /// A socket seen inside.
    pub fn new(host: impl Into<PathBuf>, inside: impl Into<PathBuf>) -> Self {
        Self {
            host: host.into(),
            inside: inside.into(),
        }
    }
}

/// `127.0.0.1:port` inside, carried to a Unix socket.
///
/// With [`Network::Host`] the port is one of the host's: it must be free there, and only the server's own user
/// may connect to it. At
/// [`crate::Level::Landlock`] there are no inet sockets, so forwards are not served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forward {
    /// The TCP port.
    pub port: u16,
    /// The socket, as seen inside: the `inside` of a [`Socket`].
    pub socket: PathBuf,
}

/// Which network is inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Network {
    /// Loopback alone, its own.
    #[default]
    None,
    /// The host's.
    Host,
}

/// How much of the machine a sandbox may use. `None` is without a limit.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Memory of the whole tree, in MiB.
    pub memory_mb: Option<u64>,
    /// Processors, in fractions.
    pub cpus: Option<f64>,
    /// Processes and threads of the whole tree.
    pub pids: Option<u64>,
    /// The largest file it may write, in MiB; the sum is for [`crate::DiskWatch`] to watch.
    pub workspace_mb: Option<u64>,
    /// Open files of each process.
    pub open_files: Option<u64>,
}

impl Default for Limits {
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
