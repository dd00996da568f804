//! Landlock: files that are not listed cannot be opened.

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use std::path::PathBuf;

use super::StageError;
use crate::control_protocol::PayloadConfinement;

/// The newest Landlock ABI whose access rights are used; older kernels get those they support.
const NEWEST: ABI = ABI::V6;

/// The kernel's Landlock ABI version; 0 if it has none.
#[allow(unsafe_code)]
pub(crate) fn abi() -> i32 {
    const VERSION: u32 = 1;
    let none = std::ptr::null::<libc::c_void>();
    // SAFETY: with a null attribute, size 0 and this flag the call only returns a number.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, 0_usize, VERSION) };
    i32::try_from(version).unwrap_or(0).max(0)
}

/// Restricts file access for this process and all it starts. Returns the Landlock ABI version.
pub(super) fn restrict(confine: &PayloadConfinement) -> Result<i32, StageError> {
    let abi = abi();
    if abi == 0 && !confine.landlock_required {
        return Ok(0);
    }
    let status = apply_ruleset(confine).map_err(|error| StageError::at("Landlock", error))?;
    if confine.landlock_required && status == RulesetStatus::NotEnforced {
        return Err(StageError::Failed(
            "Landlock does not work here, and there is no other wall".into(),
        ));
    }
    Ok(abi)
}

fn apply_ruleset(confine: &PayloadConfinement) -> Result<RulesetStatus, RulesetError> {
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
        // Landlock also separates abstract sockets and signals: the network namespace does not when it is the
        // host's, nor does the pid namespace when there is none.
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
            // A path that does not exist needs no rule.
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

/// Lets the payload signal only its own descendants: without a pid namespace, it could otherwise kill the inner
/// stage, which has to end it. Must be called in the payload's process.
pub(super) fn confine_signals() -> Result<(), RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .scope(Scope::Signal)?
        .create()?
        .restrict_self()
        .map(drop)
}
