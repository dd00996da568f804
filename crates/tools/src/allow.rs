//! An agent's `allowed`, `denied` and `ask`, compiled for lookup.
//!
//! `allowed` names catalog tools: by alias, canonical name, `<id>_<tool>`, or all of an entry with `@id/*`.
//! An alias allows only its target, never also another tool whose plain name is spelled the same, so that the
//! list allows no more than intended. `denied` and `ask` are wider: a pattern is about a tool if it matches any of its
//! names.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use oubliette_protocol::{
    agent::{AgentToolSettings, split_canonical_name},
    rule_entry::RuleEntry,
    tool::ToolRule,
};

use crate::{call_rules::CallRules, pattern_list::PatternList};

/// All names of a catalog tool.
#[derive(Debug, Clone, Copy)]
pub struct ToolNames<'a> {
    /// The id of its catalog entry.
    pub id: &'a str,
    /// `@<id>/<tool>`; `None` when only a plain name was given.
    pub canonical: Option<&'a str>,
    /// `<id>_<tool>`.
    pub plain: &'a str,
    /// Its aliases.
    pub aliases: &'a [String],
}

impl<'a> ToolNames<'a> {
    fn all(self) -> impl Iterator<Item = &'a str> {
        let aliases = self.aliases.iter().map(String::as_str);
        self.canonical.into_iter().chain([self.plain]).chain(aliases)
    }
}

/// An agent's `allowed`, `denied` and `ask` lists.
#[derive(Debug, Default)]
pub struct ToolRules {
    allowed: AllowList,
    denied: PatternRules,
    ask: PatternRules,
}

/// The entries of a list that takes patterns and governs every source.
#[derive(Debug, Default)]
struct PatternRules {
    entries: Vec<Arc<RuleEntry>>,
    patterns: PatternList,
}

#[derive(Debug, Default)]
struct AllowList {
    entries: Vec<Arc<RuleEntry>>,
    /// Positions of the entries `*`.
    all: Vec<usize>,
    /// Canonical name → positions of the entries that name it.
    canonical: HashMap<String, Vec<usize>>,
    /// Plain name → positions of the entries that are it.
    plain: HashMap<String, Vec<usize>>,
    /// Catalog id → positions of the entries that allow all of it, by `@id/*`.
    ids: HashMap<String, Vec<usize>>,
}

impl ToolRules {
    /// Compiles an agent's rules. Of a condition that is no valid schema it is never known whether it holds.
    pub fn new(tools: &AgentToolSettings) -> Self {
        if let Err(error) = tools.compile_conditions() {
            tracing::error!(%error, "a rule of an agent cannot be compiled; what it governs is blocked");
        }
        Self {
            allowed: AllowList::new(tools),
            denied: PatternRules::new(&tools.denied),
            ask: PatternRules::new(&tools.ask),
        }
    }

    /// The rules that touch a catalog tool. `denied` wins over `allowed`.
    pub(crate) fn of_catalog_tool(&self, names: ToolNames<'_>) -> CallRules {
        let granted = self.allowed.entries.is_empty().then_some(ToolRule::AllOfUse);
        CallRules::new(
            self.denied.matching(names.all()),
            self.ask.matching(names.all()),
            self.allowed.matching(names),
            granted,
        )
    }

    /// The rules that touch a tool of any other source, by its full name. `granted` is why it may be called if they do
    /// not deny it.
    pub fn of_other_tool(&self, name: &str, granted: ToolRule) -> CallRules {
        CallRules::new(
            self.denied.matching([name].into_iter()),
            self.ask.matching([name].into_iter()),
            Vec::new(),
            Some(granted),
        )
    }

    /// Whether no entry is about tools that are not from the catalog.
    pub(crate) fn govern_catalog_alone(&self) -> bool {
        self.denied.entries.is_empty() && self.ask.entries.is_empty()
    }

    /// The pattern of `denied` that denies a tool that is not from the catalog, whatever its arguments.
    pub fn denied_by(&self, name: &str) -> Option<&str> {
        let matching = self.denied.patterns.matching([name].into_iter());
        let mut entries = matching.into_iter().map(|at| &*self.denied.entries[at]);
        entries
            .find(|entry| entry.when.is_none())
            .map(|entry| &*entry.tool)
    }

    /// The rule of [`denied_by`](Self::denied_by).
    pub fn denying_rule(&self, name: &str) -> Option<ToolRule> {
        self.denied_by(name)
            .map(|pattern| ToolRule::Denied(pattern.to_owned()))
    }
}

/// The entries of a list, each pattern without a condition once: thousands of one pattern would each be kept for every
/// tool they are about.
fn distinct_entries(entries: &[RuleEntry]) -> Vec<Arc<RuleEntry>> {
    let mut seen = HashSet::new();
    let kept = entries
        .iter()
        .filter(|entry| entry.when.is_some() || seen.insert(&*entry.tool));
    kept.cloned().map(Arc::new).collect()
}

impl PatternRules {
    fn new(entries: &[RuleEntry]) -> Self {
        let entries = distinct_entries(entries);
        let patterns = entries.iter().map(|entry| &*entry.tool).enumerate();
        Self {
            patterns: PatternList::new(patterns),
            entries,
        }
    }

    fn matching<'a>(&self, names: impl Iterator<Item = &'a str>) -> Vec<Arc<RuleEntry>> {
        let matching = self.patterns.matching(names).into_iter();
        matching.map(|at| self.entries[at].clone()).collect()
    }
}

impl AllowList {
    fn new(tools: &AgentToolSettings) -> Self {
        let mut list = Self {
            entries: distinct_entries(&tools.allowed),
            ..Self::default()
        };
        for (at, entry) in list.entries.iter().enumerate() {
            let name = &entry.tool;
            let positions = if name == "*" {
                &mut list.all
            } else if let Some(target) = tools.aliases.get(name) {
                list.canonical.entry(target.clone()).or_default()
            } else {
                match split_canonical_name(name) {
                    Some((id, "*")) => list.ids.entry(id.to_owned()).or_default(),
                    Some(_) => list.canonical.entry(name.clone()).or_default(),
                    None => list.plain.entry(name.clone()).or_default(),
                }
            };
            positions.push(at);
        }
        list
    }

    fn matching(&self, names: ToolNames<'_>) -> Vec<Arc<RuleEntry>> {
        let named = names.canonical.and_then(|name| self.canonical.get(name));
        let (plain, id) = (self.plain.get(names.plain), self.ids.get(names.id));
        let mut found: Vec<usize> = [Some(&self.all), named, plain, id]
            .into_iter()
            .flatten()
            .flatten()
            .copied()
            .collect();
        found.sort_unstable();
        found.into_iter().map(|at| self.entries[at].clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rules(tools: serde_json::Value) -> ToolRules {
        ToolRules::new(&serde_json::from_value(tools).unwrap())
    }

    fn ask(rules: &ToolRules, id: &str, tool: &str, aliases: &[&str]) -> ToolRule {
        let aliases: Vec<String> = aliases.iter().map(|a| (*a).into()).collect();
        let (canonical, plain) = (format!("@{id}/{tool}"), format!("{id}_{tool}"));
        rules
            .of_catalog_tool(ToolNames {
                id,
                canonical: Some(&canonical),
                plain: &plain,
                aliases: &aliases,
            })
            .verdict
    }

    #[test]
    fn missing_empty_and_star_allow_all_of_use() {
        for allowed in [
            json!({}),
            json!({"allowed":[]}),
            json!({"allowed":["*"]}),
            json!({"allowed":["x","*"]}),
        ] {
            assert!(ask(&rules(allowed), "files", "read", &[]).allows());
        }
    }

    #[test]
    fn each_way_of_naming_a_tool_allows_it_and_nothing_else() {
        for entry in ["@files/read", "files_read", "@files/*", "r"] {
            let rules = rules(json!({"use":["files"],"allowed":[entry],"aliases":{"r":"@files/read"}}));
            assert!(ask(&rules, "files", "read", &["r"]).allows(), "{entry}");
            assert_eq!(ask(&rules, "notes", "read", &[]), ToolRule::NotListed, "{entry}");
            assert_eq!(
                ask(&rules, "files", "write", &[]).allows(),
                entry == "@files/*",
                "{entry}"
            );
        }
        // `allowed` takes no other patterns.
        assert_eq!(
            ask(&rules(json!({"allowed":["files_*"]})), "files", "read", &[]),
            ToolRule::NotListed
        );
    }

    #[test]
    fn an_alias_that_looks_like_another_tool_allows_only_its_target() {
        let rules = rules(json!({"use":["files","notes"],"allowed":["files_read"],
                                 "aliases":{"files_read":"@notes/x"}}));
        assert!(ask(&rules, "notes", "x", &["files_read"]).allows());
        assert_eq!(ask(&rules, "files", "read", &[]), ToolRule::NotListed);
    }

    #[test]
    fn a_pattern_that_is_written_again_is_one_rule() {
        let rules = rules(
            json!({"allowed": ["*", "*"], "ask": ["@files/*", {"tool": "@files/*", "when": {}}, "@files/*"],
                                 "denied": ["@notes/*", "@notes/*"]}),
        );
        let lists = [&rules.allowed.entries, &rules.ask.entries, &rules.denied.entries];
        assert_eq!(lists.map(Vec::len), [1, 2, 1]);
        assert!(matches!(ask(&rules, "notes", "x", &[]), ToolRule::Denied(_)));
    }

    #[test]
    fn denied_wins_by_any_name() {
        for pattern in [
            "@files/*",
            "@files/read",
            "files_read",
            "r",
            "*",
            "*read",
            "@*/r*d",
            "files_*",
        ] {
            let rules = rules(json!({"use":["files"],"allowed":["*"],"denied":[pattern],
                                     "aliases":{"r":"@files/read"}}));
            assert_eq!(
                ask(&rules, "files", "read", &["r"]),
                ToolRule::Denied(pattern.into())
            );
        }
        let other = rules(json!({"denied":["myapp_*","session_message"]}));
        assert_eq!(other.denied_by("myapp_send"), Some("myapp_*"));
        assert_eq!(other.denied_by("session_message"), Some("session_message"));
        assert_eq!(other.denied_by("session_messages"), None);
        assert_eq!(other.denied_by("äöü"), None);
    }
}
