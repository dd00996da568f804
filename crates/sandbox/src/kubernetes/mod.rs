//! The `kubernetes` driver: each sandbox is a pod of a cluster.
//!
//! A close relative of [`crate::docker`]. The pod's first process is `oubliette-client`, which dials the server over TLS
//! ([`crate::stage`]); nothing dials in. What an engine on this machine mounts from its disk, a pod mounts from one shared
//! volume, which this server has mounted too: workspaces, homes, programs, the one-time token and `oubliette-client`
//! itself, each by its path beneath the volume. So they outlive the pod, and an image needs nothing of ours. The pod's
//! spec, which whoever may read pods can read, holds no argument, variable or secret of the program.
//!
//! - [`cluster`]: the cluster's API, with errors that say what to do; [`access_rights`]: what this server may do there.
//! - [`volume`]: where paths of this machine are on the shared volume.
//! - [`pod`]: translates a spec into a pod; [`sandbox_object`]: the object that is created for it.
//! - [`pod_watch`]: follows the pods of this server; [`pod_status`]: what their status says, in words.
//! - [`running`]: one pod from its start to its removal.
//! - [`network_policy`]: what pods may reach.
//! - [`probe`]: what the cluster can do; removes what a killed server left.

mod access_rights;
mod cluster;
mod network_policy;
mod pod;
mod pod_status;
mod pod_watch;
mod probe;
mod running;
mod sandbox_object;
mod volume;

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::OnceCell;

use crate::container;
use crate::container::ownership::FileOwnership;
use crate::container::user_files::UserFiles;
use crate::driver::{PinnedImage, SandboxDriver, SandboxError, SandboxReport};
use crate::group::SandboxGroup;
use crate::handle::RunningSandbox;
use crate::local::leftovers::ServerIdentity;
use crate::local::scope_of;
use crate::stage::ClosedPort;
use crate::stage::tls_listener::StageListener;
use crate::{IsolationLevel, SandboxNetwork, SandboxPaths, SandboxSpec};
use cluster::Cluster;
use pod::PodSettings;
use pod_watch::PodWatch;
use sandbox_object::ObjectKind;
use volume::SharedVolume;

/// Configuration of the kubernetes driver.
#[derive(Debug, Clone)]
pub struct KubernetesDriverConfig {
    /// Path of `oubliette-client`, beneath `volume_path`.
    pub client: PathBuf,
    /// Directory for the tokens of pods, beneath `volume_path`.
    pub run_dir: PathBuf,
    /// Oubliette's home. Its path distinguishes the pods of different homes.
    pub home: PathBuf,
    /// A kubeconfig file; none: the account of the pod this server runs in, else the file that `KUBECONFIG` names.
    pub kubeconfig: Option<PathBuf>,
    /// The namespace of pods.
    pub namespace: String,
    /// The image of sessions that name none.
    pub image: Option<String>,
    /// The PersistentVolumeClaim of the shared volume.
    pub volume_claim: String,
    /// Where this server has that volume mounted.
    pub volume_path: PathBuf,
    /// Where this server listens for pods.
    pub stage_listen: SocketAddr,
    /// The host and port at which pods reach that.
    pub stage_address: String,
    /// The RuntimeClass of pods; none: the cluster's default.
    pub runtime_class: Option<String>,
    /// A SandboxWarmPool. It cannot be used; see [`probe`].
    pub warm_pool: Option<String>,
    /// Processors that a pod is scheduled with, in cores.
    pub cpu_request: f64,
    /// Memory that a pod is scheduled with, in MiB.
    pub memory_request_mb: u64,
    /// Whether sandboxes start where the cluster does not keep the network policy.
    pub network_policy: NetworkPolicyUse,
    /// How long a cut connection to a pod may take to be made again.
    pub grace: Duration,
}

/// What holds of the network policy of pods, which some clusters accept and do not keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkPolicyUse {
    /// A sandbox that reaches more than it should is refused.
    Required,
    /// It is made and not relied on.
    Unchecked,
}

/// Runs programs in pods.
#[derive(Debug, Clone)]
pub struct KubernetesDriver {
    inner: Arc<KubernetesDriverInner>,
}

#[derive(Debug)]
struct KubernetesDriverInner {
    config: KubernetesDriverConfig,
    cluster: Cluster,
    pods: PodSettings,
    /// Distinguishes the pods of this run of the server by name, also from those of servers on other machines.
    run: String,
    server: ServerIdentity,
    next_stage: AtomicU64,
    ownership: FileOwnership,
    user_files: UserFiles,
    /// Opened when it is first needed.
    listener: OnceCell<StageListener>,
    watch: OnceCell<PodWatch>,
    /// What is created for each sandbox, once the cluster has said which kinds it has.
    kind: OnceCell<ObjectKind>,
    /// What the last pod that tried it said of the port that the network policy closes.
    closed_port: Mutex<Option<ClosedPort>>,
    /// The last probe, and one probe at a time.
    probed: tokio::sync::Mutex<Option<(std::time::Instant, SandboxReport)>>,
}

impl KubernetesDriver {
    /// Creates the driver, and removes in the background what an earlier server left.
    pub async fn new(config: KubernetesDriverConfig) -> Result<Self, SandboxError> {
        let user = container::container_user();
        let server = ServerIdentity::current();
        let user_files = UserFiles::new(&config.run_dir, user);
        let settings = PodSettings {
            volume: SharedVolume::new(&config.volume_path, &config.volume_claim),
            client: config.client.clone(),
            passwd: user_files.path("passwd"),
            group: user_files.path("group"),
            user,
            scope: scope_of(&config.home),
            server: server.to_string(),
            host: probe::host_name(),
            runtime_class: config.runtime_class.clone(),
            cpu_request: config.cpu_request,
            memory_request_mb: config.memory_request_mb,
        };
        let driver = Self {
            inner: Arc::new(KubernetesDriverInner {
                cluster: Cluster::new(config.kubeconfig.clone(), config.namespace.clone()),
                pods: settings,
                run: hex::encode(rand::random::<[u8; 4]>()),
                server,
                next_stage: AtomicU64::new(0),
                ownership: FileOwnership::new(user),
                user_files,
                listener: OnceCell::new(),
                watch: OnceCell::new(),
                kind: OnceCell::new(),
                closed_port: Mutex::default(),
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
impl SandboxDriver for KubernetesDriver {
    fn driver(&self) -> &'static str {
        "kubernetes"
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

    /// Always: no pod sees the sockets of this machine. Whoever connects is this process, for the pod whose spec lists the
    /// socket.
    fn may_connect(&self, _: &Path, _: BorrowedFd<'_>) -> bool {
        true
    }

    fn passes_descriptors(&self) -> bool {
        false
    }

    fn has_images(&self) -> bool {
        true
    }

    /// The cluster pulls an image when a pod needs it, so there is nothing to do but to decide which one it is. A name without
    /// a digest stays a name: which content it stands for is known to the node alone.
    async fn prepare_image(
        &self,
        wanted: Option<&str>,
        pinned: Option<&str>,
        _: &(dyn Fn(String) + Send + Sync),
    ) -> Result<Option<PinnedImage>, SandboxError> {
        let name = wanted.or(self.inner.config.image.as_deref());
        let name = name.ok_or_else(no_image)?;
        crate::docker::check_image_name(name)?;
        Ok(Some(PinnedImage {
            name: name.to_owned(),
            digest: pinned.unwrap_or(name).to_owned(),
        }))
    }

    async fn spawn(&self, spec: SandboxSpec) -> Result<RunningSandbox, SandboxError> {
        self.inner.refusal().await?;
        container::check(&spec)?;
        if spec.network == SandboxNetwork::Host {
            return Err(SandboxError::Invalid(
                "\"network\": \"host\" is not possible with the driver \"kubernetes\": a pod in its node's network would not be \
                 restricted; use \"proxy\" with an `egress` list"
                    .into(),
            ));
        }
        let group = spec
            .group
            .clone()
            .unwrap_or_else(|| SandboxGroup::new(spec.label.as_str(), spec.limits.clone()));
        let image = match group.image() {
            Some(image) => image,
            // A sandbox that belongs to no session.
            None => self
                .prepare_image(None, None, &|_| {})
                .await?
                .ok_or_else(no_image)?,
        };
        let membership = group.join(None)?;
        running::start(self.inner.clone(), spec, image, membership, group.label()).await
    }
}

fn no_image() -> SandboxError {
    SandboxError::Invalid(
        "no image: set sandbox.image in agent.json or in the project, or [sandbox.kubernetes] image in oubliette.toml"
            .into(),
    )
}

impl KubernetesDriverInner {
    /// A name for the next pod, and for its directory.
    fn next_stage(&self) -> String {
        let number = self.next_stage.fetch_add(1, Ordering::Relaxed);
        format!("oubliette-{}-{}-{number}", self.pods.scope, self.run)
    }

    /// The directory of a stage.
    fn stage_dir(&self, stage: &str) -> PathBuf {
        container::stage_dir(&self.config.run_dir, self.server, stage)
    }

    /// Where pods are let in.
    async fn listener(&self) -> Result<&StageListener, SandboxError> {
        let address = self.config.stage_listen;
        let bound = self.listener.get_or_try_init(|| StageListener::bind(address));
        bound.await.map_err(|error| SandboxError::Unavailable {
            reason: format!("listening on {address} for pods failed: {error}"),
            remedy: "Another server may use it: name an address of this machine and a free port in [sandbox.kubernetes] \
                     stage_listen."
                .into(),
        })
    }

    /// The address that pods dial. It is looked up here: they have no name service.
    async fn stage_address(&self) -> Result<SocketAddr, SandboxError> {
        let given = &self.config.stage_address;
        let failed = |why: String| SandboxError::Unavailable {
            reason: format!("[sandbox.kubernetes] stage_address {given:?}: {why}"),
            remedy: "Write the address and port at which pods reach stage_listen, such as \"10.0.0.5:7443\"."
                .into(),
        };
        let mut found = tokio::net::lookup_host(given.as_str())
            .await
            .map_err(|error| failed(error.to_string()))?;
        found.next().ok_or_else(|| failed("it has no address".into()))
    }

    /// What is known of the port that the network policy closes.
    fn closed_port(&self) -> Option<ClosedPort> {
        *self.closed_port.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what a pod says of that port. An error if it may not be used.
    fn note_closed_port(&self, said: Option<ClosedPort>) -> Result<(), SandboxError> {
        if said.is_some() {
            *self.closed_port.lock().unwrap_or_else(PoisonError::into_inner) = said;
        }
        match (said, self.config.network_policy) {
            (Some(ClosedPort::Reached), NetworkPolicyUse::Required) => Err(SandboxError::Unavailable {
                reason: network_policy::NOT_KEPT.into(),
                remedy: network_policy::REMEDY.into(),
            }),
            _ => Ok(()),
        }
    }

    /// Follows the pods of this run of the server.
    async fn watch(&self) -> Result<&PodWatch, SandboxError> {
        let start = async {
            let client = self.cluster.client().await?;
            let api = self.cluster.pods(client);
            Ok::<_, SandboxError>(PodWatch::start(api, self.pods.server_selector()))
        };
        self.watch.get_or_try_init(|| start).await
    }
}
