//! Giving files to the container's user, where the server is root.
//!
//! Programs inside may be changing the same directories. So no path is followed twice: each directory is opened beneath
//! the one above it, and an entry's owner is changed by its name in an open directory, without following a link.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, Uid};

use crate::driver::SandboxError;
use crate::spec::{MountAccess, SandboxSpec};
use crate::stage::server_end::StageUser;

/// Maximum depth; deeper directories keep their owner.
const MAX_DEPTH: usize = 128;

/// Gives files of specs to the container's user.
#[derive(Debug)]
pub(crate) struct FileOwnership {
    user: StageUser,
    /// Workspaces whose files have been given to the container's user.
    given: Mutex<HashSet<PathBuf>>,
}

impl FileOwnership {
    pub(crate) fn new(user: StageUser) -> Self {
        Self {
            user,
            given: Mutex::default(),
        }
    }

    /// Gives what the spec lets the program write to the container's user, if the server is root.
    pub(crate) async fn give(&self, spec: &SandboxSpec) -> Result<(), SandboxError> {
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let mut trees: Vec<PathBuf> = spec.home.iter().cloned().collect();
        let writable = spec.mounts.iter();
        let writable = writable.filter(|mount| mount.access == MountAccess::ReadWrite);
        trees.extend(writable.map(|mount| mount.host.clone()));
        if let Some(workspace) = &spec.workspace {
            let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
            if given.insert(workspace.clone()) || !is_owned_by(workspace, self.user) {
                trees.push(workspace.clone());
            }
        }
        let user = self.user;
        let given = tokio::task::spawn_blocking(move || trees.iter().try_for_each(|tree| give(tree, user)));
        given
            .await
            .map_err(|error| SandboxError::setup("giving files to the container's user", error))?
            .map_err(|error| SandboxError::setup("giving files to the container's user", error))
    }
}

/// Whether a directory belongs to the user.
fn is_owned_by(dir: &Path, user: StageUser) -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(dir).is_ok_and(|found| found.uid() == user.uid)
}

/// Gives a directory and everything of root's in it to the user.
fn give(tree: &Path, user: StageUser) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = match rustix::fs::open(tree, flags, Mode::empty()) {
        Ok(top) => top,
        // A file that is mounted writable.
        Err(rustix::io::Errno::NOTDIR) => {
            return std::os::unix::fs::lchown(tree, Some(user.uid), Some(user.gid));
        }
        Err(error) => return Err(error.into()),
    };
    give_entries(top, user, MAX_DEPTH)
}

fn give_entries(dir: OwnedFd, user: StageUser, depth: usize) -> io::Result<()> {
    let (uid, gid) = (Some(Uid::from_raw(user.uid)), Some(Gid::from_raw(user.gid)));
    if rustix::fs::fstat(&dir)?.st_uid == 0 {
        rustix::fs::fchown(&dir, uid, gid)?;
    }
    for entry in Dir::read_from(&dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        // What vanishes meanwhile needs no owner.
        let Ok(found) = rustix::fs::statat(dir.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        let is_dir = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
        if is_dir && depth > 0 {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            if let Ok(below) = rustix::fs::openat(dir.as_fd(), name, flags, Mode::empty()) {
                give_entries(below, user, depth - 1)?;
            }
        } else if found.st_uid == 0 {
            let _ = rustix::fs::chownat(dir.as_fd(), name, uid, gid, AtFlags::SYMLINK_NOFOLLOW);
        }
    }
    Ok(())
}
