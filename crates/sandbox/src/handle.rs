//! A hold on a started sandbox.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal};
use tokio::net::UnixStream;
use tokio::process::{ChildStderr, ChildStdin, ChildStdout};
use tokio::sync::{Notify, watch};

use crate::{Level, Paths};

/// A program that runs.
#[derive(Debug)]
pub struct Running {
    /// Its stdin; dropping it is end of file.
    pub stdin: ChildStdin,
    /// Its stdout.
    pub stdout: ChildStdout,
    /// Its stderr.
    pub stderr: ChildStderr,
    /// Its life.
    pub handle: Handle,
    /// Where it sees the spec's paths.
    pub paths: Paths,
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// Its exit code.
    pub code: Option<i32>,
    /// Or the signal that ended it.
    pub signal: Option<i32>,
    /// Whether something in it was killed for want of memory.
    pub oom: bool,
}

impl Exit {
    /// Ended by itself, with code 0.
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }
}

impl std::fmt::Display for Exit {
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

/// A hold on a running program. Dropping the last one kills the whole tree.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

struct Shared {
    pid: Pid,
    level: Level,
    reach: Arc<Reach>,
    exit: watch::Receiver<Option<Exit>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.reach.kill();
    }
}

/// How a running tree is reached.
pub(crate) struct Reach {
    pub(crate) control: UnixStream,
    /// Pid 1 of the namespace. Killing it, rather than the process above it, makes the end orderly: the
    /// process above is told only when the kernel has killed and reaped everything inside.
    pub(crate) init: std::sync::OnceLock<OwnedFd>,
    pub(crate) killed: AtomicBool,
    pub(crate) kill_asked: Notify,
}

impl Reach {
    pub(crate) fn new(control: UnixStream) -> Self {
        Self {
            control,
            init: std::sync::OnceLock::new(),
            killed: AtomicBool::new(false),
            kill_asked: Notify::new(),
        }
    }

    pub(crate) fn kill(&self) {
        self.killed.store(true, Ordering::SeqCst);
        if let Some(init) = self.init.get() {
            let _ = rustix::process::pidfd_send_signal(init, Signal::KILL);
        }
        // Without a namespace the inner stage, on end of file, kills its descendants and ends.
        let _ = rustix::net::shutdown(&self.control, rustix::net::Shutdown::Both);
        self.kill_asked.notify_one();
    }
}

impl Handle {
    pub(crate) fn new(
        pid: Pid,
        level: Level,
        reach: Arc<Reach>,
        exit: watch::Receiver<Option<Exit>>,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                pid,
                level,
                reach,
                exit,
            }),
        }
    }

    /// The process of the host under which the whole tree lives.
    pub fn pid(&self) -> u32 {
        self.shared.pid.as_raw_pid().unsigned_abs()
    }

    /// How strong its walls are.
    pub fn level(&self) -> Level {
        self.shared.level
    }

    /// Whether a process of the host, by its pid there, belongs to this tree. Where there is no namespace to
    /// tell whose a connection is, its peer's pid does.
    pub fn contains(&self, pid: u32) -> bool {
        let mut pid = pid;
        // Depth is bounded by the number of processes; a pid reused meanwhile must not make this endless.
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

    /// Kills the whole tree, at once. [`Handle::wait`] returns when it is gone.
    pub fn kill(&self) {
        self.shared.reach.kill();
    }

    /// Asks the program itself to end: SIGTERM.
    pub fn terminate(&self) {
        // A full buffer means hundreds of such signals are waiting already.
        let _ = self.shared.reach.control.try_write(&[libc::SIGTERM as u8]);
    }

    /// Waits until the whole tree is gone. Any number may wait, before or after the end.
    pub async fn wait(&self) -> Exit {
        let mut exit = self.shared.exit.clone();
        let ended = exit.wait_for(Option::is_some).await.ok().and_then(|exit| *exit);
        // The task is gone without an answer only when the runtime is shutting down, and the child with it.
        ended.unwrap_or(Exit {
            code: None,
            signal: Some(libc::SIGKILL),
            oom: false,
        })
    }

    /// How it ended, if it has.
    pub fn exit(&self) -> Option<Exit> {
        *self.shared.exit.borrow()
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle")
            .field("pid", &self.pid())
            .field("level", &self.level())
            .finish()
    }
}
