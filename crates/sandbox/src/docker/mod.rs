//! The `docker` driver: each sandbox is a container of an engine on this machine.
//!
//! The container's first process is `oubliette-client`, mounted read-only, which connects back to the server
//! ([`crate::stage`]); an image needs nothing of ours. Nothing of the container's own configuration, which the engine
//! shows to whoever may ask it, holds a secret: arguments and environment of the program go over that connection.
//!
//! - [`engine`]: the engine's API, with errors that say what to do.
//! - [`image`]: finding or pulling an image, and which exactly it is.
//! - [`configuration`]: translates a spec into a container.
//! - [`ownership`]: gives files to the container's user where the server is root.
//! - [`running`]: one container from its start to its removal.
//! - [`probe`]: what the engine can do; removes what a killed server left.

mod configuration;
mod engine;
mod image;
mod ownership;
mod probe;
mod running;

use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;

use crate::driver::{PinnedImage, SandboxDriver, SandboxError, SandboxReport};
use crate::group::SandboxGroup;
use crate::handle::RunningSandbox;
use crate::local::cgroup::CgroupHierarchies;
use crate::local::group_watch::GroupWatch;
use crate::local::leftovers::ServerIdentity;
use crate::local::scope_of;
use crate::stage::server_end::StageUser;
use crate::{IsolationLevel, SandboxPaths, SandboxSpec, TotalLimits};
use engine::Engine;

/// The user of containers when the server is root, who may not be the user inside. No distribution has a user with it.
const USER_OF_ROOTS_SERVER: u32 = 64_646;

/// Configuration of the docker driver.
#[derive(Debug, Clone)]
pub struct DockerDriverConfig {
    /// Path of `oubliette-client`, which is mounted into containers.
    pub client: PathBuf,
    /// Directory for the sockets of containers. Its path also distinguishes the containers of different homes.
    pub run_dir: PathBuf,
    /// The engine's address, `unix:///path`.
    pub host: String,
    /// The engine's runtime, such as `runsc`; none: the engine's default.
    pub runtime: Option<String>,
    /// The engine's network for sandboxes with [`crate::SandboxNetwork::Host`].
    pub network: String,
    /// The image of sessions that name none.
    pub image: Option<String>,
    /// How long a cut connection to a container may take to be made again.
    pub grace: Duration,
}

/// Runs programs in containers.
#[derive(Debug, Clone)]
pub struct DockerDriver {
    inner: Arc<DockerDriverInner>,
}

#[derive(Debug)]
struct DockerDriverInner {
    config: DockerDriverConfig,
    engine: Engine,
    /// Limits of all sandboxes together.
    total: TotalLimits,
    /// Counts the sessions' containers together: each container is limited by the engine.
    group_watch: Arc<GroupWatch>,
    /// Distinguishes this home from others in labels.
    scope: String,
    server: ServerIdentity,
    next_stage: AtomicU64,
    user: StageUser,
    /// Workspaces whose files have been given to the container's user.
    given: Mutex<HashSet<PathBuf>>,
    /// The last probe, and one probe at a time.
    probed: tokio::sync::Mutex<Option<(std::time::Instant, SandboxReport)>>,
}

impl DockerDriver {
    /// Creates the driver, and removes in the background what an earlier server left.
    pub async fn new(config: DockerDriverConfig, total: TotalLimits) -> Result<Self, SandboxError> {
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        let user = match uid.is_root() {
            true => StageUser {
                uid: USER_OF_ROOTS_SERVER,
                gid: USER_OF_ROOTS_SERVER,
            },
            false => StageUser {
                uid: uid.as_raw(),
                gid: gid.as_raw(),
            },
        };
        let driver = Self {
            inner: Arc::new(DockerDriverInner {
                engine: Engine::new(&config.host)?,
                scope: scope_of(&config.run_dir),
                server: ServerIdentity::current(),
                total,
                group_watch: Arc::default(),
                next_stage: AtomicU64::new(0),
                user,
                given: Mutex::default(),
                probed: tokio::sync::Mutex::default(),
                config,
            }),
        };
        let probing = driver.clone();
        tokio::spawn(async move { probing.probe().await });
        Ok(driver)
    }
}

#[async_trait]
impl SandboxDriver for DockerDriver {
    fn driver(&self) -> &'static str {
        "docker"
    }

    fn level(&self) -> IsolationLevel {
        IsolationLevel::Namespaces
    }

    async fn probe(&self) -> SandboxReport {
        self.inner.probe().await
    }

    fn paths(&self, _: &SandboxSpec) -> SandboxPaths {
        SandboxPaths::as_specified()
    }

    /// Always: no container sees the sockets of the host. Whoever connects is this process, for the container whose spec
    /// lists the socket.
    fn may_connect(&self, _: &Path, _: BorrowedFd<'_>) -> bool {
        true
    }

    fn passes_descriptors(&self) -> bool {
        false
    }

    fn has_images(&self) -> bool {
        true
    }

    async fn prepare_image(
        &self,
        wanted: Option<&str>,
        pinned: Option<&str>,
        progress: &(dyn Fn(String) + Send + Sync),
    ) -> Result<Option<PinnedImage>, SandboxError> {
        let Some(name) = wanted.or(self.inner.config.image.as_deref()) else {
            return Err(image::none_named());
        };
        image::prepare(&self.inner.engine, name, pinned, progress)
            .await
            .map(Some)
    }

    async fn spawn(&self, spec: SandboxSpec) -> Result<RunningSandbox, SandboxError> {
        self.inner.refusal().await?;
        configuration::check(&spec)?;
        let group = spec
            .group
            .clone()
            .unwrap_or_else(|| SandboxGroup::new(spec.label.as_str(), spec.limits.clone()));
        let image = match group.image() {
            Some(image) => image,
            // A sandbox that belongs to no session.
            None => {
                let image = self.prepare_image(None, None, &|_| {}).await?;
                image.ok_or_else(image::none_named)?
            }
        };
        let membership = group.join(None)?;
        self.inner
            .group_watch
            .add(&group, CgroupHierarchies::default().total(&self.inner.total));
        running::start(self.inner.clone(), spec, image, membership, group.label()).await
    }
}

impl DockerDriverInner {
    /// A name for the next container, and for its directory.
    fn next_stage(&self) -> String {
        let number = self.next_stage.fetch_add(1, Ordering::Relaxed);
        format!("oubliette-{}-{}-{number}", self.scope, self.server)
    }

    /// The directory of a stage. Its path is kept short: the path of a socket has at most 107 bytes.
    fn stage_dir(&self, stage: &str) -> PathBuf {
        let number = stage.rsplit('-').next().unwrap_or_default();
        self.config
            .run_dir
            .join(format!("stage-{}-{number}", self.server))
    }

    /// Gives what the spec lets the program write to the container's user, if the server is root.
    async fn give_files(self: &Arc<Self>, spec: &SandboxSpec) -> Result<(), SandboxError> {
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let mut trees: Vec<PathBuf> = spec.home.iter().cloned().collect();
        let writable = spec.mounts.iter();
        let writable = writable.filter(|mount| mount.access == crate::MountAccess::ReadWrite);
        trees.extend(writable.map(|mount| mount.host.clone()));
        if let Some(workspace) = &spec.workspace {
            let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
            if given.insert(workspace.clone()) || !ownership::is_owned_by(workspace, self.user) {
                trees.push(workspace.clone());
            }
        }
        let user = self.user;
        let given = tokio::task::spawn_blocking(move || {
            trees.iter().try_for_each(|tree| ownership::give(tree, user))
        });
        given
            .await
            .map_err(|error| SandboxError::setup("giving files to the container's user", error))?
            .map_err(|error| SandboxError::setup("giving files to the container's user", error))
    }
}
