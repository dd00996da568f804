//! Opens files beneath the allowed directories of a workspace, with [`oubliette_os::open_beneath`].
//!
//! An allowed directory is opened without following
//! any link, since a link in its place would redirect the policy; what lies beneath it may be reached through
//! links that stay beneath it.

use std::{os::fd::OwnedFd, path::Path};

pub(super) use oubliette_os::SymlinkPolicy;
use oubliette_os::open_beneath;
use oubliette_protocol::{Error, Result, id::quoted};
use rustix::{
    fd::AsFd,
    fs::{self, AtFlags, FileType, Mode, OFlags, Stat},
    io::Errno,
};

use super::path::{AllowedPaths, PathInWorkspace};

/// The flags that open a directory as an `O_PATH` handle.
pub(super) const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The opened workspace directory.
pub(super) struct WorkspaceRoot {
    pub(super) dir: OwnedFd,
}

/// The place of a file: an open directory, and the path beneath it.
pub(super) struct FileLocation<'a> {
    pub(super) base: OwnedFd,
    /// The parts beneath `base`.
    pub(super) rest: &'a [String],
    pub(super) links: SymlinkPolicy,
}

impl WorkspaceRoot {
    pub(super) fn open(workspace: &Path) -> Result<Self> {
        let dir = fs::open(workspace, DIRECTORY, Mode::empty());
        dir.map(|dir| Self { dir }).map_err(|e| {
            Error::unavailable("the session's workspace cannot be opened")
                .with_cause(format!("{workspace:?}: {e}"))
        })
    }

    /// Runs `work` with each allowed path that contains `asked` as its base, shortest first, until one succeeds or
    /// fails for another reason than a link out of that base. `base_of` opens the base.
    pub(super) fn try_allowed_paths<T>(
        &self,
        allowed: &AllowedPaths,
        asked: &PathInWorkspace,
        mut base_of: impl FnMut(&OwnedFd, &[String]) -> Result<OwnedFd, Errno>,
        mut work: impl FnMut(FileLocation<'_>) -> Result<T, FileError>,
    ) -> Result<T> {
        let mut last = FileError::Os(Errno::NOENT);
        for allowed_path in allowed.covering(asked)? {
            // An allowed path may itself be the file: it is then opened without following links, from its parent.
            let (links, at) = match allowed_path.len() == asked.as_slice().len() {
                true => (SymlinkPolicy::Never, allowed_path.len().saturating_sub(1)),
                false => (SymlinkPolicy::Inside, allowed_path.len()),
            };
            let (base, rest) = asked.as_slice().split_at(at);
            let tried = match base_of(&self.dir, base) {
                Ok(base) => work(FileLocation { base, rest, links }),
                Err(errno) => Err(FileError::Os(errno)),
            };
            match tried {
                Ok(done) => return Ok(done),
                Err(fault @ FileError::Os(Errno::XDEV | Errno::LOOP | Errno::NOTDIR)) => last = fault,
                Err(fault) => return Err(fault.into_error(asked)),
            }
        }
        Err(last.into_error(asked))
    }
}

/// Opens a path of several parts beneath a directory.
pub(super) fn open(
    dir: impl AsFd,
    parts: &[String],
    flags: OFlags,
    mode: Mode,
    links: SymlinkPolicy,
) -> Result<OwnedFd, Errno> {
    let path = match parts.is_empty() {
        true => ".".to_owned(),
        false => parts.join("/"),
    };
    open_beneath(dir, Path::new(&path), flags, mode, links)
}

/// Opens an existing directory without following links.
pub(super) fn open_directory(root: &OwnedFd, parts: &[String]) -> Result<OwnedFd, Errno> {
    open(root, parts, DIRECTORY, Mode::empty(), SymlinkPolicy::Never)
}

/// An open file, with the directory and name it was opened by.
pub(super) struct OpenedFile {
    pub(super) file: OwnedFd,
    parent: OwnedFd,
    name: String,
}

impl FileLocation<'_> {
    /// Opens a file. A link in its last part is resolved here and not by the kernel, so that the directory
    /// which contains the file itself is known.
    pub(super) fn open(&self, flags: OFlags) -> Result<OpenedFile, Errno> {
        const MAX_LINKS: usize = 8;
        let mut path: Vec<String> = self.rest.to_vec();
        for _ in 0..MAX_LINKS {
            let name = path.pop().ok_or(Errno::ISDIR)?;
            let parent = open(&self.base, &path, DIRECTORY, Mode::empty(), self.links)?;
            match open(
                &parent,
                std::slice::from_ref(&name),
                flags,
                Mode::empty(),
                SymlinkPolicy::Never,
            ) {
                Ok(file) => return Ok(OpenedFile { file, parent, name }),
                Err(Errno::LOOP) if self.links == SymlinkPolicy::Inside => {
                    let target = fs::readlinkat(&parent, name.as_str(), Vec::new())?;
                    let target = target.into_string().map_err(|_| Errno::XDEV)?;
                    if target.starts_with('/') {
                        return Err(Errno::XDEV);
                    }
                    // Whatever the target contains, `..` included, is again opened beneath `base` only.
                    path.extend(target.split('/').map(str::to_owned));
                }
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::LOOP)
    }
}

impl OpenedFile {
    /// A file that was opened by its name in a directory.
    pub(super) fn new(file: OwnedFd, parent: OwnedFd, name: &str) -> Self {
        Self {
            file,
            parent,
            name: name.to_owned(),
        }
    }

    /// Checks that it is a regular file with only one name: another hard link may be anywhere on the file
    /// system, outside the workspace too.
    ///
    /// The handle's link count is not enough: the name it was opened by may have been removed again. So that name
    /// is looked up once more, between two `fstat` calls. If the file's change time is in the past and is the same
    /// in both, no link was added or removed in between, and the name that was found is the only one. For a file
    /// that is being written to, this is repeated several times.
    pub(super) fn require_single_name(&self) -> Result<Stat, FileError> {
        const ATTEMPTS: usize = 5;
        let mut stat = stat_in_past_tick(&self.file)?;
        for _ in 0..ATTEMPTS {
            require_regular_file(&stat)?;
            wait_for_directory_lock(&self.parent)?;
            let named = fs::statat(&self.parent, self.name.as_str(), AtFlags::SYMLINK_NOFOLLOW)?;
            require_regular_file(&named)?;
            if (named.st_dev, named.st_ino) != (stat.st_dev, stat.st_ino) {
                let why = "the file was replaced while it was being opened; try again";
                return Err(FileError::Explained(Error::conflict(why)));
            }
            let again = stat_in_past_tick(&self.file)?;
            require_regular_file(&again)?;
            if changed_at(&again) == changed_at(&stat) {
                break;
            }
            stat = again;
        }
        Ok(stat)
    }
}

/// Waits for a change of the directory that is in progress. The kernel decrements a file's link count before it
/// removes the name; in between, which is long if that thread is not scheduled, the name could still be found.
/// Reading the directory takes the lock that is held during both.
fn wait_for_directory_lock(dir: &OwnedFd) -> Result<(), Errno> {
    let readable = fs::openat(
        dir,
        ".",
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let mut buffer = [std::mem::MaybeUninit::uninit(); 512];
    // Neither the entries nor an error matter here.
    let _ = fs::RawDir::new(readable, &mut buffer).next();
    Ok(())
}

/// Calls `fstat` until the file's change time is in the past: change times come from a clock that advances in
/// ticks, and two changes within one tick have the same time.
fn stat_in_past_tick(file: &OwnedFd) -> Result<Stat, Errno> {
    const ATTEMPTS: usize = 20;
    for _ in 0..ATTEMPTS {
        let stat = fs::fstat(file)?;
        let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        if changed_at(&stat) < (now.tv_sec, now.tv_nsec) {
            return Ok(stat);
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // The clock was set back, or the times come from another machine's.
    fs::fstat(file)
}

fn changed_at(stat: &Stat) -> (i64, i64) {
    #[allow(
        clippy::unnecessary_cast,
        clippy::useless_conversion,
        reason = "the widths differ between machines"
    )]
    (stat.st_ctime as i64, stat.st_ctime_nsec as i64)
}

/// Fails for everything but a regular file with one hard link.
pub(super) fn require_regular_file(stat: &Stat) -> Result<(), FileError> {
    let refuse = |why: &str| Err(FileError::Explained(Error::not_allowed(why)));
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile if stat.st_nlink > 1 => {
            refuse("the file has more than one name (hard links); it may be one from outside")
        }
        FileType::RegularFile => Ok(()),
        FileType::Directory => Err(FileError::Os(Errno::ISDIR)),
        FileType::Symlink => refuse("it is a symbolic link; name the file itself"),
        _ => refuse("it is not a regular file"),
    }
}

/// Why a file could not be opened, read or written.
#[derive(Debug)]
pub(super) enum FileError {
    Os(Errno),
    Explained(Error),
}

impl From<Errno> for FileError {
    fn from(errno: Errno) -> Self {
        FileError::Os(errno)
    }
}

impl From<std::io::Error> for FileError {
    fn from(error: std::io::Error) -> Self {
        match Errno::from_io_error(&error) {
            Some(errno) => FileError::Os(errno),
            None => FileError::Explained(Error::internal(error)),
        }
    }
}

impl FileError {
    /// The error for the requester. It names the path in the sandbox, never one on the host.
    pub(super) fn into_error(self, asked: &PathInWorkspace) -> Error {
        let path = quoted(&asked.sandbox_path());
        match self {
            FileError::Explained(error) => {
                let message = format!("{path}: {}", error.message);
                error.with_message(message)
            }
            FileError::Os(errno) => match errno {
                Errno::NOENT => Error::not_found(format!("{path} does not exist")),
                Errno::NOTDIR => Error::not_found(format!("{path}: a part of it is not a directory")),
                Errno::EXIST => Error::conflict(format!("{path} exists already")),
                Errno::ISDIR => Error::invalid(format!("{path} is a directory")),
                Errno::XDEV | Errno::LOOP => Error::not_allowed(format!(
                    "{path} leads through a link out of what the policy allows"
                )),
                Errno::ACCESS | Errno::PERM | Errno::ROFS => {
                    Error::not_allowed(format!("{path}: the file system does not permit it"))
                }
                Errno::NAMETOOLONG => Error::invalid(format!("{path} is too long a name")),
                Errno::NXIO | Errno::NODEV | Errno::OPNOTSUPP => {
                    Error::not_allowed(format!("{path}: it is not a regular file"))
                }
                Errno::NOSPC | Errno::DQUOT | Errno::FBIG => {
                    Error::limit_exceeded(format!("{path}: there is no room left for it"))
                }
                Errno::AGAIN => Error::conflict(format!("{path} keeps changing; try again")),
                other => Error::internal_during(path, other),
            },
        }
    }
}
