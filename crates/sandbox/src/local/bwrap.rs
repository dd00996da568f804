//! Translation of a spec into bubblewrap's arguments.
//!
//! They are passed through a file descriptor, not on the command line: so their length is not limited, and they are
//! not visible in `ps`. The environment is not among them.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::host_system::HostSystemView;
use crate::control_protocol::INIT_COMMAND;
use crate::driver::SandboxError;
use crate::launch::{BWRAP_ARGS_FD, BWRAP_INFO_FD};
use crate::spec::{BindMount, CLIENT, HOME, MountAccess, SandboxNetwork, SandboxSpec, WORKSPACE};

/// Maximum sizes of tmpfs mounts: `/run`, and `/tmp` if memory is not limited.
const RUN_BYTES: u64 = 16 << 20;
const DEFAULT_TMP_MB: u64 = 1024;

/// How user namespaces are forbidden inside the sandbox. They are forbidden because they expose kernel code that
/// is otherwise unreachable for unprivileged users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NestedUserns {
    /// By bubblewrap's `--disable-userns` (a maximum of zero user namespaces), and by seccomp.
    Disabled,
    /// By seccomp alone, because this bubblewrap does not support `--disable-userns`.
    SeccompOnly,
}

/// Bubblewrap's command line, the same for every sandbox.
pub(super) fn command() -> Vec<CString> {
    let words = [
        "bwrap",
        "--args",
        &BWRAP_ARGS_FD.to_string(),
        "--info-fd",
        &BWRAP_INFO_FD.to_string(),
        "--",
        CLIENT,
        INIT_COMMAND,
    ];
    // None of them holds a NUL byte.
    words
        .into_iter()
        .filter_map(|word| CString::new(word).ok())
        .collect()
}

/// The arguments to write to [`BWRAP_ARGS_FD`], each terminated by NUL.
pub(super) fn arguments(
    system: &HostSystemView,
    spec: &SandboxSpec,
    client: &Path,
    nested_userns: NestedUserns,
) -> Result<Vec<u8>, SandboxError> {
    let mut args = BwrapArgs::default();
    args.flags(&[
        "--unshare-user",
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--new-session",
        "--as-pid-1",
        "--clearenv",
    ]);
    match nested_userns {
        NestedUserns::Disabled => args.flags(&["--disable-userns"]),
        NestedUserns::SeccompOnly => {}
    }
    if spec.network == SandboxNetwork::None {
        args.flags(&["--unshare-net"]);
    }
    args.flags(&[
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--hostname",
        "oubliette",
        "--cap-drop",
        "ALL",
    ]);

    for path in &system.bound {
        args.bind("--ro-bind", path, path);
    }
    for (link, target) in &system.links {
        args.bind("--symlink", target, link);
    }
    args.bind("--ro-bind", &system.etc, Path::new("/etc"));
    for name in &system.etc_live {
        let path = Path::new("/etc").join(name);
        args.bind("--ro-bind", &path, &path);
    }
    if spec.network == SandboxNetwork::Host {
        for path in ["/etc/resolv.conf", "/etc/hosts"].map(Path::new) {
            args.bind("--ro-bind-try", path, path);
        }
    }

    // In a sandbox of a server run by root, uid 1000 is the host's uid 0, though without capabilities, and the
    // kernel lets uid 0 write /proc/sys by file mode alone. So /proc is read-only, whoever runs the server.
    args.flags(&["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]);
    let tmp = spec
        .limits
        .memory_mb
        .map_or(DEFAULT_TMP_MB, |mb| (mb / 2).max(16))
        << 20;
    args.tmpfs(tmp, "/dev/shm");
    args.tmpfs(tmp, "/tmp");
    args.tmpfs(RUN_BYTES, "/run");

    match &spec.home {
        Some(home) => args.bind("--bind", home, Path::new(HOME)),
        None => args.tmpfs(tmp, HOME),
    }
    if let Some(workspace) = &spec.workspace {
        args.bind("--bind", workspace, Path::new(WORKSPACE));
    }
    for mount in mounts(system, spec, client)? {
        let how = match mount.access {
            MountAccess::ReadOnly => "--ro-bind",
            MountAccess::ReadWrite => "--bind",
        };
        args.bind(how, &mount.host, &mount.inside);
    }
    // Last, because every mount point is created in it.
    args.flags(&["--remount-ro", "/dev", "--remount-ro", "/"]);
    args.finish()
}

/// All mounts of the spec, parents before their children.
fn mounts(
    system: &HostSystemView,
    spec: &SandboxSpec,
    client: &Path,
) -> Result<Vec<BindMount>, SandboxError> {
    let mut mounts = spec.mounts.clone();
    // A socket on a read-only mount can be connected to but not replaced.
    mounts.extend(
        spec.sockets
            .iter()
            .map(|socket| BindMount::read_only(&socket.host, &socket.inside)),
    );
    if !mounts.iter().any(|mount| mount.inside == Path::new(CLIENT)) {
        mounts.push(BindMount::read_only(client, CLIENT));
    }
    // Those already visible through a system directory need no mount.
    mounts.retain(|mount| {
        !(mount.access == MountAccess::ReadOnly
            && mount.host == mount.inside
            && system.bound.iter().any(|bound| mount.inside.starts_with(bound)))
    });
    for mount in &mounts {
        if let Ok(name) = mount.inside.strip_prefix("/etc") {
            system
                .create_etc_mount_point(name, &mount.host)
                .map_err(|error| SandboxError::setup("a place in /etc", error))?;
        }
    }
    mounts.sort_by_key(|mount| mount.inside.components().count());
    Ok(mounts)
}

/// Builds the NUL-separated arguments.
#[derive(Default)]
struct BwrapArgs {
    bytes: Vec<u8>,
    /// An argument that contains a NUL byte, which makes the whole invalid.
    path_with_nul: Option<PathBuf>,
}

impl BwrapArgs {
    fn word(&mut self, word: &OsStr) {
        if word.as_bytes().contains(&0) {
            self.path_with_nul = Some(word.into());
        }
        self.bytes.extend_from_slice(word.as_bytes());
        self.bytes.push(0);
    }

    fn flags(&mut self, words: &[&str]) {
        words.iter().for_each(|word| self.word(word.as_ref()));
    }

    fn bind(&mut self, how: &str, from: &Path, to: &Path) {
        self.word(how.as_ref());
        self.word(from.as_os_str());
        self.word(to.as_os_str());
    }

    fn tmpfs(&mut self, size: u64, at: &str) {
        self.flags(&["--perms", "1777", "--size", &size.to_string(), "--tmpfs", at]);
    }

    fn finish(self) -> Result<Vec<u8>, SandboxError> {
        match self.path_with_nul {
            Some(path) => Err(SandboxError::Invalid(format!(
                "the path {path:?} holds a NUL byte"
            ))),
            None => Ok(self.bytes),
        }
    }
}
