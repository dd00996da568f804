//! The `local` driver: bubblewrap, or Landlock alone; it needs no daemon.
//!
//! - [`host_system`]: the host's programs and libraries that every sandbox sees, and the generated `/etc`.
//! - [`bwrap`]: translates a spec into bubblewrap's arguments.
//! - [`confinement`]: translates a spec into Landlock and seccomp restrictions, inside bubblewrap or alone.
//! - [`cgroup`]: resource limits for whole process trees; [`group_watch`]: the same by counting, where there are none.
//! - [`leftovers`]: ends what a killed server left running.
//! - [`probe`]: tests what works on this host, in the background while the server starts.
//! - [`exec_args`]: C strings for `exec`.

mod bwrap;
pub(crate) mod cgroup;
mod confinement;
pub(crate) mod exec_args;
pub(crate) mod group_watch;
mod host_system;
pub(crate) mod leftovers;
mod probe;

use std::ffi::CString;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use async_trait::async_trait;

use crate::control_protocol::{AllowedPeers, DescendantCleanup, LaunchOrder, Rlimits};
use crate::driver::{SandboxDriver, SandboxError, SandboxReport};
use crate::group::{GroupMembership, SandboxGroup};
use crate::handle::RunningSandbox;
use crate::launch::{LaunchPlan, launch};
use crate::socket_peers::SocketPeers;
use crate::spec::{HOME, PATH, WORKSPACE};
use crate::supervise::{SandboxResources, supervise};
use crate::{IsolationLevel, SandboxNetwork, SandboxPaths, SandboxSpec};
pub use cgroup::TotalLimits;
use cgroup::{Cgroup, SandboxCgroup};
use group_watch::GroupWatch;
use leftovers::ServerIdentity;
use probe::HostProbe;

/// Configuration of the local driver.
#[derive(Debug, Clone)]
pub struct LocalDriverConfig {
    /// Path of `oubliette-client`, used as inner stage.
    pub client: PathBuf,
    /// The weakest acceptable level: `Namespaces`, or `Landlock` where the operator accepts it.
    pub minimum: IsolationLevel,
    /// Path of bubblewrap; none: the one on PATH.
    pub bwrap: Option<PathBuf>,
    /// Directory for temporary files. Its path also distinguishes the cgroups of different homes.
    pub run_dir: PathBuf,
}

/// Runs programs under bubblewrap or, where the operator accepts it, under Landlock alone.
#[derive(Debug, Clone)]
pub struct LocalDriver {
    inner: Arc<LocalDriverInner>,
}

#[derive(Debug)]
struct LocalDriverInner {
    config: LocalDriverConfig,
    /// The last probe's result.
    probe_result: RwLock<Option<Arc<HostProbe>>>,
    /// Held while a probe runs.
    probing: tokio::sync::Mutex<()>,
    /// Number of the next scratch directory.
    next_scratch: AtomicU64,
    /// Which processes may use the sockets of sandboxes under Landlock alone.
    socket_peers: Arc<SocketPeers>,
    /// Limits of all sandboxes together, as configured.
    total: TotalLimits,
    /// The cgroup of all sandboxes, created with the first; none where the host has no cgroups.
    first_cgroup: OnceLock<Option<Arc<Cgroup>>>,
    /// Counts groups that no cgroup limits.
    group_watch: Arc<GroupWatch>,
    /// Distinguishes this home from others in marks and in the names of cgroups.
    scope: String,
    /// The environment variable that marks processes as started by this server.
    mark: Option<CString>,
}

impl LocalDriver {
    /// Creates the driver and starts probing the host in the background. It does not fail if the host lacks
    /// something: [`SandboxDriver::probe`] reports that, and [`SandboxDriver::spawn`] refuses.
    pub async fn new(config: LocalDriverConfig) -> Result<Self, SandboxError> {
        Self::with_total_limits(config, TotalLimits::default()).await
    }

    /// Like [`LocalDriver::new`], with limits for all its sandboxes together.
    pub async fn with_total_limits(
        config: LocalDriverConfig,
        total: TotalLimits,
    ) -> Result<Self, SandboxError> {
        if config.minimum == IsolationLevel::None {
            return Err(SandboxError::Invalid(
                "the minimum isolation level must be `namespaces` or `landlock`".into(),
            ));
        }
        let scope = scope_of(&config.run_dir);
        let inner = LocalDriverInner {
            mark: leftovers::mark(&scope),
            scope,
            total,
            first_cgroup: OnceLock::new(),
            group_watch: Arc::default(),
            config,
            probe_result: RwLock::new(None),
            probing: tokio::sync::Mutex::new(()),
            next_scratch: AtomicU64::new(0),
            socket_peers: Arc::default(),
        };
        let local = Self {
            inner: Arc::new(inner),
        };
        let probing = local.clone();
        tokio::spawn(async move {
            probing.host_probe().await;
        });
        Ok(local)
    }

    /// The probe's result. A good result is kept; a failed probe is repeated after a while, so that installing
    /// bubblewrap, or a host that was only too busy, needs no restart.
    async fn host_probe(&self) -> Arc<HostProbe> {
        if let Some(host) = self.current_probe() {
            return host;
        }
        let _probing = self.inner.probing.lock().await;
        if let Some(host) = self.current_probe() {
            return host;
        }
        let host = Arc::new(probe::probe_host(&self.inner).await);
        *self
            .inner
            .probe_result
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Some(host.clone());
        host
    }

    /// The last probe's result, if it need not be repeated.
    fn current_probe(&self) -> Option<Arc<HostProbe>> {
        self.last_probe().filter(|host| host.is_current())
    }

    fn last_probe(&self) -> Option<Arc<HostProbe>> {
        self.inner
            .probe_result
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The level of the last probe; before the first, a guess by whether bubblewrap is installed.
    fn expected_level(&self) -> IsolationLevel {
        match self.last_probe() {
            Some(host) => host.level,
            None if probe::find_bwrap(&self.inner.config).is_some() => IsolationLevel::Namespaces,
            None => IsolationLevel::Landlock,
        }
    }
}

#[async_trait]
impl SandboxDriver for LocalDriver {
    fn driver(&self) -> &'static str {
        "local"
    }

    fn level(&self) -> IsolationLevel {
        self.expected_level()
    }

    async fn probe(&self) -> SandboxReport {
        self.host_probe().await.report.clone()
    }

    fn paths(&self, spec: &SandboxSpec) -> SandboxPaths {
        match self.expected_level() {
            IsolationLevel::Namespaces => SandboxPaths::as_specified(),
            IsolationLevel::Landlock | IsolationLevel::None => {
                SandboxPaths::of_host(spec, &self.inner.config.client)
            }
        }
    }

    fn may_connect(&self, socket: &Path, connection: BorrowedFd<'_>) -> bool {
        match self.expected_level() {
            IsolationLevel::Namespaces => true,
            IsolationLevel::Landlock | IsolationLevel::None => {
                self.inner.socket_peers.may_connect(socket, connection)
            }
        }
    }

    async fn spawn(&self, spec: SandboxSpec) -> Result<RunningSandbox, SandboxError> {
        let host = self.host_probe().await;
        if let Some(refusal) = &host.refusal {
            return Err(refusal.clone());
        }
        self.inner.check_spec(&spec)?;
        let limited = self.inner.limit(&host, &spec)?;
        match host.level {
            IsolationLevel::Namespaces => self.inner.spawn_namespaced(&host, spec, limited).await,
            IsolationLevel::Landlock | IsolationLevel::None => {
                self.inner.spawn_landlocked(spec, limited).await
            }
        }
        .map(|(running, _)| running)
    }
}

impl LocalDriverInner {
    /// Checks that the spec has a program, valid inside paths and existing host paths.
    fn check_spec(&self, spec: &SandboxSpec) -> Result<(), SandboxError> {
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

    /// Joins the spec's group, or one of its own, and creates a cgroup where possible. Without one, the inner stage
    /// limits each process, and the group is counted.
    fn limit(&self, host: &HostProbe, spec: &SandboxSpec) -> Result<LimitedSandbox, SandboxError> {
        let first = self
            .first_cgroup
            .get_or_init(|| match host.cgroups.create_first(&self.total) {
                Ok(first) => first.map(|(cgroup, _)| Arc::new(cgroup)),
                Err(error) => {
                    tracing::warn!(%error, "creating the cgroup of all sandboxes failed; limits are kept without cgroups");
                    None
                }
            });
        let group = spec
            .group
            .clone()
            .unwrap_or_else(|| SandboxGroup::new(spec.label.as_str(), spec.limits.clone()));
        let membership = group.join(first.as_ref())?;
        let cgroup = membership.create_cgroup(spec).unwrap_or_else(|error| {
            tracing::warn!(%error, label = spec.label, "creating a cgroup failed; limits apply to each process instead");
            None
        });
        if group.uncounted() != (false, false) {
            self.group_watch.add(&group, host.cgroups.total(&self.total));
        }
        Ok(LimitedSandbox {
            cgroup,
            membership: Some(membership),
        })
    }

    /// Per-process limits for what the cgroup does not limit.
    fn rlimits(spec: &SandboxSpec, group: Option<&SandboxCgroup>) -> Rlimits {
        let (memory, pids) = group.map_or((false, false), SandboxCgroup::limits);
        let mb = |value: u64| value.saturating_mul(1024 * 1024);
        Rlimits {
            open_files: spec.limits.open_files,
            processes: spec.limits.pids.filter(|_| !pids),
            data: spec.limits.memory_mb.filter(|_| !memory).map(mb),
            file_size: spec.limits.workspace_mb.map(mb),
        }
    }

    /// The payload's environment: defaults, overridden by the spec's.
    fn environment(
        spec: &SandboxSpec,
        paths: &SandboxPaths,
        home: &Path,
        tmp: &Path,
    ) -> Vec<(String, String)> {
        let mut env: Vec<(String, String)> = vec![
            ("PATH".into(), PATH.into()),
            ("HOME".into(), home.to_string_lossy().into_owned()),
            ("TMPDIR".into(), tmp.to_string_lossy().into_owned()),
            ("LANG".into(), "C.UTF-8".into()),
            ("USER".into(), "agent".into()),
        ];
        for (name, value) in &spec.env {
            env.retain(|(other, _)| other != name);
            env.push((name.clone(), paths.rewrite_word(value)));
        }
        env
    }

    /// Starts a sandbox under bubblewrap.
    async fn spawn_namespaced(
        &self,
        host: &HostProbe,
        mut spec: SandboxSpec,
        limited: LimitedSandbox,
    ) -> Result<(RunningSandbox, i32), SandboxError> {
        let Some(bwrap) = &host.bwrap else {
            return Err(probe::bwrap_missing());
        };
        let system = host.system()?;
        // Without a workspace there is no /workspace to start in: it starts in its home.
        if spec.workspace.is_none() && spec.cwd.starts_with(WORKSPACE) {
            spec.cwd = HOME.into();
        }
        let plan = LaunchPlan {
            program: exec_args::path_cstring(bwrap)?,
            argv: bwrap::command(),
            environment: self.mark.iter().cloned().collect(),
            bwrap_args: Some(bwrap::arguments(
                system,
                &spec,
                &self.config.client,
                host.nested_userns,
            )?),
            group: limited.cgroup,
        };
        let paths = SandboxPaths::as_specified();
        let order = LaunchOrder {
            env: Self::environment(&spec, &paths, Path::new(HOME), Path::new("/tmp")),
            image_env: None,
            confine: Some(confinement::for_namespaces(system, &spec)),
            rlimits: Self::rlimits(&spec, plan.group.as_ref()),
            argv: spec.argv,
            cwd: spec.cwd,
            forwards: spec.forwards,
            allowed_peers: match spec.network {
                SandboxNetwork::None => AllowedPeers::Anyone,
                SandboxNetwork::Host => AllowedPeers::SameUser,
            },
            cleanup: DescendantCleanup::Namespace,
        };
        let launched = launch(plan)
            .await
            .map_err(|error| SandboxError::setup("bubblewrap", error))?;
        supervise(
            launched,
            order,
            SandboxResources {
                level: IsolationLevel::Namespaces,
                paths,
                scratch: None,
                socket_peers: None,
                membership: limited.membership,
            },
        )
        .await
    }

    /// Starts a sandbox under Landlock and seccomp alone.
    async fn spawn_landlocked(
        &self,
        mut spec: SandboxSpec,
        limited: LimitedSandbox,
    ) -> Result<(RunningSandbox, i32), SandboxError> {
        let client = &self.config.client;
        let scratch = self
            .create_scratch()
            .map_err(|error| SandboxError::setup("scratch directory", error))?;
        if let Some(membership) = &limited.membership {
            membership.set_scratch(scratch.clone());
        }
        let tmp = scratch.join("tmp");
        if spec.home.is_none() {
            spec.home = Some(scratch.join("home"));
        }
        let home = spec.home.clone().unwrap_or_default();
        if spec.workspace.is_none() && spec.cwd.starts_with(WORKSPACE) {
            spec.cwd = HOME.into();
        }
        let paths = SandboxPaths::of_host(&spec, client);
        let order = LaunchOrder {
            argv: spec.argv.iter().map(|word| paths.rewrite_word(word)).collect(),
            env: Self::environment(&spec, &paths, &home, &tmp),
            image_env: None,
            cwd: paths.resolve(&spec.cwd),
            // There is no network namespace to serve them in.
            forwards: Vec::new(),
            allowed_peers: AllowedPeers::SameUser,
            confine: Some(confinement::for_landlock_only(&spec, client, &tmp)),
            rlimits: Self::rlimits(&spec, limited.cgroup.as_ref()),
            cleanup: DescendantCleanup::Descendants,
        };
        let plan = LaunchPlan {
            program: exec_args::path_cstring(client)?,
            argv: exec_args::inner_stage_argv(client)?,
            environment: self.mark.iter().cloned().collect(),
            bwrap_args: None,
            group: limited.cgroup,
        };
        let launched = launch(plan)
            .await
            .map_err(|error| exec_args::client_start_error(client, &error))?;
        // Before the program runs: it may connect at once.
        let socket_peers = self.socket_peers.add(&spec.sockets, launched.child.pid);
        supervise(
            launched,
            order,
            SandboxResources {
                level: IsolationLevel::Landlock,
                paths,
                scratch: Some(scratch),
                socket_peers: Some(socket_peers),
                membership: limited.membership,
            },
        )
        .await
    }

    /// Creates a temporary directory for one sandbox without a mount namespace: its TMPDIR and, if the spec has
    /// none, its home.
    fn create_scratch(&self) -> std::io::Result<PathBuf> {
        let number = self.next_scratch.fetch_add(1, Ordering::Relaxed);
        let dir = self
            .config
            .run_dir
            .join(format!("sandbox-{}-{number}", ServerIdentity::current()));
        for path in [dir.join("tmp"), dir.join("home")] {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)?;
        }
        Ok(dir)
    }
}

/// A sandbox's cgroup and its place in its group.
#[derive(Default)]
struct LimitedSandbox {
    cgroup: Option<SandboxCgroup>,
    membership: Option<GroupMembership>,
}

/// Whether inet sockets are allowed at this level with this network.
fn allows_inet(level: IsolationLevel, network: SandboxNetwork) -> bool {
    match (level, network) {
        // Without a network namespace an inet socket reaches the host's network.
        (IsolationLevel::Landlock, SandboxNetwork::None) => false,
        (IsolationLevel::Landlock | IsolationLevel::None, SandboxNetwork::Host)
        | (IsolationLevel::None, SandboxNetwork::None) => true,
        (IsolationLevel::Namespaces, SandboxNetwork::None | SandboxNetwork::Host) => true,
    }
}

/// Distinguishes homes: eight hex digits that are the same after a restart.
pub(crate) fn scope_of(run_dir: &Path) -> String {
    let hash = oubliette_os::fnv1a(run_dir.as_os_str().as_bytes());
    format!("{:08x}", hash & 0xffff_ffff)
}

impl LocalDriver {
    /// Removes scratch directories of servers that no longer run, in the background.
    fn remove_stale_scratch(run_dir: &Path, runtime: &tokio::runtime::Handle) {
        for entry in std::fs::read_dir(run_dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let server = name.to_str().and_then(|name| {
                let (server, _number) = name.strip_prefix("sandbox-")?.rsplit_once('-')?;
                server.parse::<ServerIdentity>().ok()
            });
            if server.is_some_and(|server| !server.is_running()) {
                runtime.spawn(oubliette_os::remove_tree(entry.path()));
            }
        }
    }
}
