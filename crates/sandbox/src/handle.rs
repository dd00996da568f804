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
    /// Whether the kernel killed any process of the sandbox because it ran out of memory.
    pub oom: bool,
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
        if self.oom {
            f.write_str(", out of memory")
        } else {
            Ok(())
        }
    }
}

/// A handle to a running sandbox. Dropping the last clone kills the whole process tree.
#[derive(Clone)]
pub struct SandboxHandle {
    shared: Arc<SandboxHandleShared>,
}

struct SandboxHandleShared {
    pid: Pid,
    level: IsolationLevel,
    tree: Arc<ProcessTreeControl>,
    exit: watch::Receiver<Option<SandboxExit>>,
}

impl Drop for SandboxHandleShared {
    fn drop(&mut self) {
        self.tree.kill();
    }
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
    pub(crate) kill_requested: Notify,
}

impl ProcessTreeControl {
    pub(crate) fn new(control: UnixStream) -> Self {
        Self {
            control,
            init: std::sync::OnceLock::new(),
            killed: AtomicBool::new(false),
            kill_requested: Notify::new(),
        }
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
        pid: Pid,
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

    /// The pid, on the host, of the process at the top of the tree.
    pub fn pid(&self) -> u32 {
        self.shared.pid.as_raw_pid().unsigned_abs()
    }

    /// Its isolation level.
    pub fn level(&self) -> IsolationLevel {
        self.shared.level
    }

    /// Whether a process, by its pid on the host, belongs to this tree. It identifies the peer of a connection
    /// where there is no namespace to do so.
    pub fn contains(&self, pid: u32) -> bool {
        let mut pid = pid;
        // Bounded, because a pid that is reused meanwhile could make a cycle.
        for _ in 0..4096 {
            if pid == self.pid() {
                return true;
            }
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            match crate::inner::parent_of(&stat) {
                Some(parent) if parent > 1 => pid = parent.unsigned_abs(),
                Some(_) | None => return false,
            }
        }
        false
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
