//! `[upstreams.<name>]`: services that agents use with a credential they never see.

use oubliette_egress::{ExternalService, ServiceAuth, ServiceRule};
use oubliette_protocol::{Result, agent::check_env_name};
use secrecy::SecretString;

use super::{EnvLookup, field_error, raw::RawUpstream};

/// Resolves one section; its credential is read from the environment.
pub(super) fn resolve(name: &str, raw: RawUpstream, env: EnvLookup<'_>) -> Result<ExternalService> {
    let field = |field: &str| format!("upstreams.{name}.{field}");
    let mut service = ExternalService::new(name, &raw.base_url)?;
    if let Some(auth) = &raw.auth {
        service.auth = ServiceAuth::parse(auth).map_err(|why| field_error(&field("auth"), why))?;
    }
    if let Some(variable) = &raw.api_key_env {
        check_env_name(variable).map_err(|why| field_error(&field("api_key_env"), why))?;
        service.api_key = env(variable)
            .filter(|key| !key.is_empty())
            .map(SecretString::from);
    }
    service.api_key_env = raw.api_key_env;
    for (i, rule) in raw.allow.iter().enumerate() {
        let rule = ServiceRule::parse(&rule.methods, &rule.paths);
        service
            .allow
            .push(rule.map_err(|why| field_error(&field(&format!("allow[{i}]")), why))?);
    }
    service.git = raw.git;
    service.check()?;
    Ok(service)
}
