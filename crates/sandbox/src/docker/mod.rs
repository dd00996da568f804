//! The `docker` driver: each sandbox is a container of an engine on this machine.
//!
//! The container's first process is `oubliette-client`, mounted read-only, which connects back to the server
//! ([`crate::stage`]); an image needs nothing of ours. Nothing of the container's own configuration, which the engine
//! shows to whoever may ask it, holds a secret: arguments and environment of the program go over that connection.
//!
//! - [`engine`]: the engine's API, with errors that say what to do.
//! - [`image`]: finding or pulling an image, and which exactly it is.
//! - [`configuration`]: translates a spec into a container.
//! - [`running`]: one container from its start to its removal.
//! - [`probe`]: what the engine can do; removes what a killed server left.

mod configuration;
mod engine;
mod image;
mod probe;
mod running;

pub(crate) use image::check_name as check_image_name;

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;

use crate::container;
use crate::container::ownership::FileOwnership;
use crate::container::user_files::UserFiles;
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
    ownership: FileOwnership,
    /// The last probe, and one probe at a time.
    probed: tokio::sync::Mutex<Option<(std::time::Instant, SandboxReport)>>,
}

impl DockerDriver {
    /// Creates the driver, and removes in the background what an earlier server left.
    pub async fn new(config: DockerDriverConfig, total: TotalLimits) -> Result<Self, SandboxError> {
        let user = container::container_user();
        let driver = Self {
            inner: Arc::new(DockerDriverInner {
                engine: Engine::new(&config.host)?,
                scope: scope_of(&config.run_dir),
                server: ServerIdentity::current(),
                total,
                group_watch: Arc::default(),
                next_stage: AtomicU64::new(0),
                user,
                ownership: FileOwnership::new(user),
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
        container::check(&spec)?;
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

    /// The directory of a stage.
    fn stage_dir(&self, stage: &str) -> PathBuf {
        container::stage_dir(&self.config.run_dir, self.server, stage)
    }

    /// The files that name the container's user.
    fn user_files(&self) -> UserFiles {
        UserFiles::new(&self.config.run_dir, self.user)
    }
}
