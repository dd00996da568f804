//! Files that are restored: put together beside their place, then moved into it, and moved back if something fails.

use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use oubliette_home::{HomeDir, safe_fs};
use oubliette_os::{SymlinkPolicy, open_beneath, remove_tree_blocking};
use oubliette_protocol::{Error, Result};
use rustix::fs::{Mode, OFlags, Timespec, Timestamps};

use super::{
    CONFIG_NAME,
    home_path::{FOLDERS, HomePath, PROJECTS_FOLDER},
    manifest::HomeEntryKind,
    reader::HomeEntry,
};

/// Folder of the home in which files are put together.
const STAGING_FOLDER: &str = ".restoring";

/// Files that are not in their place yet. They are removed when this is dropped.
pub(crate) struct StagedFiles {
    dir: PathBuf,
    root: OwnedFd,
    /// Of projects that are not in the home: a folder beside them, since a rename does not leave a file system.
    projects: Option<(PathBuf, OwnedFd)>,
}

/// Where what was there has been moved to.
pub(crate) struct MovedAway {
    /// A folder of the home.
    pub(crate) home: PathBuf,
    /// A folder beside projects that are not in the home, if there were any.
    pub(crate) projects: Option<PathBuf>,
}

/// The directory of projects, if it is not the home's own.
fn projects_elsewhere(home: &HomeDir) -> Option<PathBuf> {
    let projects = home.projects_dir();
    (projects != home.root().join(PROJECTS_FOLDER)).then_some(projects)
}

fn open_dir(dir: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| safe_fs::io_error("open", dir, e.into()))
}

/// What a directory holds, but for names that begin with a dot.
fn entries_of(dir: &Path) -> Result<Vec<std::ffi::OsString>> {
    let failed = |error: io::Error| safe_fs::io_error("list", dir, error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if !name.as_encoded_bytes().starts_with(b".") {
            names.push(name);
        }
    }
    Ok(names)
}

impl StagedFiles {
    /// Begins with nothing. What is left of a restore that was killed is removed; the caller holds the home's lock.
    pub(crate) fn create(home: &HomeDir) -> Result<Self> {
        let dir = home.root().join(STAGING_FOLDER);
        remove_tree_blocking(&dir).map_err(|e| safe_fs::io_error("remove", &dir, e))?;
        for name in FOLDERS {
            safe_fs::create_private_dir(&dir.join(name))?;
        }
        let projects = match projects_elsewhere(home) {
            Some(place) => {
                let dir = place.join(STAGING_FOLDER);
                remove_tree_blocking(&dir).map_err(|e| safe_fs::io_error("remove", &dir, e))?;
                safe_fs::create_private_dir(&dir.join(PROJECTS_FOLDER))?;
                let root = open_dir(&dir)?;
                Some((dir, root))
            }
            None => None,
        };
        let root = open_dir(&dir)?;
        Ok(Self { dir, root, projects })
    }

    /// The folder under which an entry is made.
    fn root_of(&self, path: &HomePath) -> &OwnedFd {
        match &self.projects {
            Some((_, root)) if path.group() == PROJECTS_FOLDER => root,
            _ => &self.root,
        }
    }

    /// Makes an entry. The kernel finds its folder without following links, so that no entry leads another one out.
    pub(crate) fn place(&self, entry: HomeEntry<'_>) -> Result<()> {
        let path = entry.path.clone();
        self.try_place(entry).map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                safe_fs::io_error("write", path.as_path(), error)
            }
            _ => Error::invalid(format!(
                "{path} of the backup cannot be written: {error}; nothing was changed"
            )),
        })
    }

    fn try_place(&self, entry: HomeEntry<'_>) -> io::Result<()> {
        let folder = self.open_folder(&entry.path)?;
        let name = entry
            .path
            .as_path()
            .file_name()
            .ok_or(io::ErrorKind::InvalidInput)?;
        match &entry.kind {
            // The owner can always enter it, or what belongs into it could not be put there.
            HomeEntryKind::Folder => {
                rustix::fs::mkdirat(&folder, name, Mode::from_raw_mode(entry.mode | 0o700))?;
            }
            HomeEntryKind::Link(target) => rustix::fs::symlinkat(target.as_slice(), &folder, name)?,
            HomeEntryKind::File => {
                let flags =
                    OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file = rustix::fs::openat(&folder, name, flags, Mode::from_raw_mode(0o600))?;
                let mut file = File::from(file);
                io::copy(entry.content, &mut file)?;
                rustix::fs::fchmod(&file, Mode::from_raw_mode(entry.mode))?;
                let modified = Timespec {
                    tv_sec: i64::try_from(entry.modified).unwrap_or(0),
                    tv_nsec: 0,
                };
                let times = Timestamps {
                    last_access: modified,
                    last_modification: modified,
                };
                rustix::fs::futimens(&file, &times)?;
            }
        }
        Ok(())
    }

    fn open_folder(&self, path: &HomePath) -> io::Result<OwnedFd> {
        if path.is_at_top() {
            return self.root_of(path).try_clone();
        }
        let folder = path.as_path().parent().ok_or(io::ErrorKind::InvalidInput)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        Ok(open_beneath(
            self.root_of(path),
            folder,
            flags,
            Mode::empty(),
            SymlinkPolicy::Never,
        )?)
    }

    /// Moves everything into its place. A configuration that is there stays; returns whether the backup's was used.
    pub(crate) fn move_into(&self, home: &HomeDir, moves: &mut RevertibleMoves) -> Result<bool> {
        rustix::fs::syncfs(&self.root).map_err(|e| safe_fs::io_error("write", &self.dir, e.into()))?;
        if let Some((dir, root)) = &self.projects {
            rustix::fs::syncfs(root).map_err(|e| safe_fs::io_error("write", dir, e.into()))?;
            let (from, to) = (dir.join(PROJECTS_FOLDER), home.projects_dir());
            // One by one: the directory itself may be a file system of its own.
            for name in entries_of(&from)? {
                moves.rename(&from.join(&name), &to.join(&name))?;
            }
        }
        let in_home = FOLDERS
            .into_iter()
            .filter(|name| self.projects.is_none() || *name != PROJECTS_FOLDER);
        for name in in_home {
            let place = home.root().join(name);
            // Empty: that was looked at before.
            match std::fs::remove_dir(&place) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(safe_fs::io_error("replace", &place, error));
                }
                _ => {}
            }
            moves.rename(&self.dir.join(name), &place)?;
        }
        let (staged, place) = (self.dir.join(CONFIG_NAME), home.config_path());
        if place.exists() || !staged.exists() {
            return Ok(!staged.exists());
        }
        moves.rename(&staged, &place)?;
        Ok(true)
    }
}

impl Drop for StagedFiles {
    fn drop(&mut self) {
        let elsewhere = self.projects.as_ref().map(|(dir, _)| dir);
        for dir in elsewhere.into_iter().chain([&self.dir]) {
            if let Err(error) = remove_tree_blocking(dir) {
                tracing::warn!(dir = %dir.display(), %error, "removing the files of a restore failed");
            }
        }
    }
}

/// Renames that are undone when this is dropped, unless they are kept.
pub(crate) struct RevertibleMoves {
    home: HomeDir,
    done: Vec<(PathBuf, PathBuf)>,
}

impl RevertibleMoves {
    pub(crate) fn new(home: &HomeDir) -> Self {
        Self {
            home: home.clone(),
            done: Vec::new(),
        }
    }

    fn rename(&mut self, from: &Path, to: &Path) -> Result<()> {
        std::fs::rename(from, to).map_err(|e| safe_fs::io_error("move", from, e))?;
        self.done.push((from.to_owned(), to.to_owned()));
        Ok(())
    }

    /// Moves what a home holds into a folder of it that is named after the time, and projects that are elsewhere into such a
    /// folder there. Returns the folders.
    pub(crate) fn move_away(&mut self, home: &HomeDir) -> Result<MovedAway> {
        let time = oubliette_store::now().strftime("%Y%m%dT%H%M%SZ");
        let kept = home.root().join(format!("replaced-{time}"));
        safe_fs::create_private_dir(&kept)?;
        let database = ["oubliette.db", "oubliette.db-wal", "oubliette.db-shm"];
        for name in FOLDERS.into_iter().chain(database) {
            let path = home.root().join(name);
            if path.symlink_metadata().is_ok() {
                self.rename(&path, &kept.join(name))?;
            }
        }
        let mut kept_projects = None;
        if let Some(place) = projects_elsewhere(home) {
            let names = entries_of(&place)?;
            if !names.is_empty() {
                let kept = place.join(format!(".replaced-{time}"));
                safe_fs::create_private_dir(&kept)?;
                for name in names {
                    self.rename(&place.join(&name), &kept.join(&name))?;
                }
                kept_projects = Some(kept);
            }
        }
        home.create()?;
        Ok(MovedAway {
            home: kept,
            projects: kept_projects,
        })
    }

    /// Keeps what was moved.
    pub(crate) fn keep(mut self) {
        self.done.clear();
    }
}

impl Drop for RevertibleMoves {
    fn drop(&mut self) {
        if self.done.is_empty() {
            return;
        }
        for (from, to) in self.done.drain(..).rev() {
            // An empty folder that was made in its place.
            let _ = std::fs::remove_dir(&from);
            if let Err(error) = std::fs::rename(&to, &from) {
                tracing::error!(from = %to.display(), to = %from.display(), %error, "moving back failed; move it by hand");
            }
            let _ = to.parent().map(std::fs::remove_dir);
        }
        let _ = self.home.create();
    }
}
