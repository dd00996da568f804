//! `oubliette tool test` and `oubliette tool explain`: what a tool would be to an agent.

use std::sync::Arc;

use oubliette_protocol::{
    CatalogId, Error, Result, Slug,
    agent::AgentDefinition,
    relay::method,
    tool::{Light, Source, ToolList, ToolRow},
};
use serde_json::json;

use super::{Context, client::Client, names, output::table, style::Paint, trial::Trial};
use crate::actions;

/// Starts one entry of the catalog and says what came of it.
pub async fn test(id: &str, context: &Context) -> Result<()> {
    let id: CatalogId = id.parse()?;
    let trial = Trial::new(&context.home)?;
    let entry = trial.library.tool(&id)?;
    let definition = json!({ "name": "Trial", "prompt": "None.", "tools": { "use": [id] } });
    let definition: AgentDefinition = serde_json::from_value(definition).map_err(Error::internal)?;
    let tried = trial.hold("trial".parse()?, Arc::new(definition)).await?;
    let row = tried
        .list
        .servers
        .first()
        .ok_or_else(|| Error::internal("the entry was not started"))?;
    if row.status == Light::Red {
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
    context.output.result(&shape, |_| {
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
            Paint::stdout().green("✓")
        );
        match rows.is_empty() {
            true => said,
            false => format!("{said}\n\n{}", table(&["TOOL", "DESCRIPTION"], &rows)),
        }
    });
    Ok(())
}

/// Says whether an agent may call a tool.
pub async fn explain(
    agent: &str,
    tool: &str,
    session: Option<&str>,
    no_start: bool,
    context: &Context,
) -> Result<()> {
    let slug: Slug = agent.parse()?;
    let trial = Trial::new(&context.home)?;
    let definition = trial.library.agent(&slug)?.definition.clone();
    let list = match session {
        Some(session) => {
            let client = Client::running(&context.home).await?;
            let id = names::session(&client, session).await?;
            let runs = client.call("session_get", json!({ "session_id": id })).await?;
            if runs["agent"] != agent {
                let now = runs["agent"].as_str().unwrap_or("another agent");
                return Err(Error::invalid(format!("session {id} runs {now}, not {agent}")));
            }
            let list = client.call("tool_list", json!({ "session_id": id })).await?;
            serde_json::from_value(list).map_err(Error::internal)?
        }
        None => {
            let known = oubliette_tools::preview(&definition, &trial.used(&definition));
            match no_start || settled(&known, tool) {
                true => with_base(known, &definition),
                false => with_base(
                    trial.hold(slug.clone(), definition.clone()).await?.list,
                    &definition,
                ),
            }
        }
    };
    let sentence = oubliette_tools::explain(&slug, &definition, &list, tool);
    let row = find(&list, tool);
    let mut shape = json!({ "agent": slug, "tool": tool, "explanation": sentence });
    shape["allowed"] = json!(row.is_some_and(|row| row.allowed));
    shape["available"] = json!(row.is_some_and(|row| row.available));
    if let Some(row) = row {
        shape["canonical"] = json!(row.canonical);
        shape["source"] = json!(row.source);
        shape["reason"] = json!(row.reason);
    }
    context.output.result(&shape, |_| sentence.clone());
    Ok(())
}

fn find<'a>(list: &'a ToolList, tool: &str) -> Option<&'a ToolRow> {
    list.tools
        .iter()
        .find(|row| row.name == tool || row.canonical == tool || row.aliases.iter().any(|a| a == tool))
}

/// Whether the definitions alone say all there is to say.
fn settled(known: &ToolList, tool: &str) -> bool {
    method::BASE.contains(&tool)
        || known.servers.iter().all(|server| server.status == Light::Green)
        || find(known, tool).is_some_and(|row| row.available || !row.allowed)
}

/// With the tools every agent has.
fn with_base(mut list: ToolList, definition: &AgentDefinition) -> ToolList {
    let rules = oubliette_tools::allow::Rules::new(&definition.tools);
    let base = method::BASE
        .iter()
        .filter_map(|name| actions::find(name))
        .map(actions::spec)
        .map(|spec| {
            let denied = rules.denies(&spec.name);
            ToolRow {
                canonical: spec.name.clone(),
                aliases: Vec::new(),
                source: Source::Base,
                server: None,
                allowed: denied.is_none(),
                reason: Some(match denied {
                    Some(pattern) => format!("denied by {pattern:?} in tools.denied"),
                    None => "a base tool of every agent".into(),
                }),
                available: true,
                description: spec.description,
                input_schema: spec.input_schema,
                name: spec.name,
            }
        });
    list.tools.extend(base);
    list
}
