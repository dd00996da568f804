//! The main loop of pid 1, until the payload ends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};

use super::forward::PortForwarder;
use super::{EXIT_FAILED, StageSocket, descendants};
use crate::control_protocol::{DescendantCleanup, InnerStageReport};

/// Signals that are forwarded to the payload.
const FORWARDED_SIGNALS: [libc::c_int; 6] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// A signalfd: SIGCHLD and the forwarded signals are blocked and read from it.
pub(super) struct SignalFd {
    fd: OwnedFd,
}

impl SignalFd {
    /// Blocks the signals and opens the signalfd.
    #[allow(unsafe_code)]
    pub(super) fn open() -> io::Result<Self> {
        // SAFETY: the set is initialised by sigemptyset before use; signalfd returns a new descriptor,
        // checked before it is owned.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGCHLD);
            for signal in FORWARDED_SIGNALS {
                libc::sigaddset(&mut set, signal);
            }
            if libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
            let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Self {
                fd: OwnedFd::from_raw_fd(fd),
            })
        }
    }

    /// The next pending signal, if there is one.
    fn next(&self) -> Option<libc::c_int> {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        let read = rustix::io::read(&self.fd, &mut info).ok()?;
        // The first field is the signal's number.
        let number: [u8; 4] = info.get(..4).filter(|_| read == info.len())?.try_into().ok()?;
        i32::try_from(u32::from_ne_bytes(number)).ok()
    }
}

/// What the main loop works with.
pub(super) struct InitLoop<'a> {
    pub(super) control: &'a mut StageSocket,
    pub(super) signals: SignalFd,
    pub(super) forwards: PortForwarder,
    pub(super) payload: Pid,
    pub(super) cleanup: DescendantCleanup,
}

impl InitLoop<'_> {
    /// Runs until the payload or the server ends; returns the exit code.
    pub(super) fn run(mut self) -> i32 {
        let code = loop {
            self.wait_for_work();
            match self.read_control() {
                ServerPresence::Gone => break EXIT_FAILED,
                ServerPresence::Connected => {}
            }
            while let Some(signal) = self.signals.next() {
                self.forward_signal(signal);
            }
            if let Some(status) = self.reap() {
                let (code, signal) = (status.exit_status(), status.terminating_signal());
                // All processes must be gone before the end is known. In a namespace the kernel ensures that:
                // the driver waits for this process, and the kernel ends the rest of the namespace first.
                self.kill_descendants();
                self.control.report(&InnerStageReport::Exited { code, signal });
                return code.unwrap_or(128 + signal.unwrap_or_default());
            }
            self.forwards.transfer();
        };
        self.kill_descendants();
        code
    }

    fn kill_descendants(&self) {
        match self.cleanup {
            DescendantCleanup::Namespace => {}
            DescendantCleanup::Descendants => descendants::kill_all(),
        }
    }

    /// Polls until there is something to do.
    fn wait_for_work(&self) {
        let mut fds: Vec<PollFd<'_>> = vec![
            PollFd::from_borrowed_fd(self.signals.fd.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.control.as_fd(), PollFlags::IN),
        ];
        self.forwards
            .poll_interests(&mut |fd: BorrowedFd<'_>, flags| fds.push(PollFd::from_borrowed_fd(fd, flags)));
        // If it is interrupted, the loop simply goes round once more.
        let _ = poll(&mut fds, None);
    }

    /// Reads and forwards signals that the server sends for the payload. Returns whether the server is still
    /// connected.
    fn read_control(&self) -> ServerPresence {
        let mut bytes = [0; 64];
        let flags = rustix::net::RecvFlags::DONTWAIT;
        match rustix::net::recv(self.control.as_fd(), &mut bytes, flags) {
            Ok((0, _)) => ServerPresence::Gone,
            Ok((read, _)) => {
                bytes[..read]
                    .iter()
                    .for_each(|signal| self.forward_signal(i32::from(*signal)));
                ServerPresence::Connected
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => ServerPresence::Connected,
            Err(_) => ServerPresence::Gone,
        }
    }

    fn forward_signal(&self, signal: libc::c_int) {
        if FORWARDED_SIGNALS.contains(&signal)
            && let Some(signal) = Signal::from_named_raw(signal)
        {
            let _ = rustix::process::kill_process(self.payload, signal);
        }
    }

    /// Reaps all ended children; returns the payload's status if it is one of them.
    fn reap(&self) -> Option<WaitStatus> {
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.payload => return Some(status),
                Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
                Ok(None) | Err(_) => return None,
            }
        }
    }
}

/// Whether the server is still connected to the control socket.
enum ServerPresence {
    Connected,
    Gone,
}
