//! What this agent is told to be: raw JSON from the environment, then checked.

use std::time::Duration;

use oubliette_protocol::strict;
use serde::Deserialize;

use crate::script::Script;

/// The variable that holds the configuration, or `@` and the path of a file with it (one variable
/// cannot be longer than 128 KiB).
pub(crate) const VARIABLE: &str = "OUBLIETTE_AGENT_CONFIG";

const DEFAULT_BASE_URL: &str = "http://127.0.0.1:19999";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
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

/// The checked configuration.
#[derive(Debug)]
pub(crate) struct Config {
    /// The system prompt.
    pub(crate) prompt: String,
    /// Who thinks.
    pub(crate) mind: Mind,
}

/// Who thinks.
#[derive(Debug)]
pub(crate) enum Mind {
    /// A file.
    Script(Script),
    /// A model behind the server.
    Model(ModelConfig),
    /// Nobody: a turn fails and says what to configure.
    Missing,
}

/// Which model, and its bounds.
#[derive(Debug, Clone)]
pub(crate) struct ModelConfig {
    /// The provider's name in the server's configuration.
    pub(crate) provider: String,
    /// The model's name as the provider has it.
    pub(crate) model: String,
    /// Where the server forwards model calls, without the provider.
    pub(crate) base_url: String,
    /// The most requests to the model in one turn.
    pub(crate) max_iterations: usize,
    /// The most characters of conversation sent along; older tool results go first.
    pub(crate) context_chars: usize,
    /// The wait before a failed request is tried again; it doubles.
    pub(crate) retry: Duration,
}

impl Config {
    /// Reads [`VARIABLE`].
    pub(crate) fn from_env() -> Result<Self, String> {
        let text = std::env::var(VARIABLE)
            .map_err(|_| format!("{VARIABLE} is not set; it holds the agent's prompt and model as JSON"))?;
        match text.strip_prefix('@') {
            None => Self::parse(&text),
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|e| format!("{VARIABLE}: cannot read {path}: {e}"))?;
                Self::parse(&text)
            }
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let raw: Raw = strict::from_str(text).map_err(|e| format!("{VARIABLE}: {e}"))?;
        Ok(Self {
            prompt: raw.prompt.clone().unwrap_or_default(),
            mind: Mind::resolve(raw)?,
        })
    }
}

impl Mind {
    fn resolve(raw: Raw) -> Result<Self, String> {
        if let Some(text) = &raw.script {
            return Ok(Mind::Script(Script::parse(text)?));
        }
        let Some(name) = raw.model.as_deref().map(str::trim).filter(|m| !m.is_empty()) else {
            return Ok(Mind::Missing);
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
        Ok(Mind::Model(ModelConfig {
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
    fn a_model_is_provider_and_name() {
        let config =
            Config::parse(r#"{"prompt":"p","model":"openrouter/meta/llama-4","script":null}"#).unwrap();
        let Mind::Model(model) = config.mind else {
            panic!("{config:?}")
        };
        assert_eq!(
            (model.provider.as_str(), model.model.as_str()),
            ("openrouter", "meta/llama-4")
        );
        assert_eq!(model.base_url, DEFAULT_BASE_URL);
    }

    #[test]
    fn wrong_configuration_says_what_and_where() {
        let unknown = Config::parse(r#"{"promt":"p"}"#).unwrap_err();
        assert!(
            unknown.contains(VARIABLE) && unknown.contains("promt"),
            "{unknown}"
        );
        let model = Config::parse(r#"{"model":"claude"}"#).unwrap_err();
        assert!(model.contains("<provider>/<model>"), "{model}");
        assert!(matches!(
            Config::parse(r#"{"prompt":"p"}"#).unwrap().mind,
            Mind::Missing
        ));
    }
}
