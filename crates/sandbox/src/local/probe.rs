//! What works here.
//!
//! The proof that sandboxes can be made is one that was made: an empty one, up to the point where the
//! program would start. It is tried while the server starts and the result kept.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::bwrap::Further;
use super::cgroup::Cgroups;
use super::system::System;
use super::{Inner, Local, LocalConfig};
use crate::driver::{Check, Report, SandboxError};
use crate::inner::landlock_abi;
use crate::{Level, Limits, Spec};

/// What does not work is tried again after this long.
const AGAIN: Duration = Duration::from_secs(5);

/// What was found.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) level: Level,
    pub(super) refusal: Option<SandboxError>,
    pub(super) report: Report,
    pub(super) cgroups: Cgroups,
    pub(super) bwrap: Option<PathBuf>,
    pub(super) further: Further,
    system: Result<System, String>,
    at: Instant,
}

impl Found {
    pub(super) fn system(&self) -> Result<&System, SandboxError> {
        self.system
            .as_ref()
            .map_err(|error| SandboxError::setup("the system's view", error))
    }

    /// Whether this need not be looked at again.
    pub(super) fn holds(&self) -> bool {
        self.level == Level::Namespaces && self.refusal.is_none() || self.at.elapsed() < AGAIN
    }
}

pub(super) async fn probe(local: &Inner) -> Found {
    let run_dir = local.config.run_dir.clone();
    let scope = scope(&run_dir);
    let look = tokio::task::spawn_blocking(move || {
        std::fs::create_dir_all(&run_dir).map_err(|error| error.to_string())?;
        Local::remove_scratch(&run_dir);
        System::look(&run_dir).map_err(|error| error.to_string())
    });
    let cgroups = tokio::task::spawn_blocking(move || Cgroups::find(&scope));
    let bwrap = bwrap(&local.config);
    let version = match &bwrap {
        Some(path) => version(path).await,
        None => String::new(),
    };
    let mut found = Found {
        level: Level::Namespaces,
        refusal: None,
        report: Report {
            driver: "local",
            level: Level::Namespaces,
            ok: true,
            checks: Vec::new(),
        },
        cgroups: cgroups.await.unwrap_or_default(),
        bwrap,
        further: if can_forbid(&version) {
            Further::Forbidden
        } else {
            Further::Filtered
        },
        system: look.await.unwrap_or_else(|error| Err(error.to_string())),
        at: Instant::now(),
    };
    let namespaces = namespaces(local, &mut found).await;
    if found.bwrap.is_some() {
        found.report.checks.push(Check::good("bubblewrap", version));
    }
    settle(&mut found, local, namespaces, landlock_abi());
    limits(&mut found);
    found
}

async fn namespaces(local: &Inner, found: &mut Found) -> Result<(), SandboxError> {
    if found.bwrap.is_none() {
        return Err(no_bwrap());
    }
    let first = try_out(local, found).await;
    if first.is_ok() || found.further == Further::Filtered {
        return first;
    }
    // A host where only that is impossible (a setuid bubblewrap, for one) is still a good host.
    found.further = Further::Filtered;
    try_out(local, found)
        .await
        .map_err(|_| first.err().unwrap_or_else(no_bwrap))
}

/// An empty sandbox.
async fn try_out(local: &Inner, found: &Found) -> Result<(), SandboxError> {
    let mut spec = Spec::new("probe", ["true"]);
    spec.limits = Limits {
        memory_mb: Some(64),
        cpus: None,
        pids: None,
        workspace_mb: None,
        open_files: None,
    };
    let (running, _) = local.namespaced(found, spec, None).await?;
    running.handle.wait().await;
    Ok(())
}

fn settle(found: &mut Found, local: &Inner, namespaces: Result<(), SandboxError>, abi: i32) {
    let checks = &mut found.report.checks;
    let missing = match namespaces {
        Ok(()) => {
            checks.push(Check::good(
                "namespaces",
                "user, pid, mount, network, ipc and uts",
            ));
            None
        }
        Err(error) => {
            let error = forbidden(error);
            let (reason, remedy) = match &error {
                SandboxError::Unavailable { reason, remedy } => (reason.clone(), remedy.clone()),
                SandboxError::Invalid(text) | SandboxError::Setup(text) => (text.clone(), String::new()),
                SandboxError::Program { .. } => (error.to_string(), String::new()),
            };
            checks.push(Check::bad("namespaces", reason, remedy));
            Some(error)
        }
    };
    checks.push(if abi > 0 {
        Check::good("landlock", format!("version {abi}"))
    } else {
        Check::bad(
            "landlock",
            "the kernel has none",
            "Linux 5.13 or later has it; add `landlock` to the kernel's `lsm=` list.",
        )
    });
    checks.push(if Path::new("/proc/sys/kernel/seccomp").exists() {
        Check::good("seccomp", "filters")
    } else {
        Check::bad(
            "seccomp",
            "the kernel has none",
            "Use a kernel built with CONFIG_SECCOMP_FILTER.",
        )
    });
    if let Some(error) = missing {
        found.level = Level::Landlock;
        if local.config.minimum == Level::Namespaces {
            found.refusal = Some(error);
        } else if abi == 0 {
            found.refusal = Some(SandboxError::Unavailable {
                reason: "neither namespaces nor Landlock work here".into(),
                remedy: error.remedy().unwrap_or("Use Linux 5.13 or later.").to_owned(),
            });
        }
    }
    found.report.level = found.level;
    found.report.ok = found.refusal.is_none();
}

/// How each limit is kept.
fn limits(found: &mut Found) {
    const DELEGATE: &str = "Run the server as a systemd unit with Delegate=yes, or as root.";
    let (memory, pids, cpu) = found.cgroups.controllers();
    let by = format!(
        "cgroup {}, for the whole tree",
        found.cgroups.version().unwrap_or("none")
    );
    let root = rustix::process::geteuid().is_root();
    let checks = &mut found.report.checks;
    checks.push(if memory {
        Check::good("memory limit", by.clone())
    } else {
        Check::bad("memory limit", "RLIMIT_DATA, for each process", DELEGATE)
    });
    checks.push(match (pids, root) {
        (true, _) => Check::good("process limit", by.clone()),
        (false, false) => Check::good("process limit", "RLIMIT_NPROC, for the whole tree"),
        // The kernel exempts the host's root, and that is who the sandbox is to the host.
        (false, true) => Check::bad("process limit", "not kept", "Run the server as an ordinary user."),
    });
    checks.push(if cpu {
        Check::good("cpu limit", by)
    } else {
        Check::bad("cpu limit", "not kept", DELEGATE)
    });
}

pub(super) fn no_bwrap() -> SandboxError {
    SandboxError::Unavailable {
        reason: "bubblewrap (`bwrap`) is not installed".into(),
        remedy: "Install it: `apt-get install bubblewrap` (or `dnf install bubblewrap`). To run with weaker \
                 walls instead, set `minimum = \"landlock\"` in [sandbox]."
            .into(),
    }
}

/// Says which switch of the host forbids namespaces, if one does.
fn forbidden(error: SandboxError) -> SandboxError {
    let SandboxError::Setup(said) = &error else {
        return error;
    };
    let setting = |path: &str| {
        std::fs::read_to_string(path)
            .ok()
            .map(|text| text.trim().to_owned())
    };
    let remedy = if setting("/proc/sys/kernel/unprivileged_userns_clone").as_deref() == Some("0") {
        "Allow user namespaces: `sysctl -w kernel.unprivileged_userns_clone=1`."
    } else if setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").as_deref() == Some("1") {
        "AppArmor forbids user namespaces: install the `bwrap` profile (`apt-get install apparmor-profiles`, \
         then load /etc/apparmor.d/bwrap-userns-restrict), or \
         `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`."
    } else if setting("/proc/sys/user/max_user_namespaces").as_deref() == Some("0") {
        "Allow user namespaces: `sysctl -w user.max_user_namespaces=10000`."
    } else {
        "In a container, let it make user namespaces (Docker: `--security-opt seccomp=unconfined \
         --security-opt apparmor=unconfined --security-opt systempaths=unconfined`); or set \
         `minimum = \"landlock\"` in [sandbox]."
    };
    SandboxError::Unavailable {
        reason: format!("namespaces cannot be made here: {said}"),
        remedy: remedy.into(),
    }
}

async fn version(bwrap: &Path) -> String {
    let output = tokio::process::Command::new(bwrap)
        .arg("--version")
        .kill_on_drop(true)
        .output()
        .await;
    match output {
        Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        Err(error) => error.to_string(),
    }
}

/// Whether this version of bubblewrap knows `--disable-userns`: 0.8 or later.
fn can_forbid(version: &str) -> bool {
    let mut numbers = version
        .trim_start_matches("bubblewrap ")
        .split('.')
        .map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (0, 8)
}

/// The configured bubblewrap, or the one on PATH.
pub(super) fn bwrap(config: &LocalConfig) -> Option<PathBuf> {
    if let Some(path) = &config.bwrap {
        return Some(path.clone()).filter(|path| executable(path));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/bin", "/usr/local/bin", "/bin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(usual)
        .map(|dir| dir.join("bwrap"))
        .find(|file| executable(file))
}

fn executable(file: &Path) -> bool {
    rustix::fs::access(file, rustix::fs::Access::EXEC_OK).is_ok() && file.is_file()
}

/// Tells homes apart in the names of cgroups. FNV-1a: it has to be the same after a restart and short, and
/// nobody gains by a collision.
fn scope(run_dir: &Path) -> String {
    let hash = run_dir
        .as_os_str()
        .as_bytes()
        .iter()
        .fold(0x811c_9dc5_u32, |hash, byte| {
            (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
        });
    format!("{hash:08x}")
}

#[cfg(test)]
mod tests {
    use super::can_forbid;

    #[test]
    fn versions_are_compared_by_number() {
        assert!(can_forbid("bubblewrap 0.8.0"));
        assert!(can_forbid("bubblewrap 0.11.0"));
        assert!(can_forbid("bubblewrap 1.0"));
        assert!(!can_forbid("bubblewrap 0.6.1"));
        assert!(!can_forbid("something else"));
    }
}
