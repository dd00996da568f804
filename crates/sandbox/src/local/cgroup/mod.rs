//! Cgroups: resource limits for process trees, where the host allows them.
//!
//! They form a tree of three levels:
//!
//! - one group for all sandboxes of a server, so that no number of sessions takes the machine from the server;
//! - below it one for each [`SandboxGroup`](crate::SandboxGroup), that is for each session, with its limits;
//! - below that one for each sandbox, so that it can be killed as a whole and its out-of-memory kills be counted.
//!
//! The first is named `oubliette-<scope>-<server>-<number>`: the scope distinguishes homes, the server's identity
//! distinguishes what a dead server left from a running one's groups.
//!
//! - [`hierarchies`]: finds where groups can be created, and removes what dead servers left.
//! - [`total`]: the limits of all sandboxes together.

mod hierarchies;
mod total;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::ResourceLimits;

pub(crate) use hierarchies::CgroupHierarchies;
use hierarchies::CgroupVersion;
pub use total::TotalLimits;

const CPU_PERIOD_US: f64 = 100_000.0;
/// Processes of Oubliette's own in each sandbox: bubblewrap and the inner stage.
pub(crate) const OUR_PROCESSES: u64 = 2;

/// A cgroup: a directory for each controller, with version 2 the same for all. Removed when dropped, after all below
/// it.
#[derive(Debug)]
pub(crate) struct Cgroup {
    version: CgroupVersion,
    memory: Option<PathBuf>,
    pids: Option<PathBuf>,
    cpu: Option<PathBuf>,
    /// The group above, kept until this one is removed. None for the first level.
    _parent: Option<Arc<Cgroup>>,
    /// The directories in which the server itself is, or may be.
    base: Arc<Vec<PathBuf>>,
    next_child: AtomicU64,
}

impl Cgroup {
    /// Creates a group below this one, without limits.
    pub(crate) fn create_child(self: &Arc<Self>, kind: &str) -> io::Result<Self> {
        let name = format!("{kind}-{}", self.next_child.fetch_add(1, Ordering::Relaxed));
        if self.version == CgroupVersion::Two {
            self.delegate()?;
        }
        let mut child = Self {
            version: self.version,
            memory: None,
            pids: None,
            cpu: None,
            _parent: Some(self.clone()),
            base: self.base.clone(),
            next_child: AtomicU64::new(0),
        };
        let create = |above: &Option<PathBuf>| -> io::Result<Option<PathBuf>> {
            let Some(above) = above else { return Ok(None) };
            let dir = above.join(&name);
            match std::fs::create_dir(&dir) {
                // With version 2 it is the directory of the other controllers, created just before.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                created => created?,
            }
            Ok(Some(dir))
        };
        child.memory = create(&self.memory)?;
        child.pids = create(&self.pids)?;
        child.cpu = create(&self.cpu)?;
        Ok(child)
    }

    /// With version 2: passes the controllers on to groups below.
    fn delegate(&self) -> io::Result<()> {
        let names = [
            ("+memory", &self.memory),
            ("+pids", &self.pids),
            ("+cpu", &self.cpu),
        ];
        let names: Vec<&str> = names
            .iter()
            .filter_map(|(name, dir)| dir.is_some().then_some(*name))
            .collect();
        match self.dirs().first() {
            Some(dir) => write_file(dir, "cgroup.subtree_control", &names.join(" ")),
            None => Ok(()),
        }
    }

    /// Its directories, each once.
    fn dirs(&self) -> Vec<&Path> {
        let mut dirs: Vec<&Path> = [&self.memory, &self.pids, &self.cpu]
            .into_iter()
            .filter_map(|dir| dir.as_deref())
            .collect();
        dirs.dedup();
        dirs
    }

    /// Whether it can limit memory, and whether processes.
    pub(crate) fn controllers(&self) -> (bool, bool) {
        (self.memory.is_some(), self.pids.is_some())
    }

    /// Sets the limits of memory and processors. A limit that is not given is left as it is.
    pub(crate) fn set_limits(&self, limits: &ResourceLimits) -> io::Result<()> {
        if let (Some(dir), Some(mb)) = (&self.memory, limits.memory_mb) {
            self.set_memory(dir, mb.saturating_mul(1024 * 1024))?;
        }
        if let (Some(dir), Some(cpus)) = (&self.cpu, limits.cpus) {
            let quota = (cpus * CPU_PERIOD_US).max(1000.0) as u64;
            match self.version {
                CgroupVersion::One => write_file(dir, "cpu.cfs_quota_us", &quota.to_string())?,
                CgroupVersion::Two => write_file(dir, "cpu.max", &format!("{quota} {CPU_PERIOD_US}"))?,
            }
        }
        Ok(())
    }

    fn set_memory(&self, dir: &Path, bytes: u64) -> io::Result<()> {
        let bytes = bytes.to_string();
        match self.version {
            CgroupVersion::One => {
                // Memory with swap is never less than memory: whichever is raised first would be refused.
                let lowered = write_file(dir, "memory.limit_in_bytes", &bytes);
                // Does not exist without swap accounting.
                let _ = write_file(dir, "memory.memsw.limit_in_bytes", &bytes);
                lowered.or_else(|_| write_file(dir, "memory.limit_in_bytes", &bytes))
            }
            CgroupVersion::Two => {
                let _ = write_file(dir, "memory.swap.max", "0");
                write_file(dir, "memory.max", &bytes)
            }
        }
    }

    /// Limits processes to this many, besides Oubliette's own in this many sandboxes.
    pub(crate) fn set_pids(&self, pids: u64, sandboxes: usize) -> io::Result<()> {
        let own = OUR_PROCESSES.saturating_mul(sandboxes as u64);
        match &self.pids {
            Some(dir) => write_file(dir, "pids.max", &pids.saturating_add(own).to_string()),
            None => Ok(()),
        }
    }

    /// How many processes in it the kernel killed because of a memory limit.
    fn oom_kills(&self) -> u64 {
        let Some(dir) = &self.memory else { return 0 };
        let file = match self.version {
            CgroupVersion::One => "memory.oom_control",
            CgroupVersion::Two => "memory.events",
        };
        let text = std::fs::read_to_string(dir.join(file)).unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
            .unwrap_or_default()
    }

    /// Tries to remove its directories. Returns whether they are gone.
    fn try_remove(&self) -> bool {
        let left = |dir: &&Path| {
            std::fs::remove_dir(dir).is_err_and(|error| error.kind() != io::ErrorKind::NotFound)
        };
        self.dirs().into_iter().filter(left).count() == 0
    }

    fn kill(&self) {
        self.dirs().into_iter().for_each(kill_all);
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Busy only if the runtime shuts down or a start fails; killed processes take a moment to end.
        for _ in 0..10 {
            if self.try_remove() {
                return;
            }
            self.kill();
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The cgroup of one sandbox.
#[derive(Debug)]
pub(crate) struct SandboxCgroup {
    group: Cgroup,
    /// Whether it, or the group above it, limits memory and processes as the sandbox's limits say.
    limits: (bool, bool),
}

impl SandboxCgroup {
    /// Creates the group of a sandbox with its own limits.
    pub(crate) fn create(above: &Arc<Cgroup>, limits: &ResourceLimits) -> io::Result<Self> {
        let group = above.create_child("sandbox")?;
        group.set_limits(limits)?;
        if let Some(pids) = limits.pids {
            group.set_pids(pids, 1)?;
        }
        let (memory, pids) = group.controllers();
        Ok(Self {
            limits: (
                memory && limits.memory_mb.is_some(),
                pids && limits.pids.is_some(),
            ),
            group,
        })
    }

    /// Whether it limits memory, and whether it limits processes.
    pub(crate) fn limits(&self) -> (bool, bool) {
        self.limits
    }

    /// With version 1, moves the calling thread into the group while `start` runs, so that the process it starts
    /// begins there.
    ///
    /// A thread moving only itself is the one move for which the kernel need not block every fork and exec on the
    /// host: it takes microseconds instead of milliseconds. With version 2 a thread cannot be in another group than
    /// its process, so there [`SandboxCgroup::add`] moves the started process.
    pub(crate) fn spawn_inside<T>(&self, start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self.group.version {
            CgroupVersion::Two => start(),
            CgroupVersion::One => {
                let dirs = self.group.dirs();
                let moved = dirs.iter().try_for_each(|dir| write_file(dir, "tasks", "0"));
                let started = moved.and_then(|()| start());
                for dir in self.group.base.iter() {
                    // If that fails, the thread stays in this group, with its limits, until the next start moves
                    // it into another.
                    if let Err(error) = write_file(dir, "tasks", "0") {
                        tracing::warn!(%error, "moving the starter thread out of a cgroup failed");
                    }
                }
                started
            }
        }
    }

    /// Moves a process into the group, together with whatever it starts from now on; with version 1 it was
    /// started there.
    pub(crate) fn add(&self, pid: Pid) -> io::Result<()> {
        match self.group.version {
            CgroupVersion::One => Ok(()),
            CgroupVersion::Two => {
                let pid = pid.as_raw_pid().to_string();
                let dirs = self.group.dirs();
                dirs.iter()
                    .try_for_each(|dir| write_file(dir, "cgroup.procs", &pid))
            }
        }
    }

    /// Removes the group. Returns whether the kernel killed a process in it because of a memory limit.
    pub(crate) async fn remove(self) -> bool {
        let oom = self.group.oom_kills() > 0;
        // The kernel refuses to remove a group for a moment after its last process is reaped.
        for _ in 0..50 {
            if self.group.try_remove() {
                return oom;
            }
            self.group.kill();
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        tracing::warn!(dirs = ?self.group.dirs(), "removing a cgroup failed");
        oom
    }
}

fn write_file(dir: &Path, file: &str, value: &str) -> io::Result<()> {
    let path = dir.join(file);
    std::fs::write(&path, value)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Kills every process in a group, not in those below it.
fn kill_all(dir: &Path) {
    let pids = std::fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    for pid in pids
        .lines()
        .filter_map(|line| Pid::from_raw(line.trim().parse().ok()?))
    {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_levels(version: CgroupVersion, mount: &Path) -> Arc<Cgroup> {
        let dir = Some(mount.to_path_buf());
        let above = Arc::new(Cgroup {
            version,
            memory: dir.clone(),
            pids: dir.clone(),
            cpu: dir,
            _parent: None,
            base: Arc::default(),
            next_child: AtomicU64::new(0),
        });
        Arc::new(above.create_child("session").unwrap())
    }

    #[test]
    fn version_two_limits_are_written_as_the_kernel_reads_them() {
        let mount = tempfile::tempdir().unwrap();
        let session = two_levels(CgroupVersion::Two, mount.path());
        let limits = ResourceLimits {
            memory_mb: Some(2),
            cpus: Some(1.5),
            pids: Some(10),
            workspace_mb: None,
            open_files: None,
        };
        let sandbox = SandboxCgroup::create(&session, &limits).unwrap();
        assert_eq!(sandbox.limits(), (true, true));
        let read = |path: &str| std::fs::read_to_string(mount.path().join(path)).unwrap();
        assert_eq!(read("cgroup.subtree_control"), "+memory +pids +cpu");
        assert_eq!(read("session-0/cgroup.subtree_control"), "+memory +pids +cpu");
        assert_eq!(read("session-0/sandbox-0/memory.max"), "2097152");
        assert_eq!(read("session-0/sandbox-0/cpu.max"), "150000 100000");
        assert_eq!(read("session-0/sandbox-0/pids.max"), "12");
        session.set_pids(10, 3).unwrap();
        assert_eq!(
            read("session-0/pids.max"),
            "16",
            "what Oubliette starts itself is not the session's"
        );
    }

    #[test]
    fn a_group_is_removed_after_those_below_it() {
        let mount = tempfile::tempdir().unwrap();
        let session = two_levels(CgroupVersion::One, mount.path());
        let none = ResourceLimits {
            memory_mb: None,
            cpus: None,
            pids: None,
            workspace_mb: None,
            open_files: None,
        };
        let sandbox = SandboxCgroup::create(&session, &none).unwrap();
        assert_eq!(sandbox.limits(), (false, false));
        drop(session);
        assert!(mount.path().join("session-0/sandbox-0").exists());
        drop(sandbox);
        assert!(
            !mount.path().exists(),
            "the kernel's files would not be in the way"
        );
    }
}
