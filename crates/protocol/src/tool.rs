//! A tool as it is listed, and the result of a call.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{CallerId, CatalogId, JsonObject, relay::method};

/// The prefix of the names under which an agent sees Oubliette's own tools: `oubliette_<name>`.
pub const OWN_PREFIX: &str = "oubliette_";

/// Where a tool comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ToolSource {
    /// Lent by a caller.
    Caller,
    /// Oubliette's own, under an API key.
    Oubliette,
    /// An MCP server or built-in of the catalog.
    Catalog,
    /// What every agent has: `session_message`, `session_events`, `project_list`.
    Base,
}

/// The tool that a call is for: its source, and its name there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolAddress {
    /// A tool that a caller lends.
    Caller {
        /// Its name, without the caller's prefix.
        tool: String,
        /// The caller that lends it; needed when two lend a tool of this name.
        caller_id: Option<CallerId>,
    },
    /// One of Oubliette's own tools, without [`OWN_PREFIX`].
    Oubliette(String),
    /// A catalog tool, by any of its names: listed name, alias or canonical name.
    Catalog(String),
    /// A base tool.
    Base(String),
}

impl ToolAddress {
    /// The address of a name that is reserved for a base tool or for one of Oubliette's own. Which tool any other
    /// name means depends on the session.
    pub fn of_reserved_name(name: &str) -> Option<Self> {
        if method::BASE_TOOLS.contains(&name) {
            return Some(Self::Base(name.to_owned()));
        }
        let own = name.strip_prefix(OWN_PREFIX)?;
        Some(Self::Oubliette(own.to_owned()))
    }

    /// The source of the tool.
    pub fn source(&self) -> ToolSource {
        match self {
            Self::Caller { .. } => ToolSource::Caller,
            Self::Oubliette(_) => ToolSource::Oubliette,
            Self::Catalog(_) => ToolSource::Catalog,
            Self::Base(_) => ToolSource::Base,
        }
    }

    /// The name of the tool in its source.
    pub fn name(&self) -> &str {
        match self {
            Self::Caller { tool, .. } => tool,
            Self::Oubliette(name) | Self::Catalog(name) | Self::Base(name) => name,
        }
    }
}

/// A tool as it is shown to a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ToolSpec {
    /// Name to call it by.
    pub name: String,
    /// What it does.
    #[serde(default)]
    pub description: String,
    /// JSON schema of its arguments, of type object.
    #[serde(default = "any_object_schema")]
    pub input_schema: Value,
}

/// The schema of a tool that declares none: any object.
pub fn any_object_schema() -> Value {
    json!({ "type": "object" })
}

/// The result of a tool call, in the form of MCP's `CallToolResult`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CallResult {
    /// MCP content blocks: text, images, resources.
    #[serde(default)]
    pub content: Vec<Value>,
    /// The result as structured data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub structured_content: Option<Value>,
    /// Whether the tool ran and reports that it failed.
    #[serde(default)]
    pub is_error: bool,
}

impl CallResult {
    /// A result of one text block.
    pub fn text(text: impl Into<String>) -> Self {
        Self {
            content: vec![json!({ "type": "text", "text": text.into() })],
            ..Self::default()
        }
    }

    /// An error as a tool result: `isError`, with code and message as structured content.
    pub fn error(error: &crate::Error) -> Self {
        Self {
            structured_content: Some(error.body()),
            is_error: true,
            ..Self::text(&error.message)
        }
    }

    /// Structured data, with the same JSON as text content.
    pub fn data(value: Value) -> Self {
        Self {
            structured_content: Some(value.clone()),
            ..Self::text(value.to_string())
        }
    }

    /// A result made of any JSON value, such as a caller's answer. A value that already is an MCP result stays as it
    /// is; another object becomes structured content; anything else becomes text.
    pub fn from_value(value: Value) -> Self {
        if let Value::Object(object) = &value
            && object
                .get("content")
                .and_then(Value::as_array)
                .is_some_and(|blocks| {
                    blocks
                        .iter()
                        .all(|b| b.get("type").and_then(Value::as_str).is_some())
                })
            && object
                .keys()
                .all(|k| matches!(k.as_str(), "content" | "structuredContent" | "isError" | "_meta"))
            && let Ok(result) = serde_json::from_value::<CallResult>(value.clone())
        {
            return result;
        }
        match value {
            Value::String(text) => Self::text(text),
            Value::Object(_) => Self::data(value),
            other => Self::text(other.to_string()),
        }
    }

    /// The text of all text blocks, joined by newlines.
    pub fn joined_text(&self) -> String {
        let texts = self
            .content
            .iter()
            .filter_map(|b| b.get("text").and_then(Value::as_str));
        texts.collect::<Vec<_>>().join("\n")
    }
}

/// Health status of a tool server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HealthStatus {
    /// The last check succeeded.
    Green,
    /// Starting or restarting, or a check failed.
    Yellow,
    /// Down.
    Red,
}

/// The rule by which an agent may or may not call a tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ToolRule {
    /// `tools.allowed` is empty, so every tool of `tools.use` is allowed.
    AllOfUse,
    /// This item of `tools.allowed` allows it.
    Allowed(String),
    /// `tools.allowed` does not name it.
    NotListed,
    /// This pattern of `tools.denied` matches one of its names.
    Denied(String),
    /// This item of `tools.allowed` allows it with arguments that fit its `when`.
    AllowedWhen(String),
    /// This pattern of `tools.denied` matches one of its names, and the call's arguments fit its `when`.
    DeniedWhen(String),
    /// The call's arguments fit no `when` of the items of `tools.allowed` that name it.
    NoConditionHolds,
    /// A base tool, which every agent may call.
    BaseTool,
    /// A caller lends it to the session.
    Lent,
    /// One of Oubliette's own tools that the agent's key may call.
    WithinKey,
}

impl ToolRule {
    /// Whether the tool may be called.
    pub fn allows(&self) -> bool {
        match self {
            Self::AllOfUse
            | Self::Allowed(_)
            | Self::AllowedWhen(_)
            | Self::BaseTool
            | Self::Lent
            | Self::WithinKey => true,
            Self::NotListed | Self::Denied(_) | Self::DeniedWhen(_) | Self::NoConditionHolds => false,
        }
    }

    /// The rule as a clause with a subject, to stand inside a sentence.
    pub fn clause(&self) -> String {
        match self {
            Self::AllOfUse | Self::NoConditionHolds => self.to_string(),
            Self::Allowed(_)
            | Self::AllowedWhen(_)
            | Self::NotListed
            | Self::Denied(_)
            | Self::DeniedWhen(_)
            | Self::BaseTool
            | Self::Lent
            | Self::WithinKey => format!("it is {self}"),
        }
    }
}

impl std::fmt::Display for ToolRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AllOfUse => f.write_str("tools.allowed is empty, so all of tools.use is allowed"),
            Self::Allowed(item) => write!(f, "allowed by {item:?} in tools.allowed"),
            Self::NotListed => f.write_str("not named in tools.allowed"),
            Self::Denied(pattern) => write!(f, "denied by {pattern:?} in tools.denied"),
            Self::AllowedWhen(item) => {
                write!(
                    f,
                    "allowed by {item:?} in tools.allowed with arguments that fit its `when`"
                )
            }
            Self::DeniedWhen(pattern) => {
                write!(
                    f,
                    "denied by {pattern:?} in tools.denied, whose `when` these arguments fit"
                )
            }
            Self::NoConditionHolds => {
                f.write_str("its arguments fit no `when` of tools.allowed; `tool explain` shows the rules")
            }
            Self::BaseTool => f.write_str("a base tool of every agent"),
            Self::Lent => f.write_str("lent by its caller's declaration"),
            Self::WithinKey => f.write_str("within reach of the agent's key"),
        }
    }
}

/// Why a tool may or may not be called, and why it is not available if it is not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(into = "ReasonFields", from = "ReasonFields")]
pub struct ToolReason {
    /// The rule that allows or denies it.
    pub rule: ToolRule,
    /// Why a call cannot reach it now; `None` when one can.
    pub unavailable: Option<String>,
    /// What was corrected: an invalid listing, or an alias that another tool has.
    pub notes: Vec<String>,
}

/// The fields of [`ToolReason`] on the wire.
#[derive(Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
struct ReasonFields {
    reason: String,
    reason_detail: ReasonDetail,
}

#[derive(Serialize, Deserialize, schemars::JsonSchema)]
struct ReasonDetail {
    rule: ToolRule,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unavailable: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

impl From<ToolRule> for ToolReason {
    fn from(rule: ToolRule) -> Self {
        Self {
            rule,
            unavailable: None,
            notes: Vec::new(),
        }
    }
}

impl From<ToolReason> for ReasonFields {
    fn from(reason: ToolReason) -> Self {
        Self {
            reason: reason.to_string(),
            reason_detail: ReasonDetail {
                rule: reason.rule,
                unavailable: reason.unavailable,
                notes: reason.notes,
            },
        }
    }
}

impl From<ReasonFields> for ToolReason {
    fn from(ReasonFields { reason_detail, .. }: ReasonFields) -> Self {
        Self {
            rule: reason_detail.rule,
            unavailable: reason_detail.unavailable,
            notes: reason_detail.notes,
        }
    }
}

impl std::fmt::Display for ToolReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.rule.fmt(f)?;
        if let Some(why) = &self.unavailable {
            write!(f, "; unavailable: {why}")?;
        }
        self.notes.iter().try_for_each(|note| write!(f, "; note: {note}"))
    }
}

/// A list of rules in agent.json.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RuleList {
    /// `tools.denied`.
    Denied,
    /// `tools.ask`.
    Ask,
    /// `tools.allowed`.
    Allowed,
}

impl RuleList {
    /// Its name in agent.json.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Denied => "denied",
            Self::Ask => "ask",
            Self::Allowed => "allowed",
        }
    }
}

/// A rule that touches a tool, in the answer of `tool_list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ListedRule {
    /// The list it is in.
    pub list: RuleList,
    /// The entry as it is written: a pattern, or `{"tool", "when"}`.
    pub entry: Value,
}

/// One tool in the answer of `tool_list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ListedTool {
    /// Name the agent sees.
    pub name: String,
    /// `@<id>/<tool>` for catalog tools; the name itself for the rest.
    pub canonical: String,
    /// All its other names.
    pub aliases: Vec<String>,
    /// Where it comes from.
    pub source: ToolSource,
    /// Id of the catalog entry or caller that provides it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// Whether the agent may call it.
    pub allowed: bool,
    /// The rule that allows or denies it, and why it is not available if it is not. On the wire `reason` is all of it
    /// in words and `reasonDetail` its parts.
    #[serde(flatten)]
    pub reason: ToolReason,
    /// Whether it can be called now; false for example while its server is down.
    pub available: bool,
    /// What it does.
    pub description: String,
    /// JSON schema of its arguments.
    pub input_schema: Value,
    /// The entries of the agent's rules that touch it, in the order they are applied.
    #[serde(default)]
    pub rules: Vec<ListedRule>,
}

/// One tool server in the answer of `tool_list`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ListedServer {
    /// Its catalog id.
    pub id: CatalogId,
    /// `stdio`, `ws`, `tcp`, `http` or `builtin`.
    pub transport: String,
    /// Health status.
    pub status: HealthStatus,
    /// When it got this status.
    pub since: jiff::Timestamp,
    /// When its last health check ended or, without one, its last successful start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_check: Option<jiff::Timestamp>,
    /// Why it is not green, with the tail of its stderr.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// When it will be started again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_retry: Option<jiff::Timestamp>,
    /// Number of its tools.
    pub tools: usize,
}

/// Answer of `tool_list`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ToolList {
    /// Every tool, allowed or not, available or not.
    pub tools: Vec<ListedTool>,
    /// Every tool server.
    pub servers: Vec<ListedServer>,
}

/// The arguments of a tool call as an object; absent and null mean an empty one, other values are errors.
pub fn arguments_object(value: Option<Value>) -> crate::Result<JsonObject> {
    match value {
        None | Some(Value::Null) => Ok(JsonObject::new()),
        Some(Value::Object(object)) => Ok(object),
        Some(other) => Err(crate::Error::invalid(format!(
            "arguments must be an object, not {}",
            json_type_name(&other)
        ))),
    }
}

fn json_type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
