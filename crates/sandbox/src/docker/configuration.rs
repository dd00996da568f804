//! Translation of a spec into a container.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use bollard::models::{
    ContainerCreateBody, HealthConfig, HostConfig, HostConfigCgroupnsModeEnum, HostConfigLogConfig, Mount,
    MountBindOptions, MountBindOptionsPropagationEnum, MountType,
};

use super::DockerDriverInner;
use super::image::ImageDefaults;
use crate::control_protocol::{AllowedPeers, DescendantCleanup, LaunchOrder, PayloadConfinement, Rlimits};
use crate::driver::{PinnedImage, SandboxError};
use crate::spec::{CLIENT, HOME, MountAccess, PATH, SandboxNetwork, SandboxSpec, WORKSPACE};

/// Where the stage's directory is inside.
const STAGE_DIR: &str = "/opt/oubliette/stage";
/// Processes and threads of ours in a container: the stage and the inner stage.
const OUR_PROCESSES: u64 = 4;
/// Memory of ours in a container.
const OUR_MEMORY: u64 = 32 << 20;
/// Maximum sizes of temporary file systems: `/run` and the directories of sockets, and `/tmp` if memory is not limited.
const RUN_BYTES: u64 = 16 << 20;
const DEFAULT_TMP_MB: u64 = 1024;
/// Maximum size of what stands in for a volume of the image.
const VOLUME_BYTES: u64 = 256 << 20;

/// Labels by which a later server finds containers.
pub(super) const SCOPE_LABEL: &str = "oubliette.scope";
pub(super) const SERVER_LABEL: &str = "oubliette.server";
const SESSION_LABEL: &str = "oubliette.session";
const SANDBOX_LABEL: &str = "oubliette.sandbox";

/// Checks that the spec has a program, valid inside paths and existing host paths.
pub(super) fn check(spec: &SandboxSpec) -> Result<(), SandboxError> {
    let invalid = |text: String| Err(SandboxError::Invalid(text));
    if spec.argv.is_empty() {
        return invalid("there is no program to run".into());
    }
    let inside = spec.mounts.iter().map(|mount| &mount.inside);
    for path in inside.chain(spec.sockets.iter().map(|socket| &socket.inside)) {
        let plain = path
            .components()
            .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        if !path.is_absolute() || !plain || path == Path::new("/") {
            return invalid(format!("{} cannot be a place inside a sandbox", path.display()));
        }
    }
    let hosts = spec.mounts.iter().map(|mount| &mount.host);
    for path in hosts.chain(&spec.workspace).chain(&spec.home) {
        if !path.exists() {
            return invalid(format!("{} does not exist", path.display()));
        }
    }
    Ok(())
}

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

fn temporary_bytes(spec: &SandboxSpec) -> u64 {
    spec.limits
        .memory_mb
        .map_or(DEFAULT_TMP_MB, |mb| (mb / 2).max(16))
        << 20
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
        (driver.user_file("passwd"), "/etc/passwd".into(), read_only),
        (driver.user_file("group"), "/etc/group".into(), read_only),
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

impl DockerDriverInner {
    /// A file that names the container's user, which images do not know: some programs do not start without a name.
    pub(super) fn user_file(&self, name: &str) -> PathBuf {
        self.config.run_dir.join("container-etc").join(name)
    }

    /// Writes those files.
    pub(super) fn write_user_files(&self) -> std::io::Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let user = self.user;
        let passwd = format!(
            "root:x:0:0:root:/root:/bin/sh\nagent:x:{}:{}:agent:{HOME}:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
            user.uid, user.gid
        );
        let group = format!("root:x:0:\nagent:x:{}:\nnogroup:x:65534:\n", user.gid);
        for (name, text) in [("passwd", passwd), ("group", group)] {
            let path = self.user_file(name);
            if let Some(dir) = path.parent() {
                std::fs::create_dir_all(dir)?;
            }
            if std::fs::read_to_string(&path).is_ok_and(|old| old == text) {
                continue;
            }
            let aside = path.with_extension("new");
            std::fs::write(&aside, text)?;
            std::fs::set_permissions(&aside, std::fs::Permissions::from_mode(0o644))?;
            std::fs::rename(aside, path)?;
        }
        Ok(())
    }
}

/// What the inner stage is to set up and start. The image's environment comes first, then ours, then the spec's.
pub(super) fn order(spec: SandboxSpec, defaults: ImageDefaults) -> LaunchOrder {
    let mut env = defaults.env;
    let mut set = |name: &str, value: &str| {
        env.retain(|(other, _)| other != name);
        env.push((name.to_owned(), value.to_owned()));
    };
    for (name, value) in [("HOME", HOME), ("TMPDIR", "/tmp"), ("USER", "agent")] {
        set(name, value);
    }
    for (name, value) in &spec.env {
        set(name, value);
    }
    for (name, value) in [("PATH", PATH), ("LANG", "C.UTF-8")] {
        if !env.iter().any(|(other, _)| other == name) {
            env.push((name.to_owned(), value.to_owned()));
        }
    }
    let mut write: Vec<PathBuf> = [HOME, "/tmp", "/run", "/dev/shm"].map(PathBuf::from).into();
    write.extend(spec.workspace.iter().map(|_| PathBuf::from(WORKSPACE)));
    let writable = spec.mounts.iter();
    let writable = writable.filter(|mount| mount.access == MountAccess::ReadWrite);
    write.extend(writable.map(|mount| mount.inside.clone()));
    write.extend(defaults.volumes.iter().map(PathBuf::from));
    // Without a workspace there is no /workspace to start in: it starts in its home.
    let cwd = match spec.workspace.is_none() && spec.cwd.starts_with(WORKSPACE) {
        true => HOME.into(),
        false => spec.cwd,
    };
    LaunchOrder {
        argv: spec.argv,
        env,
        cwd,
        forwards: spec.forwards,
        allowed_peers: match spec.network {
            SandboxNetwork::None => AllowedPeers::Anyone,
            SandboxNetwork::Host => AllowedPeers::SameUser,
        },
        confine: Some(PayloadConfinement {
            // The whole image may be read; what may be written is the same as the mounts allow.
            read: vec!["/".into()],
            write,
            list: Vec::new(),
            devices: vec!["/dev".into()],
            inet: true,
            landlock_required: false,
        }),
        rlimits: Rlimits {
            open_files: spec.limits.open_files,
            processes: None,
            data: None,
            file_size: spec.limits.workspace_mb.map(|mb| mb.saturating_mul(1024 * 1024)),
        },
        // The inner stage is not the first process here.
        cleanup: DescendantCleanup::Descendants,
    }
}
