//! All definitions of one kind: each a directory on disk, with its last valid state in memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fmt::{Debug, Display},
    fs,
    io::ErrorKind,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use oubliette_protocol::{
    CatalogId, Slug,
    agent::{AgentDefinition, MAX_DEFINITION_BYTES},
    catalog::ToolDefinition,
    strict::FieldError,
};

use crate::safe_fs::{self, FileReadError};

/// What `agent.json` and `tool.json` have in common.
pub(super) trait DefinitionFile: Sized + PartialEq + Debug {
    /// Its name, which is also its directory's name.
    type Id: FromStr + Ord + Clone + Display + Debug + AsRef<str>;
    /// Name of the directory that holds all of them in the home.
    const FOLDER: &'static str;
    /// Name of the file in each definition's directory.
    const FILE: &'static str;
    /// Parses one, refusing unknown fields.
    fn parse(id: &Self::Id, text: &str) -> Result<Self, FieldError>;
}

impl DefinitionFile for AgentDefinition {
    type Id = Slug;
    const FOLDER: &'static str = "agents";
    const FILE: &'static str = "agent.json";

    fn parse(_: &Slug, text: &str) -> Result<Self, FieldError> {
        AgentDefinition::parse(text)
    }
}

impl DefinitionFile for ToolDefinition {
    type Id = CatalogId;
    const FOLDER: &'static str = "tools";
    const FILE: &'static str = "tool.json";

    fn parse(id: &CatalogId, text: &str) -> Result<Self, FieldError> {
        let definition = ToolDefinition::parse(text)?;
        match definition.id() == id {
            true => Ok(definition),
            false => Err(FieldError::at(
                "id",
                format!("is {}, but its folder is {id}: they must agree", definition.id()),
            )),
        }
    }
}

/// A definition's path relative to the home, for error messages.
pub(super) fn display_path<D: DefinitionFile>(id: &D::Id) -> String {
    format!("{}/{id}/{}", D::FOLDER, D::FILE)
}

/// What `stat` says of a file, to know whether it has to be read again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DefinitionStamp {
    modified: (i64, i64),
    changed: (i64, i64),
    size: u64,
    inode: u64,
}

impl DefinitionStamp {
    fn of(path: &Path) -> Option<Self> {
        let seen = fs::metadata(path).ok()?;
        Some(Self {
            modified: (seen.mtime(), seen.mtime_nsec()),
            changed: (seen.ctime(), seen.ctime_nsec()),
            size: seen.len(),
            inode: seen.ino(),
        })
    }

    /// Whether the file is old enough that a later edit must change the stamp. File systems keep time in ticks;
    /// two edits within one tick leave the same stamp.
    fn is_reliable(self) -> bool {
        const TICK: Duration = Duration::from_millis(100);
        let seconds = u64::try_from(self.changed.0).unwrap_or(0);
        let at = SystemTime::UNIX_EPOCH + Duration::new(seconds, u32::try_from(self.changed.1).unwrap_or(0));
        at.elapsed().is_ok_and(|age| age > TICK)
    }
}

/// One definition: what is on disk, and what is in use.
#[derive(Debug)]
struct LoadedDefinition<D> {
    /// None if it is too young to be relied on; the file is then read again next time.
    stamp: Option<DefinitionStamp>,
    /// The file's content, or why it is invalid.
    on_disk: Result<Arc<D>, String>,
    /// The last valid definition; none if there never was one.
    in_use: Option<Arc<D>>,
    /// Why `on_disk` is not in use.
    error: Option<String>,
    /// The library version at which `in_use` last changed.
    version: u64,
}

/// A definition that can be used.
pub(super) struct UsableDefinition<D> {
    pub(super) definition: Arc<D>,
    pub(super) error: Option<String>,
    pub(super) version: u64,
}

/// All definitions of one kind.
#[derive(Debug)]
pub(super) struct DefinitionSet<D: DefinitionFile> {
    dir: PathBuf,
    loaded: BTreeMap<D::Id, LoadedDefinition<D>>,
    /// Directories whose name is not a valid id; each is warned about once.
    misnamed: BTreeSet<OsString>,
    /// Whether a definition was removed since the last [`DefinitionSet::select_usable`].
    removed: bool,
}

impl<D: DefinitionFile> DefinitionSet<D> {
    pub(super) fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            loaded: BTreeMap::new(),
            misnamed: BTreeSet::new(),
            removed: false,
        }
    }

    pub(super) fn folder(&self, id: &D::Id) -> PathBuf {
        self.dir.join(id.as_ref())
    }

    pub(super) fn file(&self, id: &D::Id) -> PathBuf {
        self.folder(id).join(D::FILE)
    }

    pub(super) fn has(&self, id: &D::Id) -> bool {
        self.loaded.contains_key(id)
    }

    /// Every id that has a definition, valid or not.
    pub(super) fn ids(&self) -> impl Iterator<Item = &D::Id> {
        self.loaded.keys()
    }

    pub(super) fn has_usable(&self, id: &str) -> bool {
        id.parse()
            .is_ok_and(|id: D::Id| self.loaded.get(&id).is_some_and(|entry| entry.in_use.is_some()))
    }

    /// Every definition that is in use, and every valid one on disk that is not in use yet.
    pub(super) fn all(&self) -> impl Iterator<Item = (&D::Id, &Arc<D>)> {
        self.loaded.iter().flat_map(|(id, entry)| {
            let waiting = entry.on_disk.as_ref().ok();
            entry
                .in_use
                .iter()
                .chain(waiting)
                .map(move |definition| (id, definition))
        })
    }

    /// Every definition that can be used.
    pub(super) fn usable(&self) -> impl Iterator<Item = (&D::Id, UsableDefinition<D>)> {
        self.loaded.iter().filter_map(|(id, entry)| {
            let (error, version) = (entry.error.clone(), entry.version);
            Some((
                id,
                UsableDefinition {
                    definition: entry.in_use.clone()?,
                    error,
                    version,
                },
            ))
        })
    }

    /// Ids without any valid definition, with the error.
    pub(super) fn unusable(&self) -> impl Iterator<Item = (D::Id, String)> {
        self.loaded
            .iter()
            .filter_map(|(id, entry)| match (&entry.in_use, &entry.error) {
                (None, Some(error)) => Some((id.clone(), error.clone())),
                _ => None,
            })
    }

    /// Reads every directory's definition if it changed.
    pub(super) fn scan(&mut self, root: &Path) {
        let listed = match fs::read_dir(&self.dir) {
            Ok(listed) => listed,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                self.removed |= !self.loaded.is_empty();
                return self.loaded.clear();
            }
            Err(e) => {
                // Loaded definitions stay: an unreadable directory does not mean that they were removed.
                return tracing::warn!(dir = %self.dir.display(), error = %e, "listing definitions failed; the loaded ones stay in use");
            }
        };
        let mut seen = BTreeSet::new();
        for folder in listed.flatten() {
            let name = folder.file_name();
            match name.to_str().and_then(|text| text.parse::<D::Id>().ok()) {
                Some(id) => {
                    self.scan_one(root, &id);
                    seen.insert(id);
                }
                None => self.warn_misnamed(name, &folder.path()),
            }
        }
        let before = self.loaded.len();
        self.loaded.retain(|id, _| seen.contains(id));
        self.removed |= self.loaded.len() != before;
    }

    fn warn_misnamed(&mut self, name: OsString, folder: &Path) {
        let hidden = name.as_encoded_bytes().starts_with(b".");
        if !hidden && folder.join(D::FILE).exists() && self.misnamed.insert(name) {
            tracing::warn!(
                folder = %folder.display(),
                "ignored: a folder here is named with 1 to 32 of a-z, 0-9 and -, and no reserved name"
            );
        }
    }

    /// Reads one directory's definition if it changed.
    pub(super) fn scan_one(&mut self, root: &Path, id: &D::Id) {
        let path = self.file(id);
        let stamp = DefinitionStamp::of(&path);
        if let (Some(entry), Some(stamp)) = (self.loaded.get(id), stamp)
            && entry.stamp == Some(stamp)
        {
            return;
        }
        let read = match safe_fs::read_beneath(root, &path, MAX_DEFINITION_BYTES) {
            Ok(text) => D::parse(id, &text)
                .map(Arc::new)
                .map_err(|refusal| refusal.to_string()),
            Err(FileReadError::Refused(why)) => Err(why),
            Err(FileReadError::Missing) => {
                self.removed |= self.loaded.remove(id).is_some();
                return;
            }
        };
        let read = read.map_err(|why| format!("{}: {why}", display_path::<D>(id)));
        let stamp = stamp.filter(|stamp| stamp.is_reliable());
        match self.loaded.get_mut(id) {
            Some(entry) => (entry.stamp, entry.on_disk) = (stamp, read),
            None => {
                let entry = LoadedDefinition {
                    stamp,
                    on_disk: read,
                    in_use: None,
                    error: None,
                    version: 0,
                };
                self.loaded.insert(id.clone(), entry);
            }
        }
    }

    /// Decides which version of each definition is in use: the one on disk if it passes `check`, else the last
    /// valid one. Returns whether anything changed since the last call.
    pub(super) fn select_usable(
        &mut self,
        version: u64,
        check: impl Fn(&D) -> Result<(), FieldError>,
    ) -> bool {
        let mut changed = std::mem::take(&mut self.removed);
        for (id, entry) in &mut self.loaded {
            let verdict = match &entry.on_disk {
                Ok(read) => check(read)
                    .map_err(|why| format!("{}: {why}", display_path::<D>(id)))
                    .map(|()| read),
                Err(why) => Err(why.clone()),
            };
            let error = match verdict {
                Ok(read) => {
                    if entry.in_use.as_ref() != Some(read) {
                        (entry.in_use, entry.version) = (Some(read.clone()), version);
                        changed = true;
                    }
                    None
                }
                Err(why) => Some(why),
            };
            if error != entry.error {
                match (&error, &entry.in_use) {
                    (Some(why), Some(_)) => tracing::warn!("{why}; the last good definition stays in use"),
                    (Some(why), None) => tracing::warn!("{why}; it cannot be used"),
                    (None, _) => tracing::info!("{} is good again", display_path::<D>(id)),
                }
                entry.error = error;
                changed = true;
            }
        }
        changed
    }
}
