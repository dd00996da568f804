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
    allow::Rules,
    builtin, name,
    registry::{Entry, Found, Offer, Registry},
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

/// Whether an agent may call a tool, by which rule, and whether a call would reach it, in a sentence.
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
        Source::Caller => format!("{} (lent by a caller)", row.name),
        Source::Oubliette => format!("{} (Oubliette's own)", row.name),
        Source::Base => format!("{} (a base tool)", row.name),
    };
    let verb = match (row.allowed, row.available) {
        (true, true) => "may call",
        (true, false) => "may call, but cannot reach,",
        (false, _) => "may not call",
    };
    let why = row.reason.as_deref().unwrap_or("no rule is against it");
    format!("{agent} {verb} {what}: {why}.")
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
    if let Some(pattern) = registry.rules().denies(tool) {
        return format!(
            "{agent} may not call {}: denied by {pattern:?} in tools.denied.",
            quoted(tool)
        );
    }
    match registry.resolve(tool) {
        Found::Missing { id, verdict, down } => {
            let there = match down {
                Some(why) => format!("whether {id} has such a tool is not known, it is not up: {why}"),
                None => format!("{id} has no such tool"),
            };
            format!("{agent}: {there}; by the rules it is {}.", verdict.reason())
        }
        Found::NotUsed { id } => {
            format!(
                "{agent} may not call {}: tools.use does not name {}.",
                quoted(tool),
                quoted(id)
            )
        }
        Found::Tool(entry) => explain_row(agent, &entry.row()),
        Found::Unknown => {
            let names = list.tools.iter().map(|row| row.name.as_str());
            let near = name::nearest(tool, names);
            let hint = if near.is_empty() {
                String::new()
            } else {
                format!(" Did you mean {}?", near.join(" or "))
            };
            format!("{agent} has no tool {}.{hint}", quoted(tool))
        }
    }
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
