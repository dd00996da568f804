//! The driver trait, its errors and its self-test report.

use async_trait::async_trait;
use serde::Serialize;

use crate::{IsolationLevel, RunningSandbox, SandboxPaths, SandboxSpec};

/// A sandbox driver: runs a [`SandboxSpec`].
///
/// This crate has `local` and `host`. A Docker or Kubernetes driver would map `mounts` and `sockets` to volumes,
/// run [`crate::spec::CLIENT`] `sandbox-init` as the container's first process, and return the same
/// [`RunningSandbox`] with the pipes of an attached exec.
#[async_trait]
pub trait SandboxDriver: Send + Sync {
    /// The driver's name in configuration, such as `local`.
    fn driver(&self) -> &'static str;

    /// The isolation level of its sandboxes on this host: expected until [`SandboxDriver::probe`] has run, then
    /// measured.
    fn level(&self) -> IsolationLevel;

    /// Tests what works on this host. The result is cached.
    async fn probe(&self) -> SandboxReport;

    /// Where the program would see a spec's paths, for code that needs them before or after the start.
    fn paths(&self, spec: &SandboxSpec) -> SandboxPaths;

    /// Starts a sandbox. Returns when the program itself runs, or with the reason why it does not.
    async fn spawn(&self, spec: SandboxSpec) -> Result<RunningSandbox, SandboxError>;
}

/// Why a sandbox could not be started.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SandboxError {
    /// The host cannot provide the required isolation.
    #[error("{reason}. {remedy}")]
    Unavailable {
        /// What is missing.
        reason: String,
        /// What to do about it.
        remedy: String,
    },
    /// The spec is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The sandbox was set up, but the program could not be executed.
    #[error("`{program}` could not be started: {reason}")]
    Program {
        /// `argv[0]`.
        program: String,
        /// Why.
        reason: String,
    },
    /// A step of the setup failed.
    #[error("the sandbox could not be set up: {0}")]
    Setup(String),
}

impl SandboxError {
    /// A [`SandboxError::Setup`] that names the failed step.
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

/// What works on this host, for `doctor` and `server_info`.
#[derive(Debug, Clone, Serialize)]
pub struct SandboxReport {
    /// The driver's name.
    pub driver: &'static str,
    /// The isolation level of its sandboxes.
    pub level: IsolationLevel,
    /// Whether sandboxes can be started at the configured minimum level.
    pub ok: bool,
    /// The individual checks.
    pub checks: Vec<SandboxCheck>,
}

/// One check of a [`SandboxReport`].
#[derive(Debug, Clone, Serialize)]
pub struct SandboxCheck {
    /// What was checked: `bubblewrap`, `landlock`, `seccomp`, `memory limit`, …
    pub name: &'static str,
    /// Whether it passed.
    pub ok: bool,
    /// What was found.
    pub detail: String,
    /// What to do about it, if it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl SandboxCheck {
    /// A check that passed.
    pub fn passed(name: &'static str, detail: impl Into<String>) -> Self {
        Self {
            name,
            ok: true,
            detail: detail.into(),
            remedy: None,
        }
    }

    /// A check that failed.
    pub fn failed(name: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            name,
            ok: false,
            detail: detail.into(),
            remedy: Some(remedy.into()),
        }
    }
}
