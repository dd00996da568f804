//! Removes a directory and everything in it, whatever a program made of it.
//!
//! `std::fs::remove_dir_all` calls itself for each level and keeps a descriptor open for each: some ten thousand nested
//! directories overflow the stack, and fewer use up the descriptors. Here a directory that is not empty is first moved
//! up to the top of the tree, so that the walk is never deeper than two levels, and stack, memory and descriptors stay
//! the same for any tree. Everything is reached by its one name in an open directory and without following links, and
//! never through `..`, so that a program which moves directories about meanwhile cannot lead it out of the tree.

use std::{
    collections::VecDeque,
    ffi::{CStr, CString},
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir},
    io::Errno,
};

use crate::WorkerThreads;

/// How many trees are removed at once; further ones wait.
const MAX_REMOVALS: usize = 4;
/// How often a directory is read again because something new was found in it.
const MAX_PASSES: usize = 64;
/// How often the top of the tree is read again as long as that leads to something. Each reading gets at least one level
/// further down.
const MAX_READINGS: usize = 200_000;
/// How many directories may be open in each other where the file system cannot move them.
const MAX_OPEN: usize = 128;
/// How many names of directories that were moved up are kept; the others are found by reading.
const MAX_NAMES: usize = 1024;
/// How many entries are removed between two reports in the log.
const REPORT_INTERVAL: u64 = 250_000;
/// How many entries are removed before other threads are let in.
const YIELD_INTERVAL: u64 = 1024;

static THREADS: WorkerThreads = WorkerThreads::new(MAX_REMOVALS, 1024 * 1024);

/// Removes a file, or a directory with everything in it, on a thread of its own; see [`remove_tree_blocking`]. The
/// removal goes on if the caller stops waiting.
pub async fn remove_tree(path: PathBuf) -> io::Result<u64> {
    THREADS.run(move || remove_tree_blocking(&path)).await?
}

/// Removes a file, or a directory with everything in it. Returns how many entries were removed; none if there was
/// nothing. Links are removed, not followed, and other file systems not entered. Directories that their owner closed
/// are opened. If something cannot be removed, such as files that a running program goes on creating, everything else
/// is, and the first error is returned. The directory that holds it must not be writable to others.
pub fn remove_tree_blocking(path: &Path) -> io::Result<u64> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a path that can be removed",
        ));
    };
    let parent = if parent.as_os_str().is_empty() {
        Path::new(".")
    } else {
        parent
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = match rustix::fs::open(parent, flags, Mode::empty()) {
        Ok(parent) => parent,
        Err(Errno::NOENT) => return Ok(0),
        Err(error) => return Err(error.into()),
    };
    let name = CString::new(name.as_bytes())?;
    let mut removal = TreeRemoval::default();
    removal.remove(&parent, &name, path);
    match removal.error {
        Some(error) => Err(error.into()),
        None => Ok(removal.removed),
    }
}

/// A removal in progress.
#[derive(Default)]
struct TreeRemoval {
    removed: u64,
    /// The first error.
    error: Option<Errno>,
    /// Number of the next name for a directory that is moved up.
    next_name: u64,
}

/// Reports the progress of a large removal in the log.
struct RemovalReport<'a> {
    path: &'a Path,
    next: u64,
}

impl<'a> RemovalReport<'a> {
    fn new(path: &'a Path) -> Self {
        Self {
            path,
            next: REPORT_INTERVAL,
        }
    }

    fn update(&mut self, removed: u64) {
        if removed >= self.next {
            self.next = removed + REPORT_INTERVAL;
            tracing::info!(path = %self.path.display(), removed, "removing a large directory tree");
        }
    }
}

/// What became of an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EntryOutcome {
    Removed,
    /// It is a directory with something in it.
    NotEmpty,
    Failed,
}

impl TreeRemoval {
    fn remove(&mut self, parent: &OwnedFd, name: &CStr, path: &Path) {
        match self.remove_entry(parent.as_fd(), name, FileType::Unknown) {
            EntryOutcome::Removed | EntryOutcome::Failed => return,
            EntryOutcome::NotEmpty => {}
        }
        let top = match open_directory(parent.as_fd(), name) {
            Ok(top) => top,
            // Replaced by a file meanwhile, or gone.
            Err(Errno::NOTDIR | Errno::LOOP | Errno::NOENT) => {
                self.remove_entry(parent.as_fd(), name, FileType::RegularFile);
                return;
            }
            Err(error) => return self.note(error),
        };
        let mut report = RemovalReport::new(path);
        let mut readings = 0;
        for _ in 0..MAX_PASSES {
            self.error = None;
            while readings < MAX_READINGS {
                readings += 1;
                let before = self.removed;
                self.empty_top(&top, &mut report);
                if self.removed == before {
                    break;
                }
            }
            match self.remove_entry(parent.as_fd(), name, FileType::Directory) {
                EntryOutcome::Removed => return self.error = None,
                EntryOutcome::Failed => return,
                EntryOutcome::NotEmpty if self.error.is_some() => return,
                // A program that runs created something since.
                EntryOutcome::NotEmpty => {}
            }
        }
        self.note(Errno::NOTEMPTY);
    }

    /// Removes everything in the top directory once, and what is moved into it meanwhile.
    fn empty_top(&mut self, top: &OwnedFd, report: &mut RemovalReport<'_>) {
        let mut names = VecDeque::new();
        let mut buffer = vec![MaybeUninit::uninit(); 32 * 1024];
        let mut entries = match rewound(top) {
            Ok(entries) => RawDir::new(entries, &mut buffer),
            Err(error) => return self.note(error),
        };
        loop {
            match entries.next() {
                Some(Ok(entry)) if is_dot(entry.file_name()) => {}
                Some(Ok(entry)) => {
                    let outcome = self.remove_entry(top.as_fd(), entry.file_name(), entry.file_type());
                    if outcome == EntryOutcome::NotEmpty {
                        names.push_back(entry.file_name().to_owned());
                    }
                }
                Some(Err(error)) => return self.note(error),
                None if names.is_empty() => return,
                None => {}
            }
            // Not all at the end, so that the number of names is bounded.
            if names.len() >= MAX_NAMES || entries.is_buffer_empty() {
                while let Some(name) = names.pop_front() {
                    self.empty_directory(top, &name, &mut names);
                    report.update(self.removed);
                }
            }
            report.update(self.removed);
        }
    }

    /// Removes a directory of the top: its files, and its own directories after moving them up.
    fn empty_directory(&mut self, top: &OwnedFd, name: &CStr, moved: &mut VecDeque<CString>) {
        let directory = match open_directory(top.as_fd(), name) {
            Ok(directory) => directory,
            Err(Errno::NOENT) => return,
            Err(Errno::NOTDIR | Errno::LOOP) => {
                self.remove_entry(top.as_fd(), name, FileType::RegularFile);
                return;
            }
            Err(error) => return self.note(error),
        };
        // Directories that cannot be moved are gone through in place. The last is the innermost.
        let mut open = vec![(directory, name.to_owned(), 0)];
        while let Some((directory, _, passes)) = open.last_mut() {
            *passes += 1;
            let passes = *passes;
            let inner = self.empty_once(top, directory, moved);
            match inner {
                Some(inner) if open.len() == MAX_OPEN => {
                    drop(inner);
                    return self.note(Errno::MFILE);
                }
                Some((inner, name)) => open.push((inner, name, 0)),
                None => {
                    let Some((emptied, name, _)) = open.pop() else {
                        return;
                    };
                    let above = open.last().map_or(top.as_fd(), |(above, _, _)| above.as_fd());
                    match self.remove_entry(above, &name, FileType::Directory) {
                        EntryOutcome::NotEmpty if passes < MAX_PASSES => open.push((emptied, name, passes)),
                        EntryOutcome::NotEmpty => return self.note(Errno::NOTEMPTY),
                        EntryOutcome::Failed => return,
                        EntryOutcome::Removed => {}
                    }
                }
            }
        }
    }

    /// Goes through a directory once. Returns a directory in it that could not be moved up.
    fn empty_once(
        &mut self,
        top: &OwnedFd,
        directory: &OwnedFd,
        moved: &mut VecDeque<CString>,
    ) -> Option<(OwnedFd, CString)> {
        let mut buffer = vec![MaybeUninit::uninit(); 32 * 1024];
        let mut entries = match rewound(directory) {
            Ok(entries) => RawDir::new(entries, &mut buffer),
            Err(error) => {
                self.note(error);
                return None;
            }
        };
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) if is_dot(entry.file_name()) => continue,
                Ok(entry) => entry,
                Err(error) => {
                    self.note(error);
                    return None;
                }
            };
            let name = entry.file_name();
            if self.remove_entry(directory.as_fd(), name, entry.file_type()) != EntryOutcome::NotEmpty {
                continue;
            }
            match self.move_up(top, directory, name) {
                Ok(new_name) => {
                    if moved.len() < MAX_NAMES {
                        moved.push_back(new_name);
                    }
                }
                Err(Errno::NOENT) => {}
                Err(Errno::XDEV) if same_device(top.as_fd(), directory.as_fd(), name) => {
                    match open_directory(directory.as_fd(), name) {
                        Ok(inner) => return Some((inner, name.to_owned())),
                        Err(error) => self.note(error),
                    }
                }
                Err(error) => self.note(error),
            }
        }
        None
    }

    /// Moves a directory to the top of the tree, under a new name.
    fn move_up(&mut self, top: &OwnedFd, directory: &OwnedFd, name: &CStr) -> Result<CString, Errno> {
        let mut opened = false;
        for _ in 0..MAX_PASSES {
            self.next_name += 1;
            let new_name = format!(".removing-{}-{}", std::process::id(), self.next_name);
            let new_name = CString::new(new_name).map_err(|_| Errno::INVAL)?;
            match rustix::fs::renameat(directory, name, top, &new_name) {
                Ok(()) => return Ok(new_name),
                // A program took the name.
                Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
                // To be moved it must be writable itself, since its `..` changes.
                Err(Errno::ACCESS | Errno::PERM) if !opened => {
                    opened = true;
                    drop(open_directory(directory.as_fd(), name)?);
                }
                Err(error) => return Err(error),
            }
        }
        Err(Errno::EXIST)
    }

    /// Removes a file or an empty directory.
    fn remove_entry(&mut self, directory: BorrowedFd<'_>, name: &CStr, kind: FileType) -> EntryOutcome {
        let as_directory = kind == FileType::Directory;
        let mut result = unlink(directory, name, as_directory);
        // Linux has EISDIR for a directory, POSIX EPERM; a directory may also have been replaced by a file.
        if matches!(result, Err(Errno::ISDIR | Errno::PERM | Errno::NOTDIR)) {
            let other = unlink(directory, name, !as_directory);
            if !matches!(other, Err(Errno::ISDIR | Errno::NOTDIR)) {
                result = other;
            }
        }
        match result {
            Ok(()) => {
                self.removed += 1;
                if self.removed.is_multiple_of(YIELD_INTERVAL) {
                    std::thread::yield_now();
                }
                EntryOutcome::Removed
            }
            Err(Errno::NOENT) => EntryOutcome::Removed,
            Err(Errno::NOTEMPTY | Errno::EXIST) => EntryOutcome::NotEmpty,
            Err(error) => {
                self.note(error);
                EntryOutcome::Failed
            }
        }
    }

    fn note(&mut self, error: Errno) {
        self.error.get_or_insert(error);
    }
}

fn unlink(directory: BorrowedFd<'_>, name: &CStr, as_directory: bool) -> Result<(), Errno> {
    let flags = if as_directory {
        AtFlags::REMOVEDIR
    } else {
        AtFlags::empty()
    };
    rustix::fs::unlinkat(directory, name, flags)
}

fn is_dot(name: &CStr) -> bool {
    matches!(name.to_bytes(), b"." | b"..")
}

/// The directory, to be read from its start.
fn rewound(directory: &OwnedFd) -> Result<&OwnedFd, Errno> {
    rustix::fs::seek(directory, rustix::fs::SeekFrom::Start(0))?;
    Ok(directory)
}

/// Opens a directory for reading; one that is closed to its owner is made accessible first.
fn open_directory(parent: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // Without a permission this opens any directory, for naming it alone.
    let named = rustix::fs::openat(parent, name, flags | OFlags::PATH, Mode::empty())?;
    let mode = rustix::fs::fstat(&named)?.st_mode;
    if Mode::from_raw_mode(mode).contains(Mode::RWXU) {
        return rustix::fs::openat(&named, c".", flags | OFlags::RDONLY, Mode::empty());
    }
    // Such a descriptor cannot be given to fchmod; its name in /proc can, and means the directory itself.
    let own_name = format!("/proc/self/fd/{}", named.as_raw_fd());
    let changed = rustix::fs::chmodat(CWD, own_name, Mode::RWXU, AtFlags::empty());
    let opened = rustix::fs::openat(&named, c".", flags | OFlags::RDONLY, Mode::empty());
    // A privileged process opens it anyway.
    opened.map_err(|error| changed.err().unwrap_or(error))
}

/// Whether a directory is on the same file system as the top of the tree.
fn same_device(top: BorrowedFd<'_>, directory: BorrowedFd<'_>, name: &CStr) -> bool {
    let inner = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW);
    let mount = |of: BorrowedFd<'_>, name: &CStr| {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
        let stat = rustix::fs::statx(of, name, flags, rustix::fs::StatxFlags::MNT_ID).ok()?;
        Some(stat.stx_mnt_id)
    };
    let same_mount = mount(top, c"") == mount(directory, name);
    matches!((rustix::fs::fstat(top), inner), (Ok(top), Ok(inner)) if top.st_dev == inner.st_dev)
        && same_mount
}
