//! `preset_list`: ready definitions of well-known agents.

use oubliette_protocol::{Result, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ActionCall, ActionHandler, Effect, StateOwner};
use crate::presets::AgentPreset;

/// `preset_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PresetList {
    /// Name of one preset, for example "claude". Absent: all.
    #[serde(default)]
    pub name: Option<String>,
    /// The model to fill in, as "provider/model", at most 300 bytes. Absent: each preset's own.
    #[serde(default)]
    pub model: Option<String>,
}

/// Result of `preset_list`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct PresetPage {
    /// The presets.
    presets: Vec<AgentPreset>,
}

impl ActionHandler for PresetList {
    type Output = PresetPage;

    const NAME: &'static str = "preset_list";
    const DESCRIPTION: &'static str = "List ready definitions of well-known agents, with what each needs and what is known not to work. Store one with agent_put: its definition and files.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, _: &ActionCall<'_>) -> Result<Self::Output> {
        let presets: Vec<&AgentPreset> = match &self.name {
            Some(name) => vec![AgentPreset::find(name)?],
            None => AgentPreset::all()?.iter().collect(),
        };
        let model = self.model.as_deref();
        let filled: Result<Vec<AgentPreset>> =
            presets.iter().map(|preset| preset.with_model(model)).collect();
        Ok(PresetPage { presets: filled? })
    }
}
