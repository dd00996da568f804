//! One kind of definition as it lies on disk: a folder each, with the last good state of every one.

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
    strict::Refusal,
};

use crate::disk::{self, Unread};

/// What `agent.json` and `tool.json` have in common.
pub(super) trait Definition: Sized + PartialEq + Debug {
    /// Its name, and its folder's.
    type Id: FromStr + Ord + Clone + Display + Debug + AsRef<str>;
    /// The folder of all of them in the home.
    const SHELF: &'static str;
    /// The file of each.
    const FILE: &'static str;
    /// Reads one strictly.
    fn parse(id: &Self::Id, text: &str) -> Result<Self, Refusal>;
}

impl Definition for AgentDefinition {
    type Id = Slug;
    const SHELF: &'static str = "agents";
    const FILE: &'static str = "agent.json";

    fn parse(_: &Slug, text: &str) -> Result<Self, Refusal> {
        AgentDefinition::parse(text)
    }
}

impl Definition for ToolDefinition {
    type Id = CatalogId;
    const SHELF: &'static str = "tools";
    const FILE: &'static str = "tool.json";

    fn parse(id: &CatalogId, text: &str) -> Result<Self, Refusal> {
        let definition = ToolDefinition::parse(text)?;
        match definition.id() == id {
            true => Ok(definition),
            false => Err(Refusal::at(
                "id",
                format!("is {}, but its folder is {id}: they must agree", definition.id()),
            )),
        }
    }
}

/// The file of a definition as error messages name it.
pub(super) fn file_of<D: Definition>(id: &D::Id) -> String {
    format!("{}/{id}/{}", D::SHELF, D::FILE)
}

/// When a file was last touched, to know whether to read it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    modified: (i64, i64),
    changed: (i64, i64),
    size: u64,
    inode: u64,
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        let seen = fs::metadata(path).ok()?;
        Some(Self {
            modified: (seen.mtime(), seen.mtime_nsec()),
            changed: (seen.ctime(), seen.ctime_nsec()),
            size: seen.len(),
            inode: seen.ino(),
        })
    }

    /// Whether the file is old enough that a later edit must change the stamp: file systems keep time
    /// in ticks, and two edits within one tick look the same.
    fn settled(self) -> bool {
        const TICK: Duration = Duration::from_millis(100);
        let seconds = u64::try_from(self.changed.0).unwrap_or(0);
        let at = SystemTime::UNIX_EPOCH + Duration::new(seconds, u32::try_from(self.changed.1).unwrap_or(0));
        at.elapsed().is_ok_and(|age| age > TICK)
    }
}

#[derive(Debug)]
struct Kept<D> {
    /// `None`: not to be trusted, read again next time.
    stamp: Option<Stamp>,
    /// What is on disk.
    read: Result<Arc<D>, String>,
    /// What is in use.
    good: Option<Arc<D>>,
    error: Option<String>,
    version: u64,
}

/// A definition in use.
pub(super) struct Good<D> {
    pub(super) definition: Arc<D>,
    pub(super) error: Option<String>,
    pub(super) version: u64,
}

/// Every definition of one kind.
#[derive(Debug)]
pub(super) struct Shelf<D: Definition> {
    dir: PathBuf,
    kept: BTreeMap<D::Id, Kept<D>>,
    /// Folders with a name that cannot be one, each warned of once.
    misnamed: BTreeSet<OsString>,
    removed: bool,
}

impl<D: Definition> Shelf<D> {
    pub(super) fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            kept: BTreeMap::new(),
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
        self.kept.contains_key(id)
    }

    pub(super) fn has_good(&self, id: &str) -> bool {
        id.parse()
            .is_ok_and(|id: D::Id| self.kept.get(&id).is_some_and(|kept| kept.good.is_some()))
    }

    /// Every definition that is in use or waits on disk to be.
    pub(super) fn all(&self) -> impl Iterator<Item = (&D::Id, &Arc<D>)> {
        self.kept.iter().flat_map(|(id, kept)| {
            let waiting = kept.read.as_ref().ok();
            kept.good
                .iter()
                .chain(waiting)
                .map(move |definition| (id, definition))
        })
    }

    pub(super) fn good(&self) -> impl Iterator<Item = (&D::Id, Good<D>)> {
        self.kept.iter().filter_map(|(id, kept)| {
            let (error, version) = (kept.error.clone(), kept.version);
            Some((
                id,
                Good {
                    definition: kept.good.clone()?,
                    error,
                    version,
                },
            ))
        })
    }

    pub(super) fn broken(&self) -> impl Iterator<Item = (D::Id, String)> {
        self.kept
            .iter()
            .filter_map(|(id, kept)| match (&kept.good, &kept.error) {
                (None, Some(error)) => Some((id.clone(), error.clone())),
                _ => None,
            })
    }

    /// Looks at every folder.
    pub(super) fn scan(&mut self, root: &Path) {
        let listed = match fs::read_dir(&self.dir) {
            Ok(listed) => listed,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                self.removed |= !self.kept.is_empty();
                return self.kept.clear();
            }
            Err(e) => {
                // All that is known stays: an unreadable folder is no reason to forget it.
                return tracing::warn!(dir = %self.dir.display(), error = %e, "cannot look for definitions");
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
                None => self.warn_of_name(name, &folder.path()),
            }
        }
        let before = self.kept.len();
        self.kept.retain(|id, _| seen.contains(id));
        self.removed |= self.kept.len() != before;
    }

    fn warn_of_name(&mut self, name: OsString, folder: &Path) {
        let hidden = name.as_encoded_bytes().starts_with(b".");
        if !hidden && folder.join(D::FILE).exists() && self.misnamed.insert(name) {
            tracing::warn!(
                folder = %folder.display(),
                "ignored: a folder here is named with 1 to 32 of a-z, 0-9 and -, and no reserved name"
            );
        }
    }

    /// Looks at one folder.
    pub(super) fn scan_one(&mut self, root: &Path, id: &D::Id) {
        let path = self.file(id);
        let stamp = Stamp::of(&path);
        if let (Some(kept), Some(stamp)) = (self.kept.get(id), stamp)
            && kept.stamp == Some(stamp)
        {
            return;
        }
        let read = match disk::read_beneath(root, &path, MAX_DEFINITION_BYTES) {
            Ok(text) => D::parse(id, &text)
                .map(Arc::new)
                .map_err(|refusal| refusal.to_string()),
            Err(Unread::Refused(why)) => Err(why),
            Err(Unread::Missing) => {
                self.removed |= self.kept.remove(id).is_some();
                return;
            }
        };
        let read = read.map_err(|why| format!("{}: {why}", file_of::<D>(id)));
        let stamp = stamp.filter(|stamp| stamp.settled());
        match self.kept.get_mut(id) {
            Some(kept) => (kept.stamp, kept.read) = (stamp, read),
            None => {
                let kept = Kept {
                    stamp,
                    read,
                    good: None,
                    error: None,
                    version: 0,
                };
                self.kept.insert(id.clone(), kept);
            }
        }
    }

    /// Decides what is in use: what is on disk if it is good, else what was before. Says whether
    /// anything is different from the last time.
    pub(super) fn settle(&mut self, version: u64, check: impl Fn(&D) -> Result<(), Refusal>) -> bool {
        let mut changed = std::mem::take(&mut self.removed);
        for (id, kept) in &mut self.kept {
            let verdict = match &kept.read {
                Ok(read) => check(read)
                    .map_err(|why| format!("{}: {why}", file_of::<D>(id)))
                    .map(|()| read),
                Err(why) => Err(why.clone()),
            };
            let error = match verdict {
                Ok(read) => {
                    if kept.good.as_ref() != Some(read) {
                        (kept.good, kept.version) = (Some(read.clone()), version);
                        changed = true;
                    }
                    None
                }
                Err(why) => Some(why),
            };
            if error != kept.error {
                match (&error, &kept.good) {
                    (Some(why), Some(_)) => tracing::warn!("{why}; the last good definition stays in use"),
                    (Some(why), None) => tracing::warn!("{why}; it cannot be used"),
                    (None, _) => tracing::info!("{} is good again", file_of::<D>(id)),
                }
                kept.error = error;
                changed = true;
            }
        }
        changed
    }
}
