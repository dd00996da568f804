//! What the driver and the inner stage say to each other.
//!
//! They share one socket, file descriptor [`CONTROL`] of the inner stage. The driver sends one [`Order`]:
//! its length as four bytes, little-endian, then JSON; after that, single bytes, each a signal for the
//! payload. The inner stage answers with one [`News`] a line. When either end closes, the other ends too:
//! so the sandbox dies with the server even where no namespace or death signal does it.
//!
//! The order carries the environment: it must never be passed in arguments, which every user of the host
//! can read.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::spec::Forward;

/// The inner stage's end of the socket.
pub(crate) const CONTROL: i32 = 3;

/// The inner stage's first argument.
#[cfg_attr(not(feature = "driver"), allow(dead_code))]
pub(crate) const COMMAND: &str = "sandbox-init";

/// What the inner stage has to do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    /// The payload; empty: set everything up, report, and exit (a probe).
    pub(crate) argv: Vec<String>,
    /// Its whole environment.
    pub(crate) env: Vec<(String, String)>,
    /// Its working directory.
    pub(crate) cwd: PathBuf,
    /// TCP ports to carry to sockets.
    pub(crate) forwards: Vec<Forward>,
    /// Who may connect to them.
    pub(crate) guests: Guests,
    /// The walls to put up; none for a process of the host.
    pub(crate) confine: Option<Confine>,
    /// Resource limits of each process.
    pub(crate) rlimits: Rlimits,
    /// Who ends what the payload leaves behind.
    pub(crate) family: Family,
}

/// Who may connect to a forwarded port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Guests {
    /// Whoever can: the network is the sandbox's own.
    Anyone,
    /// The same user: the network is the host's, and a forwarded port may lead to what others must not use.
    SameUser,
}

/// Who ends what the payload leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Family {
    /// The kernel, when pid 1 of the namespace exits.
    Namespace,
    /// The inner stage, as subreaper: it finds and kills every descendant.
    Descendants,
}

/// Walls inside the walls.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Confine {
    /// May be read and executed.
    pub(crate) read: Vec<PathBuf>,
    /// May be read and written.
    pub(crate) write: Vec<PathBuf>,
    /// Directories whose listing is harmless though their content is not.
    pub(crate) list: Vec<PathBuf>,
    /// Device files: read, write and ioctl, nothing made or removed.
    pub(crate) devices: Vec<PathBuf>,
    /// Whether internet sockets may be made.
    pub(crate) inet: bool,
    /// Refuse to start when the kernel has no Landlock: it is the only wall.
    pub(crate) landlock_required: bool,
}

/// Limits of each process. Those a cgroup keeps for the whole tree are left out.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Rlimits {
    /// Open files.
    pub(crate) open_files: Option<u64>,
    /// Processes of the user in this user namespace.
    pub(crate) processes: Option<u64>,
    /// Bytes of private writable memory. Address space would be the wrong measure: Node and others
    /// reserve far more of it than they use.
    pub(crate) data: Option<u64>,
    /// Bytes of the largest file.
    pub(crate) file_size: Option<u64>,
}

/// What the inner stage tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum News {
    /// The walls stand.
    Ready {
        /// Landlock's version, 0 where the kernel has none.
        landlock: i32,
    },
    /// The payload runs.
    Started,
    /// The payload does not run: `argv[0]` cannot be executed.
    NoProgram {
        /// Why.
        reason: String,
    },
    /// Setting up failed.
    Failed {
        /// What, and why.
        reason: String,
    },
    /// The payload has ended.
    Exited {
        /// Its exit code.
        code: Option<i32>,
        /// Or the signal that ended it.
        signal: Option<i32>,
    },
}
