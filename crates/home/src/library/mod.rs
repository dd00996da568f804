//! The agents and the tool catalog in memory, kept up to date with their files in the home.
//!
//! - `library_dir`: a directory of definitions, each read and replaced whole.
//! - `definition_set`: all definitions of one kind as read from disk, and the last valid state of each.
//! - `edit`: writing and removing definitions through Oubliette.
//! - `change`: many definitions at once.
//! - `home_files`: the files with which an agent's home directory begins.
//! - `watch`: noticing edits made directly to the files.
//!
//! Readers take a snapshot and never wait for the disk. After an invalid edit the last valid definition stays in
//! use, and the entry's `error` says what is wrong.

mod change;
mod definition_set;
mod edit;
mod home_files;
mod library_dir;
mod watch;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use arc_swap::ArcSwap;
use oubliette_protocol::{
    CatalogId, Error, Result, Slug,
    agent::{AgentDefinition, MAX_DEFINITION_BYTES, split_canonical_name},
    catalog::ToolDefinition,
    library::DefinitionKind,
    strict::FieldError,
};
use parking_lot::Mutex;

use crate::{
    HomeDir,
    safe_fs::{self, FileReadError},
};
pub use home_files::HomeFile;
pub use library_dir::{LibraryDir, StagedDefinition};

use definition_set::{DefinitionFile, DefinitionSet, UsableDefinition};

/// A usable agent.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentEntry {
    /// Its name, which is also its directory's name.
    pub slug: Slug,
    /// The last valid definition.
    pub definition: Arc<AgentDefinition>,
    /// Its directory.
    pub dir: PathBuf,
    /// What is wrong with a later edit, or with a catalog entry the agent refers to; none if nothing is.
    pub error: Option<String>,
    /// The library version at which the definition last changed; comparable with [`DefinitionLibrary::version`].
    pub version: u64,
}

/// A usable catalog entry.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolEntry {
    /// Its id, which is also its directory's name.
    pub id: CatalogId,
    /// The last valid definition.
    pub definition: Arc<ToolDefinition>,
    /// What is wrong with a later edit; none if nothing is.
    pub error: Option<String>,
    /// The library version at which the definition last changed; comparable with [`DefinitionLibrary::version`].
    pub version: u64,
}

/// What readers see: one consistent state of all definitions.
#[derive(Debug, Default)]
struct LibrarySnapshot {
    version: u64,
    agents: KindSnapshot<Slug, AgentEntry>,
    tools: KindSnapshot<CatalogId, ToolEntry>,
}

/// All definitions of one kind.
#[derive(Debug)]
struct KindSnapshot<Id, Entry> {
    usable: Arc<BTreeMap<Id, Arc<Entry>>>,
    /// Those without any valid version, with the error.
    broken: Arc<BTreeMap<Id, String>>,
}

impl<Id, Entry> Default for KindSnapshot<Id, Entry> {
    fn default() -> Self {
        Self {
            usable: Arc::default(),
            broken: Arc::default(),
        }
    }
}

impl<Id: Ord + Clone + std::fmt::Display, Entry> KindSnapshot<Id, Entry> {
    fn of<D: DefinitionFile<Id = Id>>(
        set: &DefinitionSet<D>,
        entry: impl Fn(Id, UsableDefinition<D>) -> Entry,
    ) -> Self {
        let usable = set
            .usable()
            .map(|(id, good)| (id.clone(), Arc::new(entry(id.clone(), good))));
        Self {
            usable: Arc::new(usable.collect()),
            broken: Arc::new(set.unusable().collect()),
        }
    }

    /// One definition; `noun` is its kind, for errors.
    fn get(&self, noun: &str, id: &Id) -> Result<Arc<Entry>> {
        if let Some(entry) = self.usable.get(id) {
            return Ok(entry.clone());
        }
        if let Some(why) = self.broken.get(id) {
            return Err(Error::unavailable(format!("{noun} {id} cannot be used: {why}")));
        }
        let names = list_names(self.usable.keys());
        Err(Error::not_found(format!("there is no {noun} {id}; {names}")))
    }
}

/// What the files were when last read. Changed under a lock; a [`LibrarySnapshot`] is made from it.
#[derive(Debug)]
struct LibraryState {
    agents: DefinitionSet<AgentDefinition>,
    tools: DefinitionSet<ToolDefinition>,
    version: u64,
}

/// The agents and the tool catalog of a home, kept up to date with their files.
#[derive(Debug)]
pub struct DefinitionLibrary {
    /// The home's canonical path: nothing outside it is read.
    root: PathBuf,
    dir: LibraryDir,
    state: Mutex<LibraryState>,
    snapshot: ArcSwap<LibrarySnapshot>,
    changes: tokio::sync::watch::Sender<u64>,
    watcher: Mutex<Option<watch::WatchGuard>>,
}

impl DefinitionLibrary {
    /// Loads agents and catalog from the home and starts watching their files.
    pub fn open(home: &HomeDir) -> Result<Arc<Self>> {
        let library = Self::load_from(home, LibraryDir::at(home.root()))?;
        // Watched before they are read once more: an edit in between is then seen twice instead of missed.
        *library.watcher.lock() = Some(watch::start(&library, [home.agents_dir(), home.tools_dir()]));
        library.reload();
        Ok(library)
    }

    /// Loads agents and catalog from the home's copy of what a database holds. Only the server writes there, so its files
    /// are not watched.
    pub fn open_copy(home: &HomeDir) -> Result<Arc<Self>> {
        Self::load_from(home, home.library_copy())
    }

    fn load_from(home: &HomeDir, dir: LibraryDir) -> Result<Arc<Self>> {
        let [tools, agents] = DefinitionKind::ALL.map(|kind| dir.folder(kind));
        for dir in [&tools, &agents] {
            safe_fs::create_private_dir(dir)?;
        }
        let root = home
            .root()
            .canonicalize()
            .map_err(|e| safe_fs::io_error("open", home.root(), e))?;
        let state = LibraryState {
            agents: DefinitionSet::new(agents),
            tools: DefinitionSet::new(tools),
            version: 0,
        };
        let library = Arc::new(Self {
            root,
            dir,
            state: Mutex::new(state),
            snapshot: ArcSwap::default(),
            changes: tokio::sync::watch::Sender::new(0),
            watcher: Mutex::new(None),
        });
        library.reload();
        Ok(library)
    }

    /// All usable agents.
    pub fn agents(&self) -> Arc<BTreeMap<Slug, Arc<AgentEntry>>> {
        self.snapshot.load().agents.usable.clone()
    }

    /// One agent; `unavailable` if its file is invalid and no valid version was ever loaded.
    pub fn agent(&self, slug: &Slug) -> Result<Arc<AgentEntry>> {
        self.snapshot.load().agents.get("agent", slug)
    }

    /// Agents that cannot be used because no valid version of their file was ever loaded, with the error.
    pub fn broken_agents(&self) -> Arc<BTreeMap<Slug, String>> {
        self.snapshot.load().agents.broken.clone()
    }

    /// All usable catalog entries.
    pub fn catalog(&self) -> Arc<BTreeMap<CatalogId, Arc<ToolEntry>>> {
        self.snapshot.load().tools.usable.clone()
    }

    /// One catalog entry; `unavailable` if its file is invalid and no valid version was ever loaded.
    pub fn tool(&self, id: &CatalogId) -> Result<Arc<ToolEntry>> {
        self.snapshot.load().tools.get("catalog entry", id)
    }

    /// Catalog entries that cannot be used because no valid version of their file was ever loaded, with the
    /// error.
    pub fn broken_tools(&self) -> Arc<BTreeMap<CatalogId, String>> {
        self.snapshot.load().tools.broken.clone()
    }

    /// The library's version, which grows with every change.
    pub fn version(&self) -> u64 {
        self.snapshot.load().version
    }

    /// A receiver of the new version on every change of an agent, a catalog entry or an `error`.
    pub fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Catalog entries whose definition changed after `since_version`.
    pub fn changed_tools(&self, since_version: u64) -> Vec<Arc<ToolEntry>> {
        let now = self.snapshot.load();
        now.tools
            .usable
            .values()
            .filter(|entry| entry.version > since_version)
            .cloned()
            .collect()
    }

    /// Checks that every catalog entry an agent refers to exists.
    pub fn check_agent(&self, definition: &AgentDefinition) -> Result<()> {
        let now = self.snapshot.load();
        Ok(check_catalog_references(definition, |id| {
            now.tools.usable.contains_key(id)
        })?)
    }

    /// Reads the file of an agent whose model is `script:<file>`.
    pub fn script(&self, entry: &AgentEntry) -> Result<String> {
        let Some(file) = entry.definition.script() else {
            return Err(Error::invalid(format!(
                "agent {} has no script: its model is not script:<file>",
                entry.slug
            )));
        };
        let path = entry.dir.join(file);
        safe_fs::read_beneath(&self.root, &path, MAX_DEFINITION_BYTES).map_err(|unread| {
            let why = match unread {
                FileReadError::Missing => "is missing: put it beside agent.json".to_string(),
                FileReadError::Refused(why) => why,
            };
            Error::unavailable(format!("the script agents/{}/{file} {why}", entry.slug))
        })
    }

    /// Reads the files that changed on disk since the last time. Called after every edit the watcher sees; an
    /// additional call costs one `stat` per file.
    pub fn reload(&self) {
        let mut state = self.state.lock();
        state.tools.scan(&self.root);
        state.agents.scan(&self.root);
        self.publish_changes(&mut state);
    }

    /// Reads what was edited on disk a moment ago, before the watcher saw it.
    fn scan_if_watched(&self, state: &mut LibraryState) {
        if self.watcher.lock().is_some() {
            state.tools.scan(&self.root);
            state.agents.scan(&self.root);
            self.publish_changes(state);
        }
    }

    /// Selects the usable definitions and publishes a new snapshot if anything changed.
    fn publish_changes(&self, state: &mut LibraryState) {
        let next = state.version + 1;
        // Tools come first: agents are checked against them.
        let mut changed = state.tools.select_usable(next, |_| Ok(()));
        let LibraryState { agents, tools, .. } = state;
        changed |= agents.select_usable(next, |agent| {
            check_catalog_references(agent, |id| tools.has_usable(id))
        });
        if !changed && next > 1 {
            return;
        }
        state.version = next;
        let agents = KindSnapshot::of(&state.agents, |slug, good| AgentEntry {
            dir: state.agents.folder(&slug),
            slug,
            definition: good.definition,
            error: good.error,
            version: good.version,
        });
        let tools = KindSnapshot::of(&state.tools, |id, good| ToolEntry {
            id,
            definition: good.definition,
            error: good.error,
            version: good.version,
        });
        self.snapshot.store(Arc::new(LibrarySnapshot {
            version: next,
            agents,
            tools,
        }));
        self.changes.send_replace(next);
    }
}

/// Checks that every catalog entry an agent uses or has aliases for is known.
fn check_catalog_references(
    definition: &AgentDefinition,
    known: impl Fn(&str) -> bool,
) -> Result<(), FieldError> {
    let missing = |field: String, id: &str| FieldError::at(field, format!("{id} is not in the catalog"));
    for (i, id) in definition.tools.uses.iter().enumerate() {
        if !known(id.as_str()) {
            return Err(missing(format!("tools.use[{i}]"), id.as_str()));
        }
    }
    for (alias, target) in &definition.tools.aliases {
        if let Some((id, _)) = split_canonical_name(target)
            && !known(id)
        {
            return Err(missing(format!("tools.aliases.{alias}"), id));
        }
    }
    Ok(())
}

/// Lists the first existing names, for a "not found" error.
fn list_names<'a, T: std::fmt::Display + 'a>(names: impl ExactSizeIterator<Item = &'a T>) -> String {
    const SHOWN: usize = 20;
    let (count, shown) = (
        names.len(),
        names.take(SHOWN).map(ToString::to_string).collect::<Vec<_>>(),
    );
    match count {
        0 => "there are none".into(),
        _ if count > SHOWN => format!("there are {} and {} more", shown.join(", "), count - SHOWN),
        _ => format!("there are: {}", shown.join(", ")),
    }
}
