//! The driver without a daemon.
//!
//! - [`system`]: what of the host's system every sandbox sees, and the made-up `/etc`.
//! - [`bwrap`]: a spec as bubblewrap's arguments.
//! - [`confine`]: a spec as Landlock's rules, inside bubblewrap or alone.
//! - [`cgroup`]: limits for a whole tree.
//! - [`probe`]: what works here, tried out once, beside the server's start.

mod bwrap;
pub(crate) mod cgroup;
mod confine;
mod probe;
mod system;
pub(crate) mod words;

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use async_trait::async_trait;

use crate::driver::{Report, Sandbox, SandboxError};
use crate::handle::Running;
use crate::launch::{Plan, launch};
use crate::life::{Kit, supervise};
use crate::spec::{HOME, PATH, WORKSPACE};
use crate::wire::{Family, Guests, Order, Rlimits};
use crate::{Level, Network, Paths, Spec};
use cgroup::Group;
use probe::Found;

/// How the local driver is set up.
#[derive(Debug, Clone)]
pub struct LocalConfig {
    /// The `oubliette-client` program, used as inner stage.
    pub client: PathBuf,
    /// The weakest level to run at: `Namespaces`, or `Landlock` where the operator accepts it.
    pub minimum: Level,
    /// Bubblewrap, if not the one on PATH.
    pub bwrap: Option<PathBuf>,
    /// A directory of ours, for scratch files; also tells homes apart.
    pub run_dir: PathBuf,
}

/// Runs programs under bubblewrap; or, where the operator accepts it, under Landlock alone.
#[derive(Debug, Clone)]
pub struct Local {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: LocalConfig,
    /// What works here, once it is known.
    found: RwLock<Option<Arc<Found>>>,
    /// Held by whoever is finding out.
    probing: tokio::sync::Mutex<()>,
    number: AtomicU64,
}

impl Local {
    /// Sets the driver up and begins, in the background, to try out what works. This never fails for what
    /// the host lacks: [`Sandbox::probe`] tells that, and each [`Sandbox::spawn`] refuses.
    pub async fn new(config: LocalConfig) -> Result<Self, SandboxError> {
        if config.minimum == Level::None {
            return Err(SandboxError::Invalid(
                "the minimum isolation level must be `namespaces` or `landlock`".into(),
            ));
        }
        let inner = Inner {
            config,
            found: RwLock::new(None),
            probing: tokio::sync::Mutex::new(()),
            number: AtomicU64::new(0),
        };
        let local = Self {
            inner: Arc::new(inner),
        };
        let probing = local.clone();
        tokio::spawn(async move {
            probing.found().await;
        });
        Ok(local)
    }

    /// What works here. What works is remembered; what does not is tried again after a while, so that
    /// installing bubblewrap, or a host that was only too busy, needs no restart.
    async fn found(&self) -> Arc<Found> {
        if let Some(found) = self.known() {
            return found;
        }
        let _probing = self.inner.probing.lock().await;
        if let Some(found) = self.known() {
            return found;
        }
        let found = Arc::new(probe::probe(&self.inner).await);
        *self.inner.found.write().unwrap_or_else(PoisonError::into_inner) = Some(found.clone());
        found
    }

    fn known(&self) -> Option<Arc<Found>> {
        self.last_found().filter(|found| found.holds())
    }

    fn last_found(&self) -> Option<Arc<Found>> {
        self.inner
            .found
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn level_expected(&self) -> Level {
        match self.last_found() {
            Some(found) => found.level,
            None if probe::bwrap(&self.inner.config).is_some() => Level::Namespaces,
            None => Level::Landlock,
        }
    }
}

#[async_trait]
impl Sandbox for Local {
    fn driver(&self) -> &'static str {
        "local"
    }

    fn level(&self) -> Level {
        self.level_expected()
    }

    async fn probe(&self) -> Report {
        self.found().await.report.clone()
    }

    fn paths(&self, spec: &Spec) -> Paths {
        match self.level_expected() {
            Level::Namespaces => Paths::as_specified(),
            Level::Landlock | Level::None => Paths::of_host(spec, &self.inner.config.client),
        }
    }

    async fn spawn(&self, spec: Spec) -> Result<Running, SandboxError> {
        let found = self.found().await;
        if let Some(refusal) = &found.refusal {
            return Err(refusal.clone());
        }
        self.inner.check(&spec)?;
        let group = self.inner.group(&found, &spec);
        match found.level {
            Level::Namespaces => self.inner.namespaced(&found, spec, group).await,
            Level::Landlock | Level::None => self.inner.landlocked(spec, group).await,
        }
        .map(|(running, _)| running)
    }
}

impl Inner {
    fn check(&self, spec: &Spec) -> Result<(), SandboxError> {
        let invalid = |text: String| Err(SandboxError::Invalid(text));
        if spec.argv.is_empty() {
            return invalid("there is no program to run".into());
        }
        let inside = spec.mounts.iter().map(|mount| &mount.inside);
        for path in inside.chain(spec.sockets.iter().map(|socket| &socket.inside)) {
            let plain = path.components().all(|part| {
                matches!(
                    part,
                    std::path::Component::RootDir | std::path::Component::Normal(_)
                )
            });
            if !path.is_absolute() || !plain || path == Path::new("/") {
                return invalid(format!("{} cannot be a place inside a sandbox", path.display()));
            }
        }
        let hosts = spec
            .mounts
            .iter()
            .map(|mount| &mount.host)
            .chain(&spec.workspace)
            .chain(&spec.home);
        for path in hosts.chain(spec.sockets.iter().map(|socket| &socket.host)) {
            if !path.exists() {
                return invalid(format!("{} does not exist", path.display()));
            }
        }
        Ok(())
    }

    /// A cgroup for it, where there can be one. Without, the inner stage limits each process.
    fn group(&self, found: &Found, spec: &Spec) -> Option<Group> {
        found.cgroups.create(&spec.limits).unwrap_or_else(|error| {
            tracing::warn!(%error, label = spec.label, "no cgroup; limits are kept for each process instead");
            None
        })
    }

    fn rlimits(spec: &Spec, group: Option<&Group>) -> Rlimits {
        let (memory, pids) = group.map_or((false, false), Group::limits);
        let mb = |value: u64| value.saturating_mul(1024 * 1024);
        Rlimits {
            open_files: spec.limits.open_files,
            processes: spec.limits.pids.filter(|_| !pids),
            data: spec.limits.memory_mb.filter(|_| !memory).map(mb),
            file_size: spec.limits.workspace_mb.map(mb),
        }
    }

    fn environment(spec: &Spec, paths: &Paths, home: &Path, tmp: &Path) -> Vec<(String, String)> {
        let mut env: Vec<(String, String)> = vec![
            ("PATH".into(), PATH.into()),
            ("HOME".into(), home.to_string_lossy().into_owned()),
            ("TMPDIR".into(), tmp.to_string_lossy().into_owned()),
            ("LANG".into(), "C.UTF-8".into()),
            ("USER".into(), "agent".into()),
        ];
        for (name, value) in &spec.env {
            env.retain(|(other, _)| other != name);
            env.push((name.clone(), paths.see_in(value)));
        }
        env
    }

    async fn namespaced(
        &self,
        found: &Found,
        mut spec: Spec,
        group: Option<Group>,
    ) -> Result<(Running, i32), SandboxError> {
        let Some(bwrap) = &found.bwrap else {
            return Err(probe::no_bwrap());
        };
        let system = found.system()?;
        // A tool server without a workspace starts in its home.
        if spec.workspace.is_none() && spec.cwd.starts_with(WORKSPACE) {
            spec.cwd = HOME.into();
        }
        let plan = Plan {
            program: words::of_path(bwrap)?,
            argv: bwrap::command(),
            args: Some(bwrap::arguments(
                system,
                &spec,
                &self.config.client,
                found.further,
            )?),
            group,
        };
        let paths = Paths::as_specified();
        let order = Order {
            env: Self::environment(&spec, &paths, Path::new(HOME), Path::new("/tmp")),
            confine: Some(confine::in_namespaces(system, &spec)),
            rlimits: Self::rlimits(&spec, plan.group.as_ref()),
            argv: spec.argv,
            cwd: spec.cwd,
            forwards: spec.forwards,
            guests: match spec.network {
                Network::None => Guests::Anyone,
                Network::Host => Guests::SameUser,
            },
            family: Family::Namespace,
        };
        let launched = launch(plan)
            .await
            .map_err(|error| SandboxError::setup("bubblewrap", error))?;
        supervise(
            launched,
            order,
            Kit {
                level: Level::Namespaces,
                paths,
                scratch: None,
            },
        )
        .await
    }

    async fn landlocked(&self, mut spec: Spec, group: Option<Group>) -> Result<(Running, i32), SandboxError> {
        let client = &self.config.client;
        let scratch = self
            .scratch()
            .map_err(|error| SandboxError::setup("scratch directory", error))?;
        let tmp = scratch.join("tmp");
        if spec.home.is_none() {
            spec.home = Some(scratch.join("home"));
        }
        let home = spec.home.clone().unwrap_or_default();
        if spec.workspace.is_none() && spec.cwd.starts_with(WORKSPACE) {
            spec.cwd = HOME.into();
        }
        let paths = Paths::of_host(&spec, client);
        let order = Order {
            argv: spec.argv.iter().map(|word| paths.see_in(word)).collect(),
            env: Self::environment(&spec, &paths, &home, &tmp),
            cwd: paths.see(&spec.cwd),
            // There is no network of its own to serve them on.
            forwards: Vec::new(),
            guests: Guests::SameUser,
            confine: Some(confine::alone(&spec, client, &tmp)),
            rlimits: Self::rlimits(&spec, group.as_ref()),
            family: Family::Descendants,
        };
        let plan = Plan {
            program: words::of_path(client)?,
            argv: words::inner(client)?,
            args: None,
            group,
        };
        let launched = launch(plan)
            .await
            .map_err(|error| words::no_client(client, &error))?;
        supervise(
            launched,
            order,
            Kit {
                level: Level::Landlock,
                paths,
                scratch: Some(scratch),
            },
        )
        .await
    }

    /// A directory for one sandbox without a mount namespace: its `/tmp` and, if need be, its home.
    fn scratch(&self) -> std::io::Result<PathBuf> {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let dir = self
            .config
            .run_dir
            .join(format!("sandbox-{}-{number}", std::process::id()));
        for path in [dir.join("tmp"), dir.join("home")] {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)?;
        }
        Ok(dir)
    }
}

/// Whether inet sockets may be made at this level with this network.
fn inet(level: Level, network: Network) -> bool {
    match (level, network) {
        // Without a network namespace an inet socket reaches the host's network.
        (Level::Landlock, Network::None) => false,
        (Level::Landlock | Level::None, Network::Host) | (Level::None, Network::None) => true,
        (Level::Namespaces, Network::None | Network::Host) => true,
    }
}

impl Local {
    /// Removes scratch directories of servers that are gone.
    fn remove_scratch(run_dir: &Path) {
        for entry in std::fs::read_dir(run_dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let pid = name
                .to_str()
                .and_then(|name| name.strip_prefix("sandbox-")?.split('-').next()?.parse().ok());
            let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) else {
                continue;
            };
            if rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }
}
