//! Reading, writing, listing and removing files of a workspace. The kernel resolves every path beneath the
//! workspace's root without following links (`openat2`), so that nothing an agent puts there leads out.

use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use oubliette_os::SymlinkPolicy;
use oubliette_protocol::{Error, Result, id::quoted};
use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags},
    io::Errno,
};
use serde::Serialize;

use super::upload;

/// Maximum number of entries in one listing.
const MAX_ENTRIES: usize = 10_000;
/// Maximum length of a path in bytes.
const MAX_PATH_BYTES: usize = 4096;

/// A path relative to a workspace's root, as its components; none is `..`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkspacePath(Vec<String>);

impl WorkspacePath {
    /// Parses the percent-decoded path of a URL. Empty is the root.
    pub(crate) fn parse(path: &str) -> Result<Self> {
        let bad = || Error::invalid(format!("{} is not a path in a workspace", quoted(path)));
        if path.len() > MAX_PATH_BYTES || path.contains('\0') {
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

    /// The last component and the ones before it; none for the root.
    pub(super) fn split_last(&self) -> Option<(&str, &[String])> {
        self.0
            .split_last()
            .map(|(name, parents)| (name.as_str(), parents))
    }

    /// How many folders are above it, the root not counted.
    pub(crate) fn parents(&self) -> usize {
        self.0.len().saturating_sub(1)
    }

    fn path(&self) -> PathBuf {
        match self.0.is_empty() {
            true => PathBuf::from("."),
            false => self.0.iter().collect(),
        }
    }
}

impl std::fmt::Display for WorkspacePath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.join("/"))
    }
}

/// An open file, or the entries of a folder.
pub(crate) enum FileOrFolder {
    /// An open file and its size in bytes.
    File(File, u64),
    /// A folder's entries.
    Folder(Vec<FolderEntry>),
}

/// One entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct FolderEntry {
    /// File name.
    pub name: String,
    /// `file`, `directory`, `symlink` or `other`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Size in bytes.
    pub size: u64,
    /// When its content last changed.
    pub modified: Option<jiff::Timestamp>,
}

pub(super) fn open_root(workspace: &Path) -> Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::open(workspace, flags, Mode::empty())
        .map_err(|e| Error::not_found("this workspace has no files on disk").with_cause(e))
}

pub(super) fn open_beneath(root: impl AsFd, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    oubliette_os::open_beneath(root, path, flags, Mode::empty(), SymlinkPolicy::Never)
}

pub(super) fn path_error(path: &WorkspacePath, error: Errno) -> Error {
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
        other => Error::internal_during(path.to_string(), other),
    }
}

/// Opens the file or lists the folder at a path.
pub(crate) fn open_path(workspace: &Path, path: &WorkspacePath) -> Result<FileOrFolder> {
    let root = open_root(workspace)?;
    // NONBLOCK, because opening a FIFO without a writer would block the thread for ever.
    let fd = open_beneath(
        &root,
        &path.path(),
        OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY,
    )
    .map_err(|e| path_error(path, e))?;
    let stat = rustix::fs::fstat(&fd).map_err(|e| path_error(path, e))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(FileOrFolder::File(
            File::from(fd),
            u64::try_from(stat.st_size).unwrap_or(0),
        )),
        FileType::Directory => Ok(FileOrFolder::Folder(
            list_entries(&fd).map_err(|e| path_error(path, e))?,
        )),
        _ => Err(Error::permission_denied(format!(
            "{} is not a file or folder",
            quoted(&path.to_string())
        ))),
    }
}

fn list_entries(fd: &OwnedFd) -> rustix::io::Result<Vec<FolderEntry>> {
    let mut found = Vec::new();
    for entry in Dir::read_from(fd)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if found.len() == MAX_ENTRIES {
            break;
        }
        // Removed since it was listed; left out.
        let Ok(stat) = rustix::fs::statat(fd, name, AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        found.push(FolderEntry {
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

/// Writes a file atomically, so that readers see the old or the new content, and creates its parent folders.
/// `uploads` is the directory in which it is put together; `admit` is asked with how many bytes on disk it replaces.
pub(crate) fn write_file(
    uploads: &Path,
    workspace: &Path,
    path: &WorkspacePath,
    content: &[u8],
    admit: impl FnOnce(u64) -> Result<()>,
) -> Result<()> {
    let Some((name, parents)) = path.0.split_last() else {
        return Err(Error::invalid("name a file: the workspace itself is a folder"));
    };
    let mut folder = open_root(workspace)?;
    let mut admit = Some(admit);
    for part in parents {
        folder = match open_beneath(
            &folder,
            Path::new(part),
            OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW,
        ) {
            Err(Errno::NOENT) => {
                // Before a folder is created for it.
                admit.take().map_or(Ok(()), |admit| admit(0))?;
                match rustix::fs::mkdirat(&folder, part.as_str(), Mode::from_raw_mode(0o755)) {
                    Ok(()) => oubliette_os::give_to_owner_of(&folder, part),
                    Err(Errno::EXIST) => {}
                    Err(e) => return Err(path_error(path, e)),
                }
                open_beneath(
                    &folder,
                    Path::new(part),
                    OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW,
                )
            }
            other => other,
        }
        .map_err(|e| path_error(path, e))?;
    }
    let replaced = match rustix::fs::statat(&folder, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => return Err(path_error(path, Errno::ISDIR)),
            FileType::Symlink => return Err(path_error(path, Errno::LOOP)),
            _ if stat.st_nlink > 1 => 0,
            _ => u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512),
        },
        Err(Errno::NOENT) => 0,
        Err(e) => return Err(path_error(path, e)),
    };
    admit.map_or(Ok(()), |admit| admit(replaced))?;
    upload::replace_file(uploads, &folder, name, content).map_err(|e| match e.raw_os_error() {
        Some(code) => path_error(path, Errno::from_raw_os_error(code)),
        None => Error::internal(e),
    })
}

/// Removes a file, a symbolic link or an empty folder.
pub(crate) fn remove_path(workspace: &Path, path: &WorkspacePath) -> Result<()> {
    let Some((name, parents)) = path.0.split_last() else {
        return Err(Error::invalid(
            "the workspace itself is removed with workspace_delete",
        ));
    };
    let root = open_root(workspace)?;
    let parent = WorkspacePath(parents.to_vec());
    let folder = open_beneath(&root, &parent.path(), OFlags::PATH | OFlags::DIRECTORY)
        .map_err(|e| path_error(path, e))?;
    match rustix::fs::unlinkat(&folder, name.as_str(), AtFlags::empty()) {
        Err(Errno::ISDIR) => rustix::fs::unlinkat(&folder, name.as_str(), AtFlags::REMOVEDIR),
        other => other,
    }
    .map_err(|e| path_error(path, e))
}

/// Opens a workspace's root for [`super::archive`].
pub(super) fn open_root_for_reading(workspace: &Path) -> Result<OwnedFd> {
    let root = open_root(workspace)?;
    open_beneath(&root, Path::new("."), OFlags::RDONLY | OFlags::DIRECTORY).map_err(Error::internal)
}

#[cfg(test)]
mod tests {
    use std::{io::Read as _, os::unix::fs::symlink};

    use oubliette_protocol::ErrorCode;
    use proptest::prelude::*;

    use super::*;

    /// Reads at most `max_bytes` bytes of a file.
    fn read_file(workspace: &Path, path: &WorkspacePath, max_bytes: u64) -> Result<Vec<u8>> {
        match open_path(workspace, path)? {
            FileOrFolder::File(file, _) => {
                let mut bytes = Vec::new();
                file.take(max_bytes).read_to_end(&mut bytes).unwrap();
                Ok(bytes)
            }
            FileOrFolder::Folder(_) => Err(path_error(path, Errno::ISDIR)),
        }
    }

    fn parsed(path: &str) -> WorkspacePath {
        WorkspacePath::parse(path).unwrap()
    }

    #[test]
    fn a_refused_file_leaves_no_folder() {
        let dir = tempfile::tempdir().unwrap();
        let full = |_| Err(Error::limit_exceeded("full"));
        let written = write_file(
            &dir.path().join("uploads"),
            dir.path(),
            &parsed("a/b/c"),
            b"x",
            full,
        );
        assert_eq!(written.unwrap_err().code, ErrorCode::LimitExceeded);
        assert!(!dir.path().join("a").exists());
    }

    #[test]
    fn a_file_is_written_read_listed_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        write_file(
            &dir.path().join("uploads"),
            dir.path(),
            &parsed("a/b/c.txt"),
            b"hi",
            |_| Ok(()),
        )
        .unwrap();
        write_file(
            &dir.path().join("uploads"),
            dir.path(),
            &parsed("a/b/c.txt"),
            b"there",
            |replaced| {
                assert!(replaced > 0);
                Ok(())
            },
        )
        .unwrap();
        assert_eq!(
            read_file(dir.path(), &parsed("/a//b/./c.txt"), 100).unwrap(),
            b"there"
        );
        let FileOrFolder::Folder(entries) = open_path(dir.path(), &parsed("a/b")).unwrap() else {
            panic!()
        };
        assert_eq!(
            (entries.len(), entries[0].name.as_str(), entries[0].size),
            (1, "c.txt", 5)
        );
        assert_eq!(
            remove_path(dir.path(), &parsed("a")).unwrap_err().code,
            ErrorCode::Conflict
        );
        remove_path(dir.path(), &parsed("a/b/c.txt")).unwrap();
        remove_path(dir.path(), &parsed("a/b")).unwrap();
        assert_eq!(
            read_file(dir.path(), &parsed("a/b"), 1).unwrap_err().code,
            ErrorCode::NotFound
        );
    }

    #[test]
    fn links_out_of_the_workspace_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "s").unwrap();
        symlink(outside.path(), dir.path().join("out")).unwrap();
        symlink(outside.path().join("secret"), dir.path().join("file")).unwrap();
        for path in ["out/secret", "file", "out"] {
            assert!(open_path(dir.path(), &parsed(path)).is_err(), "{path}");
        }
        for path in ["out/new", "file"] {
            assert!(
                write_file(
                    &dir.path().join("uploads"),
                    dir.path(),
                    &parsed(path),
                    b"x",
                    |_| Ok(())
                )
                .is_err(),
                "{path}"
            );
        }
        assert!(remove_path(dir.path(), &parsed("out/secret")).is_err());
        assert_eq!(
            std::fs::read_to_string(outside.path().join("secret")).unwrap(),
            "s"
        );
        remove_path(dir.path(), &parsed("file")).unwrap();
    }

    #[test]
    fn reading_a_fifo_does_not_block() {
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
            read_file(dir.path(), &parsed("p"), 1).unwrap_err().code,
            ErrorCode::PermissionDenied
        );
    }

    proptest! {
        #[test]
        fn parsed_paths_have_no_parent_components(path in "(\\.\\.|\\.|/|a|\0|é){0,8}") {
            if let Ok(inner) = WorkspacePath::parse(&path) {
                prop_assert!(inner.0.iter().all(|p| p != ".." && !p.contains(['/', '\0'])));
            }
        }
    }
}
