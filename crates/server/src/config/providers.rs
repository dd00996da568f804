//! `[providers]`: services that models are reached through.

use oubliette_egress::{AuthStyle, ModelProvider};
use oubliette_protocol::Result;
use secrecy::SecretString;

use super::{EnvLookup, field_error, raw::RawProvider};

/// Resolves one provider, with its key read from the environment.
pub(super) fn resolve(name: &str, raw: RawProvider, env: EnvLookup<'_>) -> Result<ModelProvider> {
    let mut provider = ModelProvider::new(name, raw.base_url);
    provider.style = match raw.auth.as_deref() {
        None => provider.style,
        Some("anthropic") => AuthStyle::Anthropic,
        Some("gemini") => AuthStyle::Gemini,
        Some("bearer") => AuthStyle::Bearer,
        Some(other) => {
            return Err(field_error(
                &format!("providers.{name}.auth"),
                format!("{other:?}: use \"anthropic\", \"gemini\" or \"bearer\""),
            ));
        }
    };
    provider.api_key = raw
        .api_key_env
        .as_deref()
        .and_then(env)
        .filter(|k| !k.is_empty())
        .map(SecretString::from);
    provider.api_key_env = raw.api_key_env;
    provider.allow_paths = raw.allow_paths;
    Ok(provider)
}
