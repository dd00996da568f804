//! One folder of a walk over files that an agent may be changing meanwhile.

use std::{
    ffi::{CStr, CString},
    io,
    mem::MaybeUninit,
    os::fd::{AsFd as _, OwnedFd},
    vec,
};

use rustix::fs::{Mode, OFlags, RawDir};

/// How many names of a folder are read at once. They are sorted among themselves.
const NAMES_AT_ONCE: usize = 10_000;

/// An open folder, its path, and the names in it that are not visited yet. Its entries are opened relative to it and
/// without following links, so nobody can redirect the walk out of the tree.
pub(crate) struct OpenFolder<P> {
    pub(crate) folder: OwnedFd,
    pub(crate) path: P,
    names: vec::IntoIter<CString>,
}

impl<P> OpenFolder<P> {
    pub(crate) fn new(folder: OwnedFd, path: P) -> Self {
        Self {
            folder,
            path,
            names: Vec::new().into_iter(),
        }
    }

    /// The next name in the folder, without `.` and `..`; `None` if there is no further one.
    pub(crate) fn next_name(&mut self) -> io::Result<Option<CString>> {
        if self.names.len() == 0 {
            let mut names = Vec::new();
            let mut buffer = [MaybeUninit::uninit(); 8192];
            // Reads on where it stopped: only whole buffers are taken.
            let mut entries = RawDir::new(self.folder.as_fd(), &mut buffer);
            while let Some(entry) = entries.next() {
                let entry = entry?;
                if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                    names.push(entry.file_name().to_owned());
                }
                if names.len() >= NAMES_AT_ONCE && entries.is_buffer_empty() {
                    break;
                }
            }
            names.sort();
            self.names = names.into_iter();
        }
        Ok(self.names.next())
    }
}

/// Opens an entry of a folder for reading; a link is not followed.
pub(crate) fn open_entry(folder: &OwnedFd, name: &CStr, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(folder, name, flags, Mode::empty())
}
