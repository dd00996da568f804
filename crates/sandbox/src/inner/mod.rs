//! The inner stage: the first process of every sandbox, started as `oubliette-client sandbox-init`.
//!
//! It restricts itself with Landlock and seccomp, starts the payload, and then does the work of pid 1: it forwards
//! connections and signals, reaps processes and, when the payload ends, ends everything else. It has one thread, no
//! async runtime, and allocates little, because every start of a sandbox waits for it.
//!
//! - [`restrictions`]: rlimits, capabilities, and the order in which all restrictions are applied.
//! - [`landlock`]: restricts files. [`seccomp`]: restricts system calls.
//! - [`payload`]: starts the program.
//! - [`forward`]: forwards `127.0.0.1:port` to a Unix socket.
//! - [`init_loop`]: the main loop of pid 1.
//! - [`descendants`]: kills all descendants where there is no pid namespace.

mod descendants;
mod forward;
mod init_loop;
mod landlock;
mod payload;
mod restrictions;
mod seccomp;

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::control_protocol::{CONTROL_FD, InnerStageReport, LaunchOrder};

#[cfg(feature = "driver")]
pub(crate) use {
    descendants::{descendants_of, parent_pid as parent_of},
    landlock::abi as landlock_abi,
};

/// Exit code when the inner stage itself failed; the reason is reported to the server.
const EXIT_FAILED: i32 = 125;
/// Exit code when it was not started by the server.
const EXIT_MISUSE: i32 = 2;
/// Maximum size of a launch order.
const MAX_ORDER_BYTES: u32 = 64 << 20;

/// Runs the inner stage. `args` are those after `sandbox-init` and must be empty: the launch order comes through
/// file descriptor 3, which only the server sets up.
// `process::exit` is needed to return the payload's exit code; nothing is left to be dropped, and the payload's
// processes have been killed by then.
#[allow(clippy::disallowed_methods)]
pub fn main(args: impl Iterator<Item = OsString>) -> ! {
    let code = if args.count() > 0 {
        report_misuse()
    } else {
        take_control_socket().map_or_else(report_misuse, run)
    };
    std::process::exit(code)
}

fn report_misuse() -> i32 {
    eprintln!("sandbox-init is started by the Oubliette server; there is no other use for it");
    EXIT_MISUSE
}

/// Takes ownership of file descriptor 3, if it is a stream socket, and marks it close-on-exec so that the payload
/// does not inherit it.
#[allow(unsafe_code)]
fn take_control_socket() -> Option<StageSocket> {
    use std::os::fd::{BorrowedFd, FromRawFd};
    // SAFETY: the borrow is not used after ownership is taken below; if the descriptor is not open, the calls
    // on it fail, and that is handled.
    let socket = unsafe { BorrowedFd::borrow_raw(CONTROL_FD) };
    let kind = rustix::net::sockopt::socket_type(socket).ok()?;
    if kind != rustix::net::SocketType::STREAM {
        return None;
    }
    rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::CLOEXEC).ok()?;
    // SAFETY: it is open, and nothing else in this process owns it: main has only begun.
    let socket = unsafe { OwnedFd::from_raw_fd(CONTROL_FD) };
    // Closes every other inherited descriptor, so that the payload does not get it.
    // SAFETY: nothing has been opened yet above the standard three and the one just taken.
    unsafe { libc::syscall(libc::SYS_close_range, CONTROL_FD + 1, u32::MAX, 0) };
    Some(StageSocket {
        socket: UnixStream::from(socket),
    })
}

/// The control socket to the server.
struct StageSocket {
    socket: UnixStream,
}

impl StageSocket {
    /// Reads the launch order.
    fn read_order(&mut self) -> Result<LaunchOrder, StageError> {
        let mut length = [0; 4];
        self.socket
            .read_exact(&mut length)
            .map_err(StageError::server_gone)?;
        let length = u32::from_le_bytes(length);
        if length > MAX_ORDER_BYTES {
            return Err(StageError::Failed("the order is too long".into()));
        }
        let mut json = vec![0; length as usize];
        self.socket
            .read_exact(&mut json)
            .map_err(StageError::server_gone)?;
        serde_json::from_slice(&json)
            .map_err(|error| StageError::Failed(format!("the order is unreadable: {error}")))
    }

    /// Sends a report to the server. If the server is gone, the main loop notices that.
    fn report(&mut self, report: &InnerStageReport) {
        if let Ok(mut line) = serde_json::to_vec(report) {
            line.push(b'\n');
            let _ = self.socket.write_all(&line);
        }
    }
}

impl AsFd for StageSocket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Why the inner stage stops without running the payload.
enum StageError {
    /// The server closed the control socket.
    ServerGone,
    /// The program cannot be executed.
    NoProgram(String),
    /// A step of the setup failed.
    Failed(String),
}

impl StageError {
    fn server_gone(_: std::io::Error) -> Self {
        StageError::ServerGone
    }

    fn at(step: &str, cause: impl std::fmt::Display) -> Self {
        StageError::Failed(format!("{step}: {cause}"))
    }
}

fn run(mut control: StageSocket) -> i32 {
    match set_up_and_run(&mut control) {
        Ok(code) => code,
        Err(StageError::ServerGone) => EXIT_FAILED,
        Err(StageError::NoProgram(reason)) => {
            control.report(&InnerStageReport::NoProgram { reason });
            EXIT_FAILED
        }
        Err(StageError::Failed(reason)) => {
            control.report(&InnerStageReport::Failed { reason });
            EXIT_FAILED
        }
    }
}

/// The steps of the inner stage, in order. Returns the exit code.
fn set_up_and_run(control: &mut StageSocket) -> Result<i32, StageError> {
    let order = control.read_order()?;
    // Signals are blocked first, so that neither one from outside nor the SIGCHLD of a child can be missed.
    let signals = init_loop::SignalFd::open().map_err(|error| StageError::at("signals", error))?;
    // Listening comes before the payload, which may connect as soon as it starts; and before the restrictions,
    // which forbid inet sockets at some levels.
    let forwards = forward::PortForwarder::listen(&order.forwards, order.allowed_peers)?;
    restrictions::protect_self(order.cleanup).map_err(|error| StageError::at("protecting pid 1", error))?;
    let landlock = restrictions::apply(&order)?;
    control.report(&InnerStageReport::Ready { landlock });
    let payload = payload::start(&order)?;
    control.report(&InnerStageReport::Started);
    let cleanup = order.cleanup;
    // It holds secrets and is not needed any more.
    drop(order);
    Ok(init_loop::InitLoop {
        control,
        signals,
        forwards,
        payload,
        cleanup,
    }
    .run())
}
