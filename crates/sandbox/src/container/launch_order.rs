//! What the inner stage of a container is told.

use std::path::PathBuf;

use crate::control_protocol::{
    AllowedPeers, DescendantCleanup, InheritedEnv, LaunchOrder, PayloadConfinement, Rlimits,
};
use crate::spec::{HOME, MountAccess, PATH, SandboxNetwork, SandboxSpec, WORKSPACE};

/// The environment that an image gives its programs.
pub(crate) enum ImageEnv {
    /// The engine says what it is.
    Known(Vec<(String, String)>),
    /// Only the container's first process has it.
    OfFirstProcess,
}

/// What the inner stage is to set up and start. The image's environment comes first, then ours, then the spec's.
/// `volumes` are the places that the image declares to be volumes, as far as they are known.
pub(crate) fn order(spec: SandboxSpec, image: ImageEnv, volumes: &[String]) -> LaunchOrder {
    let (mut env, is_known) = match image {
        ImageEnv::Known(env) => (env, true),
        ImageEnv::OfFirstProcess => (Vec::new(), false),
    };
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
    let defaults =
        [("PATH", PATH), ("LANG", "C.UTF-8")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    let image_env = match is_known {
        true => {
            for (name, value) in defaults {
                if !env.iter().any(|(other, _)| *other == name) {
                    env.push((name, value));
                }
            }
            None
        }
        false => Some(InheritedEnv {
            defaults: defaults.into(),
        }),
    };
    let mut write: Vec<PathBuf> = [HOME, "/tmp", "/run", "/dev/shm"].map(PathBuf::from).into();
    write.extend(spec.workspace.iter().map(|_| PathBuf::from(WORKSPACE)));
    let writable = spec.mounts.iter();
    let writable = writable.filter(|mount| mount.access == MountAccess::ReadWrite);
    write.extend(writable.map(|mount| mount.inside.clone()));
    write.extend(volumes.iter().map(PathBuf::from));
    // Without a workspace there is no /workspace to start in: it starts in its home.
    let cwd = match spec.workspace.is_none() && spec.cwd.starts_with(WORKSPACE) {
        true => HOME.into(),
        false => spec.cwd,
    };
    LaunchOrder {
        argv: spec.argv,
        env,
        image_env,
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
