//! Every name of every catalog tool of one agent, and what it means. Pure: no I/O, no clock.
//!
//! Listed names are given out in `use` order. A tool whose name is taken is kept, unavailable, with the
//! reason. After the listed names come the other aliases, then the plain names, each where nobody has the
//! name yet; canonical names cannot clash.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use indexmap::IndexMap;
use oubliette_protocol::{
    CatalogId,
    agent::{AgentTools, split_canonical},
    id::quoted,
    tool::{Source, ToolRow, ToolSpec, any_object},
};
use serde_json::Value;

use crate::{
    allow::{Names, Rules, Verdict},
    name,
};

/// What stands in a reason between the rule and why a tool is not available.
pub(crate) const UNAVAILABLE: &str = "; unavailable: ";
/// What stands in a reason before what was put right.
pub(crate) const NOTE: &str = "; note: ";

/// A tool as its server offers it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolInfo {
    /// Its own name.
    pub name: Arc<str>,
    /// What it does.
    pub description: String,
    /// Its parameters.
    pub input_schema: Arc<Value>,
    /// What was wrong with its description and how it was put right.
    pub note: Option<String>,
}

/// What one entry of `use` offers.
#[derive(Debug, Clone)]
pub struct Offer {
    /// Its id.
    pub id: CatalogId,
    /// Why its tools cannot be called now.
    pub down: Option<String>,
    /// Its tools, as far as they are known.
    pub tools: Arc<[Arc<ToolInfo>]>,
}

impl Offer {
    /// Of an entry that is about to be started.
    pub(crate) fn starting(id: &CatalogId) -> Self {
        Self {
            id: id.clone(),
            down: Some(format!("its server {id} is starting")),
            tools: Arc::default(),
        }
    }
}

/// One catalog tool of the agent.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its server.
    pub id: CatalogId,
    /// `@<id>/<tool>`.
    pub canonical: Arc<str>,
    /// The name the agent's list shows.
    pub name: String,
    /// Its aliases, in order; the first is `name`.
    pub aliases: Vec<String>,
    /// `<id>_<tool>`.
    pub plain: String,
    /// Whether that name means this tool.
    answers_to_plain: bool,
    /// What the rules say.
    pub verdict: Verdict,
    /// Why no call can reach it, however its server is doing.
    pub fault: Option<String>,
    /// Why its server cannot be called now.
    pub down: Option<String>,
    /// An alias that means another tool.
    pub lost: Option<String>,
    /// The tool as its server offers it.
    pub info: Arc<ToolInfo>,
}

impl Entry {
    /// Whether the agent's list shows it.
    pub fn listed(&self) -> bool {
        self.verdict.allows() && self.unavailable().is_none()
    }

    /// Why a call cannot reach it now.
    pub fn unavailable(&self) -> Option<&str> {
        self.fault.as_deref().or(self.down.as_deref())
    }

    /// The tool as a model is shown it.
    pub fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: self.name.clone(),
            description: self.info.description.clone(),
            input_schema: Value::clone(&self.info.input_schema),
        }
    }

    /// The rule, why it is not available when it is not, and what was put right.
    pub fn reason(&self) -> String {
        let mut reason = self.verdict.reason();
        if let Some(why) = self.unavailable() {
            reason = format!("{reason}{UNAVAILABLE}{why}");
        }
        for note in self.info.note.iter().chain(&self.lost) {
            reason = format!("{reason}{NOTE}{note}");
        }
        reason
    }

    /// The tool as `tool_list` shows it.
    pub fn row(&self) -> ToolRow {
        let plain = self.answers_to_plain.then_some(&self.plain);
        let others = self
            .aliases
            .iter()
            .chain(plain)
            .filter(|other| **other != self.name);
        ToolRow {
            name: self.name.clone(),
            canonical: self.canonical.to_string(),
            aliases: others.cloned().collect(),
            source: Source::Catalog,
            server: Some(self.id.to_string()),
            allowed: self.verdict.allows(),
            reason: Some(self.reason()),
            available: self.unavailable().is_none(),
            description: self.info.description.clone(),
            input_schema: Value::clone(&self.info.input_schema),
        }
    }
}

/// What a name means.
#[derive(Debug)]
pub enum Found<'a> {
    /// A tool of the agent.
    Tool(&'a Entry),
    /// A name of an entry in `use` that has no such tool, or whose tools are not known while it is down.
    Missing {
        /// The entry.
        id: &'a CatalogId,
        /// What the rules would say.
        verdict: Verdict,
        /// Why it is down; `None`: it is up and has no such tool.
        down: Option<&'a str>,
    },
    /// A tool of a catalog entry that `use` does not name.
    NotUsed {
        /// That entry.
        id: &'a str,
    },
    /// Nothing of the catalog.
    Unknown,
}

/// All catalog tools of one agent.
#[derive(Debug, Default)]
pub struct Registry {
    entries: Vec<Entry>,
    by_name: HashMap<Box<str>, usize>,
    used: HashMap<CatalogId, Option<String>>,
    known: Arc<HashSet<CatalogId>>,
    rules: Arc<Rules>,
}

impl Registry {
    /// Gives every tool its names. `offers` come in `use` order; `known` is every id of the catalog.
    pub fn new(
        tools: &AgentTools,
        rules: Arc<Rules>,
        offers: &[Offer],
        known: Arc<HashSet<CatalogId>>,
    ) -> Self {
        let mut entries = Vec::new();
        let mut aliases = aliases_of(tools);
        for offer in offers {
            let mut aliases = aliases.remove(offer.id.as_str()).unwrap_or_default();
            let mut seen = HashSet::new();
            for info in offer.tools.iter() {
                let fault = fault_of(&info.name, &mut seen);
                let own = match (&fault, aliases.get_mut(&*info.name)) {
                    (None, Some(own)) => std::mem::take(own),
                    _ => Vec::new(),
                };
                entries.push(entry(&rules, offer, info.clone(), own, fault));
            }
            // What is left points to tools it does not have; nobody knows what one has that never came up.
            let known = offer.down.is_none() || !offer.tools.is_empty();
            for (tool, own) in aliases.into_iter().filter(|(_, own)| !own.is_empty()) {
                let missing = known.then(|| format!("{} has no tool {}", offer.id, quoted(tool)));
                let info = ToolInfo {
                    name: tool.into(),
                    description: String::new(),
                    input_schema: any_object().into(),
                    note: None,
                };
                entries.push(entry(&rules, offer, info.into(), own, missing));
            }
        }
        let by_name = give_names(&mut entries);
        let used = offers
            .iter()
            .map(|offer| (offer.id.clone(), offer.down.clone()))
            .collect();
        Self {
            entries,
            by_name,
            used,
            known,
            rules,
        }
    }

    /// What a name means. A name too long to be one means nothing.
    pub fn resolve<'a>(&'a self, called: &'a str) -> Found<'a> {
        if let Some(&at) = self.by_name.get(called) {
            return Found::Tool(&self.entries[at]);
        }
        if called.len() > name::MAX_CALLED {
            return Found::Unknown;
        }
        let (id, canonical) = match split_canonical(called) {
            Some((id, _)) => (id, Some(called)),
            None => match name::owner(called) {
                Some((id, _)) => (id, None),
                None => return Found::Unknown,
            },
        };
        if let Some((id, down)) = self.used.get_key_value(id) {
            let plain = match canonical.and_then(split_canonical) {
                Some((_, tool)) => name::plain(id, tool),
                None => called.to_owned(),
            };
            let names = Names {
                id: id.as_str(),
                canonical,
                plain: &plain,
                aliases: &[],
            };
            return Found::Missing {
                id,
                verdict: self.rules.catalog(names),
                down: down.as_deref(),
            };
        }
        match canonical.is_some() || self.known.contains(id) {
            true => Found::NotUsed { id },
            false => Found::Unknown,
        }
    }

    /// Every tool, in `use` order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The agent's rules.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// What the agent's list shows.
    pub fn listed(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.listed())
    }

    /// Whether a catalog tool answers to this name.
    pub fn has(&self, called: &str) -> bool {
        self.by_name.contains_key(called)
    }
}

/// Id → tool → its aliases, in the order they are written.
fn aliases_of(tools: &AgentTools) -> HashMap<&str, IndexMap<&str, Vec<String>>> {
    let mut of: HashMap<&str, IndexMap<&str, Vec<String>>> = HashMap::new();
    for (alias, target) in &tools.aliases {
        if let Some((id, tool)) = split_canonical(target) {
            of.entry(id)
                .or_default()
                .entry(tool)
                .or_default()
                .push(alias.clone());
        }
    }
    of
}

/// Why a server's tool cannot be taken as it is.
fn fault_of<'a>(tool: &'a str, seen: &mut HashSet<&'a str>) -> Option<String> {
    if tool.is_empty() {
        return Some("its server gave it no name".into());
    }
    if tool.len() > name::MAX_TOOL {
        return Some(format!("its name is longer than {} bytes", name::MAX_TOOL));
    }
    (!seen.insert(tool)).then(|| "its server lists the name twice".into())
}

fn entry(
    rules: &Rules,
    offer: &Offer,
    info: Arc<ToolInfo>,
    aliases: Vec<String>,
    fault: Option<String>,
) -> Entry {
    // A name too long is cut for the list; it answers to nothing.
    let shown: String = info.name.chars().take(name::MAX_TOOL).collect();
    let canonical = name::canonical(&offer.id, &shown);
    let plain = name::plain(&offer.id, &shown);
    let names = Names {
        id: offer.id.as_str(),
        canonical: Some(&canonical),
        plain: &plain,
        aliases: &aliases,
    };
    Entry {
        id: offer.id.clone(),
        verdict: rules.catalog(names),
        name: aliases.first().unwrap_or(&plain).clone(),
        canonical: canonical.into(),
        plain,
        answers_to_plain: true,
        aliases,
        fault,
        down: offer.down.clone(),
        lost: None,
        info,
    }
}

fn give_names(entries: &mut [Entry]) -> HashMap<Box<str>, usize> {
    let mut by_name: HashMap<Box<str>, usize> = HashMap::with_capacity(entries.len() * 3);
    for (at, entry) in entries.iter().enumerate() {
        by_name.entry(entry.canonical.as_ref().into()).or_insert(at);
    }
    // Tools the agent may call have the first choice: the others are never listed.
    for at in 0..entries.len() {
        if !entries[at].verdict.allows() {
            continue;
        }
        let listed = entries[at].name.clone();
        let taken = match (name::reserved(&listed), by_name.get(listed.as_str())) {
            (Some(whose), _) => format!("its name {listed} is {whose}"),
            (None, Some(&other)) if other != at => {
                let first = &entries[other].canonical;
                format!("its name {listed} is taken by {first}, which comes first")
            }
            (None, _) => {
                by_name.insert(listed.into(), at);
                continue;
            }
        };
        entries[at].fault.get_or_insert(taken);
    }
    for (at, entry) in entries.iter().enumerate() {
        for alias in entry
            .aliases
            .iter()
            .filter(|alias| name::reserved(alias).is_none())
        {
            by_name.entry(alias.as_str().into()).or_insert(at);
        }
    }
    for (at, entry) in entries.iter().enumerate() {
        by_name.entry(entry.plain.as_str().into()).or_insert(at);
    }
    keep_own_names(entries, &by_name);
    by_name
}

/// Leaves each tool the names that mean it. An alias that means another tool is told.
fn keep_own_names(entries: &mut [Entry], by_name: &HashMap<Box<str>, usize>) {
    let canonical: Vec<Arc<str>> = entries.iter().map(|entry| entry.canonical.clone()).collect();
    for (at, entry) in entries.iter_mut().enumerate() {
        let holder = |name: &str| by_name.get(name).filter(|&&holder| holder != at);
        let lost = entry
            .aliases
            .iter()
            .find_map(|alias| Some((alias, &canonical[*holder(alias)?])));
        // A tool without a fault has its listed name, so what is lost is another alias.
        if let (None, Some((alias, means))) = (&entry.fault, lost) {
            entry.lost = Some(format!("{alias} means {means} and is no alias of this one"));
        }
        entry.answers_to_plain = holder(&entry.plain).is_none();
        entry.aliases.retain(|alias| holder(alias).is_none());
    }
}
