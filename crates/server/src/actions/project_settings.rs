//! Settings of a project that its sessions run with: sandbox, limits and key, and who may set them.

use std::ops::RangeInclusive;

use oubliette_protocol::{
    Error, Result, Scope,
    agent::{NetworkAccess, check_image},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ActionCall, input};
use crate::config::ServerConfig;

/// The largest number that a sandbox setting may have.
const MAX_SANDBOX_NUMBER: f64 = 1e9;
/// The largest limit on sessions.
const MAX_SESSION_LIMIT: f64 = 1e6;

/// Sandbox settings of a project: what its sessions may use of the machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProjectSandbox {
    /// Sandbox driver. Must be the one this server is configured with (`driver` of server_info). Default: that one.
    /// Needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Container image of the sandboxes of agents that name none themselves, such as "debian:12". Refused by drivers without
    /// images, such as "local". Default: the server's. Needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Network access of the sandboxes: "none", "proxy" (HTTP and HTTPS through the server) or "host" (only if
    /// `[trust] host_network` is true in the server's configuration). Default: what each agent's definition asks for.
    /// Needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkAccess>,
    /// Memory limit of a sandbox in MiB, 16 to 1000000000. Default: the server's (`limits` of server_info); more needs
    /// admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// CPU limit of a sandbox in cores, 0.01 to 1000000000, for example 1.5. Default: the server's (`limits` of
    /// server_info); more needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// Maximum number of processes and threads in a sandbox, 8 to 1000000000. Default: the server's (`limits` of
    /// server_info); more needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids: Option<u64>,
    /// What a session may have on disk in MiB, its workspace included, and what uploads may make of a workspace, 1 to
    /// 1000000000. Default: the server's (`limits` of server_info); more needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_mb: Option<u64>,
}

impl ProjectSandbox {
    pub(super) fn check(&self, call: &ActionCall<'_>, config: &ServerConfig) -> Result<()> {
        let admin = |field: &str| call.grant.require(Scope::Admin, &format!("sandbox.{field}"));
        if let Some(driver) = &self.driver {
            admin("driver")?;
            if *driver != config.sandbox.driver {
                return Err(Error::invalid(format!(
                    "sandbox.driver: this server has the driver {:?}",
                    config.sandbox.driver
                )));
            }
        }
        if let Some(image) = &self.image {
            admin("image")?;
            if !config.sandbox.has_containers() {
                return Err(Error::invalid(format!(
                    "sandbox.image: the driver {:?} has no images, so {} cannot be used",
                    config.sandbox.driver,
                    oubliette_protocol::id::quoted(image)
                )));
            }
            check_image("sandbox.image", image).map_err(|error| Error::invalid(error.to_string()))?;
        }
        if let Some(network) = self.network {
            admin("network")?;
            if network == NetworkAccess::Host && !config.trust.host_network {
                return Err(Error::invalid(
                    "sandbox.network: \"host\" needs `host_network = true` under [trust] in oubliette.toml",
                ));
            }
        }
        check_numbers(call, &self.numbers(config))
    }

    /// The settings that are numbers, with the server's defaults.
    pub(super) fn numbers(&self, config: &ServerConfig) -> [NumericSetting; 4] {
        let defaults = &config.sandbox;
        let setting = |field, given, default, least| NumericSetting {
            field,
            given,
            default,
            range: least..=MAX_SANDBOX_NUMBER,
        };
        let whole = |field, given: Option<u64>, default: u64, least| {
            setting(field, given.map(|n| n as f64), default as f64, least)
        };
        [
            whole("sandbox.memory_mb", self.memory_mb, defaults.memory_mb, 16.0),
            setting("sandbox.cpus", self.cpus, defaults.cpus, 0.01),
            whole("sandbox.pids", self.pids, defaults.pids, 8.0),
            whole(
                "sandbox.workspace_mb",
                self.workspace_mb,
                defaults.workspace_mb,
                1.0,
            ),
        ]
    }
}

/// Limits on a project's sessions: how many there may be, and what they may use.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProjectLimits {
    /// Maximum depth of sessions started by sessions: 0 allows no child sessions, 1 children, 2 children of children; at
    /// most 1000000. Default: the server's (`limits` of server_info); more needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_depth: Option<u32>,
    /// Maximum number of active sessions at once, 1 to 1000000. Default: the server's (`limits` of server_info);
    /// more needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sessions: Option<u32>,
    /// Input and output tokens that models may use in a day (UTC), 0 to 1000000000000000. Past it model requests are refused
    /// until the next day. Null or absent: any number. Raising or removing it needs admin.
    #[serde(
        default,
        deserialize_with = "input::nullable",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<u64>")]
    pub tokens_per_day: Option<Option<u64>>,
    /// What models may cost in a day (UTC), in US dollars, 0 to 1000000000; counts what has a price in the server's
    /// configuration. Past it model requests are refused until the next day. Null or absent: any amount. Raising or removing
    /// it needs admin.
    #[serde(
        default,
        deserialize_with = "input::nullable",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<f64>")]
    pub cost_usd_per_day: Option<Option<f64>>,
    /// Tool calls an agent may make in one turn, 0 to 1000000000000000. Past it its calls fail with limit_exceeded until the
    /// next turn. Null or absent: any number. Raising or removing it needs admin.
    #[serde(
        default,
        deserialize_with = "input::nullable",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<u64>")]
    pub tool_calls_per_turn: Option<Option<u64>>,
}

impl ProjectLimits {
    pub(super) fn check(&self, call: &ActionCall<'_>, config: &ServerConfig) -> Result<()> {
        check_numbers(call, &self.numbers(config))
    }

    /// The limits, with the server's defaults.
    pub(super) fn numbers(&self, config: &ServerConfig) -> [NumericSetting; 2] {
        let limit = |field, given: Option<u32>, default: u32, least| NumericSetting {
            field,
            given: given.map(f64::from),
            default: f64::from(default),
            range: least..=MAX_SESSION_LIMIT,
        };
        let defaults = &config.session;
        [
            limit("limits.max_depth", self.max_depth, defaults.max_depth, 0.0),
            limit(
                "limits.max_sessions",
                self.max_sessions,
                defaults.max_sessions,
                1.0,
            ),
        ]
    }
}

/// The API key that the server creates for each session of a project, so that its agent can use Oubliette's own tools.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionKeySettings {
    /// Scope of the key: "read", "write" or "admin". Not above the scope of the token that sets it.
    pub scope: Scope,
}

/// A setting of a project that is a number.
pub(super) struct NumericSetting {
    /// Name of the argument.
    pub(super) field: &'static str,
    given: Option<f64>,
    /// The server's default, above which it needs admin.
    default: f64,
    range: RangeInclusive<f64>,
}

impl NumericSetting {
    /// Whether it is given and above the server's default.
    pub(super) fn is_above_default(&self) -> bool {
        self.given.is_some_and(|given| given > self.default)
    }
}

/// Checks that each number given is in its range, and that the token may set it.
fn check_numbers(call: &ActionCall<'_>, settings: &[NumericSetting]) -> Result<()> {
    for setting in settings {
        let (field, range) = (setting.field, &setting.range);
        // Not a number is in no range.
        if setting.given.is_some_and(|given| !range.contains(&given)) {
            let (least, most) = (range.start(), range.end());
            return Err(Error::invalid(format!("{field} must be {least} to {most}")));
        }
        if setting.is_above_default() {
            let what = format!("{field} above the server's default of {}", setting.default);
            call.grant.require(Scope::Admin, &what)?;
        }
    }
    Ok(())
}
