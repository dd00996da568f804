//! An agent's tools as far as they are known without a session, and why it may call a tool, in a sentence.

use std::sync::Arc;

use oubliette_protocol::{
    CatalogId, Slug,
    agent::AgentDefinition,
    catalog::ToolDefinition,
    id::quoted,
    tool::{HealthStatus, ListedServer, ListedTool, OWN_PREFIX, ToolList, ToolSource},
};

use crate::{
    allow::ToolRules,
    builtin, name,
    registry::{NameResolution, OfferedTools, RegistryEntry, ToolRegistry},
};

/// An agent's tools as far as they are known without starting anything: its built-ins, and the tools its
/// aliases name.
pub fn preview(definition: &AgentDefinition, catalog: &[Arc<ToolDefinition>]) -> ToolList {
    let offers = preview_offers(definition, catalog);
    let registry = build_registry(definition, &offers);
    let now = jiff::Timestamp::now();
    let servers = offers
        .iter()
        .zip(used_entries(definition, catalog))
        .map(|(offer, tool)| ListedServer {
            id: offer.id.clone(),
            transport: tool.transport().into(),
            status: if offer.down_reason.is_none() {
                HealthStatus::Green
            } else {
                HealthStatus::Yellow
            },
            since: now,
            last_check: None,
            error: offer.down_reason.clone(),
            next_retry: None,
            tools: offer.tools.len(),
        });
    ToolList {
        tools: registry.entries().iter().map(RegistryEntry::row).collect(),
        servers: servers.collect(),
    }
}

/// Whether an agent may call a tool, by which rule, and whether a call would reach it, in a sentence or two.
/// `list` comes from a running session or from [`preview`].
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

fn explain_row(agent: &Slug, row: &ListedTool) -> String {
    let what = match row.source {
        ToolSource::Catalog => format!("{} ({}, from the catalog)", row.name, row.canonical),
        ToolSource::Caller | ToolSource::Oubliette | ToolSource::Base => row.name.clone(),
    };
    let rule = row.reason.rule.clause();
    let mut said = match row.allowed {
        true => format!("{agent} may call {what}: {rule}."),
        false => format!("{agent} may not call {what}: {rule}."),
    };
    if let Some(why) = &row.reason.unavailable {
        said += &format!(" A call would not reach it: {}.", one_line(why));
    }
    if !row.reason.notes.is_empty() {
        said += &format!(" Note: {}.", one_line(&row.reason.notes.join("; ")));
    }
    said
}

fn explain_absent(agent: &Slug, definition: &AgentDefinition, list: &ToolList, tool: &str) -> String {
    let offers: Vec<OfferedTools> = list
        .servers
        .iter()
        .map(|row| OfferedTools {
            id: row.id.clone(),
            down_reason: (row.status != HealthStatus::Green)
                .then(|| row.error.clone().unwrap_or_else(|| "it is not ready".into())),
            tools: Arc::default(),
        })
        .collect();
    let registry = build_registry(definition, &offers);
    let shown = quoted(tool);
    if let Some(rule) = registry.rules().denying_rule(tool) {
        return format!("{agent} may not call {shown}: {}.", rule.clause());
    }
    match registry.resolve(tool) {
        NameResolution::Missing {
            id,
            verdict,
            down_reason: down,
        } => {
            let rule = verdict.clause();
            match (down.map(one_line), verdict.allows()) {
                (Some(why), true) => format!(
                    "{agent} may call {shown} if {id} has such a tool, which is not known: {why}. The rule: {}.",
                    rule
                ),
                (Some(why), false) => format!(
                    "{agent} may not call {shown}: {}. Whether {id} has such a tool is not known: {why}.",
                    rule
                ),
                (None, true) => format!("{agent} cannot call {shown}: {id} has no such tool."),
                (None, false) => format!(
                    "{agent} cannot call {shown}: {id} has no such tool, and {}.",
                    rule
                ),
            }
        }
        NameResolution::NotUsed { id } => {
            format!(
                "{agent} may not call {shown}: tools.use does not name {}.",
                quoted(id)
            )
        }
        NameResolution::Tool(entry) => explain_row(agent, &entry.row()),
        NameResolution::Unknown if tool.starts_with(OWN_PREFIX) => format!(
            "{agent} may call {shown} as far as its key reaches: one of Oubliette's own tools, listed to sessions \
             that have an OUBLIETTE_API_KEY."
        ),
        NameResolution::Unknown => {
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

/// A text on one line and without its full stop, to stand inside a sentence.
fn one_line(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    lines.join("; ").trim_end_matches('.').to_owned()
}

fn used_entries<'a>(
    definition: &'a AgentDefinition,
    catalog: &'a [Arc<ToolDefinition>],
) -> Vec<&'a ToolDefinition> {
    let find = |id: &CatalogId| catalog.iter().find(|tool| tool.id() == id).map(|tool| &**tool);
    definition.tools.uses.iter().filter_map(find).collect()
}

fn preview_offers(definition: &AgentDefinition, catalog: &[Arc<ToolDefinition>]) -> Vec<OfferedTools> {
    let offer = |tool: &ToolDefinition| match tool {
        ToolDefinition::Builtin(entry) => OfferedTools {
            id: entry.id.clone(),
            down_reason: None,
            tools: [builtin::tool_info(entry)].into(),
        },
        ToolDefinition::Mcp(server) => OfferedTools {
            id: server.id.clone(),
            down_reason: Some("it is started with a session".into()),
            tools: Arc::default(),
        },
    };
    used_entries(definition, catalog).into_iter().map(offer).collect()
}

/// A registry that knows no catalog entry outside `tools.use`.
fn build_registry(definition: &AgentDefinition, offers: &[OfferedTools]) -> ToolRegistry {
    let rules = Arc::new(ToolRules::new(&definition.tools));
    ToolRegistry::new(&definition.tools, rules, offers, Arc::default())
}
