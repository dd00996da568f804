//! No walls: a tool server the operator trusts with the host.
//!
//! It still runs under the inner stage, which as subreaper finds and kills whatever it leaves behind, and
//! which dies with the server.

use std::path::PathBuf;

use async_trait::async_trait;

use crate::driver::{Check, Report, Sandbox, SandboxError};
use crate::handle::Running;
use crate::launch::{Plan, launch};
use crate::life::{Kit, supervise};
use crate::local::words;
use crate::spec::{PATH, WORKSPACE};
use crate::wire::{Family, Guests, Order, Rlimits};
use crate::{Level, Paths, Spec};

/// What of the server's own environment a host program gets, beside the spec's: enough to find programs and
/// write files, and nothing that could be a secret.
const PASSED_ON: [&str; 8] = ["PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "SHELL", "TZ"];

/// Runs programs on the host itself.
#[derive(Debug, Clone)]
pub struct Host {
    client: PathBuf,
}

impl Host {
    /// `client`: the `oubliette-client` program, used as inner stage.
    pub fn new(client: impl Into<PathBuf>) -> Self {
        Self {
            client: client.into(),
        }
    }
}

#[async_trait]
impl Sandbox for Host {
    fn driver(&self) -> &'static str {
        "host"
    }

    fn level(&self) -> Level {
        Level::None
    }

    async fn probe(&self) -> Report {
        let ok = self.client.exists();
        let check = if ok {
            Check::good("inner stage", self.client.display().to_string())
        } else {
            Check::bad(
                "inner stage",
                format!("{} is missing", self.client.display()),
                REINSTALL,
            )
        };
        Report {
            driver: "host",
            level: Level::None,
            ok,
            checks: vec![check],
        }
    }

    fn paths(&self, spec: &Spec) -> Paths {
        Paths::of_host(spec, &self.client)
    }

    async fn spawn(&self, spec: Spec) -> Result<Running, SandboxError> {
        let paths = self.paths(&spec);
        let mut env: Vec<(String, String)> = PASSED_ON
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?)))
            .collect();
        if !env.iter().any(|(name, _)| name == "PATH") {
            env.push(("PATH".into(), PATH.into()));
        }
        env.extend(
            spec.env
                .iter()
                .map(|(name, value)| (name.clone(), paths.see_in(value))),
        );
        // Without a workspace there is no /workspace to start in.
        let nowhere = spec.workspace.is_none() && spec.cwd.starts_with(WORKSPACE);
        let order = Order {
            argv: spec.argv.iter().map(|word| paths.see_in(word)).collect(),
            env,
            cwd: if nowhere { "/".into() } else { paths.see(&spec.cwd) },
            forwards: Vec::new(),
            guests: Guests::SameUser,
            confine: None,
            rlimits: Rlimits::default(),
            family: Family::Descendants,
        };
        let plan = Plan {
            program: words::of_path(&self.client)?,
            argv: words::inner(&self.client)?,
            args: None,
            group: None,
        };
        let launched = launch(plan)
            .await
            .map_err(|error| words::no_client(&self.client, &error))?;
        let kit = Kit {
            level: Level::None,
            paths,
            scratch: None,
        };
        supervise(launched, order, kit).await.map(|(running, _)| running)
    }
}

/// The remedy when our own program is missing.
pub(crate) const REINSTALL: &str =
    "Install Oubliette again: `oubliette-client` belongs beside `oubliette`, or name it in [sandbox] client.";
