//! An agent's `allowed` and `denied`, compiled for lookup.
//!
//! `allowed` names catalog tools: by alias, canonical name, `<id>_<tool>`, or all of an entry with `@id/*`.
//! An alias allows only its target, never also another tool whose plain name is spelled the same, so that the
//! list allows no more than intended. `denied` is wider: a pattern denies a tool if it matches any of its names.

use std::collections::{HashMap, HashSet};

use oubliette_protocol::{
    agent::{AgentToolSettings, split_canonical_name},
    tool::ToolRule,
};

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

/// An agent's `allowed` and `denied` lists.
#[derive(Debug, Default)]
pub struct ToolRules {
    allowed: AllowList,
    denied: DenyList,
}

#[derive(Debug, Default)]
struct AllowList {
    /// The rule that allows all of `use`, if there is one.
    allow_all_rule: Option<ToolRule>,
    /// Canonical name → the item of `allowed` that names it.
    canonical: HashMap<String, String>,
    /// Plain names in `allowed`.
    plain: HashSet<String>,
    /// Catalog ids allowed as a whole, by `@id/*`.
    ids: HashSet<String>,
}

impl ToolRules {
    /// Compiles an agent's rules.
    pub fn new(tools: &AgentToolSettings) -> Self {
        Self {
            allowed: AllowList::new(tools),
            denied: DenyList::new(&tools.denied),
        }
    }

    /// Decides whether a catalog tool may be called. `denied` wins over `allowed`.
    pub(crate) fn judge_catalog_tool(&self, names: ToolNames<'_>) -> ToolRule {
        let every = names.canonical.into_iter().chain([names.plain]);
        let every = every.chain(names.aliases.iter().map(String::as_str));
        if let Some(pattern) = every
            .into_iter()
            .find_map(|name| self.denied.matching_pattern(name))
        {
            return ToolRule::Denied(pattern.to_owned());
        }
        self.allowed.allows(names).unwrap_or(ToolRule::NotListed)
    }

    /// The rule that denies a tool of any other source, by its full name; `None` when none does.
    pub fn denying_rule(&self, name: &str) -> Option<ToolRule> {
        self.denied_by(name)
            .map(|pattern| ToolRule::Denied(pattern.to_owned()))
    }

    /// The pattern of `denied` that matches the full name of a tool of any other source.
    pub fn denied_by(&self, name: &str) -> Option<&str> {
        self.denied.matching_pattern(name)
    }
}

impl AllowList {
    fn new(tools: &AgentToolSettings) -> Self {
        let mut allowed = Self::default();
        if tools.allowed.is_empty() {
            allowed.allow_all_rule = Some(ToolRule::AllOfUse);
        }
        for entry in &tools.allowed {
            if entry == "*" {
                allowed.allow_all_rule = Some(ToolRule::Allowed(entry.clone()));
            } else if let Some(target) = tools.aliases.get(entry) {
                allowed.canonical.insert(target.clone(), entry.clone());
            } else if let Some((id, tool)) = split_canonical_name(entry) {
                match tool {
                    "*" => drop(allowed.ids.insert(id.to_owned())),
                    _ => drop(allowed.canonical.insert(entry.clone(), entry.clone())),
                }
            } else {
                allowed.plain.insert(entry.clone());
            }
        }
        allowed
    }

    fn allows(&self, names: ToolNames<'_>) -> Option<ToolRule> {
        if let Some(rule) = &self.allow_all_rule {
            return Some(rule.clone());
        }
        let by = |entry: &str| ToolRule::Allowed(entry.to_owned());
        if let Some(entry) = names.canonical.and_then(|name| self.canonical.get(name)) {
            return Some(by(entry));
        }
        if self.plain.contains(names.plain) {
            return Some(by(names.plain));
        }
        self.ids
            .contains(names.id)
            .then(|| by(&format!("@{}/*", names.id)))
    }
}

/// The patterns of `denied`, sorted by kind so that ten thousand of them against ten thousand tools stay
/// cheap: exact names and prefixes are looked up in maps, only the other globs are tried one by one.
#[derive(Debug, Default)]
struct DenyList {
    exact: HashSet<String>,
    prefixes: HashMap<usize, HashMap<String, String>>,
    globs: Vec<String>,
}

impl DenyList {
    fn new(patterns: &[String]) -> Self {
        let mut denied = Self::default();
        for pattern in patterns {
            match pattern.find('*') {
                None => drop(denied.exact.insert(pattern.clone())),
                Some(star) if star + 1 == pattern.len() => {
                    let prefix = pattern[..star].to_owned();
                    denied
                        .prefixes
                        .entry(star)
                        .or_default()
                        .insert(prefix, pattern.clone());
                }
                Some(_) => denied.globs.push(pattern.clone()),
            }
        }
        denied
    }

    fn matching_pattern(&self, name: &str) -> Option<&str> {
        if let Some(whole) = self.exact.get(name) {
            return Some(whole);
        }
        let prefixed = self
            .prefixes
            .iter()
            .find_map(|(length, set)| set.get(name.get(..*length)?));
        prefixed
            .or_else(|| self.globs.iter().find(|glob| glob_matches(glob, name)))
            .map(String::as_str)
    }
}

/// Whether a pattern matches a whole name; `*` stands for any run of characters, even none.
///
/// It backtracks only to the last star, so the cost is at most pattern × name and never exponential.
pub fn glob_matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                back = Some((p + 1, n));
                p += 1;
            }
            Some(&byte) if byte == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match back {
                Some((after_star, from)) => {
                    back = Some((after_star, from + 1));
                    p = after_star;
                    n = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn rules(tools: serde_json::Value) -> ToolRules {
        ToolRules::new(&serde_json::from_value(tools).unwrap())
    }

    fn ask(rules: &ToolRules, id: &str, tool: &str, aliases: &[&str]) -> ToolRule {
        let aliases: Vec<String> = aliases.iter().map(|a| (*a).into()).collect();
        let (canonical, plain) = (format!("@{id}/{tool}"), format!("{id}_{tool}"));
        rules.judge_catalog_tool(ToolNames {
            id,
            canonical: Some(&canonical),
            plain: &plain,
            aliases: &aliases,
        })
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

    #[test]
    fn many_stars_do_not_backtrack_exponentially() {
        let pattern = "*a".repeat(100);
        assert!(!glob_matches(&pattern, &"a".repeat(99)));
        assert!(glob_matches(&pattern, &"a".repeat(10_000)));
        assert!(!glob_matches(&format!("{pattern}b"), &"a".repeat(10_000)));
    }

    /// The definition of a match, as a recursion without regard to cost.
    fn glob_matches_naive(pattern: &[u8], name: &[u8]) -> bool {
        match pattern.split_first() {
            None => name.is_empty(),
            Some((b'*', rest)) => (0..=name.len()).any(|skip| glob_matches_naive(rest, &name[skip..])),
            Some((byte, rest)) => name.first() == Some(byte) && glob_matches_naive(rest, &name[1..]),
        }
    }

    proptest! {
        #[test]
        fn glob_matches_agrees_with_the_naive_version(pattern in "[ab*]{0,8}", name in "[ab]{0,8}") {
            prop_assert_eq!(glob_matches(&pattern, &name), glob_matches_naive(pattern.as_bytes(), name.as_bytes()));
        }

        #[test]
        fn deny_list_agrees_with_glob_matches(patterns in prop::collection::vec("[ab_*]{1,5}", 0..6), name in "[ab_]{0,6}") {
            let denied = DenyList::new(&patterns);
            prop_assert_eq!(denied.matching_pattern(&name).is_some(), patterns.iter().any(|p| glob_matches(p, &name)));
        }
    }
}
