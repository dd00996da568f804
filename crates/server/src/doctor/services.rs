//! Checks of what is configured outside the machine: model providers, services and webhooks.

use serde_json::Value;

use super::{CheckImportance, check_result};
use crate::{app::App, config::ServerConfig};

/// Whether agents can ask a model: there is a provider, and it has the key it is configured with.
pub(super) fn check_models(config: &ServerConfig) -> Value {
    let usable = |p: &&oubliette_egress::ModelProvider| p.api_key.is_some() || p.api_key_env.is_none();
    let usable: Vec<&str> = config
        .providers
        .iter()
        .filter(usable)
        .map(|p| p.name.as_str())
        .collect();
    let detail = match (config.providers.is_empty(), usable.is_empty()) {
        (true, _) => "no model provider is configured: only scripted agents can run".to_owned(),
        (false, true) => "no model provider has its key".to_owned(),
        (false, false) => usable.join(", "),
    };
    let remedy = "add [providers.NAME] with base_url and api_key_env to oubliette.toml, and start the server with that variable set";
    check_result(
        "models",
        CheckImportance::Optional,
        !usable.is_empty(),
        detail,
        remedy,
    )
}

pub(super) fn check_providers(config: &ServerConfig) -> Vec<Value> {
    let one = |p: &oubliette_egress::ModelProvider| {
        let keyed = p.api_key.is_some() || p.api_key_env.is_none();
        let variable = p.api_key_env.as_deref().unwrap_or_default();
        let detail = match keyed {
            true => p.base_url.clone(),
            false => format!("{variable} is not set in the server's environment"),
        };
        check_result(
            &format!("provider {}", p.name),
            CheckImportance::Optional,
            keyed,
            detail,
            "set the variable and start the server again",
        )
    };
    config.providers.iter().map(one).collect()
}

pub(super) fn check_upstreams(config: &ServerConfig) -> Vec<Value> {
    let one = |service: &oubliette_egress::ExternalService| {
        let variable = service.api_key_env.as_deref().unwrap_or_default();
        let (ok, detail, remedy) = match (service.lacks_key(), service.allow.is_empty()) {
            (true, _) => (
                false,
                format!("{variable} is not set in the server's environment"),
                "set the variable and start the server again",
            ),
            (false, true) => (
                false,
                "allow is empty: nothing passes".to_owned(),
                "list methods and paths in allow, and start the server again",
            ),
            (false, false) => (true, service.base_url.to_string(), ""),
        };
        let name = format!("upstream {}", service.name);
        check_result(&name, CheckImportance::Optional, ok, detail, remedy)
    };
    config.upstreams.iter().map(one).collect()
}

/// Whether each webhook takes its events.
pub(super) async fn check_webhooks(app: &App) -> Vec<Value> {
    let mut checks = Vec::new();
    for webhook in &app.live.config().webhooks {
        let name = format!("webhook {}", webhook.shown());
        if webhook.secret.is_none() {
            let detail = format!(
                "{} is not set in the server's environment; events are kept, not sent",
                webhook.secret_env
            );
            let remedy = "set the variable and start the server again";
            checks.push(check_result(
                &name,
                CheckImportance::Optional,
                false,
                detail,
                remedy,
            ));
            continue;
        }
        let status = match app.store.webhook_status(&webhook.id()).await {
            Ok(status) => status,
            Err(error) => {
                checks.push(check_result(
                    &name,
                    CheckImportance::Optional,
                    false,
                    error.message,
                    "",
                ));
                continue;
            }
        };
        let mut detail = match (&status.last_error, status.failing_since) {
            (Some(why), Some(since)) => {
                format!("{why}; failing since {since}, {} events wait", status.waiting)
            }
            _ => format!("{} events wait", status.waiting),
        };
        if status.dropped > 0 {
            detail.push_str(&format!(", {} were given up", status.dropped));
        }
        checks.push(check_result(
            &name,
            CheckImportance::Optional,
            status.failing_since.is_none(),
            detail,
            "see that it answers 2xx at the url of its [[webhook]]; events are kept and tried again for a day",
        ));
    }
    checks
}
