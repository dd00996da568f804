//! The server itself.

use oubliette_protocol::{Result, Scope, duration::Span};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Call, Effect, Reach, Tool};

/// `server_info`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ServerInfo {}

/// `doctor`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Doctor {}

impl Tool for ServerInfo {
    const NAME: &'static str = "server_info";
    const DESCRIPTION: &'static str = "The server's version, sandbox driver, isolation level and limits.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const REACH: Reach = Reach::Server;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
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
                "caller_timeout": Span(config.relay.caller_timeout),
                "reconnect_grace": Span(config.relay.reconnect_grace),
                "drain_timeout": Span(config.drain_timeout),
                "turn_timeout": Span(config.session.turn_timeout),
            },
            "scope": call.grant.scope(),
            "project_id": call.grant.project(),
            "uptime_s": app.started.elapsed().as_secs(),
            "protocol_versions": crate::doors::mcp::VERSIONS,
        }))
    }
}

impl Tool for Doctor {
    const NAME: &'static str = "doctor";
    const DESCRIPTION: &'static str = "What works on this machine and what does not, each with its remedy.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Read;
    const REACH: Reach = Reach::Server;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        Ok(crate::doctor::examine(call.app).await)
    }
}
