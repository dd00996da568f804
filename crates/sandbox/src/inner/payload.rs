//! Starting the program.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::Pid;

use super::{Stop, landlock};
use crate::wire::{Family, Order};

/// Starts it, in a session of its own, with the order's environment and no other.
#[allow(unsafe_code)]
pub(super) fn start(order: &Order) -> Result<Pid, Stop> {
    let Some((program, arguments)) = order.argv.split_first() else {
        return Err(Stop::Failed("there is no program to run".into()));
    };
    if !order.cwd.is_dir() {
        return Err(Stop::NoProgram(format!(
            "the working directory {} is not there",
            order.cwd.display()
        )));
    }
    let family = order.family;
    let signals_in = family == Family::Descendants && order.confine.is_some();
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
            if family == Family::Descendants {
                // Behind a pid namespace the kernel does this, for everyone inside.
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            }
            if signals_in {
                landlock::keep_signals_in().map_err(io::Error::other)?;
            }
            unblock_signals()
        });
    }
    let child = command.spawn().map_err(|error| Stop::NoProgram(reason(&error)))?;
    // The loop reaps it with everyone else: `Child` would only be a second owner.
    Pid::from_raw(child.id().cast_signed()).ok_or_else(|| Stop::Failed("the program has no pid".into()))
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such program in the sandbox".to_owned(),
        io::ErrorKind::PermissionDenied => "it may not be executed".to_owned(),
        _ => error.to_string(),
    }
}

/// The loop's signals are blocked to be read; a program expects none to be.
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
