//! Translation of a spec into a pod.
//!
//! The pod keeps the Pod Security standard "restricted", and more: its root is read-only, it has no service account token,
//! no name service and no variable of the program.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{
    Capabilities, Container, EmptyDirVolumeSource, PersistentVolumeClaimVolumeSource, Pod, PodDNSConfig,
    PodSecurityContext, PodSpec, ResourceRequirements, SeccompProfile, SecurityContext, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::volume::{SharedVolume, VOLUME_NAME};
use crate::container::{
    OUR_MEMORY, RUN_BYTES, SANDBOX_LABEL, SCOPE_LABEL, SERVER_LABEL, SESSION_LABEL, STAGE_DIR,
    temporary_bytes,
};
use crate::driver::{PinnedImage, SandboxError};
use crate::spec::{CLIENT, HOME, MountAccess, SandboxSpec, WORKSPACE};
use crate::stage::server_end::StageUser;

/// The machine of the server: only there its identity says whether it runs.
pub(super) const HOST_LABEL: &str = "oubliette.host";
/// The container's name in its pod.
pub(super) const CONTAINER_NAME: &str = "sandbox";
/// The names of temporary volumes in a pod.
const TMP_VOLUME: &str = "tmp";
const RUN_VOLUME: &str = "run";
const HOME_VOLUME: &str = "home";
/// Maximum length of a label's value.
const MAX_LABEL: usize = 63;

/// What all pods of a server have in common.
#[derive(Debug)]
pub(super) struct PodSettings {
    pub(super) volume: SharedVolume,
    /// `oubliette-client`, on this machine.
    pub(super) client: PathBuf,
    /// The files that name the pod's user, on this machine.
    pub(super) passwd: PathBuf,
    pub(super) group: PathBuf,
    pub(super) user: StageUser,
    /// Distinguishes this home from others in labels.
    pub(super) scope: String,
    pub(super) server: String,
    pub(super) host: String,
    pub(super) runtime_class: Option<String>,
    pub(super) cpu_request: f64,
    pub(super) memory_request_mb: u64,
}

impl PodSettings {
    /// Selects the pods of this home.
    pub(super) fn home_selector(&self) -> String {
        format!("{SCOPE_LABEL}={}", self.scope)
    }

    /// Selects the pods of this run of the server.
    pub(super) fn server_selector(&self) -> String {
        format!(
            "{SCOPE_LABEL}={},{SERVER_LABEL}={},{HOST_LABEL}={}",
            self.scope,
            self.server,
            label_value(&self.host)
        )
    }

    /// The pod. It has no arguments or environment of the program.
    pub(super) fn pod(
        &self,
        name: &str,
        spec: &SandboxSpec,
        image: &PinnedImage,
        session: &str,
        stage_dir: &Path,
    ) -> Result<Pod, SandboxError> {
        let labels = [
            (SCOPE_LABEL, self.scope.as_str()),
            (SERVER_LABEL, self.server.as_str()),
            (HOST_LABEL, self.host.as_str()),
            (SESSION_LABEL, session),
            (SANDBOX_LABEL, spec.label.as_str()),
        ];
        let labels = labels.map(|(name, value)| (name.to_owned(), label_value(value)));
        Ok(Pod {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                labels: Some(labels.into()),
                ..ObjectMeta::default()
            },
            spec: Some(self.pod_spec(spec, image, stage_dir)?),
            status: None,
        })
    }

    fn pod_spec(
        &self,
        spec: &SandboxSpec,
        image: &PinnedImage,
        stage_dir: &Path,
    ) -> Result<PodSpec, SandboxError> {
        let container = Container {
            name: CONTAINER_NAME.into(),
            image: Some(image.digest.clone()),
            // As a local container engine does: a tag that was moved in the registry is not pulled again.
            image_pull_policy: Some("IfNotPresent".into()),
            command: Some(vec![CLIENT.into(), "remote-stage".into(), STAGE_DIR.into()]),
            working_dir: Some("/".into()),
            resources: Some(self.resources(spec)),
            security_context: Some(SecurityContext {
                allow_privilege_escalation: Some(false),
                capabilities: Some(Capabilities {
                    add: None,
                    drop: Some(vec!["ALL".into()]),
                }),
                privileged: Some(false),
                read_only_root_filesystem: Some(true),
                ..SecurityContext::default()
            }),
            volume_mounts: Some(self.mounts(spec, stage_dir)?),
            ..Container::default()
        };
        Ok(PodSpec {
            containers: vec![container],
            restart_policy: Some("Never".into()),
            automount_service_account_token: Some(false),
            enable_service_links: Some(false),
            host_network: Some(false),
            hostname: Some("oubliette".into()),
            // Nothing answers there: a pod reaches the server alone, whose address it is given.
            dns_policy: Some("None".into()),
            dns_config: Some(PodDNSConfig {
                nameservers: Some(vec!["127.0.0.1".into()]),
                ..PodDNSConfig::default()
            }),
            runtime_class_name: self.runtime_class.clone(),
            security_context: Some(PodSecurityContext {
                run_as_non_root: Some(true),
                run_as_user: Some(self.user.uid.into()),
                run_as_group: Some(self.user.gid.into()),
                seccomp_profile: Some(SeccompProfile {
                    localhost_profile: None,
                    type_: "RuntimeDefault".into(),
                }),
                ..PodSecurityContext::default()
            }),
            // The first process takes no signal; it ends when its connection is closed.
            termination_grace_period_seconds: Some(1),
            volumes: Some(self.volumes(spec)),
            ..PodSpec::default()
        })
    }

    fn resources(&self, spec: &SandboxSpec) -> ResourceRequirements {
        let limits = &spec.limits;
        let memory = limits.memory_mb.map(|mb| (mb << 20).saturating_add(OUR_MEMORY));
        let cpus = limits.cpus;
        let bytes = |bytes: u64| Quantity(bytes.to_string());
        let cores = |cores: f64| Quantity(format!("{}m", (cores * 1000.0).round().max(1.0)));
        let memory_request = self.memory_request_mb << 20;
        let requests = [
            (
                "memory",
                bytes(memory.map_or(memory_request, |limit| limit.min(memory_request))),
            ),
            (
                "cpu",
                cores(cpus.map_or(self.cpu_request, |limit| limit.min(self.cpu_request))),
            ),
        ];
        let limits = [("memory", memory.map(bytes)), ("cpu", cpus.map(cores))];
        let limits = limits
            .into_iter()
            .filter_map(|(name, limit)| Some((name.to_owned(), limit?)));
        ResourceRequirements {
            claims: None,
            limits: Some(limits.collect()),
            requests: Some(requests.map(|(name, request)| (name.to_owned(), request)).into()),
        }
    }

    fn volumes(&self, spec: &SandboxSpec) -> Vec<Volume> {
        // In memory, where the size is kept by the kernel; on a node's disk it would be looked at now and then.
        let temporary = |name: &str, bytes: u64| Volume {
            name: name.into(),
            empty_dir: Some(EmptyDirVolumeSource {
                medium: Some("Memory".into()),
                size_limit: Some(Quantity(bytes.to_string())),
            }),
            ..Volume::default()
        };
        let mut volumes = vec![
            Volume {
                name: VOLUME_NAME.into(),
                persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                    claim_name: self.volume.claim().to_owned(),
                    read_only: None,
                }),
                ..Volume::default()
            },
            temporary(TMP_VOLUME, temporary_bytes(spec)),
            temporary(RUN_VOLUME, RUN_BYTES),
        ];
        if spec.home.is_none() {
            volumes.push(temporary(HOME_VOLUME, temporary_bytes(spec)));
        }
        volumes
    }

    fn mounts(&self, spec: &SandboxSpec, stage_dir: &Path) -> Result<Vec<VolumeMount>, SandboxError> {
        let read_only = MountAccess::ReadOnly;
        let mut shared: Vec<(&Path, PathBuf, MountAccess)> = vec![
            (self.client.as_path(), CLIENT.into(), read_only),
            (stage_dir, STAGE_DIR.into(), read_only),
            (self.passwd.as_path(), "/etc/passwd".into(), read_only),
            (self.group.as_path(), "/etc/group".into(), read_only),
        ];
        let writable = MountAccess::ReadWrite;
        shared.extend(
            spec.workspace
                .iter()
                .map(|host| (host.as_path(), WORKSPACE.into(), writable)),
        );
        shared.extend(
            spec.home
                .iter()
                .map(|host| (host.as_path(), HOME.into(), writable)),
        );
        for mount in &spec.mounts {
            shared.retain(|(_, inside, _)| *inside != mount.inside);
            shared.push((mount.host.as_path(), mount.inside.clone(), mount.access));
        }
        let mut mounts = self.temporary_mounts(spec)?;
        for (host, inside, access) in shared {
            let place = text(&inside)?;
            mounts.remove(&place);
            let mount = VolumeMount {
                name: VOLUME_NAME.into(),
                mount_path: place.clone(),
                sub_path: Some(self.volume.sub_path(host)?),
                read_only: Some(access == MountAccess::ReadOnly),
                ..VolumeMount::default()
            };
            mounts.insert(place, mount);
        }
        // In the order of their paths: what is mounted beneath another comes after it.
        Ok(mounts.into_values().collect())
    }

    /// Places for temporary files, by their path: in one volume those that are small.
    fn temporary_mounts(&self, spec: &SandboxSpec) -> Result<BTreeMap<String, VolumeMount>, SandboxError> {
        let mut places = vec![
            (PathBuf::from("/tmp"), TMP_VOLUME, None),
            (PathBuf::from("/run"), RUN_VOLUME, Some("run".to_owned())),
        ];
        if spec.home.is_none() {
            places.push((HOME.into(), HOME_VOLUME, None));
        }
        for (number, socket) in spec.sockets.iter().enumerate() {
            let parent = socket.inside.parent().unwrap_or(Path::new("/"));
            let is_there = |place: &(PathBuf, &str, Option<String>)| parent.starts_with(&place.0);
            if parent != Path::new("/") && !places.iter().any(is_there) {
                places.push((parent.to_owned(), RUN_VOLUME, Some(format!("sockets-{number}"))));
            }
        }
        let mount = |(place, volume, sub_path): (PathBuf, &str, Option<String>)| {
            let place = text(&place)?;
            let mount = VolumeMount {
                name: volume.into(),
                mount_path: place.clone(),
                sub_path,
                ..VolumeMount::default()
            };
            Ok::<_, SandboxError>((place, mount))
        };
        places.into_iter().map(mount).collect()
    }
}

fn text(path: &Path) -> Result<String, SandboxError> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| {
        SandboxError::Invalid(format!("{} is not UTF-8, which Kubernetes needs", path.display()))
    })
}

/// A text as the value of a label, which takes few characters and begins and ends with a letter or digit.
pub(super) fn label_value(text: &str) -> String {
    let plain = |c: char| match c.is_ascii_alphanumeric() || "._-".contains(c) {
        true => c,
        false => '-',
    };
    let value: String = text.chars().map(plain).take(MAX_LABEL).collect();
    value
        .trim_matches(|c: char| !c.is_ascii_alphanumeric())
        .to_owned()
}

#[cfg(test)]
mod tests;
