//! Builds `tool_list`: every tool of every source, with the rule that allows or denies it.

use std::collections::HashSet;

use oubliette_protocol::{
    Result,
    caller::full_name,
    tool::{ListedTool, OWN_PREFIX, ToolList, ToolRule, ToolSource, ToolSpec},
};

use crate::{name, registry::ToolRegistry};

use super::ToolPlane;

impl ToolPlane {
    /// Base, caller and catalog tools, and the servers. Oubliette's own are in [`ToolPlane::list_own`].
    pub fn list(&self) -> ToolList {
        let Some(context) = self.context() else {
            return ToolList::default();
        };
        let registry = context.registry();
        let mut tools = Vec::new();
        for spec in self.parts.own.base_specs() {
            tools.push(tool_row(
                &registry,
                spec,
                ToolSource::Base,
                None,
                ToolRule::BaseTool,
            ));
        }
        for lender in self.parts.callers.declarations() {
            for tool in &lender.tools {
                let spec = ToolSpec {
                    name: full_name(&lender.caller_id, &tool.name),
                    description: tool.description.clone(),
                    input_schema: tool.input_schema.clone(),
                };
                let server = Some(lender.caller_id.to_string());
                tools.push(tool_row(
                    &registry,
                    spec,
                    ToolSource::Caller,
                    server,
                    ToolRule::Lent,
                ));
            }
        }
        let lent = self.lent_names();
        tools.extend(registry.entries().iter().map(|entry| {
            let mut row = entry.row();
            if row.available && row.allowed && lent.contains(&row.name) {
                row.available = false;
                row.reason.unavailable = Some("a caller lends a tool of this name".into());
            }
            row
        }));
        ToolList {
            tools,
            servers: context.servers(),
        }
    }

    /// Oubliette's own tools that a key may call.
    pub async fn list_own(&self, key: &str) -> Result<Vec<ListedTool>> {
        let Some(context) = self.context() else {
            return Ok(Vec::new());
        };
        let specs = self.parts.own.list(&self.parts.session_id, key).await?;
        let registry = context.registry();
        let rows = specs.into_iter().map(|spec| {
            let spec = ToolSpec {
                name: format!("{OWN_PREFIX}{}", spec.name),
                ..spec
            };
            tool_row(&registry, spec, ToolSource::Oubliette, None, ToolRule::WithinKey)
        });
        Ok(rows.collect())
    }

    /// Why a caller cannot lend a tool of this full name: it is reserved, or a listed catalog tool has it.
    pub fn name_conflict(&self, full_name: &str) -> Option<String> {
        if let Some(whose) = name::reserved_for(full_name) {
            return Some(format!("{full_name} is {whose}"));
        }
        let context = self.context()?;
        let registry = context.registry();
        let holder = registry
            .entries()
            .iter()
            .find(|entry| entry.listed() && entry.name == full_name)?;
        Some(format!("{full_name} is the agent's tool {}", holder.canonical))
    }

    /// The full names of all lent tools.
    pub(super) fn lent_names(&self) -> HashSet<String> {
        let lenders = self.parts.callers.declarations();
        let names = lenders
            .iter()
            .flat_map(|l| l.tools.iter().map(|tool| full_name(&l.caller_id, &tool.name)));
        names.collect()
    }
}

fn tool_row(
    registry: &ToolRegistry,
    spec: ToolSpec,
    source: ToolSource,
    server: Option<String>,
    rule: ToolRule,
) -> ListedTool {
    let rules = registry.rules().of_other_tool(&spec.name, rule);
    ListedTool {
        canonical: spec.name.clone(),
        name: spec.name,
        aliases: Vec::new(),
        source,
        server,
        allowed: rules.verdict.allows(),
        rules: rules.listed(),
        reason: rules.verdict.into(),
        available: true,
        description: spec.description,
        input_schema: spec.input_schema,
    }
}
