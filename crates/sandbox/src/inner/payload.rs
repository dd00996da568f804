//! Starting the program.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::Pid;

use super::{StageError, landlock};
use crate::control_protocol::{DescendantCleanup, LaunchOrder};

/// Starts the program in a session of its own, with exactly the launch order's environment.
#[allow(unsafe_code)]
pub(super) fn start(order: &LaunchOrder) -> Result<Pid, StageError> {
    let Some((program, arguments)) = order.argv.split_first() else {
        return Err(StageError::Failed("there is no program to run".into()));
    };
    if !order.cwd.is_dir() {
        return Err(StageError::NoProgram(format!(
            "the working directory {} is not there",
            order.cwd.display()
        )));
    }
    let cleanup = order.cleanup;
    let confine_signals = cleanup == DescendantCleanup::Descendants && order.confine.is_some();
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .envs(order.env.iter().map(|(name, value)| (name, value)))
        .current_dir(&order.cwd);
    // SAFETY: this process has one thread, so after fork every lock is free and allocation is sound.
    unsafe {
        command.pre_exec(move || {
            rustix::process::setsid()?;
            if cleanup == DescendantCleanup::Descendants {
                // In a pid namespace the kernel kills everything inside when pid 1 ends.
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            }
            if confine_signals {
                landlock::confine_signals().map_err(io::Error::other)?;
            }
            unblock_signals()
        });
    }
    let child = command.spawn().map_err(|error| match error.raw_os_error() {
        // It is there, but no process can be made: the limits are reached, or the host's are.
        Some(libc::EAGAIN | libc::ENOMEM) => StageError::at("starting the program", error),
        _ => StageError::NoProgram(reason(&error)),
    })?;
    // Only the pid is kept: the main loop reaps it together with all other children.
    Pid::from_raw(child.id().cast_signed()).ok_or_else(|| StageError::Failed("the program has no pid".into()))
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such program in the sandbox".to_owned(),
        io::ErrorKind::PermissionDenied => "it may not be executed".to_owned(),
        _ => error.to_string(),
    }
}

/// Unblocks all signals: the inner stage blocks those it reads from its signalfd, and programs expect none to be
/// blocked.
#[allow(unsafe_code)]
fn unblock_signals() -> io::Result<()> {
    // SAFETY: the set is initialised by sigemptyset before it is read.
    let failed = unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut())
    };
    if failed == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
