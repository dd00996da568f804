//! Measuring what directories take on disk, whatever is in them.
//!
//! Whoever fills a directory may try to hide from a count: with names deeper than a path can say, directories without
//! permission to read, a hundred thousand levels, or files renamed while they are counted. So the walk holds descriptors
//! instead of paths, its stack is on the heap, and what it cannot count it reports.

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// What an entry takes at least: a file without content has an inode and a name.
const ENTRY_BYTES: u64 = 1024;
/// How many directories above the current one are kept open. From further up it comes back by `..`.
const OPEN_LEVELS: usize = 64;
/// Maximum number of directories that are known and not yet counted.
const MAX_PENDING: usize = 1 << 20;

/// A measured disk usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskUsage {
    /// Bytes on disk; a lower bound if `over` or not `complete`.
    pub bytes: u64,
    /// Whether it exceeds the cap; measuring stopped there.
    pub over: bool,
    /// Whether everything was counted. If not, directories were moved or closed while they were counted.
    pub complete: bool,
}

impl DiskUsage {
    /// Nothing, counted completely.
    pub const NOTHING: Self = Self {
        bytes: 0,
        over: false,
        complete: true,
    };
    /// Could not be counted.
    pub const UNKNOWN: Self = Self {
        bytes: 0,
        over: false,
        complete: false,
    };

    /// Adds what was counted elsewhere; together they may be `cap` bytes.
    pub fn add(&mut self, other: Self, cap: u64) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.complete &= other.complete;
        self.over |= other.over || self.bytes > cap;
    }
}

/// Measures a directory's usage on disk, stopping when it exceeds `cap` bytes. Symbolic links are not followed, file
/// systems of another type not entered, and a file with several hard links is counted once. A directory that its owner,
/// who is the caller, has no permission to read is opened for the time of the count. One that belongs to somebody else
/// and cannot be read is not counted.
pub fn disk_usage(path: &Path, cap: u64) -> DiskUsage {
    let (root, restore) = match open_directory(rustix::fs::CWD, path, OFlags::empty()) {
        Ok(opened) => opened,
        Err(Errno::NOENT) => return DiskUsage::NOTHING,
        Err(_) => return DiskUsage::UNKNOWN,
    };
    let (Ok(stat), Ok(system)) = (rustix::fs::fstat(&root), rustix::fs::fstatfs(&root)) else {
        return DiskUsage::UNKNOWN;
    };
    let mut walk = DiskWalk {
        cap,
        usage: DiskUsage::NOTHING,
        device: stat.st_dev,
        system: i128::from(system.f_type),
        linked: HashSet::new(),
        levels: Vec::new(),
        pending: 0,
    };
    walk.enter(root, &stat, restore);
    while !walk.usage.over && walk.step() {}
    // Permissions are taken back from what is still open.
    while let Some(level) = walk.levels.pop() {
        level.close();
    }
    walk.usage
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

struct DiskWalk {
    cap: u64,
    usage: DiskUsage,
    /// Device and file system type of the root.
    device: u64,
    system: i128,
    /// Files with several links that were counted, by device and inode.
    linked: HashSet<(u64, u64)>,
    /// From the root to the directory that is being counted.
    levels: Vec<WalkedDirectory>,
    /// How many names all levels hold.
    pending: usize,
}

/// A directory on the way down.
struct WalkedDirectory {
    /// None where too many are open.
    dir: Option<OwnedFd>,
    device: u64,
    inode: u64,
    /// Directories in it that are to be counted.
    pending: Vec<CString>,
    /// Its permissions, if they were changed to read it.
    restore: Option<ChangedMode>,
}

/// The permissions of a directory before and after they were changed.
#[derive(Clone, Copy)]
struct ChangedMode {
    before: Mode,
    after: Mode,
}

impl WalkedDirectory {
    fn close(self) {
        if let (Some(dir), Some(changed)) = (&self.dir, self.restore)
            && let Ok(stat) = rustix::fs::fstat(dir)
            // Unless somebody else changed them meanwhile.
            && Mode::from_raw_mode(stat.st_mode) == changed.after
        {
            let _ = rustix::fs::fchmod(dir, changed.before);
        }
    }
}

impl DiskWalk {
    /// Counts the next directory, or goes up. Returns false when all is counted.
    fn step(&mut self) -> bool {
        let Some(level) = self.levels.last_mut() else {
            return false;
        };
        let Some(name) = level.pending.pop() else {
            return self.leave();
        };
        self.pending -= 1;
        let Some(dir) = &level.dir else {
            // The way back was lost; what is left in it is not counted.
            self.usage.complete = false;
            return true;
        };
        match open_directory(dir.as_fd(), name.as_c_str(), OFlags::NOFOLLOW) {
            Ok((child, restore)) => match rustix::fs::fstat(&child) {
                Ok(stat) if self.is_same_system(&child, &stat) => self.enter(child, &stat, restore),
                Ok(_) => {}
                Err(_) => self.usage.complete = false,
            },
            // It was removed or replaced meanwhile, or belongs to somebody else.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::PERM) => {}
            Err(_) => self.usage.complete = false,
        }
        true
    }

    /// Whether a directory is on a file system of the same type as the root. The device alone does not tell: anybody
    /// can make a subvolume of btrfs, which has one of its own.
    fn is_same_system(&self, dir: &OwnedFd, stat: &Stat) -> bool {
        stat.st_dev == self.device
            || rustix::fs::fstatfs(dir).is_ok_and(|system| i128::from(system.f_type) == self.system)
    }

    /// Counts the entries of a directory and makes it the current one.
    fn enter(&mut self, dir: OwnedFd, stat: &Stat, restore: Option<ChangedMode>) {
        let mut pending = Vec::new();
        match Dir::read_from(&dir) {
            Ok(entries) => {
                for entry in entries {
                    let Ok(entry) = entry else {
                        self.usage.complete = false;
                        break;
                    };
                    let name = entry.file_name();
                    if name == c"." || name == c".." {
                        continue;
                    }
                    self.count(&dir, name, &mut pending);
                    if self.usage.over {
                        break;
                    }
                }
            }
            Err(_) => self.usage.complete = false,
        }
        self.pending += pending.len();
        self.levels.push(WalkedDirectory {
            dir: Some(dir),
            device: stat.st_dev,
            inode: stat.st_ino,
            pending,
            restore,
        });
        if self.pending > MAX_PENDING {
            self.usage.over = true;
        }
        if let Some(far) = self.levels.len().checked_sub(OPEN_LEVELS + 1)
            && let Some(level) = self.levels.get_mut(far)
        {
            level.dir = None;
        }
    }

    fn count(&mut self, dir: &OwnedFd, name: &CStr, pending: &mut Vec<CString>) {
        let stat = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return,
            Err(_) => {
                self.usage.complete = false;
                return;
            }
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => pending.push(name.to_owned()),
            _ if stat.st_nlink > 1 && !self.linked.insert((stat.st_dev, stat.st_ino)) => return,
            _ => {}
        }
        let bytes = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
        self.usage.bytes = self.usage.bytes.saturating_add(bytes.max(ENTRY_BYTES));
        self.usage.over = self.usage.bytes > self.cap;
    }

    /// Goes up to the directory above. Returns false at the root.
    fn leave(&mut self) -> bool {
        let Some(done) = self.levels.pop() else {
            return false;
        };
        if let (Some(above), Some(dir)) = (self.levels.last_mut(), &done.dir)
            && above.dir.is_none()
        {
            let up = rustix::fs::openat(dir, c"..", DIRECTORY, Mode::empty()).ok();
            // Moved elsewhere, it has another directory above it.
            above.dir = up.filter(|up| {
                rustix::fs::fstat(up)
                    .is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (above.device, above.inode))
            });
        }
        done.close();
        true
    }
}

/// Opens a directory, with permission to read and search it; returns its permissions if they had to be changed. Fails
/// with `PERM` if it belongs to somebody else and may not be read.
fn open_directory(
    above: BorrowedFd<'_>,
    name: impl rustix::path::Arg + Copy,
    follow: OFlags,
) -> Result<(OwnedFd, Option<ChangedMode>), Errno> {
    let flags = DIRECTORY | follow;
    match rustix::fs::openat(above, name, flags, Mode::empty()) {
        Ok(dir) => {
            let restore = grant_access(dir.as_fd())?;
            Ok((dir, restore))
        }
        Err(Errno::ACCESS) => {
            let closed = rustix::fs::openat(above, name, flags | OFlags::PATH, Mode::empty())?;
            let restore = grant_access(closed.as_fd())?;
            let dir = rustix::fs::openat(above, name, flags, Mode::empty())?;
            Ok((dir, restore))
        }
        Err(error) => Err(error),
    }
}

/// Lets the owner, who is the caller, read and search a directory, unless it can. Root needs no permission.
fn grant_access(dir: BorrowedFd<'_>) -> Result<Option<ChangedMode>, Errno> {
    let stat = rustix::fs::fstat(dir)?;
    let before = Mode::from_raw_mode(stat.st_mode);
    let after = before | Mode::RUSR | Mode::XUSR;
    let user = rustix::process::geteuid();
    if before == after || user.is_root() {
        return Ok(None);
    }
    if stat.st_uid != user.as_raw() {
        // It may be readable for its group or for all, or else is none of the caller's.
        return rustix::fs::accessat(
            dir,
            c".",
            rustix::fs::Access::READ_OK | rustix::fs::Access::EXEC_OK,
            AtFlags::EACCESS,
        )
        .map(|()| None)
        .map_err(|_| Errno::PERM);
    }
    // By its path in /proc, because a descriptor of a directory that cannot be read cannot be used for it.
    rustix::fs::chmod(format!("/proc/self/fd/{}", dir.as_raw_fd()), after)?;
    Ok(Some(ChangedMode { before, after }))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn counts_files_once_and_stops_at_the_cap() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        let big = dir.path().join("sub/big");
        std::fs::write(&big, vec![1; 1 << 20]).unwrap();
        let one = disk_usage(dir.path(), u64::MAX);
        assert!(one.bytes >= 1 << 20 && !one.over && one.complete);
        std::fs::hard_link(&big, dir.path().join("again")).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("root")).unwrap();
        assert!(disk_usage(dir.path(), u64::MAX).bytes < one.bytes + 65_536);
        assert!(disk_usage(dir.path(), 1 << 19).over);
        assert_eq!(disk_usage(&dir.path().join("no"), 1), DiskUsage::NOTHING);
    }

    #[test]
    fn files_without_content_count_too() {
        let dir = tempfile::tempdir().unwrap();
        for n in 0..2000 {
            std::fs::write(dir.path().join(format!("f{n}")), "").unwrap();
        }
        assert!(disk_usage(dir.path(), 1 << 20).over);
    }

    /// Far deeper than a path can say and than descriptors are kept, with a file at the bottom and one beside each level.
    #[test]
    fn deep_directories_are_counted_to_the_bottom() {
        let root = tempfile::tempdir().unwrap();
        let mut dir = OwnedFd::from(std::fs::File::open(root.path()).unwrap());
        for _ in 0..3000 {
            rustix::fs::mkdirat(&dir, "deeper", Mode::RWXU).unwrap();
            rustix::fs::mkdirat(&dir, "beside", Mode::RWXU).unwrap();
            dir = rustix::fs::openat(&dir, "deeper", DIRECTORY, Mode::empty()).unwrap();
        }
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&dir, "file", flags, Mode::RUSR).unwrap();
        rustix::io::write(&file, &vec![1; 1 << 20]).unwrap();
        let usage = disk_usage(root.path(), u64::MAX);
        assert!(usage.complete && !usage.over, "{usage:?}");
        assert!(
            usage.bytes >= (1 << 20) + 6000 * ENTRY_BYTES,
            "{} bytes",
            usage.bytes
        );
        // The library's own removal would need a descriptor for each level.
        let removed = std::process::Command::new("rm")
            .arg("-rf")
            .arg(root.path())
            .status();
        assert!(removed.unwrap().success());
    }

    #[test]
    fn a_directory_without_permissions_is_counted_and_stays_closed() {
        let dir = tempfile::tempdir().unwrap();
        let closed = dir.path().join("closed");
        std::fs::create_dir_all(closed.join("within")).unwrap();
        std::fs::write(closed.join("within/big"), vec![1; 1 << 20]).unwrap();
        let mode = |mode| std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(closed.join("within"), mode(0o400)).unwrap();
        std::fs::set_permissions(&closed, mode(0)).unwrap();
        let usage = disk_usage(dir.path(), u64::MAX);
        assert!(usage.bytes >= 1 << 20 && usage.complete, "{usage:?}");
        let now = std::fs::metadata(&closed).unwrap().permissions().mode();
        assert_eq!(now & 0o777, 0, "its owner meant it to be closed");
        std::fs::set_permissions(&closed, mode(0o700)).unwrap();
        let now = std::fs::metadata(closed.join("within"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(now & 0o777, 0o400);
        std::fs::set_permissions(closed.join("within"), mode(0o700)).unwrap();
    }
}
