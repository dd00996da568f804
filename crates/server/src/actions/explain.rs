//! `tool_explain`: what an agent's rules let through, also of a definition that is not saved yet.

use oubliette_protocol::{
    Error, Result, Scope, SessionId, Slug,
    agent::{AgentDefinition, MAX_DEFINITION_BYTES},
    tool::{ListedRule, ListedTool, ToolSource, arguments_object},
};
use oubliette_tools::{explain, explain_call, judge_other_tools, preview, preview_known};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ActionCall, ActionHandler, Effect, run_blocking};

/// Maximum number of tools of one answer.
const MAX_TOOLS: usize = 1_000;
/// Maximum length of a tool's name in the question, in bytes.
const MAX_NAME_BYTES: usize = 1_024;

/// `tool_explain`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolExplain {
    /// Slug of the agent to explain. With definition: how to call it in the answer.
    pub agent: Slug,
    /// A whole agent.json that is not saved, to be judged instead of the stored one, at most 1 MiB. Nothing is started
    /// or stored.
    #[serde(default)]
    #[schemars(with = "Option<serde_json::Map<String, Value>>")]
    pub definition: Option<Value>,
    /// Id of a session (`gogol_…`) whose servers' tools are to be judged. Absent: the tools that are known without starting
    /// a server.
    #[serde(default)]
    pub session_id: Option<SessionId>,
    /// Any name of a tool to explain in a sentence, at most 1024 bytes. Absent: only the list.
    #[serde(default)]
    pub tool: Option<String>,
    /// Arguments of a call of that tool, for rules with conditions. Absent: none are judged.
    #[serde(default)]
    #[schemars(with = "Option<serde_json::Map<String, Value>>")]
    pub arguments: Option<Value>,
}

/// Result of `tool_explain`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ToolExplanation {
    /// Slug of the agent.
    agent: Slug,
    /// Its tools, at most 1000, with what its rules say of each.
    tools: Vec<ExplainedTool>,
    /// Why the tool that was asked about may or may not be called, in sentences; null if none was.
    explanation: Option<String>,
}

/// What an agent's rules say of one tool.
#[derive(Debug, Serialize, JsonSchema)]
struct ExplainedTool {
    /// Name the agent sees.
    name: String,
    /// `@<id>/<tool>` for catalog tools; the name itself for the rest.
    canonical: String,
    /// All its other names.
    aliases: Vec<String>,
    /// Id of the catalog entry or caller that provides it; null: Oubliette itself.
    server: Option<String>,
    /// Where it comes from.
    source: ToolSource,
    /// Whether the agent may call it.
    allowed: bool,
    /// Whether it can be called now.
    available: bool,
    /// The rule that decides, and why it is not available if it is not.
    reason: String,
    /// The entries of the agent's rules that touch it, in the order they are applied.
    rules: Vec<ListedRule>,
}

impl From<ListedTool> for ExplainedTool {
    fn from(tool: ListedTool) -> Self {
        Self {
            reason: tool.reason.to_string(),
            name: tool.name,
            canonical: tool.canonical,
            aliases: tool.aliases,
            server: tool.server,
            source: tool.source,
            allowed: tool.allowed,
            available: tool.available,
            rules: tool.rules,
        }
    }
}

impl ActionHandler for ToolExplain {
    type Output = ToolExplanation;

    const NAME: &'static str = "tool_explain";
    const DESCRIPTION: &'static str = "Say which tools an agent's rules let through and by which entry, for a stored agent or a \
        definition that is not saved yet; and, for one tool and its arguments, why.";
    // A definition is checked and its conditions are compiled, as for agent_put.
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        if self.tool.as_ref().is_some_and(|tool| tool.len() > MAX_NAME_BYTES) {
            return Err(Error::invalid(format!(
                "tool must be at most {MAX_NAME_BYTES} bytes"
            )));
        }
        if self.arguments.is_some() && self.tool.is_none() {
            return Err(Error::invalid("arguments: name the tool that they are for"));
        }
        let definition = match self.definition {
            Some(draft) => run_blocking(move || parse_draft(&draft)).await?,
            None => (*call.app.library.agent(&self.agent)?.definition).clone(),
        };
        let known = match &self.session_id {
            Some(id) => {
                call.app.visible_session(call.grant, id).await?;
                Some(call.app.sessions.tool_list(call.grant.principal(), id).await?)
            }
            None => None,
        };
        let catalog = call.app.library.catalog();
        let uses = definition.tools.uses.iter().filter_map(|id| catalog.get(id));
        let entries: Vec<_> = uses.map(|entry| entry.definition.clone()).collect();
        let mut list = match &known {
            Some(known) => preview_known(&definition, &entries, known),
            None => preview(&definition, &entries),
        };
        let tools = list
            .tools
            .iter()
            .take(MAX_TOOLS)
            .cloned()
            .map(ExplainedTool::from)
            .collect();
        if let Some(known) = &known {
            list.tools.extend(judge_other_tools(&definition, known));
        }
        let explanation = match (&self.tool, self.arguments) {
            (None, _) => None,
            (Some(tool), None) => Some(explain(&self.agent, &definition, &list, tool)),
            (Some(tool), given @ Some(_)) => {
                let arguments = arguments_object(given)?;
                Some(explain_call(&self.agent, &definition, &list, tool, arguments).await?)
            }
        };
        Ok(ToolExplanation {
            agent: self.agent,
            tools,
            explanation,
        })
    }
}

fn parse_draft(draft: &Value) -> Result<AgentDefinition> {
    let text = draft.to_string();
    if text.len() > MAX_DEFINITION_BYTES {
        return Err(Error::invalid(format!(
            "definition must be at most {MAX_DEFINITION_BYTES} bytes"
        )));
    }
    AgentDefinition::parse(&text).map_err(|error| Error::invalid(error.to_string()))
}
