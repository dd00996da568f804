//! Finding where cgroups can be created, and removing those that dead servers left.
//!
//! Version 2 needs a delegated subtree (systemd's `Delegate=yes`), version 1 needs write access to our own group,
//! which in practice means root.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::super::leftovers::ServerIdentity;
use super::total::{self, TotalLimits};
use super::{Cgroup, kill_all, write_file};

const CGROUP_MOUNT: &str = "/sys/fs/cgroup";
/// The first and the longest interval in which removing a group of a dead server is tried, and for how long. Its processes
/// were just killed, but one that the kernel is still writing out, on a machine that has more to do than it can, takes
/// its time to end.
const REMOVAL_INTERVAL: Duration = Duration::from_millis(20);
const REMOVAL_MAX_INTERVAL: Duration = Duration::from_secs(1);
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(600);

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
pub(super) enum CgroupVersion {
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

    /// Creates the group of all sandboxes of this server; none if nothing can be limited here. Returns it with its
    /// limits: bytes of memory and number of processes.
    pub(crate) fn create_first(&self, limits: &TotalLimits) -> io::Result<Option<(Cgroup, (u64, u64))>> {
        let Some(version) = self.version else {
            return Ok(None);
        };
        let number = NEXT_GROUP_NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("oubliette-{}-{}-{number}", self.scope, ServerIdentity::current());
        let mut bases: Vec<PathBuf> = [&self.memory, &self.pids, &self.cpu]
            .into_iter()
            .flatten()
            .cloned()
            .collect();
        bases.dedup();
        let base = Arc::new(bases);
        for dir in base.iter() {
            std::fs::create_dir(dir.join(&name))?;
        }
        let below = |base: &Option<PathBuf>| base.as_ref().map(|base| base.join(&name));
        let group = Cgroup {
            version,
            memory: below(&self.memory),
            pids: below(&self.pids),
            cpu: below(&self.cpu),
            _parent: None,
            base,
            next_child: AtomicU64::new(0),
        };
        let limits = self.total(limits);
        if let Some(dir) = &group.memory {
            if version == CgroupVersion::One {
                // Before Linux 5.11 the limits of a group did not hold for those below it otherwise.
                let _ = write_file(dir, "memory.use_hierarchy", "1");
            }
            group.set_memory(dir, limits.0)?;
        }
        group.set_pids(limits.1, 0)?;
        if let Some(dir) = &group.cpu {
            // Of the usual 100 or 1024.
            match version {
                CgroupVersion::One => {
                    let share = 1024 * total::CPU_SHARE_PERCENT / 100;
                    write_file(dir, "cpu.shares", &share.to_string())?;
                }
                CgroupVersion::Two => {
                    write_file(dir, "cpu.weight", &total::CPU_SHARE_PERCENT.to_string())?;
                }
            }
        }
        Ok(Some((group, limits)))
    }

    /// The limits of all sandboxes together, in bytes and processes.
    pub(crate) fn total(&self, limits: &TotalLimits) -> (u64, u64) {
        let (mut memory, mut pids) = (total::host_memory(), total::host_pids());
        if let Some(version) = self.version {
            if let Some(dir) = &self.memory {
                memory = memory.min(total::memory_limit(version, dir));
            }
            if let Some(dir) = &self.pids {
                pids = pids.min(total::lowest(dir, "pids.max"));
            }
        }
        limits.resolve(memory, pids)
    }

    /// Removes groups of dead servers. Surviving processes are killed only in groups of this scope; empty groups
    /// are removed whatever their scope. Those that stay busy for a moment are removed in the background.
    fn remove_leftovers(&self) {
        let mut bases: Vec<&PathBuf> = [&self.memory, &self.pids, &self.cpu]
            .into_iter()
            .flatten()
            .collect();
        bases.dedup();
        let mut busy = Vec::new();
        for base in bases {
            for entry in std::fs::read_dir(base).into_iter().flatten().flatten() {
                let name = entry.file_name();
                let Some((scope, server)) = name.to_str().and_then(parse_group_name) else {
                    continue;
                };
                if server.is_running() {
                    continue;
                }
                let whose = match scope == self.scope {
                    true => GroupOwner::ThisHome,
                    false => GroupOwner::AnotherHome,
                };
                if !remove_tree(&entry.path(), whose) && whose == GroupOwner::ThisHome {
                    busy.push(entry.path());
                }
            }
        }
        if !busy.is_empty() {
            std::thread::spawn(move || {
                let (began, mut interval) = (Instant::now(), REMOVAL_INTERVAL);
                while began.elapsed() < REMOVAL_TIMEOUT {
                    std::thread::sleep(interval);
                    busy.retain(|dir| !remove_tree(dir, GroupOwner::ThisHome));
                    if busy.is_empty() {
                        return;
                    }
                    interval = (interval * 2).min(REMOVAL_MAX_INTERVAL);
                }
                tracing::warn!(?busy, "removing cgroups of an earlier server failed");
            });
        }
    }
}

/// Whose server left a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GroupOwner {
    ThisHome,
    AnotherHome,
}

/// Removes a group with all below it; kills what runs there if the group is this home's. Returns whether it is gone.
/// The depth is bounded by how this module builds groups.
fn remove_tree(dir: &Path, whose: GroupOwner) -> bool {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path(), whose);
        }
    }
    if whose == GroupOwner::ThisHome {
        kill_all(dir);
    }
    match std::fs::remove_dir(dir) {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// The scope and the server from a group's name.
fn parse_group_name(name: &str) -> Option<(&str, ServerIdentity)> {
    let (scope, rest) = name.strip_prefix("oubliette-")?.split_once('-')?;
    let (server, _number) = rest.rsplit_once('-')?;
    Some((scope, server.parse().ok()?))
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
            parse_group_name("oubliette-0a1b-42-1200-7"),
            Some(("0a1b", "42-1200".parse().unwrap()))
        );
        assert_eq!(parse_group_name("oubliette-server"), None);
        assert_eq!(parse_group_name("oubliette-0a1b-42-7"), None);
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
    fn the_first_group_has_the_limits_of_all_and_stays_below_the_servers_own() {
        let mount = tempfile::tempdir().unwrap();
        group(mount.path(), "", "cpu memory pids", "cpu memory pids", "");
        std::fs::write(mount.path().join("memory.max"), (1_u64 << 30).to_string()).unwrap();
        group(mount.path(), "ours", "", "", "");
        let mut hierarchies = CgroupHierarchies::find_in(mount.path(), "0::/ours\n");
        hierarchies.scope = "0a1b".into();
        let limits = TotalLimits {
            memory_mb: None,
            pids: Some(30),
        };
        let (first, (memory, pids)) = hierarchies.create_first(&limits).unwrap().unwrap();
        assert_eq!((memory, pids), ((1 << 30) - (256 << 20), 30));
        let dir = first.memory.clone().unwrap();
        let read = |file: &str| std::fs::read_to_string(dir.join(file)).unwrap();
        assert_eq!(read("memory.max"), memory.to_string());
        assert_eq!(read("pids.max"), "30");
        assert_eq!(read("cpu.weight"), "50");
        let name = dir.file_name().unwrap().to_str().unwrap();
        assert_eq!(parse_group_name(name), Some(("0a1b", ServerIdentity::current())));
    }

    #[test]
    fn a_dead_servers_groups_are_removed_with_all_below_them() {
        let mount = tempfile::tempdir().unwrap();
        let left = mount.path().join("oubliette-0a1b-1-1-0");
        std::fs::create_dir_all(left.join("session-0/sandbox-3")).unwrap();
        let running = mount
            .path()
            .join(format!("oubliette-0a1b-{}-0", ServerIdentity::current()));
        std::fs::create_dir(&running).unwrap();
        let hierarchies = CgroupHierarchies {
            scope: "0a1b".into(),
            version: Some(CgroupVersion::Two),
            memory: Some(mount.path().into()),
            ..CgroupHierarchies::default()
        };
        hierarchies.remove_leftovers();
        assert!(!left.exists() && running.exists());
    }
}
