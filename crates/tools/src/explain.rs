//! Why a tool is there, or not: for an agent that runs nowhere yet, and in a sentence.

use std::{collections::HashSet, sync::Arc};

use oubliette_protocol::{
    CatalogId, Slug,
    agent::AgentDefinition,
    catalog::ToolDefinition,
    id::quoted,
    tool::{Light, ServerRow, Source, ToolList, ToolRow},
};

use crate::{
    allow::{Rules, Verdict},
    builtin, name,
    registry::{Entry, Found, NOTE, Offer, Registry, UNAVAILABLE},
};

/// What an agent's tools are as far as they are known without starting anything: its built-ins, and the
/// names its aliases give.
pub fn preview(definition: &AgentDefinition, catalog: &[Arc<ToolDefinition>]) -> ToolList {
    let offers = offers(definition, catalog);
    let registry = registry(definition, &offers, &HashSet::new());
    let now = jiff::Timestamp::now();
    let servers = offers
        .iter()
        .zip(used(definition, catalog))
        .map(|(offer, tool)| ServerRow {
            id: offer.id.clone(),
            transport: tool.transport().into(),
            status: if offer.down.is_none() {
                Light::Green
            } else {
                Light::Yellow
            },
            since: now,
            last_check: None,
            error: offer.down.clone(),
            next_retry: None,
            tools: offer.tools.len(),
        });
    ToolList {
        tools: registry.entries().iter().map(Entry::row).collect(),
        servers: servers.collect(),
    }
}

/// Whether an agent may call a tool, by which rule, and whether a call would reach it, in a sentence or two.
/// `list` is what a running session or [`preview`] shows.
pub fn explain(agent: &Slug, definition: &AgentDefinition, list: &ToolList, tool: &str) -> String {
    let row = list
        .tools
        .iter()
        .find(|row| row.name == tool || row.canonical == tool);
    let row = row.or_else(|| {
        list.tools
            .iter()
            .find(|row| row.aliases.iter().any(|alias| alias == tool))
    });
    match row {
        Some(row) => explain_row(agent, row),
        None => explain_absent(agent, definition, list, tool),
    }
}

fn explain_row(agent: &Slug, row: &ToolRow) -> String {
    let what = match row.source {
        Source::Catalog => format!("{} ({}, from the catalog)", row.name, row.canonical),
        Source::Caller | Source::Oubliette | Source::Base => row.name.clone(),
    };
    let reason = row.reason.as_deref().unwrap_or("no rule is against it");
    let (reason, note) = split(reason, NOTE);
    let (rule, why) = split(reason, UNAVAILABLE);
    let mut said = match row.allowed {
        true => format!("{agent} may call {what}: {}.", clause(rule)),
        false => format!("{agent} may not call {what}: {}.", clause(rule)),
    };
    if let Some(why) = why {
        said += &format!(" A call would not reach it: {}.", bare(why));
    }
    if let Some(note) = note {
        said += &format!(" Note: {}.", bare(&note.replace(NOTE, "; ")));
    }
    said
}

fn explain_absent(agent: &Slug, definition: &AgentDefinition, list: &ToolList, tool: &str) -> String {
    let offers: Vec<Offer> = list
        .servers
        .iter()
        .map(|row| Offer {
            id: row.id.clone(),
            down: (row.status != Light::Green)
                .then(|| row.error.clone().unwrap_or_else(|| "it is not ready".into())),
            tools: Arc::default(),
        })
        .collect();
    let registry = registry(definition, &offers, &HashSet::new());
    let shown = quoted(tool);
    if let Some(pattern) = registry.rules().denies(tool) {
        let verdict = Verdict::Denied(pattern.to_owned());
        return format!("{agent} may not call {shown}: {}.", clause(&verdict.reason()));
    }
    match registry.resolve(tool) {
        Found::Missing { id, verdict, down } => {
            let rule = verdict.reason();
            match (down.map(bare), verdict.allows()) {
                (Some(why), true) => format!(
                    "{agent} may call {shown} if {id} has such a tool, which is not known: {why}. The rule: {}.",
                    clause(&rule)
                ),
                (Some(why), false) => format!(
                    "{agent} may not call {shown}: {}. Whether {id} has such a tool is not known: {why}.",
                    clause(&rule)
                ),
                (None, true) => format!("{agent} cannot call {shown}: {id} has no such tool."),
                (None, false) => format!(
                    "{agent} cannot call {shown}: {id} has no such tool, and {}.",
                    clause(&rule)
                ),
            }
        }
        Found::NotUsed { id } => {
            format!(
                "{agent} may not call {shown}: tools.use does not name {}.",
                quoted(id)
            )
        }
        Found::Tool(entry) => explain_row(agent, &entry.row()),
        Found::Unknown if tool.starts_with(name::OWN_PREFIX) => format!(
            "{agent} may call {shown} as far as its key reaches: one of Oubliette's own tools, listed to sessions \
             that have an OUBLIETTE_API_KEY."
        ),
        Found::Unknown => {
            let names = list.tools.iter().map(|row| row.name.as_str());
            let near = name::nearest(tool, names);
            let hint = if near.is_empty() {
                String::new()
            } else {
                format!(" Did you mean {}?", near.join(" or "))
            };
            format!("{agent} has no tool {shown}.{hint}")
        }
    }
}

fn split<'a>(reason: &'a str, at: &str) -> (&'a str, Option<&'a str>) {
    match reason.split_once(at) {
        Some((before, after)) => (before, Some(after)),
        None => (reason, None),
    }
}

/// A rule as the second half of a sentence.
fn clause(rule: &str) -> String {
    const BEGUN: [&str; 6] = [
        "allowed by",
        "denied by",
        "not named",
        "a base tool",
        "lent by",
        "within reach",
    ];
    match BEGUN.iter().any(|begin| rule.starts_with(begin)) {
        true => format!("it is {}", bare(rule)),
        false => bare(rule),
    }
}

/// A text on one line, without the full stop that the sentence around it has.
fn bare(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    lines.join("; ").trim_end_matches('.').to_owned()
}

fn used<'a>(definition: &'a AgentDefinition, catalog: &'a [Arc<ToolDefinition>]) -> Vec<&'a ToolDefinition> {
    let find = |id: &CatalogId| catalog.iter().find(|tool| tool.id() == id).map(|tool| &**tool);
    definition.tools.uses.iter().filter_map(find).collect()
}

fn offers(definition: &AgentDefinition, catalog: &[Arc<ToolDefinition>]) -> Vec<Offer> {
    let offer = |tool: &ToolDefinition| match tool {
        ToolDefinition::Builtin(entry) => Offer {
            id: entry.id.clone(),
            down: None,
            tools: [builtin::info(entry)].into(),
        },
        ToolDefinition::Mcp(server) => Offer {
            id: server.id.clone(),
            down: Some("it is started with a session".into()),
            tools: Arc::default(),
        },
    };
    used(definition, catalog).into_iter().map(offer).collect()
}

fn registry(definition: &AgentDefinition, offers: &[Offer], known: &HashSet<CatalogId>) -> Registry {
    let rules = Arc::new(Rules::new(&definition.tools));
    Registry::new(&definition.tools, rules, offers, Arc::new(known.clone()))
}
