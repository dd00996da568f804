//! The name of the tool that a call reported by an agent is for, and whether it is one of the tool plane's.
//!
//! ACP has a field for the name, which few agents fill. Others put it into `_meta`, or only show a title, which may be
//! the text of a command.

use agent_client_protocol::v1::schema::{Meta, ToolCall, ToolCallUpdate, ToolKind};
use serde_json::Value;

use super::tools_endpoint::SERVER_NAME;
use crate::shown_tools::ListedNames;

/// What an agent says about a call that may tell its tool.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallDescription<'a> {
    name: Option<&'a str>,
    title: Option<&'a str>,
    kind: Option<ToolKind>,
    input: Option<&'a Value>,
    meta: Option<&'a Meta>,
}

impl<'a> From<&'a ToolCall> for CallDescription<'a> {
    fn from(call: &'a ToolCall) -> Self {
        Self {
            name: call.name.as_deref(),
            title: Some(&call.title),
            kind: Some(call.kind),
            input: call.raw_input.as_ref(),
            meta: call.meta.as_ref(),
        }
    }
}

impl<'a> From<&'a ToolCallUpdate> for CallDescription<'a> {
    fn from(update: &'a ToolCallUpdate) -> Self {
        let fields = &update.fields;
        Self {
            name: fields.name.as_deref(),
            title: fields.title.as_deref(),
            kind: fields.kind,
            input: fields.raw_input.as_ref(),
            meta: update.meta.as_ref(),
        }
    }
}

impl CallDescription<'_> {
    /// The tool's own name: from the fields meant for it, else the title unless that is the text of a command.
    pub(crate) fn tool(&self) -> Option<String> {
        if let Some(name) = self.stated_name() {
            return Some(name.to_owned());
        }
        let title = self.title.filter(|title| !title.is_empty())?;
        if let Some((tool, _)) = title.split_once(&server_suffix()) {
            return Some(tool.trim().to_owned());
        }
        let words = self.mcp_tool().is_none() && self.title_is_command(title);
        Some(match (words, self.kind) {
            (true, Some(ToolKind::Execute)) => "execute".to_owned(),
            _ => title.to_owned(),
        })
    }

    /// The tool plane's name of the tool, if the call is for one of the tools it has listed to this agent. A title counts
    /// only where it cannot be the text of a command, which the model writes.
    pub(crate) fn gated_tool(&self, listed: &ListedNames) -> Option<String> {
        if let Some(name) = self.stated_name() {
            return listed_tool(name, listed);
        }
        if let Some((server, tool)) = self.mcp_tool() {
            return (server == SERVER_NAME && listed.contains(tool)).then(|| tool.to_owned());
        }
        let title = self.title?;
        if self.kind == Some(ToolKind::Execute) || self.input_has_command(title) {
            return None;
        }
        match title.split_once(&server_suffix()) {
            Some((tool, _)) => listed.get(tool.trim()).cloned(),
            None => listed_tool(title, listed),
        }
    }

    /// The kind of the call, if it is said.
    pub(crate) fn kind(&self) -> Option<ToolKind> {
        self.kind
    }

    /// The same with the kind that was said before.
    pub(crate) fn with_kind(self, kind: Option<ToolKind>) -> Self {
        Self { kind, ..self }
    }

    /// Whether the name is in a field meant for it.
    pub(crate) fn is_named(&self) -> bool {
        self.stated_name().is_some()
    }

    /// The name in a field meant for it: `name`, or `toolName` in `_meta` or one level below.
    fn stated_name(&self) -> Option<&str> {
        let in_meta = || {
            let meta = self.meta?;
            let nested = meta.values().filter_map(|value| value.get("toolName"));
            let mut all = meta.get("toolName").into_iter().chain(nested);
            all.find_map(Value::as_str)
        };
        self.name.or_else(in_meta).filter(|name| !name.is_empty())
    }

    /// Server and tool of an MCP call, from agents that report these as its input.
    fn mcp_tool(&self) -> Option<(&str, &str)> {
        let marked = self.meta?.get("is_mcp_tool_call")?.as_bool()?;
        let input = self.input.filter(|_| marked)?;
        Some((input.get("server")?.as_str()?, input.get("tool")?.as_str()?))
    }

    fn title_is_command(&self, title: &str) -> bool {
        self.input_has_command(title) || title.contains(char::is_whitespace)
    }

    /// Whether the call's input says that this text is its command.
    fn input_has_command(&self, text: &str) -> bool {
        let command = self
            .input
            .and_then(|input| input.get("command").or_else(|| input.get("cmd")));
        match command {
            Some(Value::String(command)) => command == text,
            Some(Value::Array(words)) => words.iter().any(|word| word.as_str() == Some(text)),
            _ => false,
        }
    }
}

/// How some agents end the title of a call of ours: `notify (oubliette MCP Server)`.
fn server_suffix() -> String {
    format!(" ({SERVER_NAME} MCP Server)")
}

/// The listed tool that an agent's own name for it means: `mcp__oubliette__notify`, `oubliette_notify`,
/// `mcp.oubliette.notify` and the like.
fn listed_tool(name: &str, listed: &ListedNames) -> Option<String> {
    let separator = |c: char| matches!(c, '_' | '-' | '.' | '/' | ':');
    let after_mcp = name
        .strip_prefix("mcp")
        .map_or(name, |rest| rest.trim_start_matches(separator));
    let rest = after_mcp.strip_prefix(SERVER_NAME)?;
    let tool = rest.trim_start_matches(separator);
    // The name of a tool may itself begin with a separator.
    let mut starts = (0..=rest.len() - tool.len()).filter(|start| *start > 0);
    starts.find_map(|start| listed.get(&rest[start..]).cloned())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use serde_json::json;

    fn update(fields: Value) -> ToolCallUpdate {
        let mut call = json!({"toolCallId": "c"});
        call.as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        serde_json::from_value(call).unwrap()
    }

    fn listed() -> ListedNames {
        Arc::new(
            ["myapp_notify", "client", "oubliette_project_list"]
                .map(str::to_owned)
                .into(),
        )
    }

    #[test]
    fn names_that_agents_give_our_tools_are_recognised() {
        for call in [
            json!({"name": "mcp__oubliette__myapp_notify"}),
            json!({"title": "x", "_meta": {"claudeCode": {"toolName": "mcp__oubliette__myapp_notify"}}}),
            json!({"title": "x", "_meta": {"toolName": "oubliette___myapp_notify"}}),
            json!({"title": "oubliette_myapp_notify", "kind": "other"}),
            json!({"title": "oubliette-myapp_notify"}),
            json!({"title": "myapp_notify (oubliette MCP Server)"}),
            json!({"title": "mcp.oubliette.myapp_notify", "kind": "execute", "_meta": {"is_mcp_tool_call": true},
                   "rawInput": {"server": "oubliette", "tool": "myapp_notify"}}),
        ] {
            let update = update(call.clone());
            let gated = CallDescription::from(&update).gated_tool(&listed());
            assert_eq!(gated.as_deref(), Some("myapp_notify"), "{call}");
        }
        let own = update(json!({"name": "mcp__oubliette__oubliette_project_list"}));
        let gated = CallDescription::from(&own).gated_tool(&listed());
        assert_eq!(gated.as_deref(), Some("oubliette_project_list"));
    }

    #[test]
    fn a_command_that_reads_like_our_tool_is_not_one() {
        for call in [
            json!({"name": "Bash", "title": "mcp__oubliette__myapp_notify"}),
            json!({"title": "oubliette-client", "kind": "execute", "rawInput": {"command": "oubliette-client"}}),
            json!({"title": "myapp_notify (oubliette MCP Server)", "kind": "execute"}),
            json!({"title": "mcp__oubliette__myapp_notify; rm -rf /"}),
            // A program of the workspace, from an agent that does not say the kind of its calls.
            json!({"title": "oubliette/myapp_notify", "rawInput": {"command": "oubliette/myapp_notify"}}),
            json!({"title": "oubliette/myapp_notify", "kind": "other", "rawInput": {"cmd": ["oubliette/myapp_notify"]}}),
            json!({"title": "mcp__other__myapp_notify"}),
            json!({"title": "myapp_notify"}),
            json!({"title": "x", "kind": "execute", "rawInput": {"server": "oubliette", "tool": "myapp_notify"}}),
        ] {
            let update = update(call.clone());
            assert_eq!(
                CallDescription::from(&update).gated_tool(&listed()),
                None,
                "{call}"
            );
        }
    }

    #[test]
    fn the_tools_own_name_is_told_not_the_text_of_its_command() {
        for (call, tool) in [
            (
                json!({"name": "exec_command", "title": "List files"}),
                "exec_command",
            ),
            (
                json!({"title": "ls -la", "_meta": {"claudeCode": {"toolName": "Bash"}}}),
                "Bash",
            ),
            (json!({"title": "ls -la", "kind": "execute"}), "execute"),
            (
                json!({"title": "ls", "kind": "execute", "rawInput": {"command": ["bash", "-c", "ls"]}}),
                "execute",
            ),
            (
                json!({"title": "bash", "kind": "execute", "rawInput": {"command": "ls"}}),
                "bash",
            ),
            (
                json!({"title": "myapp_notify (oubliette MCP Server): {}"}),
                "myapp_notify",
            ),
            (json!({"title": "Read a file", "kind": "read"}), "Read a file"),
        ] {
            let update = update(call.clone());
            assert_eq!(
                CallDescription::from(&update).tool().as_deref(),
                Some(tool),
                "{call}"
            );
        }
    }
}
