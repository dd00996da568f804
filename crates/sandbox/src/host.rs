//! The driver without isolation, for tool servers that the operator trusts with the host.
//!
//! The program still runs under the inner stage, which as subreaper finds and kills the processes it leaves
//! behind, and which ends when the server does.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use async_trait::async_trait;

use crate::control_protocol::{AllowedPeers, DescendantCleanup, LaunchOrder, Rlimits};
use crate::driver::{SandboxCheck, SandboxDriver, SandboxError, SandboxReport};
use crate::handle::RunningSandbox;
use crate::launch::{LaunchPlan, launch};
use crate::local::exec_args;
use crate::spec::{PATH, WORKSPACE};
use crate::supervise::{SandboxResources, supervise};
use crate::{IsolationLevel, SandboxPaths, SandboxSpec};

/// Variables of the server's environment that a host program inherits, in addition to the spec's: enough to
/// find programs and write files, and none that could hold a secret.
const INHERITED_ENV: [&str; 8] = ["PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "SHELL", "TZ"];

/// Runs programs directly on the host.
#[derive(Debug, Clone)]
pub struct HostDriver {
    client: PathBuf,
}

impl HostDriver {
    /// `client` is the path of `oubliette-client`, used as inner stage.
    pub fn new(client: impl Into<PathBuf>) -> Self {
        Self {
            client: client.into(),
        }
    }
}

#[async_trait]
impl SandboxDriver for HostDriver {
    fn driver(&self) -> &'static str {
        "host"
    }

    fn level(&self) -> IsolationLevel {
        IsolationLevel::None
    }

    async fn probe(&self) -> SandboxReport {
        let ok = self.client.exists();
        let check = if ok {
            SandboxCheck::passed("inner stage", self.client.display().to_string())
        } else {
            SandboxCheck::failed(
                "inner stage",
                format!("{} is missing", self.client.display()),
                REINSTALL,
            )
        };
        SandboxReport {
            driver: "host",
            level: IsolationLevel::None,
            ok,
            checks: vec![check],
        }
    }

    fn paths(&self, spec: &SandboxSpec) -> SandboxPaths {
        SandboxPaths::of_host(spec, &self.client)
    }

    /// Always: its programs are not kept from anything.
    fn may_connect(&self, _: &Path, _: BorrowedFd<'_>) -> bool {
        true
    }

    async fn spawn(&self, spec: SandboxSpec) -> Result<RunningSandbox, SandboxError> {
        let paths = self.paths(&spec);
        let mut env: Vec<(String, String)> = INHERITED_ENV
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?)))
            .collect();
        if !env.iter().any(|(name, _)| name == "PATH") {
            env.push(("PATH".into(), PATH.into()));
        }
        env.extend(
            spec.env
                .iter()
                .map(|(name, value)| (name.clone(), paths.rewrite_word(value))),
        );
        // Without a workspace there is no /workspace to start in.
        let no_workspace = spec.workspace.is_none() && spec.cwd.starts_with(WORKSPACE);
        let order = LaunchOrder {
            argv: spec.argv.iter().map(|word| paths.rewrite_word(word)).collect(),
            env,
            image_env: None,
            cwd: if no_workspace {
                "/".into()
            } else {
                paths.resolve(&spec.cwd)
            },
            forwards: Vec::new(),
            allowed_peers: AllowedPeers::SameUser,
            confine: None,
            rlimits: Rlimits::default(),
            cleanup: DescendantCleanup::Descendants,
        };
        let plan = LaunchPlan {
            program: exec_args::path_cstring(&self.client)?,
            argv: exec_args::inner_stage_argv(&self.client)?,
            environment: Vec::new(),
            bwrap_args: None,
            group: None,
        };
        let launched = launch(plan)
            .await
            .map_err(|error| exec_args::client_start_error(&self.client, &error))?;
        let kit = SandboxResources {
            level: IsolationLevel::None,
            paths,
            scratch: None,
            socket_peers: None,
            membership: None,
        };
        supervise(launched, order, kit).await.map(|(running, _)| running)
    }
}

/// The remedy when `oubliette-client` is missing.
pub(crate) const REINSTALL: &str =
    "Install Oubliette again: `oubliette-client` belongs beside `oubliette`, or name it in [sandbox] client.";
