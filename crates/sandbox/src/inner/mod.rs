//! The inner stage: the first process of every sandbox, started as `oubliette-client sandbox-init`.
//!
//! It puts up the inner walls, starts the payload, and then does what pid 1 has to do: carry connections,
//! pass on signals, reap, and, when the payload ends, take everything else with it. It has one thread, no
//! runtime, and allocates little: it is on the way of every start.
//!
//! - [`walls`]: rlimits, capabilities, and the order in which everything is shut.
//! - [`landlock`], [`seccomp`]: files; system calls.
//! - [`payload`]: starting the program.
//! - [`forward`]: `127.0.0.1:port` to a Unix socket.
//! - [`tend`]: the loop.
//! - [`family`]: finding descendants where no pid namespace does it.

mod family;
mod forward;
mod landlock;
mod payload;
mod seccomp;
mod tend;
mod walls;

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::wire::{CONTROL, News, Order};

#[cfg(feature = "driver")]
pub(crate) use {family::parent as parent_of, landlock::abi as landlock_abi};

/// Exit code when the inner stage itself failed; the reason went to the server.
const FAILED: i32 = 125;
/// Exit code when it was not the server who called.
const NOT_CALLED: i32 = 2;
/// No order is longer.
const LONGEST: u32 = 64 << 20;

/// Runs the inner stage. `args` are those after `sandbox-init`; there are none: the order comes through
/// file descriptor 3, which only the server can have set up.
// The exit code is pid 1's last word, and there is nothing left to be dropped: what the payload left behind
// has been ended by then.
#[allow(clippy::disallowed_methods)]
pub fn main(args: impl Iterator<Item = OsString>) -> ! {
    let code = if args.count() > 0 {
        not_called()
    } else {
        control().map_or_else(not_called, run)
    };
    std::process::exit(code)
}

fn not_called() -> i32 {
    eprintln!("sandbox-init is started by the Oubliette server; there is no other use for it");
    NOT_CALLED
}

/// Takes file descriptor 3, if it is a socket, out of reach of the payload.
#[allow(unsafe_code)]
fn control() -> Option<Control> {
    use std::os::fd::{BorrowedFd, FromRawFd};
    // SAFETY: the borrow ends with this block; a number that is not open makes the calls fail, which is
    // the question asked.
    let socket = unsafe { BorrowedFd::borrow_raw(CONTROL) };
    let kind = rustix::net::sockopt::socket_type(socket).ok()?;
    if kind != rustix::net::SocketType::STREAM {
        return None;
    }
    rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::CLOEXEC).ok()?;
    // SAFETY: it is open, and nothing else in this process knows of it: main has only begun.
    let socket = unsafe { OwnedFd::from_raw_fd(CONTROL) };
    // Whatever else was inherited is not ours and not the payload's.
    // SAFETY: nothing has been opened yet above the standard three and the one just taken.
    unsafe { libc::syscall(libc::SYS_close_range, CONTROL + 1, u32::MAX, 0) };
    Some(Control {
        socket: UnixStream::from(socket),
    })
}

/// The socket to the server.
struct Control {
    socket: UnixStream,
}

impl Control {
    fn order(&mut self) -> Result<Order, Stop> {
        let mut length = [0; 4];
        self.socket.read_exact(&mut length).map_err(Stop::gone)?;
        let length = u32::from_le_bytes(length);
        if length > LONGEST {
            return Err(Stop::Failed("the order is too long".into()));
        }
        let mut json = vec![0; length as usize];
        self.socket.read_exact(&mut json).map_err(Stop::gone)?;
        serde_json::from_slice(&json)
            .map_err(|error| Stop::Failed(format!("the order is unreadable: {error}")))
    }

    /// Tells the server. If it is gone, the loop finds out.
    fn tell(&mut self, news: &News) {
        if let Ok(mut line) = serde_json::to_vec(news) {
            line.push(b'\n');
            let _ = self.socket.write_all(&line);
        }
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Why nothing runs.
enum Stop {
    /// The server has gone.
    Gone,
    /// The program itself cannot be executed.
    NoProgram(String),
    /// A step failed.
    Failed(String),
}

impl Stop {
    fn gone(_: std::io::Error) -> Self {
        Stop::Gone
    }

    fn at(step: &str, cause: impl std::fmt::Display) -> Self {
        Stop::Failed(format!("{step}: {cause}"))
    }
}

fn run(mut control: Control) -> i32 {
    match stages(&mut control) {
        Ok(code) => code,
        Err(Stop::Gone) => FAILED,
        Err(Stop::NoProgram(reason)) => {
            control.tell(&News::NoProgram { reason });
            FAILED
        }
        Err(Stop::Failed(reason)) => {
            control.tell(&News::Failed { reason });
            FAILED
        }
    }
}

fn stages(control: &mut Control) -> Result<i32, Stop> {
    let order = control.order()?;
    // Signals are caught before there is anyone to send them, and children before there are any.
    let signals = tend::Signals::catch().map_err(|error| Stop::at("signals", error))?;
    // Listening comes before the payload, which may connect with its first breath; and before the walls,
    // since at some levels no inet socket can be made behind them.
    let forwards = forward::Forwards::listen(&order.forwards, order.guests)?;
    walls::protect_self(order.family).map_err(|error| Stop::at("protecting pid 1", error))?;
    let landlock = walls::put_up(&order)?;
    control.tell(&News::Ready { landlock });
    let payload = payload::start(&order)?;
    control.tell(&News::Started);
    let family = order.family;
    // Secrets are no longer needed here.
    drop(order);
    Ok(tend::Tend {
        control,
        signals,
        forwards,
        payload,
        family,
    }
    .until_the_end())
}
