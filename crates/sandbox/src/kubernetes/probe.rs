//! What the cluster can do, and removing what a killed server left.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};

use super::cluster::is_not_found;
use super::pod::{HOST_LABEL, label_value};
use super::pod_status;
use super::pod_watch::PodState;
use super::sandbox_object::{ObjectKind, SANDBOX_VERSION};
use super::{KubernetesDriverInner, access_rights, network_policy};
use crate::IsolationLevel;
use crate::container::{self, SERVER_LABEL, first_process};
use crate::driver::{SandboxCheck, SandboxError, SandboxReport};
use crate::local::leftovers::ServerIdentity;
use crate::stage::ClosedPort;

/// A probe that failed is repeated after this long, one that did not after the other.
const RETRY_AFTER: Duration = Duration::from_secs(5);
const REPEAT_AFTER: Duration = Duration::from_secs(20);
/// A pod that has ended is left to its own server for this long.
const KEEP_ENDED: Duration = Duration::from_secs(60);

/// This machine's name.
pub(super) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

impl KubernetesDriverInner {
    /// The last report, or a new one. Each new one removes leftovers.
    pub(super) async fn probe(&self) -> SandboxReport {
        let mut probed = self.probed.lock().await;
        if let Some((when, report)) = &*probed {
            let keep = if report.ok { REPEAT_AFTER } else { RETRY_AFTER };
            if when.elapsed() < keep {
                return report.clone();
            }
        }
        match self.remove_leftovers().await {
            Ok(0) => {}
            Ok(removed) => tracing::warn!(removed, "removed pods that an earlier server left"),
            Err(error) => tracing::debug!(%error, "looking for leftover pods failed"),
        }
        let report = self.new_report().await;
        *probed = Some((Instant::now(), report.clone()));
        report
    }

    /// An error if no sandbox can be started.
    pub(super) async fn refusal(&self) -> Result<(), SandboxError> {
        let report = self.probe().await;
        // The last one: what failed before it is not essential.
        match report.checks.iter().rfind(|check| !check.ok && !report.ok) {
            None => Ok(()),
            Some(failed) => Err(SandboxError::Unavailable {
                reason: failed.detail.clone(),
                remedy: failed.remedy.clone().unwrap_or_default(),
            }),
        }
    }

    /// What is created for each sandbox in this cluster.
    pub(super) async fn object_kind(&self) -> Result<ObjectKind, SandboxError> {
        let client = self.cluster.client().await?;
        let found = self.kind.get_or_try_init(|| ObjectKind::find(client)).await;
        let failed = |error| self.cluster.failed("looking for the Sandbox kind", &error);
        found.copied().map_err(failed)
    }

    async fn new_report(&self) -> SandboxReport {
        let mut checks = Vec::new();
        let essential = self.essential_checks(&mut checks).await;
        let ok = match essential {
            Ok(()) => true,
            Err(failed) => {
                checks.push(failed);
                false
            }
        };
        if ok {
            checks.extend(self.other_checks());
        }
        SandboxReport {
            driver: "kubernetes",
            level: IsolationLevel::Namespaces,
            ok,
            checks,
        }
    }

    /// What must be there. The first that is not ends it.
    async fn essential_checks(&self, passed: &mut Vec<SandboxCheck>) -> Result<(), SandboxCheck> {
        let failed = |name: &'static str| {
            move |error: SandboxError| match error {
                SandboxError::Unavailable { reason, remedy } => SandboxCheck::failed(name, reason, remedy),
                other => SandboxCheck::failed(name, other.to_string(), ""),
            }
        };
        self.check_warm_pool().map_err(failed("warm pool"))?;
        passed.push(self.check_cluster().await.map_err(failed("cluster"))?);
        let kind = self.object_kind().await.map_err(failed("sandbox kind"))?;
        passed.push(SandboxCheck::passed(
            "sandbox kind",
            match kind {
                ObjectKind::Sandbox => format!("Sandbox objects of {SANDBOX_VERSION}"),
                ObjectKind::Pod => format!("plain pods: {SANDBOX_VERSION} is not installed"),
            },
        ));
        passed.push(self.check_rights(kind).await.map_err(failed("rights"))?);
        passed.push(self.check_volume().await.map_err(failed("shared volume"))?);
        let client = first_process::check(&self.config.client);
        match client.ok {
            true => passed.push(client),
            false => return Err(client),
        }
        let listener = self.listener().await.map_err(failed("stage address"))?;
        let address = self.stage_address().await.map_err(failed("stage address"))?;
        passed.push(SandboxCheck::passed(
            "stage address",
            format!("listening on {}; pods dial {address}", listener.address()),
        ));
        let policy = self.ensure_network_policy().await;
        let policy = policy.map_err(failed("network policy"))?;
        passed.push(match self.closed_port() {
            None => SandboxCheck::passed(
                "network policy",
                format!("{policy}; the first pod tries whether that is kept"),
            ),
            Some(ClosedPort::Unreached) => SandboxCheck::passed(
                "network policy",
                format!("{policy}; a pod tried another port of it in vain"),
            ),
            Some(ClosedPort::Reached) => {
                SandboxCheck::failed("network policy", network_policy::NOT_KEPT, network_policy::REMEDY)
            }
        });
        Ok(())
    }

    async fn check_cluster(&self) -> Result<SandboxCheck, SandboxError> {
        let client = self.cluster.client().await?;
        let version = client.apiserver_version().await;
        let version = version.map_err(|error| self.cluster.failed("asking the cluster", &error))?;
        Ok(SandboxCheck::passed(
            "cluster",
            format!(
                "Kubernetes {} at {}, namespace {}",
                version.git_version,
                self.cluster.address().await?,
                self.cluster.namespace()
            ),
        ))
    }

    async fn check_rights(&self, kind: ObjectKind) -> Result<SandboxCheck, SandboxError> {
        let client = self.cluster.client().await?;
        let namespace = self.cluster.namespace();
        let ask = async |rights: &[access_rights::AccessRight]| {
            let missing = access_rights::missing(client, namespace, rights).await;
            let missing = missing.map_err(|error| self.cluster.failed("asking for rights", &error))?;
            let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
            Ok::<_, SandboxError>(names.join(", "))
        };
        let needed = ask(&access_rights::needed(kind)).await?;
        if !needed.is_empty() {
            return Err(SandboxError::Unavailable {
                reason: format!("this server may not, in the namespace {namespace}: {needed}"),
                remedy: "Give its account these verbs with a Role and a RoleBinding.".into(),
            });
        }
        Ok(match ask(&access_rights::useful()).await?.as_str() {
            "" => SandboxCheck::passed("rights", format!("all that are needed in {namespace}")),
            missing => SandboxCheck::failed(
                "rights",
                format!("sandboxes work, but this server may not, in the namespace {namespace}: {missing}"),
                "Give its account these verbs, so that errors can say more.",
            ),
        })
    }

    /// Whether the volume is there, here and in the cluster, and has what pods mount.
    async fn check_volume(&self) -> Result<SandboxCheck, SandboxError> {
        let volume = &self.pods.volume;
        let unavailable = |reason: String, remedy: &str| SandboxError::Unavailable {
            reason,
            remedy: remedy.to_owned(),
        };
        let on_volume = |path: &std::path::Path| {
            volume.sub_path(path).map_err(|error| {
                unavailable(
                    error.to_string(),
                    "Start the server with --home (OUBLIETTE_HOME) beneath volume_path.",
                )
            })
        };
        // The home may still have to be made.
        let there = self.config.run_dir.ancestors().find(|dir| dir.exists());
        on_volume(there.unwrap_or(&self.config.run_dir))?;
        let client = self.cluster.client().await?;
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), self.cluster.namespace());
        let (name, path) = (volume.claim(), self.config.volume_path.display());
        let claim = match claims.get(name).await {
            Ok(claim) => claim,
            Err(error) if is_not_found(&error) => {
                return Err(unavailable(
                    format!(
                        "there is no PersistentVolumeClaim {name:?} in the namespace {}",
                        self.cluster.namespace()
                    ),
                    "Make one with the access mode ReadWriteMany, mounted by this server too, and name it in \
                     [sandbox.kubernetes] volume_claim.",
                ));
            }
            // Without the right to look, pods tell.
            Err(_) => {
                return Ok(SandboxCheck::passed(
                    "shared volume",
                    format!("{name}, mounted at {path}"),
                ));
            }
        };
        let phase = claim.status.and_then(|status| status.phase).unwrap_or_default();
        if phase == "Lost" {
            return Err(unavailable(
                format!("the PersistentVolumeClaim {name:?} has lost its volume"),
                "Restore the volume, or name another claim.",
            ));
        }
        let modes = claim.spec.and_then(|spec| spec.access_modes).unwrap_or_default();
        Ok(match modes.iter().any(|mode| mode == "ReadWriteMany") {
            true => SandboxCheck::passed("shared volume", format!("{name} ({phase}), mounted at {path}")),
            false => SandboxCheck::failed(
                "shared volume",
                format!(
                    "{name} has the access modes {modes:?}: pods start only on the node that has it mounted"
                ),
                "Use a volume with the access mode ReadWriteMany, such as NFS or CephFS.",
            ),
        })
    }

    /// A warm pool is refused rather than half kept.
    fn check_warm_pool(&self) -> Result<(), SandboxError> {
        match &self.config.warm_pool {
            None => Ok(()),
            Some(pool) => Err(SandboxError::Unavailable {
                reason: format!(
                    "[sandbox.kubernetes] warm_pool = {pool:?} cannot be used: a pod of a pool runs before its session is known, \
                     and a running pod cannot be given the session's workspace, which is a folder of the shared volume"
                ),
                remedy: "Leave it out: each sandbox is then a pod of its own.".into(),
            }),
        }
    }

    /// What is good to know.
    fn other_checks(&self) -> Vec<SandboxCheck> {
        let image = match &self.config.image {
            Some(image) => format!("{image}; the nodes pull it"),
            None => "none: each agent or project names its own".to_owned(),
        };
        let user = self.pods.user.uid;
        vec![
            SandboxCheck::passed("default image", image),
            SandboxCheck::passed(
                "pod security",
                format!("restricted: uid {user}, no capabilities, read-only root, no service account token"),
            ),
            SandboxCheck::passed("seccomp", "the runtime's filter and Oubliette's"),
            SandboxCheck::passed(
                "memory limit",
                "each pod, by its node; the sandboxes of a session are not counted together",
            ),
            SandboxCheck::passed("cpu limit", "each pod, by its node"),
            SandboxCheck::failed(
                "process limit",
                "a pod has none of its own: `pids` is not kept",
                "Set podPidsLimit in the configuration of the nodes' kubelets.",
            ),
        ]
    }

    /// Removes pods and Sandbox objects of this home whose server does not run any more.
    async fn remove_leftovers(&self) -> Result<usize, SandboxError> {
        container::remove_stale_stage_dirs(&self.config.run_dir);
        let client = self.cluster.client().await?;
        let kind = self.object_kind().await?;
        let selector = self.pods.home_selector();
        let failed = |error| self.cluster.failed("listing pods", &error);
        let pods = self.cluster.pods(client);
        let pods = pods
            .list(&ListParams::default().labels(&selector))
            .await
            .map_err(failed)?;
        let objects = kind
            .list(&self.cluster, client, &selector)
            .await
            .map_err(failed)?;
        let mut left = BTreeSet::new();
        for pod in pods {
            let name = pod.name_any();
            if self.is_left(pod.labels()) || is_long_ended(&PodState::Seen(Box::new(pod))) {
                left.insert(name);
            }
        }
        let objects = objects.iter().filter(|object| self.is_left(object.labels()));
        left.extend(objects.map(|object| object.name_any()));
        for name in &left {
            self.remove_leftover(kind, client, name).await;
        }
        Ok(left.len())
    }

    async fn remove_leftover(&self, kind: ObjectKind, client: &Client, name: &str) {
        if let Err(error) = kind.delete(&self.cluster, client, name).await {
            tracing::warn!(%error, pod = name, "removing a leftover pod failed");
        }
    }

    /// Whether labels name a server of this machine that does not run. Of one elsewhere nothing is known here: its pods end
    /// by themselves.
    fn is_left(&self, labels: &BTreeMap<String, String>) -> bool {
        let of_this_machine = labels.get(HOST_LABEL) == Some(&label_value(&self.pods.host));
        let server = labels
            .get(SERVER_LABEL)
            .and_then(|text| text.parse::<ServerIdentity>().ok());
        of_this_machine && server.is_none_or(|server| !server.is_running())
    }
}

/// Whether a pod ended so long ago that its own server would have removed it.
fn is_long_ended(state: &PodState) -> bool {
    let PodState::Seen(pod) = state else {
        return false;
    };
    let ended = pod_status::terminated(pod).and_then(|ended| ended.finished_at.as_ref());
    pod_status::has_ended(state)
        && ended.is_some_and(|ended| {
            let now = std::time::SystemTime::now();
            let since = now.duration_since(std::time::SystemTime::from(ended.0));
            since.is_ok_and(|since| since > KEEP_ENDED)
        })
}
