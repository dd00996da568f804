//! Handles to a running sandbox.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal};
use tokio::net::UnixStream;
use tokio::process::{ChildStderr, ChildStdin, ChildStdout};
use tokio::sync::{Notify, watch};

use crate::{IsolationLevel, SandboxPaths};

/// A started sandbox: the program's pipes, and a handle to end it and wait for it.
#[derive(Debug)]
pub struct RunningSandbox {
    /// The program's stdin; dropping it closes it.
    pub stdin: ChildStdin,
    /// The program's stdout.
    pub stdout: ChildStdout,
    /// The program's stderr.
    pub stderr: ChildStderr,
    /// Ends the sandbox and waits for its end.
    pub handle: SandboxHandle,
    /// Where the program sees the spec's paths.
    pub paths: SandboxPaths,
}

/// How the program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SandboxExit {
    /// Its exit code, if it exited by itself.
    pub code: Option<i32>,
    /// The signal that killed it, if one did.
    pub signal: Option<i32>,
    /// Whether any process of the sandbox was killed because a memory limit was exceeded.
    pub oom: bool,
    /// Whether it was killed because its group had more processes than it may have.
    pub too_many_processes: bool,
    /// What ended the sandbox around it, if it did not end by itself and was not killed by the server.
    pub cause: Option<ExitCause>,
}

/// What ended a sandbox from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitCause {
    /// Somebody else killed or removed its container.
    ContainerKilled,
    /// The connection to its container was cut and not made again within `[sandbox] grace`.
    ConnectionLost,
    /// The first process of its container broke the protocol.
    ProtocolViolation,
    /// The container engine does not answer.
    EngineUnreachable,
    /// Its pod was evicted from its node.
    Evicted,
    /// Its pod's node is lost.
    NodeLost,
}

impl std::fmt::Display for ExitCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ExitCause::ContainerKilled => "its container was killed from outside",
            ExitCause::ConnectionLost => {
                "the connection to its container was lost and not made again within [sandbox] grace"
            }
            ExitCause::ProtocolViolation => "its container broke the protocol and was ended",
            ExitCause::EngineUnreachable => {
                "the container engine does not answer; start it, and see `oubliette doctor`"
            }
            ExitCause::Evicted => {
                "its pod was evicted: its node was drained, shut down or short of memory or disk, or another pod took its place"
            }
            ExitCause::NodeLost => "the node of its pod is lost",
        })
    }
}

impl SandboxExit {
    /// Whether it exited with code 0.
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }
}

impl std::fmt::Display for SandboxExit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.code, self.signal) {
            (Some(code), _) => write!(f, "exit code {code}")?,
            (None, Some(signal)) => write!(f, "signal {signal}")?,
            (None, None) => f.write_str("ended")?,
        }
        match (self.oom, self.too_many_processes) {
            (true, _) => f.write_str(", out of memory"),
            (false, true) => f.write_str(", too many processes"),
            (false, false) => match self.cause {
                Some(cause) => write!(f, ": {cause}"),
                None => Ok(()),
            },
        }
    }
}

/// A handle to a running sandbox. Dropping the last clone kills the whole process tree.
#[derive(Clone)]
pub struct SandboxHandle {
    shared: Arc<SandboxHandleShared>,
}

struct SandboxHandleShared {
    pid: Option<Pid>,
    level: IsolationLevel,
    tree: Arc<ProcessTreeControl>,
    exit: watch::Receiver<Option<SandboxExit>>,
}

impl Drop for SandboxHandleShared {
    fn drop(&mut self) {
        self.tree.kill();
    }
}

/// Kills a sandbox when it is dropped, whoever else has a handle to it.
pub struct KillOnDrop(pub SandboxHandle);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.0.kill();
    }
}

/// A limit of its group for which a sandbox is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExceededLimit {
    Memory,
    Processes,
}

/// The means to signal and kill a sandbox's process tree.
pub(crate) struct ProcessTreeControl {
    /// The control socket to the inner stage.
    pub(crate) control: UnixStream,
    /// A pidfd of pid 1 of the namespace. Killing that, rather than bubblewrap above it, makes the end orderly:
    /// bubblewrap sees it end only after the kernel has killed and reaped everything inside.
    pub(crate) init: std::sync::OnceLock<OwnedFd>,
    /// Whether a kill was requested.
    pub(crate) killed: AtomicBool,
    /// The limit for which it was killed, if it was for one.
    pub(crate) overrun: std::sync::OnceLock<ExceededLimit>,
    pub(crate) kill_requested: Notify,
}

impl ProcessTreeControl {
    pub(crate) fn new(control: UnixStream) -> Self {
        Self {
            control,
            init: std::sync::OnceLock::new(),
            killed: AtomicBool::new(false),
            overrun: std::sync::OnceLock::new(),
            kill_requested: Notify::new(),
        }
    }

    /// Kills the sandbox because its group exceeds a limit.
    pub(crate) fn kill_for(&self, overrun: ExceededLimit) {
        let _ = self.overrun.set(overrun);
        self.kill();
    }

    pub(crate) fn kill(&self) {
        self.killed.store(true, Ordering::SeqCst);
        if let Some(init) = self.init.get() {
            let _ = rustix::process::pidfd_send_signal(init, Signal::KILL);
        }
        // Without a namespace, the inner stage kills its descendants and exits when this socket is closed.
        let _ = rustix::net::shutdown(&self.control, rustix::net::Shutdown::Both);
        self.kill_requested.notify_one();
    }
}

impl SandboxHandle {
    pub(crate) fn new(
        pid: Option<Pid>,
        level: IsolationLevel,
        tree: Arc<ProcessTreeControl>,
        exit: watch::Receiver<Option<SandboxExit>>,
    ) -> Self {
        Self {
            shared: Arc::new(SandboxHandleShared {
                pid,
                level,
                tree,
                exit,
            }),
        }
    }

    /// The pid, on this host, of the process at the top of the tree; none if it is not among this host's.
    pub fn pid(&self) -> Option<u32> {
        self.shared.pid.map(|pid| pid.as_raw_pid().unsigned_abs())
    }

    /// Its isolation level.
    pub fn level(&self) -> IsolationLevel {
        self.shared.level
    }

    /// Whether a process, by its pid on the host, belongs to this tree.
    pub fn contains(&self, pid: u32) -> bool {
        self.pid()
            .is_some_and(|top| crate::socket_peers::is_in_tree(pid, top))
    }

    /// Kills the whole tree with SIGKILL. [`SandboxHandle::wait`] returns when it is gone.
    pub fn kill(&self) {
        self.shared.tree.kill();
    }

    /// Sends SIGTERM to the program itself.
    pub fn terminate(&self) {
        // Fails if the buffer is full; then hundreds of such signals are already waiting.
        let _ = self.shared.tree.control.try_write(&[libc::SIGTERM as u8]);
    }

    /// Waits until the whole tree is gone. Any number of tasks may wait, before or after the end.
    pub async fn wait(&self) -> SandboxExit {
        let mut exit = self.shared.exit.clone();
        let ended = exit.wait_for(Option::is_some).await.ok().and_then(|exit| *exit);
        // The supervising task ends without a result only when the runtime shuts down, which kills the child.
        ended.unwrap_or(SandboxExit {
            code: None,
            signal: Some(libc::SIGKILL),
            oom: false,
            too_many_processes: false,
            cause: None,
        })
    }

    /// How the program ended; none while it runs.
    pub fn exit(&self) -> Option<SandboxExit> {
        *self.shared.exit.borrow()
    }
}

impl std::fmt::Debug for SandboxHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SandboxHandle")
            .field("pid", &self.pid())
            .field("level", &self.level())
            .finish()
    }
}
