//! The driver trait, its errors and its self-test report.

use std::{os::fd::BorrowedFd, path::Path};

use async_trait::async_trait;
use serde::Serialize;

use crate::{IsolationLevel, RunningSandbox, SandboxPaths, SandboxSpec};

/// A sandbox driver: runs a [`SandboxSpec`].
///
/// `local` starts processes of this host, `docker` containers that are connected by the remote stage ([`crate::stage`]),
/// `host` processes without isolation. Whatever it is, the program's stdin, stdout and stderr are pipes of this process,
/// and sockets of the spec lead to this process.
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

    /// Whether a connection to a socket, by its path on the host, was made by a process of a sandbox whose spec lists
    /// that socket. Whoever listens on such a socket has to ask. Where sandboxes have a mount namespace only those
    /// processes see the socket, and the answer is always yes.
    fn may_connect(&self, socket: &Path, connection: BorrowedFd<'_>) -> bool;

    /// Whether descriptors that a program inside passes over a socket of its spec arrive here. They do only where the
    /// socket itself is seen inside.
    fn passes_descriptors(&self) -> bool {
        true
    }

    /// Whether its sandboxes are started from images.
    fn has_images(&self) -> bool {
        false
    }

    /// Makes an image available, and says which exactly it is. `wanted` is its name, `pinned` the one that the name stood
    /// for before. Sandboxes of a group use the image it was given ([`crate::SandboxGroup::set_image`]). A driver
    /// without images refuses a name and needs none.
    async fn prepare_image(
        &self,
        wanted: Option<&str>,
        _pinned: Option<&str>,
        _progress: &(dyn Fn(String) + Send + Sync),
    ) -> Result<Option<PinnedImage>, SandboxError> {
        match wanted {
            None => Ok(None),
            Some(image) => Err(SandboxError::Invalid(format!(
                "sandbox.image: the driver {:?} has no images, so {image:?} cannot be used",
                self.driver()
            ))),
        }
    }

    /// Starts a sandbox. Returns when the program itself runs, or with the reason why it does not.
    async fn spawn(&self, spec: SandboxSpec) -> Result<RunningSandbox, SandboxError>;
}

/// An image of a container engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PinnedImage {
    /// The name it was asked for by.
    pub name: String,
    /// The digest that the name stood for, as the engine takes it: always the same content.
    pub digest: String,
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
    /// The group has as many sandboxes as it may have.
    #[error("{0}")]
    LimitExceeded(String),
    /// The sandbox was set up, but the program could not be executed.
    #[error("`{program}` could not be started: {reason}")]
    Program {
        /// `argv[0]`.
        program: String,
        /// Why it could not be started.
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
            SandboxError::Invalid(_)
            | SandboxError::LimitExceeded(_)
            | SandboxError::Program { .. }
            | SandboxError::Setup(_) => None,
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
