//! `server_info` and `doctor`: what the server is and whether its machine has what it needs.

use oubliette_protocol::{Error, ProjectId, Result, Scope, duration::HumanDuration};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ActionCall, ActionHandler, Effect, StateOwner};

/// `server_info`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ServerInfo {}

/// `doctor`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Doctor {}

/// Result of `server_info`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ServerDescription {
    /// `oubliette`.
    name: &'static str,
    /// Its version.
    version: &'static str,
    /// The sandbox driver.
    driver: String,
    /// The isolation of sandboxes: `none`, `namespaces` or `landlock`.
    isolation: &'static str,
    /// What sessions have unless their project says otherwise.
    limits: DefaultLimits,
    /// Your token's scope.
    scope: Scope,
    /// The project your token is limited to; null: all.
    project_id: Option<ProjectId>,
    /// How long the server runs, in seconds.
    uptime_s: u64,
    /// The MCP revisions it speaks.
    protocol_versions: Vec<String>,
}

/// What sessions have unless their project says otherwise.
#[derive(Debug, Serialize, JsonSchema)]
struct DefaultLimits {
    /// Memory of a session, in MiB.
    memory_mb: u64,
    /// Processors of a session, in cores.
    cpus: f64,
    /// Maximum number of processes of a session.
    pids: u64,
    /// What a session may have on disk, in MiB.
    workspace_mb: u64,
    /// How many levels deep sessions may start further sessions.
    max_depth: u32,
    /// Maximum number of active sessions of a project.
    max_sessions: u32,
    /// How long a caller may take to answer a tool call.
    caller_timeout: HumanDuration,
    /// How long a disconnected caller may take to come back.
    reconnect_grace: HumanDuration,
    /// How long a call waits for a person to allow it.
    approval_timeout: HumanDuration,
    /// How long a running turn may take to end before a switch cancels it.
    drain_timeout: HumanDuration,
    /// How long one turn may take.
    turn_timeout: HumanDuration,
}

/// Result of `doctor`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DoctorReport {
    /// Whether everything that is essential works.
    ok: bool,
    /// The server's version.
    version: String,
    /// What agents need for real work and do not have.
    missing: Vec<String>,
    /// Every check.
    checks: Vec<DoctorCheck>,
}

/// One check of `doctor`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DoctorCheck {
    /// What was checked.
    name: String,
    /// Whether it works.
    ok: bool,
    /// Whether nothing works without it.
    essential: bool,
    /// What was found.
    detail: String,
    /// What to do about it; absent if nothing is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl ActionHandler for ServerInfo {
    type Output = ServerDescription;

    const NAME: &'static str = "server_info";
    const DESCRIPTION: &'static str = "Show the server's version, sandbox driver, isolation level and default limits, and your token's scope and project.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let app = call.app;
        let config = app.live.config();
        Ok(ServerDescription {
            name: "oubliette",
            version: env!("CARGO_PKG_VERSION"),
            driver: config.sandbox.driver.to_owned(),
            isolation: app.sandbox.level().as_str(),
            limits: DefaultLimits {
                memory_mb: config.sandbox.memory_mb,
                cpus: config.sandbox.cpus,
                pids: config.sandbox.pids,
                workspace_mb: config.sandbox.workspace_mb,
                max_depth: config.session.max_depth,
                max_sessions: config.session.max_sessions,
                caller_timeout: HumanDuration(config.relay.caller_timeout),
                reconnect_grace: HumanDuration(config.relay.reconnect_grace),
                approval_timeout: HumanDuration(config.approval_timeout),
                drain_timeout: HumanDuration(config.drain_timeout),
                turn_timeout: HumanDuration(config.session.turn_timeout),
            },
            scope: call.grant.scope(),
            project_id: call.grant.project().cloned(),
            uptime_s: app.started.elapsed().as_secs(),
            protocol_versions: crate::doors::mcp::PROTOCOL_VERSIONS
                .iter()
                .map(ToString::to_string)
                .collect(),
        })
    }
}

impl ActionHandler for Doctor {
    type Output = DoctorReport;

    const NAME: &'static str = "doctor";
    const DESCRIPTION: &'static str =
        "Check what works on the server's machine and what does not, each with its remedy.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        serde_json::from_value(crate::doctor::examine(call.app).await).map_err(Error::internal)
    }
}
