//! The lock of a program: the hash of every file, written when it was installed and compared before it is used.
//!
//! Hashing a large program takes a second. So it is done once after each start of the server, and again when something
//! about a file differs from what it was then: size, mode, inode, or the times of the last change.

use std::{
    fs::File,
    io::{self, Read as _},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Component, Path, PathBuf},
};

use oubliette_protocol::{Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// Maximum number of files and directories of a program.
pub(crate) const MAX_ENTRIES: usize = 200_000;
/// Maximum depth of its directories.
const MAX_DEPTH: usize = 64;

/// Every file, link and directory of a program, in the order of their paths.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProgramLock {
    entries: Vec<LockEntry>,
}

/// One of them. Its path is relative to the program's tree.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LockEntry {
    path: PathBuf,
    content: LockContent,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LockContent {
    Directory,
    File {
        executable: bool,
        size: u64,
        sha256: String,
    },
    Link {
        target: PathBuf,
    },
}

/// What tells that a file may have changed since it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileStamp {
    inode: u64,
    mode: u32,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    fn of(path: &Path) -> io::Result<Self> {
        Ok(Self::from_metadata(&path.symlink_metadata()?))
    }

    fn from_metadata(of: &std::fs::Metadata) -> Self {
        Self {
            inode: of.ino(),
            mode: of.mode(),
            size: of.size(),
            modified: (of.mtime(), of.mtime_nsec()),
            changed: (of.ctime(), of.ctime_nsec()),
        }
    }
}

/// The stamps of all files of a tree, taken before they were hashed.
#[derive(Debug, Clone)]
pub(crate) struct TreeStamps(Vec<(PathBuf, FileStamp)>);

impl TreeStamps {
    /// The stamps of a tree that was moved. Moving it changes nothing in it, and not its root either: that is moved with
    /// the directory it is in.
    pub(crate) fn moved(self, from: &Path, to: &Path) -> Self {
        let moved = self
            .0
            .into_iter()
            .map(|(path, stamp)| match path.strip_prefix(from) {
                // Joining an empty path would end it with a slash.
                Ok(rest) if rest.as_os_str().is_empty() => (to.to_path_buf(), stamp),
                Ok(rest) => (to.join(rest), stamp),
                Err(_) => (path, stamp),
            });
        Self(moved.collect())
    }

    /// Whether nothing has changed since. A new file shows in the stamp of its directory.
    pub(crate) fn unchanged(&self) -> bool {
        self.0
            .iter()
            .all(|(path, stamp)| FileStamp::of(path).is_ok_and(|now| now == *stamp))
    }
}

/// A tree that was read: its lock, its stamps and its size.
pub(crate) struct ReadTree {
    pub(crate) lock: ProgramLock,
    pub(crate) stamps: TreeStamps,
    pub(crate) bytes: u64,
    pub(crate) files: u64,
}

impl ProgramLock {
    /// Hashes every file of a tree. Nothing may be writing to it. Links are not followed; what is neither a file, a link
    /// nor a directory, and a link that leads out of the tree to anything but a system directory, is refused. So are files
    /// that have more than `max_bytes` together: a file with holes can be far longer than what it takes on disk.
    pub(crate) fn read_tree(root: &Path, max_bytes: u64) -> Result<ReadTree> {
        let mut read = ReadTree {
            lock: ProgramLock { entries: Vec::new() },
            stamps: TreeStamps(Vec::new()),
            bytes: 0,
            files: 0,
        };
        let mut unread = vec![(PathBuf::new(), 0)];
        let stamp = FileStamp::of(root).map_err(|error| unreadable(root, &error))?;
        read.stamps.0.push((root.to_path_buf(), stamp));
        while let Some((dir, depth)) = unread.pop() {
            let at = root.join(&dir);
            for entry in std::fs::read_dir(&at).map_err(|error| unreadable(&at, &error))? {
                let entry = entry.map_err(|error| unreadable(&at, &error))?;
                let relative = dir.join(entry.file_name());
                let path = root.join(&relative);
                let metadata = path
                    .symlink_metadata()
                    .map_err(|error| unreadable(&path, &error))?;
                let kind = metadata.file_type();
                let content = if kind.is_dir() {
                    if depth >= MAX_DEPTH {
                        return Err(too_much(&format!("directories nested {MAX_DEPTH} deep")));
                    }
                    unread.push((relative.clone(), depth + 1));
                    LockContent::Directory
                } else if kind.is_symlink() {
                    let target = path.read_link().map_err(|error| unreadable(&path, &error))?;
                    check_link(&relative, &target)?;
                    LockContent::Link { target }
                } else if kind.is_file() {
                    read.files += 1;
                    read.bytes = read.bytes.saturating_add(metadata.size());
                    if read.bytes > max_bytes {
                        return Err(too_much(&format!(
                            "files of more than {max_bytes} bytes together"
                        )));
                    }
                    LockContent::File {
                        executable: metadata.permissions().mode() & 0o111 != 0,
                        size: metadata.size(),
                        sha256: hash_file(&path, metadata.size())
                            .map_err(|error| unreadable(&path, &error))?,
                    }
                } else {
                    return Err(Error::invalid(format!(
                        "the package has {}, which is neither a file nor a directory",
                        relative.display()
                    )));
                };
                read.stamps.0.push((path, FileStamp::from_metadata(&metadata)));
                read.lock.entries.push(LockEntry {
                    path: relative,
                    content,
                });
                if read.lock.entries.len() > MAX_ENTRIES {
                    return Err(too_much(&format!("more than {MAX_ENTRIES} files")));
                }
            }
        }
        read.lock.entries.sort();
        Ok(read)
    }

    /// The first path that differs from another lock.
    pub(crate) fn first_difference<'a>(&'a self, other: &'a Self) -> Option<&'a Path> {
        let pairs = self.entries.iter().zip(&other.entries);
        let differing = pairs.into_iter().find(|(a, b)| a != b).map(|(a, b)| a.min(b));
        let shorter = self.entries.len().min(other.entries.len());
        let longer = if self.entries.len() > shorter { self } else { other };
        differing
            .or_else(|| longer.entries.get(shorter))
            .map(|entry| entry.path.as_path())
    }
}

/// A link stays in the tree, or leads to a directory that every sandbox has: to the interpreter of a Python environment.
fn check_link(link: &Path, target: &Path) -> Result<()> {
    let outside = || {
        Error::invalid(format!(
            "the package has a link {} that leads out of it",
            link.display()
        ))
    };
    if target.is_absolute() {
        let system = ["/usr", "/bin", "/opt/programs"]
            .iter()
            .any(|dir| target.starts_with(dir));
        let plain = target.components().all(|part| part != Component::ParentDir);
        return if system && plain { Ok(()) } else { Err(outside()) };
    }
    let mut depth = link.components().count().saturating_sub(1);
    for part in target.components() {
        match part {
            Component::ParentDir => depth = depth.checked_sub(1).ok_or_else(outside)?,
            Component::Normal(_) => depth += 1,
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    Ok(())
}

/// Hashes a file, of which no more is read than its size was.
fn hash_file(path: &Path, size: u64) -> io::Result<String> {
    let mut file = File::open(path)?.take(size);
    let mut hash = Sha256::new();
    let mut chunk = vec![0; 256 * 1024];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hex::encode(hash.finalize())),
            read => hash.update(&chunk[..read]),
        }
    }
}

fn too_much(what: &str) -> Error {
    Error::limit_exceeded(format!("the package has {what}"))
}

fn unreadable(path: &Path, error: &io::Error) -> Error {
    Error::unavailable("a file of the program could not be read; install it again")
        .with_cause(format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const MAX: u64 = 1 << 20;

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        std::fs::write(dir.path().join("a/b/c.js"), "1").unwrap();
        std::fs::write(dir.path().join("d"), "2").unwrap();
        symlink("../d", dir.path().join("a/link")).unwrap();
        symlink("/usr/bin/python3", dir.path().join("python")).unwrap();
        dir
    }

    #[test]
    fn any_change_of_a_file_shows_in_its_stamp_and_in_the_lock() {
        type Change = fn(&Path);
        let changes: [(&str, Change); 5] = [
            ("d", |root| std::fs::write(root.join("d"), "3").unwrap()),
            ("new", |root| std::fs::write(root.join("new"), "").unwrap()),
            ("d", |root| std::fs::remove_file(root.join("d")).unwrap()),
            ("d", |root| {
                std::fs::set_permissions(root.join("d"), std::fs::Permissions::from_mode(0o755)).unwrap()
            }),
            ("a/link", |root| {
                std::fs::remove_file(root.join("a/link")).unwrap();
                symlink("b", root.join("a/link")).unwrap();
            }),
        ];
        for (path, change) in changes {
            let dir = tree();
            let before = ProgramLock::read_tree(dir.path(), MAX).unwrap();
            assert!(before.stamps.unchanged());
            change(dir.path());
            assert!(!before.stamps.unchanged(), "{path}");
            let after = ProgramLock::read_tree(dir.path(), MAX).unwrap();
            assert_eq!(before.lock.first_difference(&after.lock), Some(Path::new(path)));
            assert_eq!(after.lock.first_difference(&before.lock), Some(Path::new(path)));
        }
    }

    #[test]
    fn a_touched_file_with_the_same_content_has_the_same_lock() {
        let dir = tree();
        let before = ProgramLock::read_tree(dir.path(), MAX).unwrap();
        std::fs::write(dir.path().join("d"), "2").unwrap();
        let after = ProgramLock::read_tree(dir.path(), MAX).unwrap();
        assert_eq!(before.lock.first_difference(&after.lock), None);
        assert_eq!((before.files, before.bytes), (2, 2));
    }

    #[test]
    fn links_out_of_the_tree_and_special_files_are_refused() {
        for target in ["/etc/passwd", "../../x", "/usr/../etc", "b/../../../x"] {
            let dir = tree();
            symlink(target, dir.path().join("a/out")).unwrap();
            let error = ProgramLock::read_tree(dir.path(), MAX).err().unwrap();
            assert!(error.message.contains("a/out"), "{target}: {}", error.message);
        }
        let dir = tree();
        std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
        assert!(ProgramLock::read_tree(dir.path(), MAX).is_err());
    }

    #[test]
    fn a_file_that_is_mostly_a_hole_is_not_read_to_its_end() {
        let dir = tree();
        let file = File::create(dir.path().join("hole")).unwrap();
        file.set_len(1 << 40).unwrap();
        let error = ProgramLock::read_tree(dir.path(), MAX).err().unwrap();
        assert!(error.message.contains("bytes together"), "{}", error.message);
    }
}
