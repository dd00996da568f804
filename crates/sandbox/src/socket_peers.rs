//! Which processes may use a socket that a sandbox was given, where there is no mount namespace.
//!
//! With one, a sandbox sees the sockets of its spec and no others. Without one, every process of the server's user can
//! connect to every socket whose path it knows: Landlock does not restrict that. So whoever listens asks here about
//! each connection, and the same spec decides that would have been mounted.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::{
    event::{PollFd, PollFlags},
    process::Pid,
};

use crate::SocketMount;

/// The running sandboxes without a mount namespace, by the sockets they were given.
#[derive(Debug, Default)]
pub(crate) struct SocketPeers {
    /// Paths on the host, each with the processes at the top of the sandboxes that may use it.
    by_socket: Mutex<HashMap<PathBuf, Vec<u32>>>,
}

/// One sandbox in [`SocketPeers`], until dropped.
#[derive(Debug)]
pub(crate) struct SocketPeersEntry {
    peers: Arc<SocketPeers>,
    sockets: Vec<PathBuf>,
    top: u32,
}

impl SocketPeers {
    /// Adds a sandbox by the process at its top. To be called before its program runs.
    pub(crate) fn add(self: &Arc<Self>, sockets: &[SocketMount], top: Pid) -> SocketPeersEntry {
        let entry = SocketPeersEntry {
            peers: self.clone(),
            sockets: sockets.iter().map(|socket| socket.host.clone()).collect(),
            top: top.as_raw_pid().unsigned_abs(),
        };
        let mut by_socket = self.lock();
        for socket in &entry.sockets {
            by_socket.entry(socket.clone()).or_default().push(entry.top);
        }
        drop(by_socket);
        entry
    }

    /// Whether a connection to a socket was made by a process of a sandbox that was given it.
    pub(crate) fn may_connect(&self, socket: &Path, connection: BorrowedFd<'_>) -> bool {
        let Ok(peer) = rustix::net::sockopt::socket_peercred(connection) else {
            return false;
        };
        let Ok(pidfd) = peer_pidfd(connection) else {
            return false;
        };
        let tops = self.lock().get(socket).cloned().unwrap_or_default();
        let pid = peer.pid.as_raw_pid().unsigned_abs();
        tops.iter().any(|top| is_in_tree(pid, *top)) && pidfd.is_none_or(|pidfd| is_running(&pidfd))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, Vec<u32>>> {
        self.by_socket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for SocketPeersEntry {
    fn drop(&mut self) {
        let mut by_socket = self.peers.lock();
        for socket in &self.sockets {
            let Some(tops) = by_socket.get_mut(socket) else {
                continue;
            };
            tops.retain(|top| *top != self.top);
            if tops.is_empty() {
                by_socket.remove(socket);
            }
        }
    }
}

/// Whether a process is `top` or one of its descendants. A daemon counts as well: the inner stage is a subreaper.
pub(crate) fn is_in_tree(pid: u32, top: u32) -> bool {
    let mut pid = pid;
    // Bounded, because a pid that is reused meanwhile could make a cycle.
    for _ in 0..4096 {
        if pid == top {
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

/// A pidfd of the process that connected; `None` where the kernel has none to give (before 6.5). A process that has ended
/// is an error: its pid, which is all that the credentials hold, may be another's by now.
#[allow(unsafe_code)]
fn peer_pidfd(connection: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    let mut raw: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: value and length are of the type that this option has, and live until the call returns.
    let result = unsafe {
        libc::getsockopt(
            connection.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut raw).cast(),
            &raw mut length,
        )
    };
    if result == 0 && raw >= 0 {
        // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
        return Ok(Some(unsafe { OwnedFd::from_raw_fd(raw) }));
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(None),
        error => Err(error),
    }
}

/// Whether a process has not ended. One that has not had its pid all the time.
fn is_running(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN)];
    let at_once = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // A pidfd becomes readable when its process ends.
    matches!(rustix::event::poll(&mut fds, Some(&at_once)), Ok(0))
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::net::{UnixListener, UnixStream},
        process::{Command, Stdio},
    };

    use super::*;

    fn pid_of(process: u32) -> Pid {
        Pid::from_raw(process as i32).unwrap()
    }

    #[test]
    fn a_process_is_in_the_trees_of_its_ancestors_only() {
        let me = std::process::id();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        assert!(is_in_tree(child.id(), me));
        assert!(is_in_tree(me, me));
        assert!(!is_in_tree(me, child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn only_a_sandbox_that_was_given_a_socket_may_use_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let peers = Arc::new(SocketPeers::default());
        let accepted = || {
            let client = UnixStream::connect(&path).unwrap();
            (client, listener.accept().unwrap().0)
        };
        let (_client, connection) = accepted();
        assert!(!peers.may_connect(&path, connection.as_fd()), "no sandbox has it");
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        let mounts = [SocketMount::new(&path, "/a.sock")];
        let others = peers.add(&mounts, pid_of(other.id()));
        assert!(!peers.may_connect(&path, connection.as_fd()), "another's");
        let ours = peers.add(&mounts, pid_of(std::process::id()));
        assert!(peers.may_connect(&path, connection.as_fd()));
        assert!(!peers.may_connect(&dir.path().join("b.sock"), connection.as_fd()));
        drop(ours);
        assert!(!peers.may_connect(&path, connection.as_fd()), "ended");
        drop(others);
        assert!(peers.lock().is_empty());
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn a_peer_that_has_ended_is_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let peers = Arc::new(SocketPeers::default());
        let _ours = peers.add(&[SocketMount::new(&path, "/a.sock")], pid_of(std::process::id()));
        let connect = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])";
        let status = Command::new("python3")
            .args(["-c", connect])
            .arg(&path)
            .stdin(Stdio::null())
            .status();
        let Ok(status) = status else {
            eprintln!("skipped: there is no python3");
            return;
        };
        assert!(status.success());
        let (connection, _) = listener.accept().unwrap();
        assert!(!peers.may_connect(&path, connection.as_fd()));
    }
}
