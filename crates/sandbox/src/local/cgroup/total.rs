//! The limits of all sandboxes of a server together: what is left of the machine for the server itself.

use std::path::Path;

use super::hierarchies::CgroupVersion;

/// What is kept for the server and the rest of the host: an eighth of the memory, within these bounds.
const RESERVED_PART: u64 = 8;
const RESERVED_MIN: u64 = 256 << 20;
const RESERVED_MAX: u64 = 2 << 30;
/// Share of the processors that all sandboxes together have against each other group of the host, in percent of what
/// such a group has.
pub(super) const CPU_SHARE_PERCENT: u64 = 50;

/// Limits of all sandboxes together. What is `None` is derived from the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TotalLimits {
    /// Memory, in MiB. Default: that of the host, or of the server's own cgroup, less an eighth, which is at least
    /// 256 MiB and at most 2 GiB.
    pub memory_mb: Option<u64>,
    /// Processes and threads. Default: three quarters of what the host, or the server's own cgroup, allows.
    pub pids: Option<u64>,
}

impl TotalLimits {
    /// The limits in bytes and processes, derived from the host where they are not set.
    pub(crate) fn resolve(&self, memory: u64, pids: u64) -> (u64, u64) {
        let reserved = (memory / RESERVED_PART).clamp(RESERVED_MIN, RESERVED_MAX);
        (
            self.memory_mb
                // On a very small host half of it is left.
                .map_or((memory.saturating_sub(reserved)).max(memory / 2), |mb| {
                    mb.saturating_mul(1024 * 1024)
                }),
            self.pids.unwrap_or(pids / 4 * 3).max(1),
        )
    }
}

/// The host's memory in bytes.
pub(crate) fn host_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text.lines().find_map(|line| {
        let value = line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?;
        value.trim().parse::<u64>().ok()
    });
    kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024))
}

/// How many processes and threads the kernel allows.
pub(crate) fn host_pids() -> u64 {
    ["pid_max", "threads-max"]
        .iter()
        .filter_map(|name| {
            let text = std::fs::read_to_string(Path::new("/proc/sys/kernel").join(name)).ok()?;
            text.trim().parse().ok()
        })
        .min()
        .unwrap_or(32_768)
}

/// The lowest memory limit of a group and those above it, in bytes.
pub(super) fn memory_limit(version: CgroupVersion, dir: &Path) -> u64 {
    match version {
        CgroupVersion::One => {
            let text = std::fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
            text.lines()
                .find_map(|line| {
                    line.strip_prefix("hierarchical_memory_limit ")?
                        .trim()
                        .parse()
                        .ok()
                })
                .unwrap_or(u64::MAX)
        }
        CgroupVersion::Two => lowest(dir, "memory.max"),
    }
}

/// The lowest number in this file of a group and those above it. The file of a group without the limit says `max`,
/// and the first group has none.
pub(super) fn lowest(dir: &Path, file: &str) -> u64 {
    dir.ancestors()
        .map_while(|dir| std::fs::read_to_string(dir.join(file)).ok())
        .filter_map(|text| text.trim().parse().ok())
        .min()
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn something_is_always_left_for_the_server() {
        const GIB: u64 = 1 << 30;
        let derived = |memory: u64| TotalLimits::default().resolve(memory, 1000);
        assert_eq!(derived(64 * GIB), (62 * GIB, 750));
        assert_eq!(derived(8 * GIB).0, 7 * GIB);
        assert_eq!(derived(GIB).0, GIB - (256 << 20));
        assert_eq!(derived(256 << 20).0, 128 << 20);
        let set = TotalLimits {
            memory_mb: Some(100),
            pids: Some(7),
        };
        assert_eq!(set.resolve(64 * GIB, 1000), (100 << 20, 7));
    }

    #[test]
    fn limits_above_the_own_group_count() {
        let mount = tempfile::tempdir().unwrap();
        let own = mount.path().join("a/b");
        std::fs::create_dir_all(&own).unwrap();
        std::fs::write(mount.path().join("a/memory.max"), "4096\n").unwrap();
        std::fs::write(own.join("memory.max"), "max\n").unwrap();
        assert_eq!(memory_limit(CgroupVersion::Two, &own), 4096);
        std::fs::write(
            own.join("memory.stat"),
            "cache 1\nhierarchical_memory_limit 512\n",
        )
        .unwrap();
        assert_eq!(memory_limit(CgroupVersion::One, &own), 512);
        assert!(host_memory() > 1 << 20 && host_pids() > 100);
    }
}
