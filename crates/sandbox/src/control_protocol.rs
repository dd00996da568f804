//! The protocol between the driver and the inner stage.
//!
//! They share one Unix socket, file descriptor [`CONTROL_FD`] of the inner stage. The driver sends one [`LaunchOrder`]:
//! its length as four bytes, little-endian, then JSON; after that, single bytes, each the number of a
//! signal for the payload. The inner stage sends one [`InnerStageReport`] per line, as JSON. When either end closes the
//! socket, the other ends too, so the sandbox ends with the server even where no namespace and no
//! parent-death signal ensures that.
//!
//! The launch order contains the environment, and with it secrets. It must never be passed in command-line
//! arguments, which every user of the host can read.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::spec::PortForward;

/// The inner stage's file descriptor of the control socket.
pub(crate) const CONTROL_FD: i32 = 3;

/// The inner stage's first argument.
#[cfg_attr(not(feature = "remote-stage"), allow(dead_code))]
pub(crate) const INIT_COMMAND: &str = "sandbox-init";

/// What the inner stage is to set up and start.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LaunchOrder {
    /// The payload: the program and its arguments. The inner stage refuses an empty list.
    pub(crate) argv: Vec<String>,
    /// Its environment: the whole of it, unless `image_env` adds the image's.
    pub(crate) env: Vec<(String, String)>,
    /// Set where the image's environment is known only inside: the inner stage's own comes before `env`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) image_env: Option<InheritedEnv>,
    /// Its working directory.
    pub(crate) cwd: PathBuf,
    /// TCP ports to forward to Unix sockets.
    pub(crate) forwards: Vec<PortForward>,
    /// Who may connect to forwarded ports.
    #[serde(rename = "guests")]
    pub(crate) allowed_peers: AllowedPeers,
    /// Landlock and seccomp restrictions; none for the host driver.
    pub(crate) confine: Option<PayloadConfinement>,
    /// Resource limits of each process.
    pub(crate) rlimits: Rlimits,
    /// Who kills the processes the payload leaves behind.
    #[serde(rename = "family")]
    pub(crate) cleanup: DescendantCleanup,
}

/// How the payload gets the environment of its image.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct InheritedEnv {
    /// Variables for what neither the image nor the order has.
    pub(crate) defaults: Vec<(String, String)>,
}

/// Who may connect to a forwarded port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AllowedPeers {
    /// Anyone who can reach it: the network is the sandbox's own.
    Anyone,
    /// Only processes of the same user: the network is the host's, and a forwarded port may give access to
    /// something other users must not use.
    SameUser,
}

/// Who kills the processes the payload leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DescendantCleanup {
    /// The kernel, when pid 1 of the namespace exits.
    Namespace,
    /// The inner stage, as subreaper: it finds and kills all its descendants.
    Descendants,
}

/// Restrictions of the payload by Landlock (files) and seccomp (system calls).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PayloadConfinement {
    /// Paths that may be read and executed.
    pub(crate) read: Vec<PathBuf>,
    /// Paths that may be read, executed and written.
    pub(crate) write: Vec<PathBuf>,
    /// Directories that may be listed, without access to their content.
    pub(crate) list: Vec<PathBuf>,
    /// Device files and directories of them: read, write and ioctl, but no creating or removing.
    pub(crate) devices: Vec<PathBuf>,
    /// Whether inet sockets may be created.
    pub(crate) inet: bool,
    /// Refuse to start if the kernel has no Landlock, because it is the only file isolation.
    pub(crate) landlock_required: bool,
}

/// Resource limits of each process. Those that a cgroup enforces for the whole tree are left out.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Rlimits {
    /// RLIMIT_NOFILE: open files.
    pub(crate) open_files: Option<u64>,
    /// RLIMIT_NPROC: processes of the user in this user namespace.
    pub(crate) processes: Option<u64>,
    /// RLIMIT_DATA: bytes of private writable memory. RLIMIT_AS would be wrong: Node and others reserve far
    /// more address space than they use.
    pub(crate) data: Option<u64>,
    /// RLIMIT_FSIZE: bytes of the largest file.
    pub(crate) file_size: Option<u64>,
}

/// A message of the inner stage to the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum InnerStageReport {
    /// All restrictions are in force.
    Ready {
        /// Landlock's ABI version; 0 if the kernel has none.
        landlock: i32,
    },
    /// The payload runs.
    Started,
    /// The payload could not be executed.
    NoProgram {
        /// Why it could not.
        reason: String,
    },
    /// A step of the setup failed.
    Failed {
        /// Which step, and why.
        reason: String,
    },
    /// The payload has ended.
    Exited {
        /// Its exit code.
        code: Option<i32>,
        /// The signal that killed it.
        signal: Option<i32>,
    },
}
