//! `oubliette tool test` starts a catalog entry and lists its tools; `oubliette tool explain` says whether an agent
//! may call a tool.

use std::sync::Arc;

use oubliette_protocol::{
    CatalogId, Error, Result, Slug,
    agent::AgentDefinition,
    relay::method,
    tool::{HealthStatus, ListedTool, ToolList, ToolRule, ToolSource, arguments_object},
};
use serde_json::json;

use super::{
    CommandContext, client::ActionClient, files, output::format_table, program, resolve, style::AnsiStyle,
};
use crate::{actions, trial::ToolTrial};

/// Starts one catalog entry and prints its tools and how long it took.
pub(crate) async fn test_entry(id: &str, context: &CommandContext) -> Result<()> {
    context.require_home("tool test")?;
    let id: CatalogId = id.parse()?;
    let trial = ToolTrial::new(&context.home)?;
    let entry = trial.library.tool(&id)?;
    program::ensure_installed(&entry.definition, context).await?;
    let definition = json!({ "name": "Trial", "prompt": "None.", "tools": { "use": [id] } });
    let definition: AgentDefinition = serde_json::from_value(definition).map_err(Error::internal)?;
    let tried = trial.run("trial".parse()?, Arc::new(definition)).await?;
    let row = tried
        .list
        .servers
        .first()
        .ok_or_else(|| Error::internal("the entry was not started"))?;
    if row.status == HealthStatus::Red {
        let why = row.error.as_deref().unwrap_or("it did not become ready");
        return Err(Error::unavailable(format!("{id} could not be started: {why}")));
    }
    let took_ms = u64::try_from(tried.took.as_millis()).unwrap_or(u64::MAX);
    let tools: Vec<_> = tried
        .list
        .tools
        .iter()
        .map(|tool| json!({ "name": tool.canonical, "description": tool.description, "inputSchema": tool.input_schema }))
        .collect();
    let shape = json!({
        "id": id,
        "transport": entry.definition.transport(),
        "status": row.status,
        "took_ms": took_ms,
        "tools": tools,
    });
    context.output.print_result(&shape, |_| {
        let rows: Vec<_> = tried
            .list
            .tools
            .iter()
            .map(|t| vec![t.canonical.clone(), t.description.clone()])
            .collect();
        let count = match rows.len() {
            1 => "1 tool".to_owned(),
            n => format!("{n} tools"),
        };
        let said = format!(
            "{} {id} was ready in {took_ms} ms with {count}",
            AnsiStyle::stdout().green("✓")
        );
        match rows.is_empty() {
            true => said,
            false => format!("{said}\n\n{}", format_table(&["TOOL", "DESCRIPTION"], &rows)),
        }
    });
    Ok(())
}

/// What `oubliette tool explain` is asked.
pub(crate) struct ExplainQuestion<'a> {
    /// The agent.
    pub agent: &'a str,
    /// Any name of the tool.
    pub tool: &'a str,
    /// The running session to answer for.
    pub session: Option<&'a str>,
    /// Whether to start no servers.
    pub no_start: bool,
    /// Arguments of a call, as JSON.
    pub arguments: Option<&'a str>,
}

/// Prints whether an agent may call a tool, and by which rule. Without a session the agent's tool servers are started
/// to list their tools, unless the definitions already decide or `no_start` is given.
pub(crate) async fn explain_tool(question: ExplainQuestion<'_>, context: &CommandContext) -> Result<()> {
    let ExplainQuestion {
        agent,
        tool,
        session,
        no_start,
        arguments,
    } = question;
    let arguments = match arguments {
        Some(given) => Some(arguments_object(Some(files::read_arguments(given)?))?),
        None => None,
    };
    context.require_home("tool explain")?;
    let slug: Slug = agent.parse()?;
    let trial = ToolTrial::new(&context.home)?;
    let definition = trial.library.agent(&slug)?.definition.clone();
    let list = match session {
        Some(session) => {
            let client = ActionClient::connect_running(context).await?;
            let id = resolve::session_id(&client, session).await?;
            let runs = client.call("session_get", json!({ "session_id": id })).await?;
            if runs["agent"] != agent {
                let now = runs["agent"].as_str().unwrap_or("another agent");
                return Err(Error::invalid(format!("session {id} runs {now}, not {agent}")));
            }
            let list = client.call("tool_list", json!({ "session_id": id })).await?;
            serde_json::from_value(list).map_err(Error::internal)?
        }
        None => {
            let known = oubliette_tools::preview(&definition, &trial.used_definitions(&definition));
            match no_start || is_known_without_start(&known, tool) {
                true => with_base_tools(known, &definition),
                false => with_base_tools(
                    trial.run(slug.clone(), definition.clone()).await?.list,
                    &definition,
                ),
            }
        }
    };
    let sentence = match arguments {
        None => oubliette_tools::explain(&slug, &definition, &list, tool),
        Some(arguments) => oubliette_tools::explain_call(&slug, &definition, &list, tool, arguments).await?,
    };
    let row = find_row(&list, tool);
    let mut shape = json!({ "agent": slug, "tool": tool, "explanation": sentence });
    shape["allowed"] = json!(row.is_some_and(|row| row.allowed));
    shape["available"] = json!(row.is_some_and(|row| row.available));
    if let Some(row) = row {
        shape["canonical"] = json!(row.canonical);
        shape["source"] = json!(row.source);
        shape["reason"] = json!(row.reason.to_string());
        shape["rules"] = json!(row.rules);
    }
    context.output.print_result(&shape, |_| sentence.clone());
    Ok(())
}

fn find_row<'a>(list: &'a ToolList, tool: &str) -> Option<&'a ListedTool> {
    list.tools
        .iter()
        .find(|row| row.name == tool || row.canonical == tool || row.aliases.iter().any(|a| a == tool))
}

/// Whether the definitions alone decide, so that no tool server has to be started.
fn is_known_without_start(known: &ToolList, tool: &str) -> bool {
    method::BASE_TOOLS.contains(&tool)
        || known
            .servers
            .iter()
            .all(|server| server.status == HealthStatus::Green)
        || find_row(known, tool).is_some_and(|row| row.available || !row.allowed)
}

/// Adds the base tools, which every agent has, to a list made without a session.
fn with_base_tools(mut list: ToolList, definition: &AgentDefinition) -> ToolList {
    let rules = oubliette_tools::allow::ToolRules::new(&definition.tools);
    let base = method::BASE_TOOLS
        .iter()
        .filter_map(|name| actions::find(name))
        .map(actions::tool_spec)
        .map(|spec| {
            let rules = rules.of_other_tool(&spec.name, ToolRule::BaseTool);
            ListedTool {
                canonical: spec.name.clone(),
                aliases: Vec::new(),
                source: ToolSource::Base,
                server: None,
                allowed: rules.verdict.allows(),
                rules: rules.listed(),
                reason: rules.verdict.into(),
                available: true,
                description: spec.description,
                input_schema: spec.input_schema,
                name: spec.name,
            }
        });
    list.tools.extend(base);
    list
}
