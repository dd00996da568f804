//! A spec as bubblewrap's arguments.
//!
//! They go through a file descriptor, not the command line: there is no limit on their length, and nobody
//! reads them in `ps`. The environment is not among them at all.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::system::System;
use crate::driver::SandboxError;
use crate::launch::{ARGS, INFO};
use crate::spec::{Access, CLIENT, HOME, Mount, Network, Spec, WORKSPACE};
use crate::wire::COMMAND;

/// Sizes of the file systems that live in memory.
const RUN_BYTES: u64 = 16 << 20;
const DEFAULT_TMP_MB: u64 = 1024;

/// How user namespaces inside the sandbox are kept from being made: they lead to kernel code that nothing
/// else reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Further {
    /// By a count of zero, and by the filter.
    Forbidden,
    /// By the filter alone: this bubblewrap knows no better.
    Filtered,
}

/// The command line, the same for every sandbox.
pub(super) fn command() -> Vec<CString> {
    let words = [
        "bwrap",
        "--args",
        &ARGS.to_string(),
        "--info-fd",
        &INFO.to_string(),
        "--",
        CLIENT,
        COMMAND,
    ];
    // None of them holds a NUL byte.
    words
        .into_iter()
        .filter_map(|word| CString::new(word).ok())
        .collect()
}

/// The arguments for [`ARGS`], each ended by NUL.
pub(super) fn arguments(
    system: &System,
    spec: &Spec,
    client: &Path,
    further: Further,
) -> Result<Vec<u8>, SandboxError> {
    let mut args = Args::default();
    args.flags(&[
        "--unshare-user",
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--clearenv",
    ]);
    match further {
        Further::Forbidden => args.flags(&["--disable-userns"]),
        Further::Filtered => {}
    }
    if spec.network == Network::None {
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
    if spec.network == Network::Host {
        for path in ["/etc/resolv.conf", "/etc/hosts"].map(Path::new) {
            args.bind("--ro-bind-try", path, path);
        }
    }

    // A server run by root gives its sandboxes the host's uid 0, if under another name and without a
    // capability; and the kernel lets uid 0 write system settings by file mode alone. So /proc is
    // read-only, whoever runs the server.
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
            Access::ReadOnly => "--ro-bind",
            Access::ReadWrite => "--bind",
        };
        args.bind(how, &mount.host, &mount.inside);
    }
    // Last, since every mount point is made in it.
    args.flags(&["--remount-ro", "/dev", "--remount-ro", "/"]);
    args.finish()
}

/// Everything of the spec that is mounted, parents before what lies in them.
fn mounts(system: &System, spec: &Spec, client: &Path) -> Result<Vec<Mount>, SandboxError> {
    let mut mounts = spec.mounts.clone();
    // A socket on a read-only mount can still be connected to; it cannot be replaced.
    mounts.extend(
        spec.sockets
            .iter()
            .map(|socket| Mount::read_only(&socket.host, &socket.inside)),
    );
    if !mounts.iter().any(|mount| mount.inside == Path::new(CLIENT)) {
        mounts.push(Mount::read_only(client, CLIENT));
    }
    // Seen already.
    mounts.retain(|mount| {
        !(mount.access == Access::ReadOnly
            && mount.host == mount.inside
            && system.bound.iter().any(|bound| mount.inside.starts_with(bound)))
    });
    for mount in &mounts {
        if let Ok(name) = mount.inside.strip_prefix("/etc") {
            system
                .etc_place(name, &mount.host)
                .map_err(|error| SandboxError::setup("a place in /etc", error))?;
        }
    }
    mounts.sort_by_key(|mount| mount.inside.components().count());
    Ok(mounts)
}

#[derive(Default)]
struct Args {
    bytes: Vec<u8>,
    broken: Option<PathBuf>,
}

impl Args {
    fn word(&mut self, word: &OsStr) {
        if word.as_bytes().contains(&0) {
            self.broken = Some(word.into());
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
        match self.broken {
            Some(path) => Err(SandboxError::Invalid(format!(
                "the path {path:?} holds a NUL byte"
            ))),
            None => Ok(self.bytes),
        }
    }
}
