//! Limits for a whole tree, where the host lets us set them.
//!
//! Version 2 needs a delegated subtree (systemd's `Delegate=yes`), version 1 needs write access to our own
//! group, which in practice means root. Without either, the inner stage limits each process instead.
//!
//! A group is named `oubliette-<scope>-<server's pid>-<number>`: the scope tells homes apart, the pid tells
//! a dead server's leftovers from a living one's groups.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::Limits;

const MOUNT: &str = "/sys/fs/cgroup";
const PERIOD_US: f64 = 100_000.0;
/// Bubblewrap and the inner stage are in the group too.
const OUR_PROCESSES: u64 = 2;

/// Where groups can be made: a directory for each controller (with version 2 it is always the same one).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Cgroups {
    scope: String,
    version: Option<Version>,
    memory: Option<PathBuf>,
    pids: Option<PathBuf>,
    cpu: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

static NUMBER: AtomicU64 = AtomicU64::new(0);

impl Cgroups {
    /// Looks for them, and removes what dead servers of this scope left behind.
    pub(crate) fn find(scope: &str) -> Self {
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mut found = Self::find_in(Path::new(MOUNT), &own);
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

    /// What can be limited: memory, processes, processors.
    pub(crate) fn controllers(&self) -> (bool, bool, bool) {
        (self.memory.is_some(), self.pids.is_some(), self.cpu.is_some())
    }

    /// `v1`, `v2` or nothing.
    pub(crate) fn version(&self) -> Option<&'static str> {
        self.version.map(|version| match version {
            Version::One => "v1",
            Version::Two => "v2",
        })
    }

    /// A group with these limits, or none when nothing asked for can be limited here.
    pub(crate) fn create(&self, limits: &Limits) -> io::Result<Option<Group>> {
        let Some(version) = self.version else {
            return Ok(None);
        };
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("oubliette-{}-{}-{number}", self.scope, std::process::id());
        let mut group = Group {
            version,
            dirs: Vec::new(),
            memory: None,
            pids: false,
        };
        if let (Some(base), Some(mb)) = (&self.memory, limits.memory_mb) {
            let dir = group.make(base, &name)?;
            let bytes = mb.saturating_mul(1024 * 1024).to_string();
            match version {
                Version::One => {
                    set(&dir, "memory.limit_in_bytes", &bytes)?;
                    // Absent without swap accounting.
                    let _ = set(&dir, "memory.memsw.limit_in_bytes", &bytes);
                }
                Version::Two => {
                    set(&dir, "memory.max", &bytes)?;
                    let _ = set(&dir, "memory.swap.max", "0");
                }
            }
            group.memory = Some(dir);
        }
        if let (Some(base), Some(pids)) = (&self.pids, limits.pids) {
            let dir = group.make(base, &name)?;
            set(&dir, "pids.max", &pids.saturating_add(OUR_PROCESSES).to_string())?;
            group.pids = true;
        }
        if let (Some(base), Some(cpus)) = (&self.cpu, limits.cpus) {
            let dir = group.make(base, &name)?;
            let quota = (cpus * PERIOD_US).max(1000.0) as u64;
            match version {
                Version::One => set(&dir, "cpu.cfs_quota_us", &quota.to_string())?,
                Version::Two => set(&dir, "cpu.max", &format!("{quota} {PERIOD_US}"))?,
            }
        }
        Ok((!group.dirs.is_empty()).then_some(group))
    }

    /// Removes groups of dead servers. Only those of this scope can hold survivors that are ours to kill;
    /// empty ones can be anybody's.
    fn remove_leftovers(&self) {
        let mut bases: Vec<&PathBuf> = [&self.memory, &self.pids, &self.cpu]
            .into_iter()
            .flatten()
            .collect();
        bases.dedup();
        for base in bases {
            for entry in std::fs::read_dir(base).into_iter().flatten().flatten() {
                let name = entry.file_name();
                let Some((scope, server)) = name.to_str().and_then(owner) else {
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

/// Scope and server of a group, by its name.
fn owner(name: &str) -> Option<(&str, Pid)> {
    let mut parts = name.strip_prefix("oubliette-")?.split('-');
    let (scope, server) = (parts.next()?, parts.next()?);
    parts.next()?;
    Some((scope, Pid::from_raw(server.parse().ok()?)?))
}

/// A group of one sandbox. Removed when dropped, if it is empty by then.
#[derive(Debug)]
pub(crate) struct Group {
    version: Version,
    dirs: Vec<PathBuf>,
    memory: Option<PathBuf>,
    pids: bool,
}

impl Group {
    fn make(&mut self, base: &Path, name: &str) -> io::Result<PathBuf> {
        let dir = base.join(name);
        if !self.dirs.contains(&dir) {
            std::fs::create_dir(&dir)?;
            self.dirs.push(dir.clone());
        }
        Ok(dir)
    }

    /// Whether it limits memory, and processes.
    pub(crate) fn limits(&self) -> (bool, bool) {
        (self.memory.is_some(), self.pids)
    }

    /// Takes the calling thread into the group while `start` runs, so that what it starts is born there.
    ///
    /// Moving oneself, one thread, is the one move for which the kernel need not stop every fork and exec of
    /// the host: microseconds instead of milliseconds. Version 2 does not let a thread stray from its
    /// process, so there it is [`Group::add`] that does the work.
    pub(crate) fn around<T>(&self, start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self.version {
            Version::Two => start(),
            Version::One => {
                let moved = self.dirs.iter().try_for_each(|dir| set(dir, "tasks", "0"));
                let started = moved.and_then(|()| start());
                for above in self.dirs.iter().filter_map(|dir| dir.parent()) {
                    // If that fails, the thread goes on in a group that allows it little, and the next
                    // sandbox takes it out of there.
                    if let Err(error) = set(above, "tasks", "0") {
                        tracing::warn!(%error, "the starter thread could not leave a cgroup");
                    }
                }
                started
            }
        }
    }

    /// Puts a process, and whatever it starts from now on, into it, if it was not born there.
    pub(crate) fn add(&self, pid: Pid) -> io::Result<()> {
        match self.version {
            Version::One => Ok(()),
            Version::Two => {
                let pid = pid.as_raw_pid().to_string();
                self.dirs
                    .iter()
                    .try_for_each(|dir| set(dir, "cgroup.procs", &pid))
            }
        }
    }

    /// Removes it, and says whether anything in it was killed for want of memory.
    pub(crate) async fn end(mut self) -> bool {
        let oom = self.memory.as_deref().is_some_and(|dir| self.oom_kills(dir) > 0);
        // The kernel lets go of a group a moment after its last process is reaped.
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
            tracing::warn!(dirs = ?self.dirs, "a cgroup could not be removed");
        }
        oom
    }

    fn oom_kills(&self, dir: &Path) -> u64 {
        let file = match self.version {
            Version::One => "memory.oom_control",
            Version::Two => "memory.events",
        };
        let text = std::fs::read_to_string(dir.join(file)).unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
            .unwrap_or_default()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Here only if the runtime shuts down or a start fails; what was killed takes a moment to go.
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

fn set(dir: &Path, file: &str, value: &str) -> io::Result<()> {
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

/// Our own group for each controller, if we may make groups below it.
fn version_one(mount: &Path, own: &str) -> Cgroups {
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
    Cgroups {
        scope: String::new(),
        version: any.then_some(Version::One),
        memory,
        pids,
        cpu,
    }
}

/// The nearest group above us that is ours and hands controllers to its children; else our own, once we
/// have moved into a group below it.
fn version_two(mount: &Path, own: &str) -> Cgroups {
    let Some(path) = own.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return Cgroups::default();
    };
    let own = mount.join(path);
    let base = own
        .ancestors()
        .skip(1)
        .take_while(|dir| dir.starts_with(mount) && writable(dir))
        .find(|dir| {
            handed_down(dir)
                .iter()
                .any(|name| name == "memory" || name == "pids")
        })
        .map(Path::to_path_buf)
        .or_else(|| hand_down(&own).ok());
    let Some(base) = base else {
        return Cgroups::default();
    };
    let names = handed_down(&base);
    let has = |name: &str| names.iter().any(|other| other == name).then(|| base.clone());
    let (memory, pids, cpu) = (has("memory"), has("pids"), has("cpu"));
    let any = memory.is_some() || pids.is_some() || cpu.is_some();
    Cgroups {
        scope: String::new(),
        version: any.then_some(Version::Two),
        memory,
        pids,
        cpu,
    }
}

fn handed_down(dir: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(dir.join("cgroup.subtree_control")).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// A group that hands controllers down may hold no process itself: so we move into one below. Only if we
/// are alone: other people's processes are not ours to move.
fn hand_down(own: &Path) -> io::Result<PathBuf> {
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
    set(&below, "cgroup.procs", &me)?;
    set(own, "cgroup.subtree_control", &wanted.join(" "))?;
    Ok(own.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_groups_name_tells_whose_it_is() {
        assert_eq!(
            owner("oubliette-0a1b-42-7"),
            Some(("0a1b", Pid::from_raw(42).unwrap()))
        );
        assert_eq!(owner("oubliette-server"), None);
        assert_eq!(owner("oubliette-0a1b-42"), None);
        assert_eq!(owner("user.slice"), None);
    }

    /// A group as the kernel shows it, as far as is looked at.
    fn group(mount: &Path, path: &str, controllers: &str, handed_down: &str, procs: &str) {
        let dir = mount.join(path);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("cgroup.controllers"), controllers).unwrap();
        std::fs::write(dir.join("cgroup.subtree_control"), handed_down).unwrap();
        std::fs::write(dir.join("cgroup.procs"), procs).unwrap();
    }

    #[test]
    fn version_one_finds_each_controller_where_we_are() {
        let mount = tempfile::tempdir().unwrap();
        group(mount.path(), "memory/ours", "", "", "");
        group(mount.path(), "cpu", "", "", "");
        let found = Cgroups::find_in(
            mount.path(),
            "4:memory:/ours\n3:cpuacct,cpu:/of/the/host\n2:pids:/\n",
        );
        assert_eq!(found.version(), Some("v1"));
        assert_eq!(found.memory, Some(mount.path().join("memory/ours")));
        assert_eq!(
            found.cpu,
            Some(mount.path().join("cpu")),
            "a container's mount begins at its own group"
        );
        assert_eq!(found.pids, None);
    }

    #[test]
    fn version_two_uses_the_nearest_group_that_hands_controllers_down() {
        let mount = tempfile::tempdir().unwrap();
        group(mount.path(), "", "cpu memory pids", "cpu memory pids", "");
        group(mount.path(), "user", "memory pids", "memory pids", "");
        group(mount.path(), "user/app", "memory pids", "", "1\n2\n");
        let found = Cgroups::find_in(mount.path(), "0::/user/app\n");
        assert_eq!(found.version(), Some("v2"));
        assert_eq!(found.controllers(), (true, true, false));
        assert_eq!(found.memory, Some(mount.path().join("user")));
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
        assert_eq!(Cgroups::find_in(mount.path(), "0::/unit\n").version(), None);
        group(
            mount.path(),
            "unit",
            "memory pids",
            "",
            &format!("{}\n", std::process::id()),
        );
        // A real kernel would now read `memory pids`; this one keeps what was written.
        Cgroups::find_in(mount.path(), "0::/unit\n");
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
        let found = Cgroups::find_in(mount.path(), "0::/ours\n");
        let limits = Limits {
            memory_mb: Some(2),
            cpus: Some(1.5),
            pids: Some(10),
            workspace_mb: None,
            open_files: None,
        };
        let group = found.create(&limits).unwrap().unwrap();
        assert_eq!(group.limits(), (true, true));
        let read = |file: &str| std::fs::read_to_string(group.dirs[0].join(file)).unwrap();
        assert_eq!(read("memory.max"), "2097152");
        assert_eq!(read("cpu.max"), "150000 100000");
        assert_eq!(read("pids.max"), "12");
    }
}
