//! Everything that is shut before the payload starts.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{Stop, landlock, seccomp};
use crate::wire::{Family, Order, Rlimits};

/// Makes this process unreadable to the payload, which has the same uid: no core, no `/proc/1/mem`.
#[allow(unsafe_code)]
pub(super) fn protect_self(family: Family) -> io::Result<()> {
    // SAFETY: prctl with integer arguments only.
    unsafe {
        if libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        if family == Family::Descendants && libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Shuts everything, and says which Landlock the kernel has.
///
/// The order matters. Limits and capabilities come first: lowering them needs nothing, but could not be
/// done behind the filters. no_new_privs comes before Landlock and seccomp, which an ordinary user may
/// only set up with it, and before any exec. Landlock opens every path it allows, so it comes before the
/// system call filter.
pub(super) fn put_up(order: &Order) -> Result<i32, Stop> {
    limit(&order.rlimits).map_err(|error| Stop::at("resource limits", error))?;
    let Some(confine) = &order.confine else {
        return Ok(landlock::abi());
    };
    drop_capabilities().map_err(|error| Stop::at("capabilities", error))?;
    rustix::thread::set_no_new_privs(true).map_err(|error| Stop::at("no_new_privs", error))?;
    let abi = landlock::restrict(confine)?;
    seccomp::filter(confine.inet)?;
    Ok(abi)
}

fn limit(wanted: &Rlimits) -> io::Result<()> {
    lower(Resource::Core, Some(0))?;
    lower(Resource::Nofile, wanted.open_files)?;
    lower(Resource::Nproc, wanted.processes)?;
    lower(Resource::Data, wanted.data)?;
    lower(Resource::Fsize, wanted.file_size)
}

/// Lowers a limit; one that is lower already stays.
fn lower(resource: Resource, wanted: Option<u64>) -> io::Result<()> {
    let Some(wanted) = wanted else { return Ok(()) };
    let now = getrlimit(resource);
    let limit = now.maximum.map_or(wanted, |maximum| maximum.min(wanted));
    Ok(setrlimit(
        resource,
        Rlimit {
            current: Some(limit),
            maximum: Some(limit),
        },
    )?)
}

/// Gives up every capability for good. In a user namespace bubblewrap has done so; without one, a server
/// run by root would hand its capabilities on: exec gives uid 0 all that the bounding set still holds.
#[allow(unsafe_code)]
fn drop_capabilities() -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    for capability in 0..64 {
        // SAFETY: prctl with integer arguments only. Beyond the last capability it fails: the end.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            break;
        }
    }
    let none = rustix::thread::CapabilitySets {
        effective: rustix::thread::CapabilitySet::empty(),
        permitted: rustix::thread::CapabilitySet::empty(),
        inheritable: rustix::thread::CapabilitySet::empty(),
    };
    Ok(rustix::thread::set_capabilities(None, none)?)
}
