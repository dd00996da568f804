//! Every name of every catalog tool of one agent, and the tool it resolves to. Pure: no I/O, no clock.
//!
//! Listed names are assigned in `use` order. A tool whose listed name is taken already stays in the registry,
//! unavailable, with the reason. After the listed names the other aliases are assigned, then the plain names,
//! each only if the name is still free; canonical names cannot clash.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use indexmap::IndexMap;
use oubliette_protocol::{
    CatalogId,
    agent::{AgentToolSettings, split_canonical_name},
    id::quoted,
    tool::{ListedTool, ToolReason, ToolSource, ToolSpec, any_object_schema},
};
use serde_json::Value;

use crate::{
    allow::{ToolNames, ToolRules},
    call_rules::CallRules,
    name,
};

/// A tool as its server offers it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolInfo {
    /// The name its server gives it.
    pub name: Arc<str>,
    /// Its description.
    pub description: String,
    /// The JSON schema of its arguments.
    pub input_schema: Arc<Value>,
    /// What was invalid in the server's listing of the tool and how it was corrected.
    pub note: Option<String>,
}

/// The tools that one entry of `use` offers, and whether it can be called.
#[derive(Debug, Clone)]
pub struct OfferedTools {
    /// The entry's id.
    pub id: CatalogId,
    /// Why its tools cannot be called now; `None` when they can.
    pub down_reason: Option<String>,
    /// Its tools, as far as they are known.
    pub tools: Arc<[Arc<ToolInfo>]>,
}

impl OfferedTools {
    /// The offer of an entry that is about to be started: no tools yet.
    pub(crate) fn starting(id: &CatalogId) -> Self {
        Self {
            id: id.clone(),
            down_reason: Some(format!("its server {id} is starting")),
            tools: Arc::default(),
        }
    }
}

/// One catalog tool of the agent.
#[derive(Debug, Clone)]
pub struct RegistryEntry {
    /// The catalog entry it belongs to.
    pub id: CatalogId,
    /// Its canonical name, `@<id>/<tool>`.
    pub canonical: Arc<str>,
    /// The name under which the agent's tool list shows it.
    pub name: String,
    /// Its aliases, in order; the first is `name`.
    pub aliases: Vec<String>,
    /// Its plain name, `<id>_<tool>`.
    pub plain: String,
    /// Whether the plain name resolves to this tool and not to another one.
    owns_plain_name: bool,
    /// The agent's rules that touch it.
    pub rules: CallRules,
    /// Why no call can reach it even while its server is up: a bad or taken name, or a missing tool.
    pub fault: Option<String>,
    /// Why its server cannot be called now; `None` when it can.
    pub down_reason: Option<String>,
    /// A note about an alias of it that resolves to another tool.
    pub lost_alias: Option<String>,
    /// The tool as its server offers it.
    pub info: Arc<ToolInfo>,
}

impl RegistryEntry {
    /// Whether the agent's tool list shows it: allowed and available.
    pub fn listed(&self) -> bool {
        self.rules.verdict.allows() && self.unavailable().is_none()
    }

    /// Why a call cannot reach it now; `None` when one can.
    pub fn unavailable(&self) -> Option<&str> {
        self.fault.as_deref().or(self.down_reason.as_deref())
    }

    /// The tool as the agent's model sees it.
    pub fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: self.name.clone(),
            description: self.info.description.clone(),
            input_schema: Value::clone(&self.info.input_schema),
        }
    }

    /// The rule that allows or denies it, then why it is unavailable if it is, then notes on what was corrected.
    pub fn reason(&self) -> ToolReason {
        ToolReason {
            rule: self.rules.verdict.clone(),
            unavailable: self.unavailable().map(str::to_owned),
            notes: self.info.note.iter().chain(&self.lost_alias).cloned().collect(),
        }
    }

    /// The tool as `tool_list` shows it.
    pub fn row(&self) -> ListedTool {
        let plain = self.owns_plain_name.then_some(&self.plain);
        let others = self
            .aliases
            .iter()
            .chain(plain)
            .filter(|other| **other != self.name);
        ListedTool {
            name: self.name.clone(),
            canonical: self.canonical.to_string(),
            aliases: others.cloned().collect(),
            source: ToolSource::Catalog,
            server: Some(self.id.to_string()),
            allowed: self.rules.verdict.allows(),
            reason: self.reason(),
            available: self.unavailable().is_none(),
            description: self.info.description.clone(),
            input_schema: Value::clone(&self.info.input_schema),
            rules: self.rules.listed(),
        }
    }
}

/// What a name resolves to.
#[derive(Debug)]
pub enum NameResolution<'a> {
    /// A tool of the agent.
    Tool(&'a RegistryEntry),
    /// A tool name of an entry in `use` that has no such tool, or whose tools are unknown while it is down.
    Missing {
        /// The entry.
        id: &'a CatalogId,
        /// The agent's rules that would touch such a tool.
        rules: CallRules,
        /// Why the entry is down; `None` when it is up and has no such tool.
        down_reason: Option<&'a str>,
    },
    /// A tool of a catalog entry that `use` does not name.
    NotUsed {
        /// The entry's id.
        id: &'a str,
    },
    /// Not a name of any catalog tool.
    Unknown,
}

/// All catalog tools of one agent.
#[derive(Debug, Default)]
pub struct ToolRegistry {
    entries: Vec<RegistryEntry>,
    by_name: HashMap<Box<str>, usize>,
    used: HashMap<CatalogId, Option<String>>,
    catalog_ids: Arc<HashSet<CatalogId>>,
    rules: Arc<ToolRules>,
}

impl ToolRegistry {
    /// Assigns every tool its names. `offers` come in `use` order; `catalog_ids` is every id of the catalog.
    pub fn new(
        tools: &AgentToolSettings,
        rules: Arc<ToolRules>,
        offers: &[OfferedTools],
        catalog_ids: Arc<HashSet<CatalogId>>,
    ) -> Self {
        let mut entries = Vec::new();
        let mut aliases = aliases_of(tools);
        for offer in offers {
            let mut aliases = aliases.remove(offer.id.as_str()).unwrap_or_default();
            let mut seen = HashSet::new();
            for info in offer.tools.iter() {
                let fault = name_fault(&info.name, &mut seen);
                let own = match (&fault, aliases.get_mut(&*info.name)) {
                    (None, Some(own)) => std::mem::take(own),
                    _ => Vec::new(),
                };
                entries.push(new_entry(&rules, offer, info.clone(), own, fault));
            }
            // The remaining aliases point to tools the entry does not have. The tools of an entry that never
            // came up are unknown, so its aliases are not called missing.
            let tools_known = offer.down_reason.is_none() || !offer.tools.is_empty();
            for (tool, own) in aliases.into_iter().filter(|(_, own)| !own.is_empty()) {
                let missing = tools_known.then(|| format!("{} has no tool {}", offer.id, quoted(tool)));
                let info = ToolInfo {
                    name: tool.into(),
                    description: String::new(),
                    input_schema: any_object_schema().into(),
                    note: None,
                };
                entries.push(new_entry(&rules, offer, info.into(), own, missing));
            }
        }
        let by_name = assign_names(&mut entries);
        let used = offers
            .iter()
            .map(|offer| (offer.id.clone(), offer.down_reason.clone()))
            .collect();
        Self {
            entries,
            by_name,
            used,
            catalog_ids,
            rules,
        }
    }

    /// Resolves a name. One longer than [`name::MAX_CALLED_NAME`] is unknown.
    pub fn resolve<'a>(&'a self, called: &'a str) -> NameResolution<'a> {
        if let Some(&at) = self.by_name.get(called) {
            return NameResolution::Tool(&self.entries[at]);
        }
        if called.len() > name::MAX_CALLED_NAME {
            return NameResolution::Unknown;
        }
        let (id, canonical) = match split_canonical_name(called) {
            Some((id, _)) => (id, Some(called)),
            None => match name::split_owner(called) {
                Some((id, _)) => (id, None),
                None => return NameResolution::Unknown,
            },
        };
        if let Some((id, down)) = self.used.get_key_value(id) {
            let plain = match canonical.and_then(split_canonical_name) {
                Some((_, tool)) => name::plain(id, tool),
                None => called.to_owned(),
            };
            let names = ToolNames {
                id: id.as_str(),
                canonical,
                plain: &plain,
                aliases: &[],
            };
            return NameResolution::Missing {
                id,
                rules: self.rules.of_catalog_tool(names),
                down_reason: down.as_deref(),
            };
        }
        match canonical.is_some() || self.catalog_ids.contains(id) {
            true => NameResolution::NotUsed { id },
            false => NameResolution::Unknown,
        }
    }

    /// Every tool, in `use` order.
    pub fn entries(&self) -> &[RegistryEntry] {
        &self.entries
    }

    /// The agent's rules.
    pub fn rules(&self) -> &ToolRules {
        &self.rules
    }

    /// The tools that the agent's tool list shows.
    pub fn listed(&self) -> impl Iterator<Item = &RegistryEntry> {
        self.entries.iter().filter(|entry| entry.listed())
    }

    /// Whether a catalog tool has this name.
    pub fn contains(&self, called: &str) -> bool {
        self.by_name.contains_key(called)
    }
}

/// Catalog id → tool → its aliases, in the order they are written.
fn aliases_of(tools: &AgentToolSettings) -> HashMap<&str, IndexMap<&str, Vec<String>>> {
    let mut of: HashMap<&str, IndexMap<&str, Vec<String>>> = HashMap::new();
    for (alias, target) in &tools.aliases {
        if let Some((id, tool)) = split_canonical_name(target) {
            of.entry(id)
                .or_default()
                .entry(tool)
                .or_default()
                .push(alias.clone());
        }
    }
    of
}

/// Why a tool's name, as its server gives it, cannot be used.
fn name_fault<'a>(tool: &'a str, seen: &mut HashSet<&'a str>) -> Option<String> {
    if tool.is_empty() {
        return Some("its server gave it no name".into());
    }
    if tool.len() > name::MAX_TOOL_NAME {
        return Some(format!("its name is longer than {} bytes", name::MAX_TOOL_NAME));
    }
    (!seen.insert(tool)).then(|| "its server lists the name twice".into())
}

/// Builds a registry entry; its names are assigned afterwards.
fn new_entry(
    rules: &ToolRules,
    offer: &OfferedTools,
    info: Arc<ToolInfo>,
    aliases: Vec<String>,
    fault: Option<String>,
) -> RegistryEntry {
    // Too long a name is cut for display; the tool has a fault then and cannot be called.
    let shown: String = info.name.chars().take(name::MAX_TOOL_NAME).collect();
    let canonical = name::canonical(&offer.id, &shown);
    let plain = name::plain(&offer.id, &shown);
    let names = ToolNames {
        id: offer.id.as_str(),
        canonical: Some(&canonical),
        plain: &plain,
        aliases: &aliases,
    };
    RegistryEntry {
        id: offer.id.clone(),
        rules: rules.of_catalog_tool(names),
        name: aliases.first().unwrap_or(&plain).clone(),
        canonical: canonical.into(),
        plain,
        owns_plain_name: true,
        aliases,
        fault,
        down_reason: offer.down_reason.clone(),
        lost_alias: None,
        info,
    }
}

/// Decides which tool each name resolves to; see the module's documentation for the order.
fn assign_names(entries: &mut [RegistryEntry]) -> HashMap<Box<str>, usize> {
    let mut by_name: HashMap<Box<str>, usize> = HashMap::with_capacity(entries.len() * 3);
    for (at, entry) in entries.iter().enumerate() {
        by_name.entry(entry.canonical.as_ref().into()).or_insert(at);
    }
    // Tools the agent may call get their listed names first: the others are never listed.
    for at in 0..entries.len() {
        if !entries[at].rules.verdict.allows() {
            continue;
        }
        let listed = entries[at].name.clone();
        let taken = match (name::reserved_for(&listed), by_name.get(listed.as_str())) {
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
            .filter(|alias| name::reserved_for(alias).is_none())
        {
            by_name.entry(alias.as_str().into()).or_insert(at);
        }
    }
    for (at, entry) in entries.iter().enumerate() {
        by_name.entry(entry.plain.as_str().into()).or_insert(at);
    }
    drop_lost_names(entries, &by_name);
    by_name
}

/// Removes from each tool the names that resolve to another one, and notes the alias it lost.
fn drop_lost_names(entries: &mut [RegistryEntry], by_name: &HashMap<Box<str>, usize>) {
    let canonical: Vec<Arc<str>> = entries.iter().map(|entry| entry.canonical.clone()).collect();
    for (at, entry) in entries.iter_mut().enumerate() {
        let holder = |name: &str| by_name.get(name).filter(|&&holder| holder != at);
        let lost = entry
            .aliases
            .iter()
            .find_map(|alias| Some((alias, &canonical[*holder(alias)?])));
        // A tool without a fault has its listed name, so the lost alias is one of the others.
        if let (None, Some((alias, means))) = (&entry.fault, lost) {
            entry.lost_alias = Some(format!("{alias} means {means} and is no alias of this one"));
        }
        entry.owns_plain_name = holder(&entry.plain).is_none();
        entry.aliases.retain(|alias| holder(alias).is_none());
    }
}
