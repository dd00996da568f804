//! [`AgentCapabilities`]: what an agent says of itself in its answer to `initialize`, and what is known about it besides.

use agent_client_protocol::v1::schema::InitializeResponse;
use serde_json::Value;

/// How an agent learns of tools that change while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum ToolChanges {
    /// It lists its tools again when it is notified.
    #[default]
    Listed,
    /// It ignores the notification and has to be opened again.
    Ignored,
}

/// Whether an agent starts the MCP servers it is given when it loads a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum LoadedTools {
    #[default]
    Started,
    /// It ignores them, so its conversations cannot be loaded.
    Ignored,
}

/// What an agent can do.
#[derive(Debug, Clone, Default)]
pub(crate) struct AgentCapabilities {
    /// Its name and version, for error texts; empty when it says none.
    pub(crate) agent: String,
    /// `session/load`.
    pub(crate) load: bool,
    /// `session/resume`: like load, without a replay of the history.
    pub(crate) resume: bool,
    /// MCP servers over HTTP.
    pub(crate) http_servers: bool,
    /// The field `systemPrompt` in the requests that open a conversation.
    pub(crate) system_prompt: bool,
    /// The `authenticate` method that uses an API key from the environment.
    pub(crate) api_key_method: Option<String>,
    pub(crate) tool_changes: ToolChanges,
    pub(crate) loaded_tools: LoadedTools,
}

/// Agents that are known to ignore changes of their tools, by a part of the name they give in `agentInfo`.
const IGNORE_TOOL_CHANGES: [&str; 4] = ["codex", "qwen", "vibe", "openhands"];
/// Agents that are known to ignore the MCP servers in `session/load`.
const IGNORE_SERVERS_ON_LOAD: [&str; 1] = ["openhands"];
/// The longest name and version that are kept, in bytes.
const MAX_NAME_BYTES: usize = 200;

impl AgentCapabilities {
    /// Reads an answer to `initialize`. `answer` is the same as it was on the wire, for fields that are not stable yet.
    pub(crate) fn read(parsed: &InitializeResponse, answer: &Value) -> Self {
        let sessions = &answer["agentCapabilities"]["sessionCapabilities"];
        let info = parsed.agent_info.as_ref();
        let name = info.map(|info| info.name.to_lowercase()).unwrap_or_default();
        let is_one_of = |known: &[&str]| known.iter().any(|part| name.contains(part));
        let shown = info.map(|info| format!("{} {}", info.name, info.version));
        Self {
            agent: super::truncate_text(shown.unwrap_or_default(), MAX_NAME_BYTES),
            load: parsed.agent_capabilities.load_session,
            resume: sessions["resume"].is_object(),
            http_servers: parsed.agent_capabilities.mcp_capabilities.http,
            system_prompt: sessions["systemPrompt"].is_object(),
            api_key_method: api_key_method(&answer["authMethods"]),
            tool_changes: match is_one_of(&IGNORE_TOOL_CHANGES) {
                true => ToolChanges::Ignored,
                false => ToolChanges::Listed,
            },
            loaded_tools: match is_one_of(&IGNORE_SERVERS_ON_LOAD) {
                true => LoadedTools::Ignored,
                false => LoadedTools::Started,
            },
        }
    }
}

/// The id of the first method that takes an API key and needs nobody at a terminal.
fn api_key_method(methods: &Value) -> Option<String> {
    let takes_key = |method: &&Value| {
        let words = |field: &str| method[field].as_str().unwrap_or_default().to_lowercase();
        let said = ["id", "name"]
            .map(words)
            .iter()
            .any(|text| text.replace(['-', '_', ' '], "").contains("apikey"));
        method["type"] != "terminal" && (said || method["_meta"]["api-key"].is_object())
    };
    let method = methods.as_array()?.iter().find(takes_key)?;
    let id = method["id"].as_str()?;
    (id.len() <= MAX_NAME_BYTES).then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(answer: &Value) -> AgentCapabilities {
        AgentCapabilities::read(&serde_json::from_value(answer.clone()).unwrap(), answer)
    }

    #[test]
    fn what_an_agent_says_and_what_is_known_of_it() {
        let codex = json!({
            "protocolVersion": 1,
            "agentInfo": {"name": "@agentclientprotocol/codex-acp", "version": "2"},
            "agentCapabilities": {"loadSession": true, "sessionCapabilities": {"resume": {}, "systemPrompt": {}}},
            "authMethods": [{"id": "chat", "name": "Chat"}, {"id": "api-key", "name": "API Key"}],
        });
        let codex = read(&codex);
        assert!(codex.load && codex.resume && codex.system_prompt);
        assert_eq!(codex.api_key_method.as_deref(), Some("api-key"));
        assert_eq!(
            (codex.tool_changes, codex.loaded_tools),
            (ToolChanges::Ignored, LoadedTools::Started)
        );
        for name in ["qwen", "vibe", "openhands"] {
            let known = read(&json!({"protocolVersion": 1, "agentInfo": {"name": name, "version": "1"}}));
            assert_eq!(known.tool_changes, ToolChanges::Ignored, "{name}");
            let loaded = match name {
                "openhands" => LoadedTools::Ignored,
                _ => LoadedTools::Started,
            };
            assert_eq!(known.loaded_tools, loaded, "{name}");
        }
        let other = read(&json!({"protocolVersion": 1}));
        assert!(!other.load && !other.resume && other.api_key_method.is_none());
        assert_eq!(other.tool_changes, ToolChanges::Listed);
    }
}
