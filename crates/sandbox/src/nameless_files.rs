//! Space on disk that no directory shows: files that were removed and that a process still has open or mapped.

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use oubliette_os::DiskUsage;

use crate::process_table::processes_below;

/// How much of a process's list of mappings is read.
const MAX_MAPS_BYTES: u64 = 8 << 20;
/// Maximum number of descriptors that are looked at.
const MAX_DESCRIPTORS: usize = 200_000;
/// File systems in memory, as `statfs` names them: tmpfs, ramfs, hugetlbfs.
const MEMORY_SYSTEMS: [i128; 3] = [0x0102_1994, 0x8584_58f6, 0x9584_58f6];

/// Bytes of such files, of all processes at and below these. Each file counts once. `devices` are those of the
/// directories that are watched; other file systems in memory do not count. Not complete if a process may have such a file
/// where it cannot be seen.
pub(crate) fn nameless_usage(tops: impl IntoIterator<Item = i32>, devices: &HashSet<u64>) -> DiskUsage {
    let mut search = NamelessFiles {
        devices,
        files: HashMap::new(),
        sockets: HashSet::new(),
        descriptors: 0,
        complete: true,
    };
    for pid in processes_below(tops) {
        search.look_at(Path::new(&format!("/proc/{pid}")));
    }
    DiskUsage {
        bytes: search.files.into_values().fold(0, u64::saturating_add),
        over: false,
        complete: search.complete,
    }
}

struct NamelessFiles<'a> {
    devices: &'a HashSet<u64>,
    /// Bytes of each file found, by device and inode.
    files: HashMap<(u64, u64), u64>,
    /// Sockets that were looked at, by inode.
    sockets: HashSet<u64>,
    descriptors: usize,
    complete: bool,
}

impl NamelessFiles<'_> {
    fn look_at(&mut self, process: &Path) {
        // Each thread: it may have descriptors of its own.
        match std::fs::read_dir(process.join("task")) {
            Ok(threads) => threads
                .flatten()
                .for_each(|thread| self.look_at_descriptors(&thread.path())),
            Err(error) => self.note(&error),
        }
        match read_maps(process) {
            Ok(Some(maps)) => self.look_at_mappings(&maps),
            Ok(None) => self.complete = false,
            Err(error) => self.note(&error),
        }
    }

    /// A process that has ended has no files; any other error may hide some.
    fn note(&mut self, error: &std::io::Error) {
        let ended = error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH);
        self.complete &= ended;
    }

    fn look_at_descriptors(&mut self, thread: &Path) {
        let descriptors = match std::fs::read_dir(thread.join("fd")) {
            Ok(descriptors) => descriptors,
            Err(error) => return self.note(&error),
        };
        for entry in descriptors.flatten() {
            self.descriptors += 1;
            if self.descriptors > MAX_DESCRIPTORS {
                self.complete = false;
                return;
            }
            // Follows the link to the open file itself, whatever its name was.
            let Ok(file) = std::fs::metadata(entry.path()) else {
                continue;
            };
            if file.file_type().is_socket() && self.sockets.insert(file.ino()) {
                let path = thread.join("fdinfo").join(entry.file_name());
                let info = std::fs::read_to_string(path).unwrap_or_default();
                self.complete &= !holds_descriptors(&info);
            } else if file.is_file()
                && file.nlink() == 0
                && (self.devices.contains(&file.dev()) || !is_in_memory(&entry.path()))
            {
                self.files
                    .insert((file.dev(), file.ino()), file.blocks().saturating_mul(512));
            }
        }
    }

    fn look_at_mappings(&mut self, maps: &str) {
        for mapping in maps.lines().filter_map(RemovedMapping::parse) {
            let (major, minor) = mapping.device;
            let device = rustix::fs::makedev(major, minor);
            if self.devices.contains(&device) {
                // How much of it is on disk cannot be seen; at most as much as is mapped.
                let most = self.files.entry((device, mapping.inode)).or_default();
                *most = (*most).max(mapping.bytes);
            } else if major == 0 && self.devices.iter().any(|device| rustix::fs::major(*device) == 0) {
                // Some file systems name one device here and another one for the file itself.
                self.complete = false;
            }
        }
    }
}

/// The list of mappings; none if it is too long.
fn read_maps(process: &Path) -> std::io::Result<Option<String>> {
    let mut maps = Vec::new();
    let file = std::fs::File::open(process.join("maps"))?;
    file.take(MAX_MAPS_BYTES).read_to_end(&mut maps)?;
    let is_whole = (maps.len() as u64) < MAX_MAPS_BYTES;
    // Names may be anything.
    Ok(is_whole.then(|| String::from_utf8_lossy(&maps).into_owned()))
}

fn is_in_memory(file: &Path) -> bool {
    rustix::fs::statfs(file).is_ok_and(|system| MEMORY_SYSTEMS.contains(&i128::from(system.f_type)))
}

/// Whether descriptors wait in a socket to be received, by its `/proc/<pid>/fdinfo/<fd>`. Nobody has those open.
fn holds_descriptors(info: &str) -> bool {
    let waiting = info.lines().find_map(|line| line.strip_prefix("scm_fds:"));
    waiting.is_some_and(|number| number.trim() != "0")
}

/// A mapping of a file that was removed.
#[derive(Debug, PartialEq, Eq)]
struct RemovedMapping {
    device: (u32, u32),
    inode: u64,
    bytes: u64,
}

impl RemovedMapping {
    /// From a line of `/proc/<pid>/maps`: `start-end permissions offset major:minor inode path`.
    fn parse(line: &str) -> Option<Self> {
        let line = line.strip_suffix(" (deleted)")?;
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (major, minor) = fields.nth(2)?.split_once(':')?;
        let inode = fields.next()?.parse().ok()?;
        // Memory of the kernel's own file system, which has no directories.
        let name = fields.next()?;
        if ["/memfd:", "/SYSV", "/dev/", "/anon_hugepage", "/[aio]"]
            .iter()
            .any(|own| name.starts_with(own))
        {
            return None;
        }
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        let device = |text: &str| u32::from_str_radix(text, 16).ok();
        Some(Self {
            device: (device(major)?, device(minor)?),
            inode,
            bytes: number(end)?.checked_sub(number(start)?)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_removed_file_counts_while_it_is_open() {
        let dir = tempfile::tempdir().unwrap();
        let devices = HashSet::from([std::fs::metadata(dir.path()).unwrap().dev()]);
        let own = std::process::id().cast_signed();
        let mut file = std::fs::File::create(dir.path().join("x")).unwrap();
        file.write_all(&vec![1; 3 << 20]).unwrap();
        file.sync_all().unwrap();
        let before = nameless_usage([own], &devices).bytes;
        std::fs::remove_file(dir.path().join("x")).unwrap();
        // Other tests of this process may have such files too.
        let after = nameless_usage([own], &devices).bytes;
        assert!(after >= before.saturating_sub(1 << 20) + (3 << 20));
        assert_eq!(nameless_usage([], &devices), DiskUsage::NOTHING);
    }

    #[test]
    fn mappings_of_removed_files_are_read_as_the_kernel_writes_them() {
        let line = "7f00-7f20 rw-s 00000000 fe:01 1234                       /home/agent/a b (deleted)";
        let mapping = RemovedMapping {
            device: (0xfe, 1),
            inode: 1234,
            bytes: 0x20,
        };
        assert_eq!(RemovedMapping::parse(line), Some(mapping));
        assert_eq!(
            RemovedMapping::parse(line.strip_suffix(" (deleted)").unwrap()),
            None
        );
        assert_eq!(RemovedMapping::parse("7f00-7f20 rw-p 00000000 00:00 0"), None);
        let memory = "7f00-7f20 rw-s 00000000 00:01 1234 /memfd:x (deleted)";
        assert_eq!(RemovedMapping::parse(memory), None);
    }

    #[test]
    fn descriptors_that_wait_in_a_socket_are_noticed() {
        assert!(holds_descriptors("pos:\t0\nflags:\t02\nscm_fds: 3\n"));
        assert!(!holds_descriptors("pos:\t0\nflags:\t02\nscm_fds: 0\n"));
        assert!(!holds_descriptors("pos:\t0\n"));
    }
}
