//! An agent's tools as far as they are known without a session, and why it may call a tool, in a sentence.

use std::sync::Arc;

use oubliette_protocol::{
    CatalogId, JsonObject, Result, Slug,
    agent::{AgentDefinition, split_canonical_name},
    catalog::ToolDefinition,
    id::quoted,
    relay::method,
    tool::{
        HealthStatus, ListedRule, ListedServer, ListedTool, OWN_PREFIX, RuleList, ToolList, ToolRule,
        ToolSource,
    },
};
use serde_json::Value;
use tokio::sync::Semaphore;

use crate::{
    allow::{ToolNames, ToolRules},
    builtin,
    call_rules::{CallJudgement, CallRules},
    name,
    plane::argument_check::judge_arguments,
    registry::{NameResolution, OfferedTools, RegistryEntry, ToolInfo, ToolRegistry},
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

/// Like [`preview`], with the tools that a running session knows: so that a definition that is not saved yet can be judged
/// by the tools that its servers really offer.
pub fn preview_known(
    definition: &AgentDefinition,
    catalog: &[Arc<ToolDefinition>],
    known: &ToolList,
) -> ToolList {
    let mut offers = preview_offers(definition, catalog);
    for offer in offers.iter_mut().filter(|offer| offer.tools.is_empty()) {
        let own = known.tools.iter().filter(|row| row.source == ToolSource::Catalog);
        let own = own.filter_map(|row| {
            let (id, name) = split_canonical_name(&row.canonical)?;
            (id == offer.id.as_str()).then(|| {
                Arc::new(ToolInfo {
                    name: name.into(),
                    description: row.description.clone(),
                    input_schema: Arc::new(row.input_schema.clone()),
                    note: None,
                })
            })
        });
        offer.tools = own.collect();
        let server = known.servers.iter().find(|server| server.id == offer.id);
        if let Some(server) = server {
            offer.down_reason = (server.status == HealthStatus::Red)
                .then(|| server.error.clone().unwrap_or_else(|| "it is not ready".into()));
        }
    }
    let registry = build_registry(definition, &offers);
    ToolList {
        tools: registry.entries().iter().map(RegistryEntry::row).collect(),
        servers: Vec::new(),
    }
}

/// The tools of a running session that are not from the catalog, judged by the rules of a definition.
pub fn judge_other_tools(definition: &AgentDefinition, known: &ToolList) -> Vec<ListedTool> {
    let rules = ToolRules::new(&definition.tools);
    let judge = |row: &ListedTool| {
        let granted = match row.source {
            ToolSource::Catalog => return None,
            ToolSource::Base => ToolRule::BaseTool,
            ToolSource::Caller => ToolRule::Lent,
            ToolSource::Oubliette => ToolRule::WithinKey,
        };
        let rules = rules.of_other_tool(&row.name, granted);
        Some(ListedTool {
            allowed: rules.verdict.allows(),
            rules: rules.listed(),
            reason: rules.verdict.into(),
            ..row.clone()
        })
    };
    known.tools.iter().filter_map(judge).collect()
}

/// Whether an agent may call a tool, by which rule, and whether a call would reach it, in a sentence or two.
/// `list` comes from a running session or from [`preview`].
pub fn explain(agent: &Slug, definition: &AgentDefinition, list: &ToolList, tool: &str) -> String {
    explain_by_name(agent, definition, list, tool).0
}

/// What [`explain`] says, and what the agent's rules say of a call with these arguments.
pub async fn explain_call(
    agent: &Slug,
    definition: &AgentDefinition,
    list: &ToolList,
    tool: &str,
    arguments: JsonObject,
) -> Result<String> {
    let (said, rules) = explain_by_name(agent, definition, list, tool);
    let Some(rules) = rules else {
        return Ok(said);
    };
    let judgement = match rules.by_arguments() {
        None => CallJudgement::Allowed,
        Some(rules) => {
            let (judgement, _) = judge_arguments(rules.clone(), arguments, &Semaphore::new(1)).await?;
            judgement
        }
    };
    Ok(match judgement {
        CallJudgement::Allowed => format!("{said} With these arguments it may be called."),
        CallJudgement::Ask(entries) => {
            let entry = entries.first().map(|entry| entry.to_json()).unwrap_or_default();
            format!(
                "{said} With these arguments it may be called once a person has allowed it, by {entry} in tools.ask."
            )
        }
        CallJudgement::Blocked(rule) => {
            format!(
                "{said} With these arguments it may not be called: {}.",
                rule.clause()
            )
        }
    })
}

/// The sentences of [`explain`], and the rules by which a call would be judged; `None` if none can be allowed.
fn explain_by_name(
    agent: &Slug,
    definition: &AgentDefinition,
    list: &ToolList,
    tool: &str,
) -> (String, Option<CallRules>) {
    match find_row(list, tool) {
        Some(row) => {
            let rules = || rules_of_row(&ToolRules::new(&definition.tools), row);
            (explain_row(agent, row), row.allowed.then(rules))
        }
        None => explain_absent(agent, definition, list, tool),
    }
}

fn find_row<'a>(list: &'a ToolList, tool: &str) -> Option<&'a ListedTool> {
    let named = list
        .tools
        .iter()
        .find(|row| row.name == tool || row.canonical == tool);
    named.or_else(|| {
        list.tools
            .iter()
            .find(|row| row.aliases.iter().any(|alias| alias == tool))
    })
}

/// The rules that touch a listed tool.
fn rules_of_row(rules: &ToolRules, row: &ListedTool) -> CallRules {
    let catalog_id = row.server.as_deref().and_then(|id| id.parse::<CatalogId>().ok());
    match (row.source, catalog_id, split_canonical_name(&row.canonical)) {
        (ToolSource::Catalog, Some(id), Some((_, tool))) => {
            let plain = name::plain(&id, tool);
            let aliases = std::iter::once(&row.name).chain(&row.aliases);
            let aliases: Vec<String> = aliases.filter(|alias| **alias != plain).cloned().collect();
            rules.of_catalog_tool(ToolNames {
                id: id.as_str(),
                canonical: Some(&row.canonical),
                plain: &plain,
                aliases: &aliases,
            })
        }
        _ => rules.of_other_tool(&row.name, row.reason.rule.clone()),
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
    if row.allowed {
        said.extend(row.rules.iter().filter_map(explain_rule));
    }
    if let Some(why) = &row.reason.unavailable {
        said += &format!(" A call would not reach it: {}.", one_line(why));
    }
    if !row.reason.notes.is_empty() {
        said += &format!(" Note: {}.", one_line(&row.reason.notes.join("; ")));
    }
    said
}

/// What an entry that does not hold for every call does, as a sentence.
fn explain_rule(rule: &ListedRule) -> Option<String> {
    const LONGEST_CONDITION: usize = 400;
    let condition = rule.entry.get("when").map(Value::to_string);
    let condition = condition.map(|text| match text.char_indices().nth(LONGEST_CONDITION) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    });
    match (rule.list, condition) {
        (RuleList::Denied, Some(when)) => Some(format!(
            " tools.denied denies calls with arguments that fit {when}."
        )),
        (RuleList::Ask, Some(when)) => Some(format!(
            " Calls with arguments that fit {when} wait for a person's approval (tools.ask)."
        )),
        (RuleList::Ask, None) => Some(" Calls wait for a person's approval (tools.ask).".into()),
        (RuleList::Allowed, Some(when)) => Some(format!(
            " tools.allowed allows calls with arguments that fit {when}."
        )),
        (RuleList::Denied | RuleList::Allowed, None) => None,
    }
}

/// Like [`explain_by_name`], for a tool that is not in the list.
fn explain_absent(
    agent: &Slug,
    definition: &AgentDefinition,
    list: &ToolList,
    tool: &str,
) -> (String, Option<CallRules>) {
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
        return (format!("{agent} may not call {shown}: {}.", rule.clause()), None);
    }
    match registry.resolve(tool) {
        NameResolution::Missing {
            id,
            rules,
            down_reason: down,
        } => {
            let rule = rules.verdict.clause();
            match (down.map(one_line), rules.verdict.allows()) {
                (Some(why), true) => with_rules(
                    format!(
                        "{agent} may call {shown} if {id} has such a tool, which is not known: {why}. The rule: {rule}."
                    ),
                    rules,
                ),
                (Some(why), false) => {
                    let said = format!(
                        "{agent} may not call {shown}: {rule}. Whether {id} has such a tool is not known: {why}."
                    );
                    (said, None)
                }
                (None, true) => (
                    format!("{agent} cannot call {shown}: {id} has no such tool."),
                    None,
                ),
                (None, false) => {
                    let said = format!("{agent} cannot call {shown}: {id} has no such tool, and {rule}.");
                    (said, None)
                }
            }
        }
        NameResolution::NotUsed { id } => {
            let said = format!(
                "{agent} may not call {shown}: tools.use does not name {}.",
                quoted(id)
            );
            (said, None)
        }
        NameResolution::Tool(entry) => {
            let row = entry.row();
            (explain_row(agent, &row), row.allowed.then(|| entry.rules.clone()))
        }
        NameResolution::Unknown => explain_other(agent, registry.rules(), list, tool),
    }
}

/// Like [`explain_absent`], for a tool that is not from the catalog.
fn explain_other(
    agent: &Slug,
    rules: &ToolRules,
    list: &ToolList,
    tool: &str,
) -> (String, Option<CallRules>) {
    let shown = quoted(tool);
    if method::BASE_TOOLS.contains(&tool) {
        let rules = rules.of_other_tool(tool, ToolRule::BaseTool);
        let said = format!("{agent} may call {tool}: {}.", rules.verdict.clause());
        return with_rules(said, rules);
    }
    if tool.starts_with(OWN_PREFIX) {
        let said = format!(
            "{agent} may call {shown} as far as its key reaches: one of Oubliette's own tools, listed to sessions \
             that have an OUBLIETTE_API_KEY."
        );
        return with_rules(said, rules.of_other_tool(tool, ToolRule::WithinKey));
    }
    let lent = rules.of_other_tool(tool, ToolRule::Lent);
    if name::split_owner(tool).is_some() && !lent.listed().is_empty() {
        return with_rules(
            format!("{agent} has no tool {shown} unless a caller lends it."),
            lent,
        );
    }
    let names = list.tools.iter().map(|row| row.name.as_str());
    let near = name::nearest(tool, names);
    let hint = if near.is_empty() {
        String::new()
    } else {
        format!(" Did you mean {}?", near.join(" or "))
    };
    (format!("{agent} has no tool {shown}.{hint}"), None)
}

/// Adds what the entries that do not hold for every call do.
fn with_rules(mut said: String, rules: CallRules) -> (String, Option<CallRules>) {
    said.extend(rules.listed().iter().filter_map(explain_rule));
    (said, Some(rules))
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
