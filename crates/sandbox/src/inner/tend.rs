//! What pid 1 does until the payload ends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};

use super::forward::Forwards;
use super::{Control, FAILED, family};
use crate::wire::{Family, News};

/// Passed on to the payload.
const PASSED_ON: [libc::c_int; 6] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// Signals, read instead of handled.
pub(super) struct Signals {
    fd: OwnedFd,
}

impl Signals {
    #[allow(unsafe_code)]
    pub(super) fn catch() -> io::Result<Self> {
        // SAFETY: the set is initialised by sigemptyset before use; signalfd returns a new descriptor,
        // checked before it is owned.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGCHLD);
            for signal in PASSED_ON {
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

    /// The next one that has come.
    fn next(&self) -> Option<libc::c_int> {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        let read = rustix::io::read(&self.fd, &mut info).ok()?;
        // The first field is the signal's number.
        let number: [u8; 4] = info.get(..4).filter(|_| read == info.len())?.try_into().ok()?;
        i32::try_from(u32::from_ne_bytes(number)).ok()
    }
}

pub(super) struct Tend<'a> {
    pub(super) control: &'a mut Control,
    pub(super) signals: Signals,
    pub(super) forwards: Forwards,
    pub(super) payload: Pid,
    pub(super) family: Family,
}

impl Tend<'_> {
    /// Tends until the payload or the server ends; returns the exit code.
    pub(super) fn until_the_end(mut self) -> i32 {
        let code = loop {
            self.rest();
            match self.look_up() {
                Server::Gone => break FAILED,
                Server::There => {}
            }
            while let Some(signal) = self.signals.next() {
                self.pass_on(signal);
            }
            if let Some(status) = self.reap() {
                let (code, signal) = (status.exit_status(), status.terminating_signal());
                // Whoever hears of the end must find everything gone. In a namespace the kernel sees to
                // that: the driver waits for this very process, and it is not gone before the rest is.
                self.end_family();
                self.control.tell(&News::Exited { code, signal });
                return code.unwrap_or(128 + signal.unwrap_or_default());
            }
            self.forwards.carry();
        };
        self.end_family();
        code
    }

    fn end_family(&self) {
        match self.family {
            Family::Namespace => {}
            Family::Descendants => family::end(),
        }
    }

    /// Waits until there is something to do.
    fn rest(&self) {
        let mut fds: Vec<PollFd<'_>> = vec![
            PollFd::from_borrowed_fd(self.signals.fd.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.control.as_fd(), PollFlags::IN),
        ];
        self.forwards
            .interests(&mut |fd: BorrowedFd<'_>, flags| fds.push(PollFd::from_borrowed_fd(fd, flags)));
        // An interrupted wait is a wait that ended.
        let _ = poll(&mut fds, None);
    }

    /// Reads signals the server sends for the payload, and whether it is still there.
    fn look_up(&self) -> Server {
        let mut bytes = [0; 64];
        let flags = rustix::net::RecvFlags::DONTWAIT;
        match rustix::net::recv(self.control.as_fd(), &mut bytes, flags) {
            Ok((0, _)) => Server::Gone,
            Ok((read, _)) => {
                bytes[..read]
                    .iter()
                    .for_each(|signal| self.pass_on(i32::from(*signal)));
                Server::There
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Server::There,
            Err(_) => Server::Gone,
        }
    }

    fn pass_on(&self, signal: libc::c_int) {
        if PASSED_ON.contains(&signal)
            && let Some(signal) = Signal::from_named_raw(signal)
        {
            let _ = rustix::process::kill_process(self.payload, signal);
        }
    }

    /// Reaps everyone who has ended; the payload's status, if it is among them.
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

enum Server {
    There,
    Gone,
}
