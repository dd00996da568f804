//! Agents and catalog in memory, following the files in the home.
//!
//! - `shelf`: one kind of definition as it lies on disk, and the last good state of each.
//! - `edit`: definitions written and removed through Oubliette.
//! - `watch`: hand edits, seen as they happen.
//!
//! Readers take a snapshot and never wait for a disk. A broken edit keeps the last good definition, and
//! the entry's `error` says what is wrong.

mod edit;
mod shelf;
mod watch;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use arc_swap::ArcSwap;
use oubliette_protocol::{
    CatalogId, Error, Result, Slug,
    agent::{AgentDefinition, MAX_DEFINITION_BYTES, split_canonical},
    catalog::ToolDefinition,
    strict::Refusal,
};
use parking_lot::Mutex;

use crate::{
    Home,
    disk::{self, Unread},
};
use shelf::Shelf;

/// An agent as it can be used now.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentEntry {
    /// Its name, and its folder's.
    pub slug: Slug,
    /// The last good definition.
    pub definition: Arc<AgentDefinition>,
    /// Its folder.
    pub dir: PathBuf,
    /// What is wrong with a later edit, or with what it names, if anything is.
    pub error: Option<String>,
    /// Grows when the definition changes; comparable with [`Library::version`].
    pub version: u64,
}

/// A catalog entry as it can be used now.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolEntry {
    /// Its id, and its folder's name.
    pub id: CatalogId,
    /// The last good definition.
    pub definition: Arc<ToolDefinition>,
    /// What is wrong with a later edit, if anything is.
    pub error: Option<String>,
    /// Grows when the definition changes; comparable with [`Library::version`].
    pub version: u64,
}

/// Everything at one moment.
#[derive(Debug, Default)]
struct Snapshot {
    version: u64,
    agents: Arc<BTreeMap<Slug, Arc<AgentEntry>>>,
    tools: Arc<BTreeMap<CatalogId, Arc<ToolEntry>>>,
    broken_agents: Arc<BTreeMap<Slug, String>>,
    broken_tools: Arc<BTreeMap<CatalogId, String>>,
}

#[derive(Debug)]
struct State {
    agents: Shelf<AgentDefinition>,
    tools: Shelf<ToolDefinition>,
    version: u64,
}

/// The agents and the catalog of a home.
#[derive(Debug)]
pub struct Library {
    /// The home's real path: nothing is read beyond it.
    root: PathBuf,
    state: Mutex<State>,
    now: ArcSwap<Snapshot>,
    changes: tokio::sync::watch::Sender<u64>,
    watcher: Mutex<Option<watch::Stop>>,
}

impl Library {
    /// Loads agents and catalog and begins to follow their files.
    pub fn open(home: &Home) -> Result<Arc<Self>> {
        for dir in [home.agents_dir(), home.tools_dir()] {
            disk::private_dir(&dir)?;
        }
        let root = home
            .root()
            .canonicalize()
            .map_err(|e| disk::io_error("open", home.root(), &e))?;
        let state = State {
            agents: Shelf::new(home.agents_dir()),
            tools: Shelf::new(home.tools_dir()),
            version: 0,
        };
        let library = Arc::new(Self {
            root,
            state: Mutex::new(state),
            now: ArcSwap::default(),
            changes: tokio::sync::watch::Sender::new(0),
            watcher: Mutex::new(None),
        });
        // Watched before it is read: an edit in between is then seen twice, not missed.
        *library.watcher.lock() = Some(watch::start(&library, [home.agents_dir(), home.tools_dir()]));
        library.reload();
        Ok(library)
    }

    /// Every usable agent.
    pub fn agents(&self) -> Arc<BTreeMap<Slug, Arc<AgentEntry>>> {
        self.now.load().agents.clone()
    }

    /// One agent.
    pub fn agent(&self, slug: &Slug) -> Result<Arc<AgentEntry>> {
        let now = self.now.load();
        if let Some(entry) = now.agents.get(slug) {
            return Ok(entry.clone());
        }
        if let Some(why) = now.broken_agents.get(slug) {
            return Err(Error::unavailable(format!("agent {slug} cannot be used: {why}")));
        }
        Err(Error::not_found(format!(
            "there is no agent {slug}; {}",
            there_are(now.agents.keys())
        )))
    }

    /// Agents whose file is broken and never was good here, with what is wrong.
    pub fn broken_agents(&self) -> Arc<BTreeMap<Slug, String>> {
        self.now.load().broken_agents.clone()
    }

    /// Every usable catalog entry.
    pub fn catalog(&self) -> Arc<BTreeMap<CatalogId, Arc<ToolEntry>>> {
        self.now.load().tools.clone()
    }

    /// One catalog entry.
    pub fn tool(&self, id: &CatalogId) -> Result<Arc<ToolEntry>> {
        let now = self.now.load();
        if let Some(entry) = now.tools.get(id) {
            return Ok(entry.clone());
        }
        if let Some(why) = now.broken_tools.get(id) {
            return Err(Error::unavailable(format!(
                "catalog entry {id} cannot be used: {why}"
            )));
        }
        Err(Error::not_found(format!(
            "there is no catalog entry {id}; {}",
            there_are(now.tools.keys())
        )))
    }

    /// Catalog entries whose file is broken and never was good here, with what is wrong.
    pub fn broken_tools(&self) -> Arc<BTreeMap<CatalogId, String>> {
        self.now.load().broken_tools.clone()
    }

    /// Grows with every change.
    pub fn version(&self) -> u64 {
        self.now.load().version
    }

    /// Is told the version with every change of an agent, a catalog entry or an `error`.
    pub fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Catalog entries whose definition is newer than a version.
    pub fn changed_tools(&self, since_version: u64) -> Vec<Arc<ToolEntry>> {
        let now = self.now.load();
        now.tools
            .values()
            .filter(|entry| entry.version > since_version)
            .cloned()
            .collect()
    }

    /// Whether all that an agent names is in the catalog.
    pub fn check_agent(&self, definition: &AgentDefinition) -> Result<()> {
        let now = self.now.load();
        Ok(check_against(definition, |id| now.tools.contains_key(id))?)
    }

    /// The text of an agent's `script:<file>`.
    pub fn script(&self, entry: &AgentEntry) -> Result<String> {
        let Some(file) = entry.definition.script() else {
            return Err(Error::invalid(format!(
                "agent {} has no script: its model is not script:<file>",
                entry.slug
            )));
        };
        let path = entry.dir.join(file);
        disk::read_beneath(&self.root, &path, MAX_DEFINITION_BYTES).map_err(|unread| {
            let why = match unread {
                Unread::Missing => "is missing: put it beside agent.json".to_string(),
                Unread::Refused(why) => why,
            };
            Error::unavailable(format!("the script agents/{}/{file} {why}", entry.slug))
        })
    }

    /// Reads what changed on disk since the last time. Called for every hand edit; calling it once more
    /// costs a look at each file's date.
    pub fn reload(&self) {
        let mut state = self.state.lock();
        state.tools.scan(&self.root);
        state.agents.scan(&self.root);
        self.settle(&mut state);
    }

    /// Decides what is usable and shows it to readers.
    fn settle(&self, state: &mut State) {
        let next = state.version + 1;
        // Tools first: agents are checked against them.
        let mut changed = state.tools.settle(next, |_| Ok(()));
        let State { agents, tools, .. } = state;
        changed |= agents.settle(next, |agent| check_against(agent, |id| tools.has_good(id)));
        if !changed && next > 1 {
            return;
        }
        state.version = next;
        let agents = state.agents.good().map(|(slug, good)| {
            let entry = AgentEntry {
                slug: slug.clone(),
                definition: good.definition,
                dir: state.agents.folder(slug),
                error: good.error,
                version: good.version,
            };
            (slug.clone(), Arc::new(entry))
        });
        let tools = state.tools.good().map(|(id, good)| {
            let (definition, error, version) = (good.definition, good.error, good.version);
            (
                id.clone(),
                Arc::new(ToolEntry {
                    id: id.clone(),
                    definition,
                    error,
                    version,
                }),
            )
        });
        self.now.store(Arc::new(Snapshot {
            version: next,
            agents: Arc::new(agents.collect()),
            tools: Arc::new(tools.collect()),
            broken_agents: Arc::new(state.agents.broken().collect()),
            broken_tools: Arc::new(state.tools.broken().collect()),
        }));
        self.changes.send_replace(next);
    }
}

fn check_against(definition: &AgentDefinition, known: impl Fn(&str) -> bool) -> Result<(), Refusal> {
    let missing = |field: String, id: &str| Refusal::at(field, format!("{id} is not in the catalog"));
    for (i, id) in definition.tools.uses.iter().enumerate() {
        if !known(id.as_str()) {
            return Err(missing(format!("tools.use[{i}]"), id.as_str()));
        }
    }
    for (alias, target) in &definition.tools.aliases {
        if let Some((id, _)) = split_canonical(target)
            && !known(id)
        {
            return Err(missing(format!("tools.aliases.{alias}"), id));
        }
    }
    Ok(())
}

/// What there is instead, for a "not found" that helps.
fn there_are<'a, T: std::fmt::Display + 'a>(names: impl ExactSizeIterator<Item = &'a T>) -> String {
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
