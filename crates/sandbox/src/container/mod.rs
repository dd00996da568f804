//! What the drivers whose sandboxes are containers have in common: the first process, the user, labels, limits of ours.
//!
//! - [`launch_order`]: what the inner stage is told.
//! - [`ownership`]: gives files to the container's user where the server is root.
//! - [`user_files`]: files that name that user inside.
//! - [`first_process`]: whether `oubliette-client` starts in any image.

pub(crate) mod first_process;
pub(crate) mod launch_order;
pub(crate) mod ownership;
pub(crate) mod user_files;

use std::path::{Component, Path, PathBuf};

use crate::driver::SandboxError;
use crate::local::leftovers::ServerIdentity;
use crate::spec::SandboxSpec;
use crate::stage::server_end::StageUser;

/// The user of containers when the server is root, who may not be the user inside. No distribution has a user with it.
const USER_OF_ROOTS_SERVER: u32 = 64_646;
/// Where the stage's directory is inside.
pub(crate) const STAGE_DIR: &str = "/opt/oubliette/stage";
/// Memory of ours in a container.
pub(crate) const OUR_MEMORY: u64 = 32 << 20;
/// Maximum size of temporary file systems for `/run` and the directories of sockets.
pub(crate) const RUN_BYTES: u64 = 16 << 20;
/// Maximum size of `/tmp` if memory is not limited.
const DEFAULT_TMP_MB: u64 = 1024;

/// Labels by which a later server finds containers.
pub(crate) const SCOPE_LABEL: &str = "oubliette.scope";
pub(crate) const SERVER_LABEL: &str = "oubliette.server";
pub(crate) const SESSION_LABEL: &str = "oubliette.session";
pub(crate) const SANDBOX_LABEL: &str = "oubliette.sandbox";

/// The user of containers: the server's own, unless that is root.
pub(crate) fn container_user() -> StageUser {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    match uid.is_root() {
        true => StageUser {
            uid: USER_OF_ROOTS_SERVER,
            gid: USER_OF_ROOTS_SERVER,
        },
        false => StageUser {
            uid: uid.as_raw(),
            gid: gid.as_raw(),
        },
    }
}

/// Checks that the spec has a program, valid inside paths and existing host paths.
pub(crate) fn check(spec: &SandboxSpec) -> Result<(), SandboxError> {
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

/// Maximum size of `/tmp`, in bytes.
pub(crate) fn temporary_bytes(spec: &SandboxSpec) -> u64 {
    spec.limits
        .memory_mb
        .map_or(DEFAULT_TMP_MB, |mb| (mb / 2).max(16))
        << 20
}

/// The directory of a stage. Its path is kept short: the path of a socket has at most 107 bytes.
pub(crate) fn stage_dir(run_dir: &Path, server: ServerIdentity, stage: &str) -> PathBuf {
    let number = stage.rsplit('-').next().unwrap_or_default();
    run_dir.join(format!("stage-{server}-{number}"))
}

/// Removes directories of stages whose server does not run any more.
pub(crate) fn remove_stale_stage_dirs(run_dir: &Path) {
    for entry in std::fs::read_dir(run_dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let server = name.to_str().and_then(|name| {
            let (server, _number) = name.strip_prefix("stage-")?.rsplit_once('-')?;
            server.parse::<ServerIdentity>().ok()
        });
        if server.is_some_and(|server| !server.is_running()) {
            let _ = oubliette_os::remove_tree_blocking(&entry.path());
        }
    }
}
