//! The rules that touch one tool, and what they say of one call of it.
//!
//! What holds whatever the arguments are is decided when the rules are compiled. Only where an entry has a `when`, or
//! asks a person, is each call judged ([`ArgumentRules`]).

use std::sync::Arc;

use oubliette_protocol::{
    argument_schema::CheckEffort,
    rule_entry::RuleEntry,
    tool::{ListedRule, RuleList, ToolRule},
};
use serde_json::Value;

/// The rules that touch one tool.
#[derive(Debug, Clone)]
pub struct CallRules {
    /// Whether the tool may be called, with some arguments at least.
    pub verdict: ToolRule,
    /// The entries that touch it: `denied`, `ask`, `allowed`, each list in its order.
    entries: Vec<(RuleList, Arc<RuleEntry>)>,
    /// What is judged for each call; `None` if nothing is.
    by_arguments: Option<Arc<ArgumentRules>>,
}

/// The entries by which each call is judged.
#[derive(Debug, Default)]
pub struct ArgumentRules {
    /// Entries of `denied` with a `when`.
    denied: Vec<Arc<RuleEntry>>,
    /// Entries of `ask`, with and without a `when`.
    ask: Vec<Arc<RuleEntry>>,
    /// Entries of `allowed` with a `when`, one of which must hold. Empty: it is allowed with any arguments.
    allowed: Vec<Arc<RuleEntry>>,
}

/// What an agent's rules say of one call.
#[derive(Debug, Clone, PartialEq)]
pub enum CallJudgement {
    /// It may be made.
    Allowed,
    /// It may be made once a person has allowed it, by these entries of `ask`.
    Ask(Vec<Arc<RuleEntry>>),
    /// It may not, by this rule.
    Blocked(ToolRule),
}

impl CallRules {
    /// Puts the rules of a tool together from the entries that touch it. `granted` is why it may be called if no entry of
    /// `allowed` decides that, as for tools that are not from the catalog.
    pub(crate) fn new(
        denied: Vec<Arc<RuleEntry>>,
        ask: Vec<Arc<RuleEntry>>,
        allowed: Vec<Arc<RuleEntry>>,
        granted: Option<ToolRule>,
    ) -> Self {
        let always = |entries: &[Arc<RuleEntry>]| {
            let unconditional = entries.iter().find(|entry| entry.when.is_none());
            unconditional.map(|entry| entry.tool.clone())
        };
        let (always_denied, always_allowed) = (always(&denied), always(&allowed));
        let verdict = match (always_denied, always_allowed, granted, allowed.first()) {
            (Some(pattern), ..) => ToolRule::Denied(pattern),
            (None, Some(item), ..) => ToolRule::Allowed(item),
            (None, None, Some(granted), _) => granted,
            (None, None, None, Some(entry)) => ToolRule::AllowedWhen(entry.tool.clone()),
            (None, None, None, None) => ToolRule::NotListed,
        };
        let by_arguments = ArgumentRules {
            denied: denied
                .iter()
                .filter(|entry| entry.when.is_some())
                .cloned()
                .collect(),
            ask: ask.clone(),
            allowed: match &verdict {
                ToolRule::AllowedWhen(_) => allowed.clone(),
                _ => Vec::new(),
            },
        };
        let depends = verdict.allows() && !by_arguments.is_empty();
        let lists = [
            (RuleList::Denied, denied),
            (RuleList::Ask, ask),
            (RuleList::Allowed, allowed),
        ];
        let entries = lists
            .into_iter()
            .flat_map(|(list, entries)| entries.into_iter().map(move |entry| (list, entry)));
        Self {
            verdict,
            entries: entries.collect(),
            by_arguments: depends.then(|| Arc::new(by_arguments)),
        }
    }

    /// What is judged for each call; `None` if the verdict holds for all of them.
    pub fn by_arguments(&self) -> Option<&Arc<ArgumentRules>> {
        self.by_arguments.as_ref()
    }

    /// The entries that touch the tool, as `tool_list` shows them.
    pub fn listed(&self) -> Vec<ListedRule> {
        let listed = |(list, entry): &(RuleList, Arc<RuleEntry>)| ListedRule {
            list: *list,
            entry: entry.to_json(),
        };
        self.entries.iter().map(listed).collect()
    }
}

impl ArgumentRules {
    fn is_empty(&self) -> bool {
        self.denied.is_empty() && self.ask.is_empty() && self.allowed.is_empty()
    }

    /// Judges a call by its arguments, an object. `None`: [`CheckEffort::Small`] was not enough to tell. Where
    /// [`CheckEffort::Full`] is not enough either, the answer is the one that allows less.
    pub fn judge(&self, arguments: &Value, effort: CheckEffort) -> Option<CallJudgement> {
        let holds = |entry: &RuleEntry, if_unknown: bool| match effort {
            CheckEffort::Small => entry.holds(arguments, effort),
            CheckEffort::Full => Some(entry.holds(arguments, effort).unwrap_or(if_unknown)),
        };
        for entry in &self.denied {
            if holds(entry, true)? {
                return Some(CallJudgement::Blocked(ToolRule::DeniedWhen(entry.tool.clone())));
            }
        }
        let mut allowed = self.allowed.is_empty();
        for entry in &self.allowed {
            allowed = allowed || holds(entry, false)?;
        }
        if !allowed {
            return Some(CallJudgement::Blocked(ToolRule::NoConditionHolds));
        }
        let mut asking = Vec::new();
        for entry in &self.ask {
            if holds(entry, true)? {
                asking.push(entry.clone());
            }
        }
        Some(match asking.is_empty() {
            true => CallJudgement::Allowed,
            false => CallJudgement::Ask(asking),
        })
    }
}
