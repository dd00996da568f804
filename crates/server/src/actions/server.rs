//! `server_info` and `doctor`: what the server is and whether its machine has what it needs.

use oubliette_protocol::{Result, Scope, duration::HumanDuration};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{ActionCall, Effect, StateOwner, ActionHandler};

/// `server_info`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ServerInfo {}

/// `doctor`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Doctor {}

impl ActionHandler for ServerInfo {
    const NAME: &'static str = "server_info";
    const DESCRIPTION: &'static str = "Show the server's version, sandbox driver, isolation level and default limits, and your token's scope and project.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let app = call.app;
        let config = &app.config;
        Ok(json!({
            "name": "oubliette",
            "version": env!("CARGO_PKG_VERSION"),
            "driver": config.sandbox.driver,
            "isolation": app.sandbox.level().as_str(),
            "limits": {
                "memory_mb": config.sandbox.memory_mb,
                "cpus": config.sandbox.cpus,
                "pids": config.sandbox.pids,
                "workspace_mb": config.sandbox.workspace_mb,
                "max_depth": config.session.max_depth,
                "max_sessions": config.session.max_sessions,
                "caller_timeout": HumanDuration(config.relay.caller_timeout),
                "reconnect_grace": HumanDuration(config.relay.reconnect_grace),
                "drain_timeout": HumanDuration(config.drain_timeout),
                "turn_timeout": HumanDuration(config.session.turn_timeout),
            },
            "scope": call.grant.scope(),
            "project_id": call.grant.project(),
            "uptime_s": app.started.elapsed().as_secs(),
            "protocol_versions": crate::doors::mcp::PROTOCOL_VERSIONS,
        }))
    }
}

impl ActionHandler for Doctor {
    const NAME: &'static str = "doctor";
    const DESCRIPTION: &'static str = "Check what works on the server's machine and what does not, each with its remedy.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        Ok(crate::doctor::examine(call.app).await)
    }
}
