//! Cgroups: resource limits for a whole process tree, where the host allows them.
//!
//! Version 2 needs a delegated subtree (systemd's `Delegate=yes`), version 1 needs write access to our own group,
//! which in practice means root. Without either, the inner stage limits each process instead.
//!
//! A group is named `oubliette-<scope>-<server's pid>-<number>`: the scope distinguishes homes, the pid
//! distinguishes a dead server's leftovers from a running one's groups.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::ResourceLimits;

const CGROUP_MOUNT: &str = "/sys/fs/cgroup";
const CPU_PERIOD_US: f64 = 100_000.0;
/// Bubblewrap and the inner stage are in the group too, so the process limit is raised by this many.
const OUR_PROCESSES: u64 = 2;

/// Where groups can be created: a directory for each controller (with version 2 the same for all).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CgroupHierarchies {
    scope: String,
    version: Option<CgroupVersion>,
    memory: Option<PathBuf>,
    pids: Option<PathBuf>,
    cpu: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CgroupVersion {
    One,
    Two,
}

static NEXT_GROUP_NUMBER: AtomicU64 = AtomicU64::new(0);

impl CgroupHierarchies {
    /// Finds them, and removes groups that dead servers left behind.
    pub(crate) fn find(scope: &str) -> Self {
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mut found = Self::find_in(Path::new(CGROUP_MOUNT), &own);
        found.scope = scope.to_owned();
        found.remove_leftovers();
        found
    }

    fn find_in(mount: &Path, own: &str) -> Self {
        if mount.join("cgroup.controllers").exists() {
            version_two(mount, own)
        } else {
            version_one(mount, own)
        }
    }

    /// Whether memory, processes and processors can be limited.
    pub(crate) fn controllers(&self) -> (bool, bool, bool) {
        (self.memory.is_some(), self.pids.is_some(), self.cpu.is_some())
    }

    /// `v1` or `v2`; none if nothing can be limited.
    pub(crate) fn version(&self) -> Option<&'static str> {
        self.version.map(|version| match version {
            CgroupVersion::One => "v1",
            CgroupVersion::Two => "v2",
        })
    }

    /// Creates a group with these limits; none if none of them can be enforced here.
    pub(crate) fn create(&self, limits: &ResourceLimits) -> io::Result<Option<SandboxCgroup>> {
        let Some(version) = self.version else {
            return Ok(None);
        };
        let number = NEXT_GROUP_NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("oubliette-{}-{}-{number}", self.scope, std::process::id());
        let mut group = SandboxCgroup {
            version,
            dirs: Vec::new(),
            memory: None,
            pids: false,
        };
        if let (Some(base), Some(mb)) = (&self.memory, limits.memory_mb) {
            let dir = group.create_dir(base, &name)?;
            let bytes = mb.saturating_mul(1024 * 1024).to_string();
            match version {
                CgroupVersion::One => {
                    write_file(&dir, "memory.limit_in_bytes", &bytes)?;
                    // Does not exist without swap accounting.
                    let _ = write_file(&dir, "memory.memsw.limit_in_bytes", &bytes);
                }
                CgroupVersion::Two => {
                    write_file(&dir, "memory.max", &bytes)?;
                    let _ = write_file(&dir, "memory.swap.max", "0");
                }
            }
            group.memory = Some(dir);
        }
        if let (Some(base), Some(pids)) = (&self.pids, limits.pids) {
            let dir = group.create_dir(base, &name)?;
            write_file(&dir, "pids.max", &pids.saturating_add(OUR_PROCESSES).to_string())?;
            group.pids = true;
        }
        if let (Some(base), Some(cpus)) = (&self.cpu, limits.cpus) {
            let dir = group.create_dir(base, &name)?;
            let quota = (cpus * CPU_PERIOD_US).max(1000.0) as u64;
            match version {
                CgroupVersion::One => write_file(&dir, "cpu.cfs_quota_us", &quota.to_string())?,
                CgroupVersion::Two => write_file(&dir, "cpu.max", &format!("{quota} {CPU_PERIOD_US}"))?,
            }
        }
        Ok((!group.dirs.is_empty()).then_some(group))
    }

    /// Removes groups of dead servers. Surviving processes are killed only in groups of this scope; empty groups
    /// are removed whatever their scope.
    fn remove_leftovers(&self) {
        let mut bases: Vec<&PathBuf> = [&self.memory, &self.pids, &self.cpu]
            .into_iter()
            .flatten()
            .collect();
        bases.dedup();
        for base in bases {
            for entry in std::fs::read_dir(base).into_iter().flatten().flatten() {
                let name = entry.file_name();
                let Some((scope, server)) = name.to_str().and_then(parse_group_name) else {
                    continue;
                };
                if rustix::process::test_kill_process(server) != Err(rustix::io::Errno::SRCH) {
                    continue;
                }
                if scope == self.scope {
                    kill_all(&entry.path());
                }
                let _ = std::fs::remove_dir(entry.path());
            }
        }
    }
}

/// The scope and the server's pid from a group's name.
fn parse_group_name(name: &str) -> Option<(&str, Pid)> {
    let mut parts = name.strip_prefix("oubliette-")?.split('-');
    let (scope, server) = (parts.next()?, parts.next()?);
    parts.next()?;
    Some((scope, Pid::from_raw(server.parse().ok()?)?))
}

/// The cgroup of one sandbox; a directory for each controller. Removed when dropped.
#[derive(Debug)]
pub(crate) struct SandboxCgroup {
    version: CgroupVersion,
    dirs: Vec<PathBuf>,
    memory: Option<PathBuf>,
    pids: bool,
}

impl SandboxCgroup {
    fn create_dir(&mut self, base: &Path, name: &str) -> io::Result<PathBuf> {
        let dir = base.join(name);
        if !self.dirs.contains(&dir) {
            std::fs::create_dir(&dir)?;
            self.dirs.push(dir.clone());
        }
        Ok(dir)
    }

    /// Whether it limits memory, and whether it limits processes.
    pub(crate) fn limits(&self) -> (bool, bool) {
        (self.memory.is_some(), self.pids)
    }

    /// With version 1, moves the calling thread into the group while `start` runs, so that the process it starts
    /// begins there.
    ///
    /// A thread moving only itself is the one move for which the kernel need not block every fork and exec on the
    /// host: it takes microseconds instead of milliseconds. With version 2 a thread cannot be in another group than
    /// its process, so there [`SandboxCgroup::add`] moves the started process.
    pub(crate) fn spawn_inside<T>(&self, start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self.version {
            CgroupVersion::Two => start(),
            CgroupVersion::One => {
                let moved = self.dirs.iter().try_for_each(|dir| write_file(dir, "tasks", "0"));
                let started = moved.and_then(|()| start());
                for above in self.dirs.iter().filter_map(|dir| dir.parent()) {
                    // If that fails, the thread stays in this group, with its limits, until the next start moves
                    // it into another.
                    if let Err(error) = write_file(above, "tasks", "0") {
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
        match self.version {
            CgroupVersion::One => Ok(()),
            CgroupVersion::Two => {
                let pid = pid.as_raw_pid().to_string();
                self.dirs
                    .iter()
                    .try_for_each(|dir| write_file(dir, "cgroup.procs", &pid))
            }
        }
    }

    /// Removes the group. Returns whether the kernel killed a process in it because of the memory limit.
    pub(crate) async fn remove(mut self) -> bool {
        let oom = self.memory.as_deref().is_some_and(|dir| self.oom_kills(dir) > 0);
        // The kernel refuses to remove a group for a moment after its last process is reaped.
        for _ in 0..50 {
            self.dirs.retain(|dir| {
                std::fs::remove_dir(dir).is_err_and(|error| error.kind() != io::ErrorKind::NotFound)
            });
            if self.dirs.is_empty() {
                break;
            }
            self.dirs.iter().for_each(|dir| kill_all(dir));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if !self.dirs.is_empty() {
            tracing::warn!(dirs = ?self.dirs, "removing a cgroup failed");
        }
        oom
    }

    fn oom_kills(&self, dir: &Path) -> u64 {
        let file = match self.version {
            CgroupVersion::One => "memory.oom_control",
            CgroupVersion::Two => "memory.events",
        };
        let text = std::fs::read_to_string(dir.join(file)).unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
            .unwrap_or_default()
    }
}

impl Drop for SandboxCgroup {
    fn drop(&mut self) {
        // Reached with directories left only if the runtime shuts down or a start fails; killed processes take
        // a moment to end.
        for _ in 0..10 {
            self.dirs.retain(|dir| {
                std::fs::remove_dir(dir).is_err_and(|error| error.kind() != io::ErrorKind::NotFound)
            });
            if self.dirs.is_empty() {
                return;
            }
            self.dirs.iter().for_each(|dir| kill_all(dir));
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn write_file(dir: &Path, file: &str, value: &str) -> io::Result<()> {
    let path = dir.join(file);
    std::fs::write(&path, value)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

fn kill_all(dir: &Path) {
    let pids = std::fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    for pid in pids
        .lines()
        .filter_map(|line| Pid::from_raw(line.trim().parse().ok()?))
    {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}

fn writable(dir: &Path) -> bool {
    rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).is_ok()
        && rustix::fs::access(dir.join("cgroup.procs"), rustix::fs::Access::WRITE_OK).is_ok()
}

/// With version 1: our own group for each controller, if we may create groups below it.
fn version_one(mount: &Path, own: &str) -> CgroupHierarchies {
    let base = |controller: &str| {
        let path = own.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            controllers
                .split(',')
                .any(|name| name == controller)
                .then_some(path)
        })?;
        let mount = mount.join(controller);
        let below = mount.join(path.trim_start_matches('/'));
        // In a container the path is the host's while the mount starts at the container's own group.
        let dir = if below.exists() { below } else { mount };
        writable(&dir).then_some(dir)
    };
    let (memory, pids, cpu) = (base("memory"), base("pids"), base("cpu"));
    let any = memory.is_some() || pids.is_some() || cpu.is_some();
    CgroupHierarchies {
        scope: String::new(),
        version: any.then_some(CgroupVersion::One),
        memory,
        pids,
        cpu,
    }
}

/// With version 2: the nearest writable group above us that delegates controllers to its children; else our own,
/// after we have moved into a new group below it.
fn version_two(mount: &Path, own: &str) -> CgroupHierarchies {
    let Some(path) = own.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return CgroupHierarchies::default();
    };
    let own = mount.join(path);
    let base = own
        .ancestors()
        .skip(1)
        .take_while(|dir| dir.starts_with(mount) && writable(dir))
        .find(|dir| {
            delegated_controllers(dir)
                .iter()
                .any(|name| name == "memory" || name == "pids")
        })
        .map(Path::to_path_buf)
        .or_else(|| delegate_controllers(&own).ok());
    let Some(base) = base else {
        return CgroupHierarchies::default();
    };
    let names = delegated_controllers(&base);
    let has = |name: &str| names.iter().any(|other| other == name).then(|| base.clone());
    let (memory, pids, cpu) = (has("memory"), has("pids"), has("cpu"));
    let any = memory.is_some() || pids.is_some() || cpu.is_some();
    CgroupHierarchies {
        scope: String::new(),
        version: any.then_some(CgroupVersion::Two),
        memory,
        pids,
        cpu,
    }
}

/// The controllers that a group delegates to its children.
fn delegated_controllers(dir: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(dir.join("cgroup.subtree_control")).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// Makes our own group delegate controllers. Such a group may contain no process itself, so we move into a new group
/// below it; but only if no other process is in it, because those are not ours to move.
fn delegate_controllers(own: &Path) -> io::Result<PathBuf> {
    let procs = std::fs::read_to_string(own.join("cgroup.procs"))?;
    let me = std::process::id().to_string();
    if !writable(own) || procs.split_whitespace().any(|pid| pid != me) {
        return Err(io::Error::other("not ours alone"));
    }
    let offered = std::fs::read_to_string(own.join("cgroup.controllers"))?;
    let wanted: Vec<String> = ["memory", "pids", "cpu"]
        .into_iter()
        .filter(|name| offered.split_whitespace().any(|other| other == *name))
        .map(|name| format!("+{name}"))
        .collect();
    if wanted.is_empty() {
        return Err(io::Error::other("no controllers"));
    }
    let below = own.join("oubliette-server");
    match std::fs::create_dir(&below) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    write_file(&below, "cgroup.procs", &me)?;
    write_file(own, "cgroup.subtree_control", &wanted.join(" "))?;
    Ok(own.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_name_contains_its_scope_and_server() {
        assert_eq!(
            parse_group_name("oubliette-0a1b-42-7"),
            Some(("0a1b", Pid::from_raw(42).unwrap()))
        );
        assert_eq!(parse_group_name("oubliette-server"), None);
        assert_eq!(parse_group_name("oubliette-0a1b-42"), None);
        assert_eq!(parse_group_name("user.slice"), None);
    }

    /// Creates the files of a group that this module reads.
    fn group(mount: &Path, path: &str, controllers: &str, delegated: &str, procs: &str) {
        let dir = mount.join(path);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("cgroup.controllers"), controllers).unwrap();
        std::fs::write(dir.join("cgroup.subtree_control"), delegated).unwrap();
        std::fs::write(dir.join("cgroup.procs"), procs).unwrap();
    }

    #[test]
    fn version_one_finds_each_controller_where_we_are() {
        let mount = tempfile::tempdir().unwrap();
        group(mount.path(), "memory/ours", "", "", "");
        group(mount.path(), "cpu", "", "", "");
        let hierarchies = CgroupHierarchies::find_in(
            mount.path(),
            "4:memory:/ours\n3:cpuacct,cpu:/of/the/host\n2:pids:/\n",
        );
        assert_eq!(hierarchies.version(), Some("v1"));
        assert_eq!(hierarchies.memory, Some(mount.path().join("memory/ours")));
        assert_eq!(
            hierarchies.cpu,
            Some(mount.path().join("cpu")),
            "a container's mount begins at its own group"
        );
        assert_eq!(hierarchies.pids, None);
    }

    #[test]
    fn version_two_uses_the_nearest_group_that_delegates_controllers() {
        let mount = tempfile::tempdir().unwrap();
        group(mount.path(), "", "cpu memory pids", "cpu memory pids", "");
        group(mount.path(), "user", "memory pids", "memory pids", "");
        group(mount.path(), "user/app", "memory pids", "", "1\n2\n");
        let hierarchies = CgroupHierarchies::find_in(mount.path(), "0::/user/app\n");
        assert_eq!(hierarchies.version(), Some("v2"));
        assert_eq!(hierarchies.controllers(), (true, true, false));
        assert_eq!(hierarchies.memory, Some(mount.path().join("user")));
    }

    #[test]
    fn version_two_moves_us_below_our_own_group_only_when_alone_there() {
        let mount = tempfile::tempdir().unwrap();
        group(mount.path(), "", "memory pids", "", "");
        group(
            mount.path(),
            "unit",
            "memory pids",
            "",
            &format!("{}\n99999\n", std::process::id()),
        );
        assert_eq!(
            CgroupHierarchies::find_in(mount.path(), "0::/unit\n").version(),
            None
        );
        group(
            mount.path(),
            "unit",
            "memory pids",
            "",
            &format!("{}\n", std::process::id()),
        );
        // A real kernel would now report `memory pids`; these plain files keep what was written.
        CgroupHierarchies::find_in(mount.path(), "0::/unit\n");
        let unit = mount.path().join("unit");
        assert_eq!(
            std::fs::read_to_string(unit.join("cgroup.subtree_control")).unwrap(),
            "+memory +pids"
        );
        let moved = std::fs::read_to_string(unit.join("oubliette-server/cgroup.procs")).unwrap();
        assert_eq!(moved, std::process::id().to_string());
    }

    #[test]
    fn version_two_limits_are_written_as_the_kernel_reads_them() {
        let mount = tempfile::tempdir().unwrap();
        group(mount.path(), "", "cpu memory pids", "cpu memory pids", "");
        group(mount.path(), "ours", "", "", "");
        let hierarchies = CgroupHierarchies::find_in(mount.path(), "0::/ours\n");
        let limits = ResourceLimits {
            memory_mb: Some(2),
            cpus: Some(1.5),
            pids: Some(10),
            workspace_mb: None,
            open_files: None,
        };
        let group = hierarchies.create(&limits).unwrap().unwrap();
        assert_eq!(group.limits(), (true, true));
        let read = |file: &str| std::fs::read_to_string(group.dirs[0].join(file)).unwrap();
        assert_eq!(read("memory.max"), "2097152");
        assert_eq!(read("cpu.max"), "150000 100000");
        assert_eq!(read("pids.max"), "12");
    }
}
