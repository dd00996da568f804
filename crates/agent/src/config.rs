//! The agent's configuration: raw JSON from the environment, then validated.

use std::time::Duration;

use oubliette_protocol::strict;
use serde::Deserialize;

use crate::script::Script;

/// The environment variable with the configuration: JSON, or `@` and the path of a JSON file. The file
/// form exists because Linux limits one environment variable to 128 KiB.
pub(crate) const CONFIG_VARIABLE: &str = "OUBLIETTE_AGENT_CONFIG";

const DEFAULT_BASE_URL: &str = "http://127.0.0.1:19999";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAgentConfig {
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    script: Option<String>,
    #[serde(default)]
    base_url: Option<String>,
    #[serde(default)]
    max_iterations: Option<usize>,
    #[serde(default)]
    context_chars: Option<usize>,
    #[serde(default)]
    retry_ms: Option<u64>,
}

/// The validated configuration.
#[derive(Debug)]
pub(crate) struct AgentProcessConfig {
    /// The system prompt.
    pub(crate) prompt: String,
    /// What produces the agent's answers.
    pub(crate) model_choice: ModelChoice,
}

/// What produces the agent's answers.
#[derive(Debug)]
pub(crate) enum ModelChoice {
    /// A fixed list of steps.
    Script(Script),
    /// A model provider, reached through the server's forwarder.
    Model(ModelConfig),
    /// Nothing is configured: each turn fails with an error that says what to set.
    Missing,
}

/// Which model to ask, and its limits.
#[derive(Debug, Clone)]
pub(crate) struct ModelConfig {
    /// The provider's name in the server's configuration.
    pub(crate) provider: String,
    /// The model's name at the provider.
    pub(crate) model: String,
    /// The forwarder's base URL, without the provider's path segment. Default: `http://127.0.0.1:19999`.
    pub(crate) base_url: String,
    /// The maximum number of requests to the model in one turn. Default 100, at least 1.
    pub(crate) max_iterations: usize,
    /// The maximum size of the conversation, in bytes of text; beyond it old tool results are shortened, then
    /// old turns dropped. Default 400,000, at least 1,000.
    pub(crate) context_chars: usize,
    /// The wait before the first retry of a failed request; it doubles each time. Default 500 ms.
    pub(crate) retry: Duration,
}

impl AgentProcessConfig {
    /// Reads [`CONFIG_VARIABLE`].
    pub(crate) fn from_env() -> Result<Self, String> {
        let text = std::env::var(CONFIG_VARIABLE).map_err(|_| {
            format!("{CONFIG_VARIABLE} is not set; it holds the agent's prompt and model as JSON")
        })?;
        match text.strip_prefix('@') {
            None => Self::parse(&text),
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|e| format!("{CONFIG_VARIABLE}: cannot read {path}: {e}"))?;
                Self::parse(&text)
            }
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let raw: RawAgentConfig = strict::from_str(text).map_err(|e| format!("{CONFIG_VARIABLE}: {e}"))?;
        Ok(Self {
            prompt: raw.prompt.clone().unwrap_or_default(),
            model_choice: ModelChoice::resolve(raw)?,
        })
    }
}

impl ModelChoice {
    fn resolve(raw: RawAgentConfig) -> Result<Self, String> {
        if let Some(text) = &raw.script {
            return Ok(ModelChoice::Script(Script::parse(text)?));
        }
        let Some(name) = raw.model.as_deref().map(str::trim).filter(|m| !m.is_empty()) else {
            return Ok(ModelChoice::Missing);
        };
        if let Some(file) = name.strip_prefix("script:") {
            return Err(format!(
                "model script:{file}: the script's text did not reach the agent"
            ));
        }
        let Some((provider, model)) = name
            .split_once('/')
            .filter(|(p, m)| !p.is_empty() && !m.is_empty())
        else {
            return Err(format!(
                "model {name:?}: write it as <provider>/<model>, such as anthropic/claude-sonnet-4-5"
            ));
        };
        let base_url = raw.base_url.unwrap_or_else(|| DEFAULT_BASE_URL.to_owned());
        Ok(ModelChoice::Model(ModelConfig {
            provider: provider.to_owned(),
            model: model.to_owned(),
            base_url: base_url.trim_end_matches('/').to_owned(),
            max_iterations: raw.max_iterations.unwrap_or(100).max(1),
            context_chars: raw.context_chars.unwrap_or(400_000).max(1_000),
            retry: Duration::from_millis(raw.retry_ms.unwrap_or(500)),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_name_is_split_at_the_first_slash() {
        let config =
            AgentProcessConfig::parse(r#"{"prompt":"p","model":"openrouter/meta/llama-4","script":null}"#)
                .unwrap();
        let ModelChoice::Model(model) = config.model_choice else {
            panic!("{config:?}")
        };
        assert_eq!(
            (model.provider.as_str(), model.model.as_str()),
            ("openrouter", "meta/llama-4")
        );
        assert_eq!(model.base_url, DEFAULT_BASE_URL);
    }

    #[test]
    fn configuration_errors_name_the_variable_and_the_cause() {
        let unknown = AgentProcessConfig::parse(r#"{"promt":"p"}"#).unwrap_err();
        assert!(
            unknown.contains(CONFIG_VARIABLE) && unknown.contains("promt"),
            "{unknown}"
        );
        let model = AgentProcessConfig::parse(r#"{"model":"claude"}"#).unwrap_err();
        assert!(model.contains("<provider>/<model>"), "{model}");
        assert!(matches!(
            AgentProcessConfig::parse(r#"{"prompt":"p"}"#)
                .unwrap()
                .model_choice,
            ModelChoice::Missing
        ));
    }
}
