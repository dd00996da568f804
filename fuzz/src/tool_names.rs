//! Tool name resolution with arbitrary agents, servers and names.

use std::{collections::HashSet, sync::Arc};

use oubliette_protocol::{CatalogId, agent::AgentToolSettings, tool::ToolRule};
use oubliette_tools::{
    allow::ToolRules,
    pattern_list::glob_matches,
    registry::{NameResolution, OfferedTools, ToolInfo, ToolRegistry},
};

use crate::with_text;

/// It never panics, listed names are unique, and `denied` wins.
///
/// The input, a line each: `u<id>` a catalog entry in use, `t<tool>` a tool of the entry before it, `a<allowed>`,
/// `d<denied>`, `=<alias> <target>`, and `?<name>` (or any other letter) a name to resolve.
pub fn run(bytes: &[u8]) {
    with_text(bytes, resolve);
}

fn resolve(text: &str) {
    let mut tools = AgentToolSettings::default();
    let mut offers: Vec<(CatalogId, Vec<Arc<ToolInfo>>)> = Vec::new();
    let mut called = Vec::new();
    for line in text.lines() {
        let Some(kind) = line.chars().next() else { continue };
        let rest = &line[kind.len_utf8()..];
        match kind {
            'u' => {
                if let Ok(id) = rest.parse()
                    && !tools.uses.contains(&id)
                {
                    tools.uses.push(id.clone());
                    offers.push((id, Vec::new()));
                }
            }
            't' => {
                let info = ToolInfo {
                    name: rest.into(),
                    description: String::new(),
                    input_schema: serde_json::Value::Null.into(),
                    note: None,
                };
                if let Some((_, tools)) = offers.last_mut() {
                    tools.push(info.into());
                }
            }
            'a' => tools.allowed.push(rest.into()),
            'd' => tools.denied.push(rest.into()),
            '=' => {
                if let Some((alias, target)) = rest.split_once(' ') {
                    tools.aliases.insert(alias.into(), target.into());
                }
            }
            _ => called.push(rest),
        }
    }
    let offers: Vec<OfferedTools> = offers
        .into_iter()
        .map(|(id, tools)| OfferedTools {
            id,
            down_reason: None,
            tools: tools.into(),
        })
        .collect();
    let registry = ToolRegistry::new(&tools, Arc::new(ToolRules::new(&tools)), &offers, Arc::default());
    let denied = |name: &str| {
        tools
            .denied
            .iter()
            .any(|pattern| glob_matches(&pattern.tool, name))
    };
    let mut seen = HashSet::new();
    for entry in registry.listed() {
        assert!(seen.insert(entry.name.as_str()), "{} twice", entry.name);
        assert!(
            matches!(registry.resolve(&entry.name), NameResolution::Tool(found) if found.canonical == entry.canonical)
        );
        assert!(!denied(&entry.canonical));
    }
    for name in called {
        if let NameResolution::Tool(entry) = registry.resolve(name) {
            assert!(
                name == &*entry.canonical || name == entry.plain || entry.aliases.iter().any(|a| a == name)
            );
            if denied(name) && name != entry.plain {
                assert!(matches!(entry.rules.verdict, ToolRule::Denied(_)));
            }
        }
    }
}
