//! Testing which isolation and which limits work on this host.
//!
//! Whether sandboxes work is tested by starting one that runs `true`. It is done in the background while the
//! server starts, and the result is kept.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::bwrap::NestedUserns;
use super::cgroup::CgroupHierarchies;
use super::host_system::HostSystemView;
use super::{LimitedSandbox, LocalDriver, LocalDriverConfig, LocalDriverInner};
use super::{group_watch, leftovers};
use crate::driver::{SandboxCheck, SandboxError, SandboxReport};
use crate::inner::landlock_abi;
use crate::{IsolationLevel, ResourceLimits, SandboxSpec};

/// A failed probe is repeated after this long.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// Result of probing the host.
#[derive(Debug)]
pub(super) struct HostProbe {
    pub(super) level: IsolationLevel,
    /// Why no sandbox can be started; none if they can.
    pub(super) refusal: Option<SandboxError>,
    pub(super) report: SandboxReport,
    pub(super) cgroups: CgroupHierarchies,
    pub(super) bwrap: Option<PathBuf>,
    pub(super) nested_userns: NestedUserns,
    system: Result<HostSystemView, String>,
    probed_at: Instant,
}

impl HostProbe {
    pub(super) fn system(&self) -> Result<&HostSystemView, SandboxError> {
        self.system
            .as_ref()
            .map_err(|error| SandboxError::setup("the system's view", error))
    }

    /// Whether the result is good, or too recent to probe again.
    pub(super) fn is_current(&self) -> bool {
        self.level == IsolationLevel::Namespaces && self.refusal.is_none()
            || self.probed_at.elapsed() < RETRY_AFTER
    }
}

/// Probes the host.
pub(super) async fn probe_host(local: &LocalDriverInner) -> HostProbe {
    let run_dir = local.config.run_dir.clone();
    let scope = local.scope.clone();
    let runtime = tokio::runtime::Handle::current();
    let look = tokio::task::spawn_blocking(move || {
        std::fs::create_dir_all(&run_dir).map_err(|error| error.to_string())?;
        LocalDriver::remove_stale_scratch(&run_dir, &runtime);
        HostSystemView::discover(&run_dir).map_err(|error| error.to_string())
    });
    let cgroups = tokio::task::spawn_blocking(move || {
        let killed = leftovers::kill_processes(&scope);
        if killed > 0 {
            tracing::warn!(killed, "killed processes that an earlier server left running");
        }
        CgroupHierarchies::find(&scope)
    });
    let bwrap = find_bwrap(&local.config);
    let version = match &bwrap {
        Some(path) => bwrap_version(path).await,
        None => String::new(),
    };
    let mut host = HostProbe {
        level: IsolationLevel::Namespaces,
        refusal: None,
        report: SandboxReport {
            driver: "local",
            level: IsolationLevel::Namespaces,
            ok: true,
            checks: Vec::new(),
        },
        cgroups: cgroups.await.unwrap_or_default(),
        bwrap,
        nested_userns: if supports_disable_userns(&version) {
            NestedUserns::Disabled
        } else {
            NestedUserns::SeccompOnly
        },
        system: look.await.unwrap_or_else(|error| Err(error.to_string())),
        probed_at: Instant::now(),
    };
    let namespaces = probe_namespaces(local, &mut host).await;
    if host.bwrap.is_some() {
        host.report
            .checks
            .push(SandboxCheck::passed("bubblewrap", version));
    }
    conclude_isolation(&mut host, local, namespaces, landlock_abi());
    check_limits(&mut host, local);
    host
}

/// Tests whether a sandbox with namespaces can be started, if need be without `--disable-userns`.
async fn probe_namespaces(local: &LocalDriverInner, host: &mut HostProbe) -> Result<(), SandboxError> {
    if host.bwrap.is_none() {
        return Err(bwrap_missing());
    }
    let first = spawn_empty_sandbox(local, host).await;
    if first.is_ok() || host.nested_userns == NestedUserns::SeccompOnly {
        return first;
    }
    // On some hosts only `--disable-userns` does not work (with a setuid bubblewrap, for example).
    host.nested_userns = NestedUserns::SeccompOnly;
    spawn_empty_sandbox(local, host)
        .await
        .map_err(|_| first.err().unwrap_or_else(bwrap_missing))
}

/// Starts a sandbox that runs `true`, and waits for its end.
async fn spawn_empty_sandbox(local: &LocalDriverInner, host: &HostProbe) -> Result<(), SandboxError> {
    let mut spec = SandboxSpec::new("probe", ["true"]);
    spec.limits = ResourceLimits {
        memory_mb: Some(64),
        cpus: None,
        pids: None,
        workspace_mb: None,
        open_files: None,
    };
    let (running, _) = local
        .spawn_namespaced(host, spec, LimitedSandbox::default())
        .await?;
    running.handle.wait().await;
    Ok(())
}

/// Adds the checks of namespaces, Landlock and seccomp, and decides the level and whether sandboxes are refused.
fn conclude_isolation(
    host: &mut HostProbe,
    local: &LocalDriverInner,
    namespaces: Result<(), SandboxError>,
    abi: i32,
) {
    let checks = &mut host.report.checks;
    let missing = match namespaces {
        Ok(()) => {
            checks.push(SandboxCheck::passed(
                "namespaces",
                "user, pid, mount, network, ipc and uts",
            ));
            None
        }
        Err(error) => {
            let error = explain_userns_failure(error);
            let (reason, remedy) = match &error {
                SandboxError::Unavailable { reason, remedy } => (reason.clone(), remedy.clone()),
                SandboxError::Invalid(text)
                | SandboxError::LimitExceeded(text)
                | SandboxError::Setup(text) => (text.clone(), String::new()),
                SandboxError::Program { .. } => (error.to_string(), String::new()),
            };
            checks.push(SandboxCheck::failed("namespaces", reason, remedy));
            Some(error)
        }
    };
    checks.push(if abi > 0 {
        SandboxCheck::passed("landlock", format!("version {abi}"))
    } else {
        SandboxCheck::failed(
            "landlock",
            "the kernel has none",
            "Linux 5.13 or later has it; add `landlock` to the kernel's `lsm=` list.",
        )
    });
    checks.push(if Path::new("/proc/sys/kernel/seccomp").exists() {
        SandboxCheck::passed("seccomp", "filters")
    } else {
        SandboxCheck::failed(
            "seccomp",
            "the kernel has none",
            "Use a kernel built with CONFIG_SECCOMP_FILTER.",
        )
    });
    if let Some(error) = missing {
        host.level = IsolationLevel::Landlock;
        if local.config.minimum == IsolationLevel::Namespaces {
            host.refusal = Some(error);
        } else if abi == 0 {
            host.refusal = Some(SandboxError::Unavailable {
                reason: "neither namespaces nor Landlock work here".into(),
                remedy: error.remedy().unwrap_or("Use Linux 5.13 or later.").to_owned(),
            });
        }
    }
    host.report.level = host.level;
    host.report.ok = host.refusal.is_none();
}

/// Adds the checks of how each limit is enforced.
fn check_limits(host: &mut HostProbe, local: &LocalDriverInner) {
    const DELEGATE: &str = "Run the server as a systemd unit with Delegate=yes, or as root.";
    let (memory, pids, cpu) = host.cgroups.controllers();
    let (total_bytes, total_pids) = host.cgroups.total(&local.total);
    let by = format!(
        "cgroup {}, for each session as a whole",
        host.cgroups.version().unwrap_or("none")
    );
    let counted = format!(
        "the server counts each session every {} ms",
        group_watch::INTERVAL.as_millis()
    );
    let all_memory = format!("all sessions together {} MiB", total_bytes >> 20);
    let all_pids = format!("all sessions together {total_pids}");
    let root = rustix::process::geteuid().is_root();
    let checks = &mut host.report.checks;
    checks.push(if memory {
        SandboxCheck::passed("memory limit", format!("{by}; {all_memory}"))
    } else {
        let detail = format!("RLIMIT_DATA for each process, and {counted}; {all_memory}");
        SandboxCheck::failed("memory limit", detail, DELEGATE)
    });
    checks.push(match (pids, root) {
        (true, _) => SandboxCheck::passed("process limit", format!("{by}; {all_pids}")),
        (false, false) => SandboxCheck::passed(
            "process limit",
            format!("RLIMIT_NPROC for each sandbox, and {counted}; {all_pids}"),
        ),
        // The kernel exempts the host's root from RLIMIT_NPROC, and a sandbox of root's server is root to it.
        (false, true) => SandboxCheck::failed(
            "process limit",
            format!("not kept by the kernel; {counted}; {all_pids}"),
            "Run the server as an ordinary user.",
        ),
    });
    checks.push(if cpu {
        let detail = format!("{by}; all sessions together yield to the server");
        SandboxCheck::passed("cpu limit", detail)
    } else {
        SandboxCheck::failed("cpu limit", "not kept", DELEGATE)
    });
}

pub(super) fn bwrap_missing() -> SandboxError {
    SandboxError::Unavailable {
        reason: "bubblewrap (`bwrap`) is not installed".into(),
        remedy: "Install it: `apt-get install bubblewrap` (or `dnf install bubblewrap`). To run with weaker \
                 isolation instead, set `minimum = \"landlock\"` in [sandbox]."
            .into(),
    }
}

/// Adds to a namespace failure which setting of the host causes it, if one does, and how to change it.
fn explain_userns_failure(error: SandboxError) -> SandboxError {
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

async fn bwrap_version(bwrap: &Path) -> String {
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
fn supports_disable_userns(version: &str) -> bool {
    let mut numbers = version
        .trim_start_matches("bubblewrap ")
        .split('.')
        .map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (0, 8)
}

/// The configured bubblewrap, or the one on PATH; none if it cannot be executed.
pub(super) fn find_bwrap(config: &LocalDriverConfig) -> Option<PathBuf> {
    if let Some(path) = &config.bwrap {
        return Some(path.clone()).filter(|path| is_executable(path));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/bin", "/usr/local/bin", "/bin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(usual)
        .map(|dir| dir.join("bwrap"))
        .find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    rustix::fs::access(file, rustix::fs::Access::EXEC_OK).is_ok() && file.is_file()
}

#[cfg(test)]
mod tests {
    use super::supports_disable_userns;

    #[test]
    fn versions_are_compared_by_number() {
        assert!(supports_disable_userns("bubblewrap 0.8.0"));
        assert!(supports_disable_userns("bubblewrap 0.11.0"));
        assert!(supports_disable_userns("bubblewrap 1.0"));
        assert!(!supports_disable_userns("bubblewrap 0.6.1"));
        assert!(!supports_disable_userns("something else"));
    }
}
