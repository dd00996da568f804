//! `[sandbox]`: the driver and the limits of sandboxes.

use std::time::Duration;

use oubliette_protocol::{Error, Result, agent::check_image};
use oubliette_sandbox::{IsolationLevel, TotalLimits};

use super::{
    field_error,
    kubernetes::{self, KubernetesConfig},
    raw::{RawDocker, RawSandbox},
};

/// The least that `[sandbox] total_memory_mb` and `total_pids` may be: below it no sandbox could start.
const MIN_TOTAL_MEMORY_MB: u64 = 64;
const MIN_TOTAL_PIDS: u64 = 16;
/// `[sandbox] grace`: its default and bounds.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);
const MIN_GRACE: Duration = Duration::from_secs(1);
const MAX_GRACE: Duration = Duration::from_secs(600);

/// `[sandbox]`: the driver, the default limits of a session's sandboxes together, and those of all sessions.
#[derive(Debug, Clone)]
pub struct SandboxConfig {
    /// The name of the sandbox driver.
    pub driver: &'static str,
    /// The container engine, if the driver is `docker`.
    pub docker: Option<DockerConfig>,
    /// The cluster, if the driver is `kubernetes`.
    pub kubernetes: Option<KubernetesConfig>,
    /// How long a cut connection to a container may take to be made again.
    pub grace: Duration,
    /// The weakest isolation that sessions may start with.
    pub minimum: IsolationLevel,
    /// Memory of a session, in MiB.
    pub memory_mb: u64,
    /// Processors of a session, in cores.
    pub cpus: f64,
    /// Maximum number of processes of a session.
    pub pids: u64,
    /// What a session may have on disk, its workspace included, in MiB.
    pub workspace_mb: u64,
    /// Memory and processes of all sessions together.
    pub total: TotalLimits,
}

impl SandboxConfig {
    /// Whether sandboxes of sessions are containers: they are started from images, and see only what can be mounted into them.
    pub(crate) fn has_containers(&self) -> bool {
        self.docker.is_some() || self.kubernetes.is_some()
    }
}

/// `[sandbox.docker]`: the container engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DockerConfig {
    /// Its address, `unix:///path`.
    pub host: String,
    /// Its runtime; none: its own default.
    pub runtime: Option<String>,
    /// Its network for sandboxes with `"network": "host"`.
    pub network: String,
    /// The image of sessions that name none.
    pub image: Option<String>,
}

fn resolve_docker(raw: RawDocker) -> Result<DockerConfig> {
    let host = raw.host.unwrap_or_else(|| "unix:///var/run/docker.sock".into());
    if !host.starts_with("unix:///") {
        return Err(field_error(
            "sandbox.docker.host",
            format!(
                "{host:?}: use the socket of an engine on this machine, such as \"unix:///var/run/docker.sock\"; an engine \
                 elsewhere does not see the workspaces"
            ),
        ));
    }
    let plain = |field: &str, value: Option<String>| match value {
        Some(name)
            if name.is_empty()
                || name.len() > 100
                || !name
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)) =>
        {
            Err(field_error(field, format!("{name:?} is not a name")))
        }
        value => Ok(value),
    };
    if let Some(image) = &raw.image {
        check_image("sandbox.docker.image", image).map_err(|error| Error::invalid(error.to_string()))?;
    }
    Ok(DockerConfig {
        host,
        runtime: plain("sandbox.docker.runtime", raw.runtime)?,
        network: plain("sandbox.docker.network", raw.network)?.unwrap_or_else(|| "host".into()),
        image: raw.image,
    })
}

pub(super) fn resolve(raw: RawSandbox) -> Result<SandboxConfig> {
    let docker = resolve_docker(raw.docker)?;
    let (driver, docker, kubernetes) = match raw.driver.as_deref() {
        None | Some("local") => ("local", None, None),
        Some("docker") => ("docker", Some(docker), None),
        Some("kubernetes") => ("kubernetes", None, Some(kubernetes::resolve(raw.kubernetes)?)),
        Some(other) => {
            return Err(field_error(
                "sandbox.driver",
                format!("{other:?} is not a driver here: use \"local\", \"docker\" or \"kubernetes\""),
            ));
        }
    };
    let grace = raw.grace.map_or(DEFAULT_GRACE, |grace| grace.0);
    if !(MIN_GRACE..=MAX_GRACE).contains(&grace) {
        return Err(field_error("sandbox.grace", "must be between 1s and 10m"));
    }
    let minimum = match raw.minimum.as_deref() {
        None | Some("namespaces") => IsolationLevel::Namespaces,
        Some("landlock") => IsolationLevel::Landlock,
        Some(other) => {
            return Err(field_error(
                "sandbox.minimum",
                format!("{other:?}: use \"namespaces\" or \"landlock\""),
            ));
        }
    };
    let cpus = raw.cpus.unwrap_or(2.0);
    if !(cpus.is_finite() && (0.01..=4096.0).contains(&cpus)) {
        return Err(field_error("sandbox.cpus", "must be between 0.01 and 4096"));
    }
    let positive = |field: &str, given: Option<u64>, default: u64| match given.unwrap_or(default) {
        0 => Err(field_error(field, "must be at least 1")),
        n => Ok(n),
    };
    let at_least = |field: &str, given: Option<u64>, least: u64| match given {
        Some(n) if n < least => Err(field_error(field, format!("must be at least {least}"))),
        given => Ok(given),
    };
    Ok(SandboxConfig {
        driver,
        docker,
        kubernetes,
        grace,
        minimum,
        memory_mb: positive("sandbox.memory_mb", raw.memory_mb, 2048)?,
        cpus,
        pids: positive("sandbox.pids", raw.pids, 512)?,
        workspace_mb: positive("sandbox.workspace_mb", raw.workspace_mb, 4096)?,
        total: TotalLimits {
            memory_mb: at_least(
                "sandbox.total_memory_mb",
                raw.total_memory_mb,
                MIN_TOTAL_MEMORY_MB,
            )?,
            pids: at_least("sandbox.total_pids", raw.total_pids, MIN_TOTAL_PIDS)?,
        },
    })
}
