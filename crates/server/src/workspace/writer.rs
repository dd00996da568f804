//! Puts the entries of an archive into a workspace. Each is made outside it and moved into its place, below folders that
//! the kernel opens without following links.

use std::{
    fs::File,
    io::{self, Read},
    os::{fd::OwnedFd, unix::fs::DirBuilderExt as _},
    path::Path,
};

use oubliette_protocol::{Error, Result};
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags},
    io::Errno,
};

use super::{
    archive::reader::ArchiveEntryKind,
    files::{WorkspacePath, open_beneath, open_root, path_error},
};

/// Puts entries into one workspace.
pub(crate) struct WorkspaceWriter {
    root: OwnedFd,
    staging: OwnedFd,
}

impl WorkspaceWriter {
    /// For a workspace; `uploads` is the directory in which entries are made.
    pub(crate) fn open(uploads: &Path, workspace: &Path) -> Result<Self> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(uploads)
            .map_err(Error::internal)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = open_root(workspace)?;
        let mut staging = rustix::fs::open(uploads, flags, Mode::empty()).map_err(Error::internal)?;
        let device = |fd: &OwnedFd| {
            rustix::fs::fstat(fd)
                .map(|stat| stat.st_dev)
                .map_err(Error::internal)
        };
        // The operator has put this workspace on another file system, into which nothing can be moved.
        if device(&root)? != device(&staging)? {
            staging = root.try_clone().map_err(Error::internal)?;
        }
        Ok(Self { root, staging })
    }

    /// Fails if an entry could not be put where it belongs as the workspace is now.
    pub(crate) fn check(&self, path: &WorkspacePath, kind: &ArchiveEntryKind) -> Result<()> {
        let Some((name, parents)) = path.split_last() else {
            return match kind {
                ArchiveEntryKind::Folder => Ok(()),
                ArchiveEntryKind::File | ArchiveEntryKind::Link(_) => {
                    Err(Error::invalid("an entry of the archive has no name"))
                }
            };
        };
        let mut folder = None;
        for part in parents {
            let at = folder.as_ref().unwrap_or(&self.root);
            folder = match open_folder(at, part) {
                Ok(opened) => Some(opened),
                Err(Errno::NOENT) => return Ok(()),
                Err(error) => return Err(path_error(path, error)),
            };
        }
        let at = folder.as_ref().unwrap_or(&self.root);
        match rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(path_error(path, error)),
            Ok(stat) => {
                let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
                match (is_folder, *kind == ArchiveEntryKind::Folder) {
                    (true, false) => Err(path_error(path, Errno::ISDIR)),
                    (false, true) => Err(Error::conflict(format!("{path} is no folder in this workspace"))),
                    (true, true) | (false, false) => Ok(()),
                }
            }
        }
    }

    /// Makes a folder, unless there is one.
    pub(crate) fn make_folder(&self, path: &WorkspacePath, mode: u32) -> Result<()> {
        let Some((name, parents)) = path.split_last() else {
            return Ok(());
        };
        let parent = self.open_parents(path, parents)?;
        // The owner can always enter it, or what belongs into it could not be put there.
        match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(mode | 0o700)) {
            Ok(()) => {
                oubliette_os::give_to_owner_of(&parent, name);
                Ok(())
            }
            Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(path_error(path, error)),
        }
    }

    /// Makes a file with this content, in the place of one that is there.
    pub(crate) fn place_file(&self, path: &WorkspacePath, mode: u32, content: &mut dyn Read) -> Result<()> {
        let (parent, name) = self.parent_and_name(path)?;
        self.place(path, &parent, name, &mut |folder, temporary| {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = rustix::fs::openat(folder, temporary, flags, Mode::from_raw_mode(0o600))?;
            let mut file = File::from(fd);
            io::copy(content, &mut file)?;
            rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))?;
            Ok(())
        })
    }

    /// Makes a symbolic link, in the place of a file or link that is there. It is not followed by anything here; in a
    /// sandbox it leads where any link that an agent makes leads.
    pub(crate) fn place_link(&self, path: &WorkspacePath, target: &str) -> Result<()> {
        let (parent, name) = self.parent_and_name(path)?;
        self.place(path, &parent, name, &mut |folder, temporary| {
            Ok(rustix::fs::symlinkat(target, folder, temporary)?)
        })
    }

    /// Makes something in the staging directory and moves it into its place.
    fn place(
        &self,
        path: &WorkspacePath,
        parent: &OwnedFd,
        name: &str,
        make: &mut dyn FnMut(&OwnedFd, &str) -> io::Result<()>,
    ) -> Result<()> {
        let temporary = format!(".oubliette-{}", uuid::Uuid::new_v4().simple());
        let made = make(&self.staging, &temporary).and_then(|()| {
            rustix::fs::renameat(&self.staging, temporary.as_str(), parent, name)?;
            oubliette_os::give_to_owner_of(parent, name);
            Ok(())
        });
        made.map_err(|error| {
            let _ = rustix::fs::unlinkat(&self.staging, temporary.as_str(), AtFlags::empty());
            match error.raw_os_error() {
                Some(code) => path_error(path, Errno::from_raw_os_error(code)),
                None => Error::invalid(format!("the archive ends within {path}")),
            }
        })
    }

    fn parent_and_name<'p>(&self, path: &'p WorkspacePath) -> Result<(OwnedFd, &'p str)> {
        let (name, parents) = path
            .split_last()
            .ok_or_else(|| Error::invalid("an entry of the archive has no name"))?;
        Ok((self.open_parents(path, parents)?, name))
    }

    /// Opens the folder of an entry, making what is missing.
    fn open_parents(&self, path: &WorkspacePath, parents: &[String]) -> Result<OwnedFd> {
        let mut folder = self.root.try_clone().map_err(Error::internal)?;
        for part in parents {
            folder = match open_folder(&folder, part) {
                Err(Errno::NOENT) => {
                    match rustix::fs::mkdirat(&folder, part.as_str(), Mode::from_raw_mode(0o755)) {
                        Ok(()) => {
                            oubliette_os::give_to_owner_of(&folder, part);
                            open_folder(&folder, part)
                        }
                        Err(Errno::EXIST) => open_folder(&folder, part),
                        Err(error) => Err(error),
                    }
                }
                opened => opened,
            }
            .map_err(|error| path_error(path, error))?;
        }
        Ok(folder)
    }
}

fn open_folder(folder: &OwnedFd, name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
    open_beneath(folder, Path::new(name), flags)
}
