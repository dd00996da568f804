//! A directory of definitions, `DIR/agents/<slug>/…` and `DIR/tools/<id>/…`, as whole definitions: read strictly, replaced in
//! one step each. Whoever made the directory is not trusted: no link is followed, and everything is bounded.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Read as _, Write as _},
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

use oubliette_os::{SymlinkPolicy, open_beneath};
use oubliette_protocol::{
    Error, Result,
    id::quoted,
    library::{
        DefinitionFiles, DefinitionKey, DefinitionKind, LibraryFile, MAX_LIBRARY_DEFINITIONS,
        MAX_LIBRARY_FILE_BYTES, MAX_LIBRARY_FILES, MAX_SEED_DEPTH, check_library_path,
    },
};
use rustix::{
    fs::{FileType, Mode, OFlags, RenameFlags},
    io::Errno,
};

use crate::safe_fs;

/// Prefix of what is being written or removed; no definition has such a name.
const TEMPORARY_PREFIX: &str = ".writing-";

/// A directory of definitions.
#[derive(Debug, Clone)]
pub struct LibraryDir {
    root: PathBuf,
}

impl LibraryDir {
    /// The directory at this path, which need not exist.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Its path.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory of all definitions of a kind.
    pub fn folder(&self, kind: DefinitionKind) -> PathBuf {
        self.root.join(kind.folder())
    }

    fn place(&self, key: &DefinitionKey) -> PathBuf {
        self.folder(key.kind).join(key.id())
    }

    /// The definitions that are in it, by kind and id. Names that begin with a dot are left out; anything else that is not a
    /// definition's folder is an error.
    pub fn keys(&self) -> Result<Vec<DefinitionKey>> {
        let mut keys = Vec::new();
        for kind in DefinitionKind::ALL {
            let folder = self.folder(kind);
            match fs::symlink_metadata(&folder) {
                Ok(seen) if seen.is_dir() => {}
                Ok(_) => return Err(not_a_folder(&folder)),
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(safe_fs::io_error("look at", &folder, e)),
            }
            for item in fs::read_dir(&folder).map_err(|e| safe_fs::io_error("list", &folder, e))? {
                let item = item.map_err(|e| safe_fs::io_error("list", &folder, e))?;
                let name = item.file_name();
                if name.as_encoded_bytes().starts_with(b".") {
                    continue;
                }
                let shown = format!("{}/{}", kind.folder(), name.to_string_lossy().escape_debug());
                let key = name.to_str().and_then(|name| DefinitionKey::parse(kind, name).ok()).ok_or_else(|| {
                    Error::invalid(format!(
                        "{shown}: a folder here is named with 1 to 32 of a-z, 0-9 and -, not beginning with -, and no reserved name"
                    ))
                })?;
                if !item.file_type().is_ok_and(|kind| kind.is_dir()) {
                    return Err(Error::invalid(format!(
                        "{shown}: is not a folder: a definition is a folder with {} in it",
                        kind.main_file()
                    )));
                }
                keys.push(key);
                if keys.len() > MAX_LIBRARY_DEFINITIONS {
                    return Err(Error::limit_exceeded(format!(
                        "{} holds more than {MAX_LIBRARY_DEFINITIONS} definitions",
                        self.root.display()
                    )));
                }
            }
        }
        keys.sort();
        Ok(keys)
    }

    /// Reads all files of a definition and checks their names, count and sizes; `not_found` if its folder is missing. Beside
    /// the main file names that begin with a dot are left out.
    pub fn read(&self, key: &DefinitionKey) -> Result<DefinitionFiles> {
        let place = self.place(key);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = match rustix::fs::open(&place, flags, Mode::empty()) {
            Ok(folder) => folder,
            Err(Errno::NOENT) => return Err(Error::not_found(format!("there is no {key}"))),
            Err(Errno::NOTDIR | Errno::LOOP) => return Err(not_a_folder(&place)),
            Err(e) => return Err(safe_fs::io_error("open", &place, e.into())),
        };
        let mut reader = DefinitionReader {
            key,
            folder,
            files: Vec::new(),
            bytes: 0,
        };
        reader.read_folder("", 0)?;
        let mut files = reader.files;
        files.sort_by(|one, other| one.path.cmp(&other.path));
        let found = DefinitionFiles {
            key: key.clone(),
            files,
        };
        found.check()?;
        Ok(found)
    }

    /// Writes a definition beside its place. It takes its place with [`StagedDefinition::publish`].
    pub fn stage(&self, definition: &DefinitionFiles) -> Result<StagedDefinition> {
        // What comes from a database or a server is checked before it becomes a path.
        definition.check()?;
        let place = self.place(&definition.key);
        if fs::symlink_metadata(&place).is_ok_and(|seen| !seen.is_dir()) {
            return Err(Error::conflict(format!(
                "{} is not a folder: move it away",
                place.display()
            )));
        }
        let parent = self.folder(definition.key.kind);
        fs::create_dir_all(&parent).map_err(|e| safe_fs::io_error("make the directory", &parent, e))?;
        let write = || -> io::Result<tempfile::TempDir> {
            let holder = tempfile::Builder::new()
                .prefix(TEMPORARY_PREFIX)
                .tempdir_in(&parent)?;
            let staged = holder.path().join(STAGED_NAME);
            private_dir(&staged)?;
            for file in &definition.files {
                let path = staged.join(&file.path);
                if let Some(folder) = path.parent().filter(|folder| *folder != staged) {
                    private_dir(folder)?;
                }
                let mut written = fs::OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(&path)?;
                written.write_all(&file.content)?;
                // After it was written, and whatever the umask is.
                written.set_permissions(fs::Permissions::from_mode(file.mode))?;
            }
            Ok(holder)
        };
        let holder = write().map_err(|e| safe_fs::io_error("write", &place, e))?;
        let key = definition.key.clone();
        Ok(StagedDefinition { holder, place, key })
    }

    /// Removes a definition with all its files, if it is there.
    pub fn remove(&self, key: &DefinitionKey) -> Result<()> {
        let place = self.place(key);
        match fs::symlink_metadata(&place) {
            Ok(_) => super::edit::remove_folder(&place),
            Err(_) => Ok(()),
        }
    }

    /// Removes everything but these definitions, whatever it is: also what a process that was killed left behind.
    pub fn remove_all_but(&self, kept: &BTreeSet<DefinitionKey>) -> Result<()> {
        for kind in DefinitionKind::ALL {
            for item in fs::read_dir(self.folder(kind)).into_iter().flatten().flatten() {
                let name = item.file_name();
                let key = name
                    .to_str()
                    .and_then(|name| DefinitionKey::parse(kind, name).ok());
                if !key.is_some_and(|key| kept.contains(&key)) {
                    let path = item.path();
                    oubliette_os::remove_tree_blocking(&path)
                        .map_err(|e| safe_fs::io_error("remove", &path, e))?;
                }
            }
        }
        Ok(())
    }

    /// Waits until everything that was written is on the disk.
    pub fn sync(&self) -> Result<()> {
        let synced = File::open(&self.root).and_then(|root| Ok(rustix::fs::syncfs(root)?));
        synced.map_err(|e| safe_fs::io_error("write", &self.root, e))
    }
}

/// Name of a staged definition in its temporary folder.
const STAGED_NAME: &str = "it";

/// A definition that was written beside its place. It is removed when this is dropped, as is what it replaced.
#[derive(Debug)]
pub struct StagedDefinition {
    holder: tempfile::TempDir,
    place: PathBuf,
    key: DefinitionKey,
}

impl StagedDefinition {
    /// Which definition it is.
    pub fn key(&self) -> &DefinitionKey {
        &self.key
    }

    /// Puts it in its place in one step: nobody finds a part of it.
    pub fn publish(self) -> Result<()> {
        let staged = self.holder.path().join(STAGED_NAME);
        let fail = |e: Errno| safe_fs::io_error("replace", &self.place, e.into());
        let swap =
            |flags| rustix::fs::renameat_with(rustix::fs::CWD, &staged, rustix::fs::CWD, &self.place, flags);
        match swap(RenameFlags::EXCHANGE) {
            Ok(()) => Ok(()),
            Err(Errno::NOENT) => swap(RenameFlags::NOREPLACE).or_else(|error| match error {
                Errno::INVAL | Errno::NOSYS => rustix::fs::rename(&staged, &self.place),
                other => Err(other),
            }),
            // The file system cannot exchange: for a moment there is nothing.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                let old = self.holder.path().join("old");
                match rustix::fs::rename(&self.place, &old) {
                    Ok(()) | Err(Errno::NOENT) => {}
                    Err(error) => return Err(fail(error)),
                }
                rustix::fs::rename(&staged, &self.place)
            }
            Err(error) => Err(error),
        }
        .map_err(fail)
    }
}

/// Reads the files of one definition.
struct DefinitionReader<'k> {
    key: &'k DefinitionKey,
    folder: OwnedFd,
    files: Vec<LibraryFile>,
    bytes: usize,
}

impl DefinitionReader<'_> {
    fn refused(&self, path: &str, why: &str) -> Error {
        Error::invalid(format!("{}/{}: {why}", self.key, path.escape_debug()))
    }

    fn failed(&self, path: &str, error: impl Into<io::Error>) -> Error {
        self.refused(path, &format!("cannot be read: {}", error.into()))
    }

    fn open(&self, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let path = if path.is_empty() { "." } else { path };
        open_beneath(
            &self.folder,
            Path::new(path),
            flags | OFlags::RDONLY | OFlags::NONBLOCK,
            Mode::empty(),
            SymlinkPolicy::Never,
        )
    }

    fn read_folder(&mut self, path: &str, depth: usize) -> Result<()> {
        let listed = self
            .open(path, OFlags::DIRECTORY)
            .and_then(rustix::fs::Dir::new)
            .map_err(|e| self.failed(path, e))?;
        for item in listed {
            let item = item.map_err(|e| self.failed(path, e))?;
            let name = item.file_name().to_bytes();
            if matches!(name, b"." | b"..") || depth == 0 && name.starts_with(b".") {
                continue;
            }
            let Ok(name) = std::str::from_utf8(name) else {
                return Err(self.refused(
                    path,
                    &format!("{} is not a UTF-8 name", quoted(&String::from_utf8_lossy(name))),
                ));
            };
            let inside = match path {
                "" => name.to_owned(),
                folder => format!("{folder}/{name}"),
            };
            match self.kind_of(&inside, item.file_type())? {
                FileType::Directory if depth <= MAX_SEED_DEPTH => {
                    // By a name that could be in it, because a folder alone is no file of a definition.
                    let probe = format!("{inside}/x");
                    check_library_path(self.key.kind, &probe).map_err(|why| self.refused(&inside, why))?;
                    self.read_folder(&inside, depth + 1)?;
                }
                FileType::Directory => {
                    return Err(self.refused(&inside, "is too deep: at most 16 folders below home/"));
                }
                FileType::RegularFile => self.read_file(inside)?,
                FileType::Symlink => {
                    return Err(self.refused(&inside, "is a symbolic link, which is not followed"));
                }
                _ => return Err(self.refused(&inside, "is not a plain file or folder")),
            }
        }
        Ok(())
    }

    /// What an entry is. Some file systems do not tell with its name.
    fn kind_of(&self, path: &str, told: FileType) -> Result<FileType> {
        if told != FileType::Unknown {
            return Ok(told);
        }
        let stat = rustix::fs::statat(&self.folder, path, rustix::fs::AtFlags::SYMLINK_NOFOLLOW);
        Ok(FileType::from_raw_mode(
            stat.map_err(|e| self.failed(path, e))?.st_mode,
        ))
    }

    fn read_file(&mut self, path: String) -> Result<()> {
        check_library_path(self.key.kind, &path).map_err(|why| self.refused(&path, why))?;
        if self.files.len() >= MAX_LIBRARY_FILES {
            return Err(self.refused(
                &path,
                &format!("is one too many: at most {MAX_LIBRARY_FILES} files"),
            ));
        }
        let file = File::from(
            self.open(&path, OFlags::empty())
                .map_err(|e| self.failed(&path, e))?,
        );
        let seen = file.metadata().map_err(|e| self.failed(&path, e))?;
        if !seen.is_file() {
            return Err(self.refused(&path, "is not a plain file"));
        }
        let most = MAX_LIBRARY_FILE_BYTES - self.bytes;
        let too_large = || {
            format!(
                "is too large: a definition may have {} MiB",
                MAX_LIBRARY_FILE_BYTES >> 20
            )
        };
        if seen.len() > most as u64 {
            return Err(self.refused(&path, &too_large()));
        }
        let mut content = Vec::new();
        file.take(most as u64 + 1)
            .read_to_end(&mut content)
            .map_err(|e| self.failed(&path, e))?;
        if content.len() > most {
            return Err(self.refused(&path, &too_large()));
        }
        self.bytes += content.len();
        self.files.push(LibraryFile {
            path,
            mode: seen.permissions().mode() & 0o777,
            content,
        });
        Ok(())
    }
}

fn private_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn not_a_folder(path: &Path) -> Error {
    Error::invalid(format!(
        "{} is not a folder; symbolic links are not followed",
        path.display()
    ))
}
