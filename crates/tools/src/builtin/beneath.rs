//! Files opened beneath a directory with the kernel's help.
//!
//! Comparing strings cannot keep a path inside: between looking and opening, a directory can become a link.
//! `openat2` with `RESOLVE_BENEATH` decides while it opens. An allowed directory is opened without following
//! any link, since a link in its place would move the policy; what lies beneath it may be reached through
//! links that stay beneath it.

use std::{os::fd::OwnedFd, path::Path};

use oubliette_protocol::{Error, Result, id::quoted};
use rustix::{
    fd::AsFd,
    fs::{self, AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat},
    io::Errno,
};

use super::path::{Allowed, Parts};

/// What to do about symbolic links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Links {
    /// Follow those that stay beneath.
    Inside,
    /// Follow none.
    Never,
}

/// A directory handle.
pub(super) const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The workspace, and what of it a policy opens.
pub(super) struct Root {
    pub(super) dir: OwnedFd,
}

/// Where a file is: a name, which may have several parts, beneath a directory.
pub(super) struct Spot<'a> {
    pub(super) base: OwnedFd,
    /// The parts beneath `base`.
    pub(super) rest: &'a [String],
    pub(super) links: Links,
}

impl Root {
    pub(super) fn open(workspace: &Path) -> Result<Self> {
        let dir = fs::open(workspace, DIRECTORY, Mode::empty());
        dir.map(|dir| Self { dir }).map_err(|e| {
            Error::unavailable("the session's workspace cannot be opened")
                .with_log(format!("{workspace:?}: {e}"))
        })
    }

    /// Runs `work` at every spot the policy gives for a path, until one does not lead out of it.
    pub(super) fn within<T>(
        &self,
        allowed: &Allowed,
        asked: &Parts,
        mut base_of: impl FnMut(&OwnedFd, &[String]) -> Result<OwnedFd, Errno>,
        mut work: impl FnMut(Spot<'_>) -> Result<T, Fault>,
    ) -> Result<T> {
        let mut last = Fault::Os(Errno::NOENT);
        for above in allowed.above(asked)? {
            // The allowed path itself is reached without links, so its last part belongs to the rest.
            let (links, at) = match above.len() == asked.as_slice().len() {
                true => (Links::Never, above.len().saturating_sub(1)),
                false => (Links::Inside, above.len()),
            };
            let (base, rest) = asked.as_slice().split_at(at);
            let tried = match base_of(&self.dir, base) {
                Ok(base) => work(Spot { base, rest, links }),
                Err(errno) => Err(Fault::Os(errno)),
            };
            match tried {
                Ok(done) => return Ok(done),
                Err(fault @ Fault::Os(Errno::XDEV | Errno::LOOP | Errno::NOTDIR)) => last = fault,
                Err(fault) => return Err(fault.explain(asked)),
            }
        }
        Err(last.explain(asked))
    }
}

/// Opens a path of several parts beneath a directory.
pub(super) fn open(
    dir: impl AsFd,
    parts: &[String],
    flags: OFlags,
    mode: Mode,
    links: Links,
) -> Result<OwnedFd, Errno> {
    const TRIES: usize = 64;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let resolve = match links {
        Links::Inside => resolve,
        Links::Never => resolve | ResolveFlags::NO_SYMLINKS,
    };
    let path = if parts.is_empty() {
        ".".to_owned()
    } else {
        parts.join("/")
    };
    for _ in 0..TRIES {
        // EAGAIN: something was renamed while the kernel looked, and it would not promise.
        match fs::openat2(&dir, path.as_str(), flags | OFlags::CLOEXEC, mode, resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            result => return result,
        }
    }
    Err(Errno::AGAIN)
}

/// Opens an existing directory without following links.
pub(super) fn existing(root: &OwnedFd, parts: &[String]) -> Result<OwnedFd, Errno> {
    open(root, parts, DIRECTORY, Mode::empty(), Links::Never)
}

/// An open file, and the one name it was opened by.
pub(super) struct Found {
    pub(super) file: OwnedFd,
    parent: OwnedFd,
    name: String,
}

impl Spot<'_> {
    /// Opens a file. A link in its last part is followed by hand, so that the directory the file itself is in
    /// is known.
    pub(super) fn open(&self, flags: OFlags) -> Result<Found, Errno> {
        const MOST_LINKS: usize = 8;
        let mut path: Vec<String> = self.rest.to_vec();
        for _ in 0..MOST_LINKS {
            let name = path.pop().ok_or(Errno::ISDIR)?;
            let parent = open(&self.base, &path, DIRECTORY, Mode::empty(), self.links)?;
            match open(
                &parent,
                std::slice::from_ref(&name),
                flags,
                Mode::empty(),
                Links::Never,
            ) {
                Ok(file) => return Ok(Found { file, parent, name }),
                Err(Errno::LOOP) if self.links == Links::Inside => {
                    let target = fs::readlinkat(&parent, name.as_str(), Vec::new())?;
                    let target = target.into_string().map_err(|_| Errno::XDEV)?;
                    if target.starts_with('/') {
                        return Err(Errno::XDEV);
                    }
                    // Whatever it holds, `..` too, is only ever opened beneath `base`.
                    path.extend(target.split('/').map(str::to_owned));
                }
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::LOOP)
    }
}

impl Found {
    /// A file opened by its name in a directory.
    pub(super) fn new(file: OwnedFd, parent: OwnedFd, name: &str) -> Self {
        Self {
            file,
            parent,
            name: name.to_owned(),
        }
    }

    /// Makes sure that it is a plain file with no other name, which may be anywhere on the file system.
    ///
    /// Counting names by the handle is not enough: the one it was opened by may be gone again. So that name
    /// is looked up once more, between two looks at the handle. If the file's change time is in the past and
    /// stays the same, no name came or went between the looks, and the one that was found is the only one.
    /// A file that is written to all the time is looked at several times.
    pub(super) fn only_name(&self) -> Result<Stat, Fault> {
        const LOOKS: usize = 5;
        let mut stat = settled(&self.file)?;
        for _ in 0..LOOKS {
            plain(&stat)?;
            finish_changes(&self.parent)?;
            let named = fs::statat(&self.parent, self.name.as_str(), AtFlags::SYMLINK_NOFOLLOW)?;
            plain(&named)?;
            if (named.st_dev, named.st_ino) != (stat.st_dev, stat.st_ino) {
                let why = "the file was replaced while it was being opened; try again";
                return Err(Fault::Says(Error::conflict(why)));
            }
            let again = settled(&self.file)?;
            plain(&again)?;
            if changed_at(&again) == changed_at(&stat) {
                break;
            }
            stat = again;
        }
        Ok(stat)
    }
}

/// Waits for whoever is changing a directory right now. The kernel counts a name out before it forgets it;
/// in between, which is long when that thread has to wait for its turn, the name could still be found.
/// Reading the directory takes the lock that is held all the while.
fn finish_changes(dir: &OwnedFd) -> Result<(), Errno> {
    let readable = fs::openat(
        dir,
        ".",
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let mut buffer = [std::mem::MaybeUninit::uninit(); 512];
    // What is in it, or that it does not fit, is of no interest.
    let _ = fs::RawDir::new(readable, &mut buffer).next();
    Ok(())
}

/// A file's state, its change time in the past: the clock that stamps changes goes in ticks, and within one
/// tick two changes look like one.
fn settled(file: &OwnedFd) -> Result<Stat, Errno> {
    const MOST_TICKS: usize = 20;
    for _ in 0..MOST_TICKS {
        let stat = fs::fstat(file)?;
        let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        if changed_at(&stat) < (now.tv_sec, now.tv_nsec) {
            return Ok(stat);
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // The clock was set back, or belongs to another machine.
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

/// Refuses what is not a regular file with one name.
pub(super) fn plain(stat: &Stat) -> Result<(), Fault> {
    let refuse = |why: &str| Err(Fault::Says(Error::not_allowed(why)));
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile if stat.st_nlink > 1 => {
            refuse("the file has more than one name (hard links); it may be one from outside")
        }
        FileType::RegularFile => Ok(()),
        FileType::Directory => Err(Fault::Os(Errno::ISDIR)),
        FileType::Symlink => refuse("it is a symbolic link; name the file itself"),
        _ => refuse("it is not a regular file"),
    }
}

/// Why a file could not be had.
#[derive(Debug)]
pub(super) enum Fault {
    Os(Errno),
    Says(Error),
}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Self {
        Fault::Os(errno)
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        match Errno::from_io_error(&error) {
            Some(errno) => Fault::Os(errno),
            None => Fault::Says(Error::internal(error)),
        }
    }
}

impl Fault {
    /// The fault as whoever asked is told it. Host paths are not.
    pub(super) fn explain(self, asked: &Parts) -> Error {
        let path = quoted(&asked.inside());
        match self {
            Fault::Says(error) => Error {
                message: format!("{path}: {}", error.message),
                ..error
            },
            Fault::Os(errno) => match errno {
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
                other => Error::internal(format!("{path}: {other}")),
            },
        }
    }
}
