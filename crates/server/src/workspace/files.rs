//! Files of a workspace, by path. The kernel resolves every path beneath the workspace's root and
//! follows no link, so nothing an agent puts there leads out.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use oubliette_protocol::{Error, Result, id::quoted};
use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags},
    io::Errno,
};
use serde::Serialize;

/// Most entries of one listing.
const MOST_ENTRIES: usize = 10_000;
/// Longest path.
const MOST_PATH: usize = 4096;

/// A path inside a workspace: its parts, none of which leads up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inner(Vec<String>);

impl Inner {
    /// Reads a path as it stands in a URL, decoded. Empty is the root.
    pub fn parse(path: &str) -> Result<Self> {
        let bad = || Error::invalid(format!("{} is not a path in a workspace", quoted(path)));
        if path.len() > MOST_PATH || path.contains('\0') {
            return Err(bad());
        }
        let mut parts = Vec::new();
        for part in path.split('/') {
            match part {
                "" | "." => {}
                ".." => return Err(bad()),
                part if part.len() > 255 => return Err(bad()),
                part => parts.push(part.to_owned()),
            }
        }
        Ok(Self(parts))
    }

    fn path(&self) -> PathBuf {
        match self.0.is_empty() {
            true => PathBuf::from("."),
            false => self.0.iter().collect(),
        }
    }
}

impl std::fmt::Display for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.join("/"))
    }
}

/// What is at a path.
pub enum Found {
    /// A file, open.
    File(File, u64),
    /// A folder's entries.
    Folder(Vec<Entry>),
}

/// One entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// `file`, `directory`, `symlink` or `other`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Its size in bytes.
    pub size: u64,
    /// When it last changed.
    pub modified: Option<jiff::Timestamp>,
}

const RESOLVE: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS);

fn root(workspace: &Path) -> Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::open(workspace, flags, Mode::empty())
        .map_err(|e| Error::not_found("this workspace has no files on disk").with_log(e))
}

fn open(root: impl AsFd, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    // The kernel may ask for another try when something is moved meanwhile.
    for _ in 0..16 {
        match rustix::fs::openat2(
            root.as_fd(),
            path,
            flags | OFlags::CLOEXEC,
            Mode::empty(),
            RESOLVE,
        ) {
            Err(Errno::AGAIN) => {}
            other => return other,
        }
    }
    Err(Errno::AGAIN)
}

fn refused(path: &Inner, error: Errno) -> Error {
    match error {
        Errno::NOENT | Errno::NOTDIR => Error::not_found(format!(
            "there is no {} in this workspace",
            quoted(&path.to_string())
        )),
        Errno::LOOP | Errno::XDEV => Error::permission_denied(format!(
            "{} is or leads through a link; links are not followed",
            quoted(&path.to_string())
        )),
        Errno::ACCESS | Errno::PERM => {
            Error::permission_denied(format!("{} may not be opened", quoted(&path.to_string())))
        }
        Errno::ISDIR => Error::conflict(format!("{} is a folder", quoted(&path.to_string()))),
        Errno::NOTEMPTY | Errno::EXIST => Error::conflict(format!(
            "{} is a folder that is not empty",
            quoted(&path.to_string())
        )),
        Errno::NOSPC | Errno::DQUOT => {
            Error::unavailable("the server's disk is full; free some space and try again")
        }
        other => Error::internal(format!("{path}: {other}")),
    }
}

/// Opens what is at a path.
pub fn find(workspace: &Path, path: &Inner) -> Result<Found> {
    let root = root(workspace)?;
    // Not blocking: a pipe without a writer would hold the thread for ever.
    let fd = open(
        &root,
        &path.path(),
        OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY,
    )
    .map_err(|e| refused(path, e))?;
    let stat = rustix::fs::fstat(&fd).map_err(|e| refused(path, e))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(Found::File(
            File::from(fd),
            u64::try_from(stat.st_size).unwrap_or(0),
        )),
        FileType::Directory => Ok(Found::Folder(entries(&fd).map_err(|e| refused(path, e))?)),
        _ => Err(Error::permission_denied(format!(
            "{} is not a file or folder",
            quoted(&path.to_string())
        ))),
    }
}

fn entries(fd: &OwnedFd) -> rustix::io::Result<Vec<Entry>> {
    let mut found = Vec::new();
    for entry in Dir::read_from(fd)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if found.len() == MOST_ENTRIES {
            break;
        }
        // Gone again already: not an error of the listing.
        let Ok(stat) = rustix::fs::statat(fd, name, AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        found.push(Entry {
            name: name.to_string_lossy().into_owned(),
            kind: kind(FileType::from_raw_mode(stat.st_mode)),
            size: u64::try_from(stat.st_size).unwrap_or(0),
            modified: jiff::Timestamp::from_second(stat.st_mtime).ok(),
        });
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn kind(of: FileType) -> &'static str {
    match of {
        FileType::RegularFile => "file",
        FileType::Directory => "directory",
        FileType::Symlink => "symlink",
        _ => "other",
    }
}

/// Writes a file whole: whoever reads it sees the old or the new one. Makes the folders above it.
pub fn put(workspace: &Path, path: &Inner, content: &[u8]) -> Result<()> {
    let Some((name, parents)) = path.0.split_last() else {
        return Err(Error::invalid("name a file: the workspace itself is a folder"));
    };
    let mut folder = root(workspace)?;
    for part in parents {
        folder = match open(
            &folder,
            Path::new(part),
            OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW,
        ) {
            Err(Errno::NOENT) => {
                match rustix::fs::mkdirat(&folder, part.as_str(), Mode::from_raw_mode(0o755)) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(e) => return Err(refused(path, e)),
                }
                open(
                    &folder,
                    Path::new(part),
                    OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW,
                )
            }
            other => other,
        }
        .map_err(|e| refused(path, e))?;
    }
    match rustix::fs::statat(&folder, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => return Err(refused(path, Errno::ISDIR)),
            FileType::Symlink => return Err(refused(path, Errno::LOOP)),
            _ => {}
        },
        Err(Errno::NOENT) => {}
        Err(e) => return Err(refused(path, e)),
    }
    let temporary = format!(".oubliette-{}", uuid::Uuid::new_v4().simple());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let written = (|| {
        let fd = rustix::fs::openat(&folder, temporary.as_str(), flags, Mode::from_raw_mode(0o644))?;
        let mut file = File::from(fd);
        file.write_all(content)?;
        file.sync_all()?;
        rustix::fs::renameat(&folder, temporary.as_str(), &folder, name.as_str())?;
        Ok::<_, std::io::Error>(())
    })();
    written.map_err(|e| {
        let _ = rustix::fs::unlinkat(&folder, temporary.as_str(), AtFlags::empty());
        e.raw_os_error().map_or_else(
            || Error::internal(&e),
            |code| refused(path, Errno::from_raw_os_error(code)),
        )
    })
}

/// Removes a file, a link or an empty folder.
pub fn delete(workspace: &Path, path: &Inner) -> Result<()> {
    let Some((name, parents)) = path.0.split_last() else {
        return Err(Error::invalid(
            "the workspace itself is removed with workspace_delete",
        ));
    };
    let root = root(workspace)?;
    let parent = Inner(parents.to_vec());
    let folder =
        open(&root, &parent.path(), OFlags::PATH | OFlags::DIRECTORY).map_err(|e| refused(path, e))?;
    match rustix::fs::unlinkat(&folder, name.as_str(), AtFlags::empty()) {
        Err(Errno::ISDIR) => rustix::fs::unlinkat(&folder, name.as_str(), AtFlags::REMOVEDIR),
        other => other,
    }
    .map_err(|e| refused(path, e))
}

/// Opens a folder's files for packing; see [`super::archive`].
pub(super) fn open_beneath(workspace: &Path) -> Result<OwnedFd> {
    let root = root(workspace)?;
    open(&root, Path::new("."), OFlags::RDONLY | OFlags::DIRECTORY).map_err(Error::internal)
}

/// Reads a whole small file; for tests and tools.
pub fn read(workspace: &Path, path: &Inner, most: u64) -> Result<Vec<u8>> {
    match find(workspace, path)? {
        Found::File(file, _) => {
            let mut bytes = Vec::new();
            file.take(most).read_to_end(&mut bytes).map_err(Error::internal)?;
            Ok(bytes)
        }
        Found::Folder(_) => Err(refused(path, Errno::ISDIR)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use oubliette_protocol::ErrorCode;
    use proptest::prelude::*;

    use super::*;

    fn inner(path: &str) -> Inner {
        Inner::parse(path).unwrap()
    }

    #[test]
    fn a_file_is_put_read_listed_and_deleted() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), &inner("a/b/c.txt"), b"hi").unwrap();
        put(dir.path(), &inner("a/b/c.txt"), b"there").unwrap();
        assert_eq!(read(dir.path(), &inner("/a//b/./c.txt"), 100).unwrap(), b"there");
        let Found::Folder(entries) = find(dir.path(), &inner("a/b")).unwrap() else {
            panic!()
        };
        assert_eq!(
            (entries.len(), entries[0].name.as_str(), entries[0].size),
            (1, "c.txt", 5)
        );
        assert_eq!(
            delete(dir.path(), &inner("a")).unwrap_err().code,
            ErrorCode::Conflict
        );
        delete(dir.path(), &inner("a/b/c.txt")).unwrap();
        delete(dir.path(), &inner("a/b")).unwrap();
        assert_eq!(
            read(dir.path(), &inner("a/b"), 1).unwrap_err().code,
            ErrorCode::NotFound
        );
    }

    #[test]
    fn no_link_leads_out() {
        let dir = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "s").unwrap();
        symlink(outside.path(), dir.path().join("out")).unwrap();
        symlink(outside.path().join("secret"), dir.path().join("file")).unwrap();
        for path in ["out/secret", "file", "out"] {
            assert!(find(dir.path(), &inner(path)).is_err(), "{path}");
        }
        for path in ["out/new", "file"] {
            assert!(put(dir.path(), &inner(path), b"x").is_err(), "{path}");
        }
        assert!(delete(dir.path(), &inner("out/secret")).is_err());
        assert_eq!(
            std::fs::read_to_string(outside.path().join("secret")).unwrap(),
            "s"
        );
        delete(dir.path(), &inner("file")).unwrap();
    }

    #[test]
    fn a_pipe_does_not_hold_the_reader() {
        let dir = tempfile::tempdir().unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            dir.path().join("p"),
            FileType::Fifo,
            Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert_eq!(
            read(dir.path(), &inner("p"), 1).unwrap_err().code,
            ErrorCode::PermissionDenied
        );
    }

    proptest! {
        #[test]
        fn no_path_leads_up(path in "(\\.\\.|\\.|/|a|\0|é){0,8}") {
            if let Ok(inner) = Inner::parse(&path) {
                prop_assert!(inner.0.iter().all(|p| p != ".." && !p.contains(['/', '\0'])));
            }
        }
    }
}
