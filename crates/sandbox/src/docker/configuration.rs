//! Translation of a spec into a container.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use bollard::models::{
    ContainerCreateBody, HealthConfig, HostConfig, HostConfigCgroupnsModeEnum, HostConfigLogConfig, Mount,
    MountBindOptions, MountBindOptionsPropagationEnum, MountType,
};

use super::DockerDriverInner;
use super::image::ImageDefaults;
use crate::container::{
    OUR_MEMORY, RUN_BYTES, SANDBOX_LABEL, SCOPE_LABEL, SERVER_LABEL, SESSION_LABEL, STAGE_DIR,
    temporary_bytes,
};
use crate::driver::{PinnedImage, SandboxError};
use crate::spec::{CLIENT, HOME, MountAccess, SandboxNetwork, SandboxSpec, WORKSPACE};

/// Processes and threads of ours in a container: the stage and the inner stage.
const OUR_PROCESSES: u64 = 4;
/// Maximum size of what stands in for a volume of the image.
const VOLUME_BYTES: u64 = 256 << 20;

/// The container. It has no arguments or environment of the program.
pub(super) fn container(
    driver: &DockerDriverInner,
    spec: &SandboxSpec,
    image: &PinnedImage,
    defaults: &ImageDefaults,
    session: &str,
    stage_dir: &Path,
) -> Result<ContainerCreateBody, SandboxError> {
    let user = driver.user;
    let labels = [
        (SCOPE_LABEL, driver.scope.clone()),
        (SERVER_LABEL, driver.server.to_string()),
        (SESSION_LABEL, session.to_owned()),
        (SANDBOX_LABEL, spec.label.clone()),
    ];
    Ok(ContainerCreateBody {
        image: Some(image.digest.clone()),
        hostname: (spec.network == SandboxNetwork::None).then(|| "oubliette".to_owned()),
        user: Some(format!("{}:{}", user.uid, user.gid)),
        entrypoint: Some(vec![CLIENT.into(), "remote-stage".into(), STAGE_DIR.into()]),
        cmd: Some(Vec::new()),
        working_dir: Some("/".into()),
        // It would run beside the program, without its restrictions.
        healthcheck: Some(HealthConfig {
            test: Some(vec!["NONE".into()]),
            ..HealthConfig::default()
        }),
        labels: Some(labels.map(|(name, value)| (name.to_owned(), value)).into()),
        host_config: Some(host_config(driver, spec, defaults, stage_dir)?),
        ..ContainerCreateBody::default()
    })
}

fn host_config(
    driver: &DockerDriverInner,
    spec: &SandboxSpec,
    defaults: &ImageDefaults,
    stage_dir: &Path,
) -> Result<HostConfig, SandboxError> {
    let limits = &spec.limits;
    let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let memory = limits
        .memory_mb
        .map(|mb| signed((mb << 20).saturating_add(OUR_MEMORY)));
    Ok(HostConfig {
        memory,
        // As much as memory: no swap.
        memory_swap: memory,
        nano_cpus: limits.cpus.map(|cpus| (cpus * 1e9) as i64),
        pids_limit: limits.pids.map(|pids| signed(pids + OUR_PROCESSES)),
        // Limits of open files and the like are set by the inner stage: an engine cannot raise its own.
        oom_score_adj: Some(500),
        network_mode: Some(match spec.network {
            SandboxNetwork::None => "none".into(),
            SandboxNetwork::Host => driver.config.network.clone(),
        }),
        cap_drop: Some(vec!["ALL".into()]),
        security_opt: Some(vec!["no-new-privileges".into()]),
        privileged: Some(false),
        readonly_rootfs: Some(true),
        ipc_mode: Some("private".into()),
        cgroupns_mode: Some(HostConfigCgroupnsModeEnum::PRIVATE),
        shm_size: Some(signed(temporary_bytes(spec))),
        tmpfs: Some(temporary_file_systems(driver, spec, defaults)),
        mounts: Some(mounts(driver, spec, stage_dir)?),
        // Nothing is written to the container's own stdout but an error of the stage; see `running`.
        log_config: Some(HostConfigLogConfig {
            typ: Some("json-file".into()),
            config: Some([("max-size".to_owned(), "64k".to_owned())].into()),
        }),
        runtime: driver.config.runtime.clone(),
        auto_remove: Some(false),
        ..HostConfig::default()
    })
}

/// Temporary file systems, which count against the container's memory.
fn temporary_file_systems(
    driver: &DockerDriverInner,
    spec: &SandboxSpec,
    defaults: &ImageDefaults,
) -> HashMap<String, String> {
    // They belong to the container's user: where the image has the directory, runc gives it that one's mode.
    let user = driver.user;
    let of_user = |bytes: u64, mode: &str| {
        format!(
            "rw,exec,nosuid,nodev,size={bytes},mode={mode},uid={},gid={}",
            user.uid, user.gid
        )
    };
    let shared = |bytes: u64| of_user(bytes, "1777");
    let private = |bytes: u64| of_user(bytes, "0700");
    let tmp = temporary_bytes(spec);
    let mut all: HashMap<String, String> = HashMap::new();
    // A volume of the image would be a directory on the engine's disk that nobody counts.
    for volume in &defaults.volumes {
        if Path::new(volume).is_absolute() && !volume.contains("..") {
            all.insert(volume.trim_end_matches('/').to_owned(), shared(VOLUME_BYTES));
        }
    }
    all.insert("/tmp".into(), shared(tmp));
    all.insert("/run".into(), shared(RUN_BYTES));
    if spec.home.is_none() {
        all.insert(HOME.into(), private(tmp));
    }
    for socket in &spec.sockets {
        let parent = socket.inside.parent().unwrap_or(Path::new("/"));
        if parent != Path::new("/") && !parent.starts_with("/run") && !parent.starts_with("/tmp") {
            all.insert(parent.to_string_lossy().into_owned(), private(RUN_BYTES));
        }
    }
    let mounted = |place: &str| {
        let mut given = spec.mounts.iter();
        given.any(|mount| mount.inside == Path::new(place))
            || (spec.workspace.is_some() && place == WORKSPACE)
            || (spec.home.is_some() && place == HOME)
    };
    all.retain(|place, _| !place.is_empty() && !mounted(place));
    all
}

fn mounts(
    driver: &DockerDriverInner,
    spec: &SandboxSpec,
    stage_dir: &Path,
) -> Result<Vec<Mount>, SandboxError> {
    let read_only = MountAccess::ReadOnly;
    let mut all: Vec<(PathBuf, PathBuf, MountAccess)> = vec![
        (driver.config.client.clone(), CLIENT.into(), read_only),
        (stage_dir.into(), STAGE_DIR.into(), read_only),
        (
            driver.user_files().path("passwd"),
            "/etc/passwd".into(),
            read_only,
        ),
        (driver.user_files().path("group"), "/etc/group".into(), read_only),
    ];
    let writable = MountAccess::ReadWrite;
    all.extend(
        spec.workspace
            .iter()
            .map(|host| (host.clone(), WORKSPACE.into(), writable)),
    );
    all.extend(spec.home.iter().map(|host| (host.clone(), HOME.into(), writable)));
    for mount in &spec.mounts {
        all.retain(|(_, inside, _)| *inside != mount.inside);
        all.push((mount.host.clone(), mount.inside.clone(), mount.access));
    }
    all.into_iter()
        .map(|(host, inside, access)| {
            let text = |path: &Path| match path.to_str() {
                Some(text) => Ok(text.to_owned()),
                None => Err(SandboxError::Invalid(format!(
                    "{} is not UTF-8, which the container engine needs",
                    path.display()
                ))),
            };
            Ok(Mount {
                typ: Some(MountType::BIND),
                source: Some(text(&host)?),
                target: Some(text(&inside)?),
                read_only: Some(access == MountAccess::ReadOnly),
                bind_options: Some(MountBindOptions {
                    propagation: Some(MountBindOptionsPropagationEnum::RPRIVATE),
                    ..MountBindOptions::default()
                }),
                ..Mount::default()
            })
        })
        .collect()
}
