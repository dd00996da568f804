//! All restrictions that are applied before the payload starts.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{StageError, landlock, seccomp};
use crate::control_protocol::{DescendantCleanup, LaunchOrder, Rlimits};

/// Protects this process from the payload, which has the same uid: not dumpable means no core dump and no access
/// to `/proc/1/mem`. Where it has to find its descendants it becomes a subreaper. In a namespace it ends when the
/// process above it does, which is bubblewrap's, and the kernel ends everything else inside.
#[allow(unsafe_code)]
pub(super) fn protect_self(cleanup: DescendantCleanup) -> io::Result<()> {
    // SAFETY: prctl with integer arguments only.
    unsafe {
        if libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        let set = match cleanup {
            DescendantCleanup::Descendants => libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0),
            DescendantCleanup::Namespace => libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0),
        };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Applies all restrictions. Returns the kernel's Landlock ABI version.
///
/// The order matters. Limits and capabilities come first: lowering them needs no privilege, but the seccomp filter
/// could forbid it. no_new_privs comes before Landlock and seccomp, which an unprivileged user may only use with
/// it, and before any exec. Landlock opens every path it allows, so it comes before the seccomp filter.
pub(super) fn apply(order: &LaunchOrder) -> Result<i32, StageError> {
    set_rlimits(&order.rlimits).map_err(|error| StageError::at("resource limits", error))?;
    let Some(confine) = &order.confine else {
        return Ok(landlock::abi());
    };
    drop_capabilities().map_err(|error| StageError::at("capabilities", error))?;
    rustix::thread::set_no_new_privs(true).map_err(|error| StageError::at("no_new_privs", error))?;
    let abi = landlock::restrict(confine)?;
    seccomp::install_filters(confine)?;
    Ok(abi)
}

fn set_rlimits(wanted: &Rlimits) -> io::Result<()> {
    lower_rlimit(Resource::Core, Some(0))?;
    lower_rlimit(Resource::Nofile, wanted.open_files)?;
    lower_rlimit(Resource::Nproc, wanted.processes)?;
    lower_rlimit(Resource::Data, wanted.data)?;
    lower_rlimit(Resource::Fsize, wanted.file_size)
}

/// Lowers a resource limit; one that is already lower is left as it is.
fn lower_rlimit(resource: Resource, wanted: Option<u64>) -> io::Result<()> {
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

/// Drops all capabilities permanently. In a user namespace bubblewrap has done so; without one, a server run by
/// root would pass its capabilities on, because exec gives uid 0 everything in the bounding set.
#[allow(unsafe_code)]
fn drop_capabilities() -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    for capability in 0..64 {
        // SAFETY: prctl with integer arguments only. It fails beyond the last capability, which ends the loop.
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
