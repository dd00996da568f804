//! Files: what is not listed cannot be opened.

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use std::path::PathBuf;

use super::Stop;
use crate::wire::Confine;

/// The newest version whose rights are used; older kernels get what they know.
const NEWEST: ABI = ABI::V6;

/// The kernel's version of Landlock, 0 for none.
#[allow(unsafe_code)]
pub(crate) fn abi() -> i32 {
    const VERSION: u32 = 1;
    let none = std::ptr::null::<libc::c_void>();
    // SAFETY: with a null attribute, size 0 and this flag the call only answers a number.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, 0_usize, VERSION) };
    i32::try_from(version).unwrap_or(0).max(0)
}

/// Shuts the files, for this process and all it starts.
pub(super) fn restrict(confine: &Confine) -> Result<i32, Stop> {
    let abi = abi();
    if abi == 0 && !confine.landlock_required {
        return Ok(0);
    }
    let status = rules(confine).map_err(|error| Stop::at("Landlock", error))?;
    if confine.landlock_required && status == RulesetStatus::NotEnforced {
        return Err(Stop::Failed(
            "Landlock does not work here, and there is no other wall".into(),
        ));
    }
    Ok(abi)
}

fn rules(confine: &Confine) -> Result<RulesetStatus, RulesetError> {
    let all = AccessFs::from_all(NEWEST);
    let read = AccessFs::from_read(NEWEST);
    let device = AccessFs::ReadFile
        | AccessFs::ReadDir
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::IoctlDev;
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)?
        // Abstract sockets belong to the network namespace, and with the host's network that is no wall;
        // signals, to the pid namespace, likewise.
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    let lists: [(&[PathBuf], BitFlags<AccessFs>); 4] = [
        (&confine.read, read),
        (&confine.write, all),
        (&confine.devices, device),
        (&confine.list, AccessFs::ReadDir.into()),
    ];
    for (paths, access) in lists {
        for path in paths {
            // What is not there needs no rule.
            let Ok(fd) = PathFd::new(path) else { continue };
            let access = if path.is_dir() {
                access
            } else {
                access & AccessFs::from_file(NEWEST)
            };
            ruleset = ruleset.add_rule(PathBeneath::new(fd, access))?;
        }
    }
    Ok(ruleset.restrict_self()?.ruleset)
}

/// Lets the payload signal only its own descendants: where there is no pid namespace, it must not be able
/// to kill the inner stage, which ends it. To be called in the payload's process.
pub(super) fn keep_signals_in() -> Result<(), RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .scope(Scope::Signal)?
        .create()?
        .restrict_self()
        .map(drop)
}
