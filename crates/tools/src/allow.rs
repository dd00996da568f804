//! An agent's `allowed` and `denied`, made ready to be asked.
//!
//! `allowed` names catalog tools: by alias, canonical name, `<id>_<tool>`, or all of an entry with `@id/*`.
//! An alias is read as its target, never also as another tool's plain name: what is allowed stays as narrow
//! as it was meant. `denied` is the other way round: a pattern denies a tool if it fits any of its names.

use std::collections::{HashMap, HashSet};

use oubliette_protocol::agent::{AgentTools, split_canonical};

/// What the rules say about a tool, and which rule said it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It may be called.
    Allowed(String),
    /// `allowed` does not name it.
    NotListed,
    /// A pattern of `denied` fits it.
    Denied(String),
}

impl Verdict {
    /// Whether it may be called.
    pub fn allows(&self) -> bool {
        matches!(self, Verdict::Allowed(_))
    }

    /// The rule in words.
    pub fn reason(&self) -> String {
        match self {
            Verdict::Allowed(rule) => rule.clone(),
            Verdict::NotListed => "not named in tools.allowed".into(),
            Verdict::Denied(pattern) => format!("denied by {pattern:?} in tools.denied"),
        }
    }
}

/// Every name of a catalog tool.
#[derive(Debug, Clone, Copy)]
pub struct Names<'a> {
    /// Its entry's id.
    pub id: &'a str,
    /// `@<id>/<tool>`, when it is known.
    pub canonical: Option<&'a str>,
    /// `<id>_<tool>`.
    pub plain: &'a str,
    /// Its aliases.
    pub aliases: &'a [String],
}

/// An agent's rules.
#[derive(Debug, Default)]
pub struct Rules {
    allowed: Allowed,
    denied: Denied,
}

#[derive(Debug, Default)]
struct Allowed {
    /// The whole of `use`, and by which rule.
    everything: Option<&'static str>,
    /// Canonical name → the entry that allows it.
    canonical: HashMap<String, String>,
    /// Plain names.
    plain: HashSet<String>,
    /// Ids whose every tool is allowed.
    ids: HashSet<String>,
}

impl Rules {
    /// Reads an agent's rules.
    pub fn new(tools: &AgentTools) -> Self {
        Self {
            allowed: Allowed::new(tools),
            denied: Denied::new(&tools.denied),
        }
    }

    /// What they say about a catalog tool.
    pub fn catalog(&self, names: Names<'_>) -> Verdict {
        let every = names.canonical.into_iter().chain([names.plain]);
        let every = every.chain(names.aliases.iter().map(String::as_str));
        if let Some(pattern) = every.into_iter().find_map(|name| self.denied.fits(name)) {
            return Verdict::Denied(pattern.to_owned());
        }
        self.allowed
            .allows(names)
            .map_or(Verdict::NotListed, Verdict::Allowed)
    }

    /// The pattern that denies a tool of another source.
    pub fn denies(&self, name: &str) -> Option<&str> {
        self.denied.fits(name)
    }
}

impl Allowed {
    fn new(tools: &AgentTools) -> Self {
        let mut allowed = Self::default();
        if tools.allowed.is_empty() {
            allowed.everything = Some("tools.allowed is empty, so all of tools.use is allowed");
        }
        for entry in &tools.allowed {
            if entry == "*" {
                allowed.everything = Some("allowed by \"*\" in tools.allowed");
            } else if let Some(target) = tools.aliases.get(entry) {
                allowed.canonical.insert(target.clone(), entry.clone());
            } else if let Some((id, tool)) = split_canonical(entry) {
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

    fn allows(&self, names: Names<'_>) -> Option<String> {
        if let Some(rule) = self.everything {
            return Some(rule.to_owned());
        }
        let by = |entry: &str| format!("allowed by {entry:?} in tools.allowed");
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

/// Patterns in three heaps, so that ten thousand of them against ten thousand tools stay cheap: whole names
/// and prefixes are looked up, only the rest is tried one by one.
#[derive(Debug, Default)]
struct Denied {
    whole: HashSet<String>,
    prefixes: HashMap<usize, HashMap<String, String>>,
    globs: Vec<String>,
}

impl Denied {
    fn new(patterns: &[String]) -> Self {
        let mut denied = Self::default();
        for pattern in patterns {
            match pattern.find('*') {
                None => drop(denied.whole.insert(pattern.clone())),
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

    fn fits(&self, name: &str) -> Option<&str> {
        if let Some(whole) = self.whole.get(name) {
            return Some(whole);
        }
        let prefixed = self
            .prefixes
            .iter()
            .find_map(|(length, set)| set.get(name.get(..*length)?));
        prefixed
            .or_else(|| self.globs.iter().find(|glob| glob_fits(glob, name)))
            .map(String::as_str)
    }
}

/// Whether a pattern fits a whole name; `*` stands for any run of characters, even none.
///
/// It goes back only to the last star, so its cost is at most pattern × name and never exponential.
pub fn glob_fits(pattern: &str, name: &str) -> bool {
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

    fn rules(tools: serde_json::Value) -> Rules {
        Rules::new(&serde_json::from_value(tools).unwrap())
    }

    fn ask(rules: &Rules, id: &str, tool: &str, aliases: &[&str]) -> Verdict {
        let aliases: Vec<String> = aliases.iter().map(|a| (*a).into()).collect();
        let (canonical, plain) = (format!("@{id}/{tool}"), format!("{id}_{tool}"));
        rules.catalog(Names {
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
            assert_eq!(ask(&rules, "notes", "read", &[]), Verdict::NotListed, "{entry}");
            assert_eq!(
                ask(&rules, "files", "write", &[]).allows(),
                entry == "@files/*",
                "{entry}"
            );
        }
        // Other patterns name no tool.
        assert_eq!(
            ask(&rules(json!({"allowed":["files_*"]})), "files", "read", &[]),
            Verdict::NotListed
        );
    }

    #[test]
    fn an_alias_that_looks_like_another_tool_allows_only_its_target() {
        let rules = rules(json!({"use":["files","notes"],"allowed":["files_read"],
                                 "aliases":{"files_read":"@notes/x"}}));
        assert!(ask(&rules, "notes", "x", &["files_read"]).allows());
        assert_eq!(ask(&rules, "files", "read", &[]), Verdict::NotListed);
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
                Verdict::Denied(pattern.into())
            );
        }
        let other = rules(json!({"denied":["myapp_*","session_message"]}));
        assert_eq!(other.denies("myapp_send"), Some("myapp_*"));
        assert_eq!(other.denies("session_message"), Some("session_message"));
        assert_eq!(other.denies("session_messages"), None);
        assert_eq!(other.denies("äöü"), None);
    }

    #[test]
    fn a_bomb_of_stars_is_cheap() {
        let pattern = "*a".repeat(100);
        assert!(!glob_fits(&pattern, &"a".repeat(99)));
        assert!(glob_fits(&pattern, &"a".repeat(10_000)));
        assert!(!glob_fits(&format!("{pattern}b"), &"a".repeat(10_000)));
    }

    /// The same, the slow and plain way.
    fn plainly(pattern: &[u8], name: &[u8]) -> bool {
        match pattern.split_first() {
            None => name.is_empty(),
            Some((b'*', rest)) => (0..=name.len()).any(|skip| plainly(rest, &name[skip..])),
            Some((byte, rest)) => name.first() == Some(byte) && plainly(rest, &name[1..]),
        }
    }

    proptest! {
        #[test]
        fn globs_fit_as_defined(pattern in "[ab*]{0,8}", name in "[ab]{0,8}") {
            prop_assert_eq!(glob_fits(&pattern, &name), plainly(pattern.as_bytes(), name.as_bytes()));
        }

        #[test]
        fn denied_heaps_agree_with_the_glob(patterns in prop::collection::vec("[ab_*]{1,5}", 0..6), name in "[ab_]{0,6}") {
            let denied = Denied::new(&patterns);
            prop_assert_eq!(denied.fits(&name).is_some(), patterns.iter().any(|p| glob_fits(p, &name)));
        }
    }
}
