//! Presets: definitions of well-known agents with the settings that make them work here, one file each in `presets/`.
//! Their packages are pinned; `{{provider}}` and `{{model}}` stand for the model that is chosen.

use std::{collections::BTreeMap, sync::OnceLock};

use oubliette_protocol::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The preset files.
const FILES: [&str; 9] = [
    include_str!("../presets/claude.json"),
    include_str!("../presets/codex.json"),
    include_str!("../presets/gemini.json"),
    include_str!("../presets/opencode.json"),
    include_str!("../presets/droid.json"),
    include_str!("../presets/qwen.json"),
    include_str!("../presets/copilot.json"),
    include_str!("../presets/vibe.json"),
    include_str!("../presets/openhands.json"),
];

/// A ready definition of a well-known agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AgentPreset {
    /// What `agent add` calls it, and the agent's slug unless another is given.
    pub name: String,
    /// The agent's display name.
    pub title: String,
    /// What it is.
    pub description: String,
    /// What it needs besides its package.
    pub needs: Vec<String>,
    /// What is known not to work, or to work in another way.
    pub limits: Vec<String>,
    /// The model it uses unless another is chosen, as `provider/model`.
    pub model: String,
    /// The agent.json.
    #[schemars(with = "serde_json::Map<String, Value>")]
    pub definition: Value,
    /// Files beside agent.json, by name.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
}

impl AgentPreset {
    /// All presets.
    pub(crate) fn all() -> Result<&'static [AgentPreset]> {
        static ALL: OnceLock<Result<Vec<AgentPreset>>> = OnceLock::new();
        let parse = |text: &&str| serde_json::from_str(text).map_err(Error::internal);
        let all = ALL.get_or_init(|| FILES.iter().map(parse).collect());
        all.as_deref().map_err(Clone::clone)
    }

    /// The preset of this name.
    pub(crate) fn find(name: &str) -> Result<&'static AgentPreset> {
        let all = Self::all()?;
        all.iter().find(|preset| preset.name == name).ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|preset| preset.name.as_str()).collect();
            Error::not_found(format!(
                "there is no preset {}; there are {}",
                oubliette_protocol::id::quoted(name),
                names.join(", ")
            ))
        })
    }

    /// The preset with its placeholders replaced by a model: `provider/model`, by default its own.
    pub(crate) fn with_model(&self, model: Option<&str>) -> Result<Self> {
        let model = model.unwrap_or(&self.model);
        // Put into JSON within JSON as they are, so nothing that would have to be escaped.
        let plain = |text: &str| {
            let allowed =
                |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':' | b'/' | b'@');
            !text.is_empty() && text.bytes().all(allowed)
        };
        let (provider, name) = model
            .split_once('/')
            .filter(|(provider, name)| plain(provider) && plain(name) && model.len() <= 300)
            .ok_or_else(|| {
                Error::invalid(format!(
                    "a model is given as provider/model, such as {}: a provider of oubliette.toml and the name it has there",
                    self.model
                ))
            })?;
        let replace = |text: &str| text.replace("{{provider}}", provider).replace("{{model}}", name);
        let definition = replace(&self.definition.to_string());
        Ok(Self {
            model: model.to_owned(),
            definition: serde_json::from_str(&definition).map_err(Error::internal)?,
            files: self
                .files
                .iter()
                .map(|(file, text)| (file.clone(), replace(text)))
                .collect(),
            ..self.clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use oubliette_protocol::agent::{AgentDefinition, AgentRuntime};

    use super::*;

    #[test]
    fn every_preset_is_a_valid_definition_of_a_pinned_program() {
        let all = AgentPreset::all().unwrap();
        for name in ["claude", "codex", "gemini", "opencode", "droid"] {
            assert!(AgentPreset::find(name).is_ok(), "{name}");
        }
        for preset in all {
            let filled = preset.with_model(Some("scripted/some-model")).unwrap();
            let definition = AgentDefinition::parse(&filled.definition.to_string()).unwrap();
            assert_eq!(definition.model.as_deref(), Some("scripted/some-model"));
            let AgentRuntime::Acp {
                program: Some(program),
                ..
            } = &definition.runtime
            else {
                panic!("{} runs no program", preset.name);
            };
            program.check("program").unwrap();
            let text = format!("{}{:?}", filled.definition, filled.files);
            assert!(text.contains("${model_url:scripted}"), "{}", preset.name);
            assert!(!text.contains("{{"), "{}", preset.name);
            assert!(!preset.needs.is_empty());
        }
        assert!(all[0].with_model(Some("no-provider")).is_err());
        assert!(all[0].with_model(Some("p/\"quoted\"")).is_err());
    }
}
