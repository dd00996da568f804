//! What every driver offers.

use async_trait::async_trait;
use serde::Serialize;

use crate::{Level, Paths, Running, Spec};

/// A driver: something that can run a [`Spec`].
///
/// `local` and `host` live here. A Docker or Kubernetes driver maps `mounts` and `sockets` to volumes,
/// runs [`crate::spec::CLIENT`] `sandbox-init` as the container's first process, and hands the same
/// [`Running`] back, its pipes being those of an attached exec.
#[async_trait]
pub trait Sandbox: Send + Sync {
    /// Its name in configuration: `local`, `docker`.
    fn driver(&self) -> &'static str;

    /// The level its sandboxes reach here, as far as is known yet; [`Sandbox::probe`] makes sure.
    fn level(&self) -> Level;

    /// What works here. Measured once, then remembered.
    async fn probe(&self) -> Report;

    /// Where a spec's paths would be, for whoever has to name one before or after the start.
    fn paths(&self, spec: &Spec) -> Paths;

    /// Starts it. Returns when the program itself runs, or with the reason why it does not.
    async fn spawn(&self, spec: Spec) -> Result<Running, SandboxError>;
}

/// Why nothing runs.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SandboxError {
    /// The host cannot give the isolation asked for.
    #[error("{reason}. {remedy}")]
    Unavailable {
        /// What is missing.
        reason: String,
        /// What to do about it.
        remedy: String,
    },
    /// The spec itself is wrong.
    #[error("{0}")]
    Invalid(String),
    /// The sandbox stands, the program does not start.
    #[error("`{program}` could not be started: {reason}")]
    Program {
        /// `argv[0]`.
        program: String,
        /// Why.
        reason: String,
    },
    /// Setting up failed on the way.
    #[error("the sandbox could not be set up: {0}")]
    Setup(String),
}

impl SandboxError {
    /// A failed step of setting up.
    pub(crate) fn setup(step: &str, cause: impl std::fmt::Display) -> Self {
        SandboxError::Setup(format!("{step}: {cause}"))
    }

    /// What to do about it, where that is known.
    pub fn remedy(&self) -> Option<&str> {
        match self {
            SandboxError::Unavailable { remedy, .. } => Some(remedy),
            SandboxError::Invalid(_) | SandboxError::Program { .. } | SandboxError::Setup(_) => None,
        }
    }
}

/// What works here, for `doctor` and `server_info`.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The driver's name.
    pub driver: &'static str,
    /// The level sandboxes reach.
    pub level: Level,
    /// Whether sandboxes can be started at all, given the configured minimum.
    pub ok: bool,
    /// Each thing looked at.
    pub checks: Vec<Check>,
}

/// One thing looked at.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// What: `bubblewrap`, `landlock`, `seccomp`, `memory limit`, …
    pub name: &'static str,
    /// Whether it is as it should be.
    pub ok: bool,
    /// What was found.
    pub detail: String,
    /// What to do about it, if it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Check {
    /// It is as it should be.
    pub fn good(name: &'static str, detail: impl Into<String>) -> Self {
        Self {
            name,
            ok: true,
            detail: detail.into(),
            remedy: None,
        }
    }

    /// It is not.
    pub fn bad(name: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            name,
            ok: false,
            detail: detail.into(),
            remedy: Some(remedy.into()),
        }
    }
}
