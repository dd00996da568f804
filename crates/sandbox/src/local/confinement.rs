//! Translation of a spec into Landlock and seccomp restrictions.

use std::path::{Path, PathBuf};

use super::allows_inet;
use super::host_system::HostSystemView;
use crate::control_protocol::PayloadConfinement;
use crate::spec::{HOME, MountAccess, SandboxSpec, WORKSPACE};
use crate::{IsolationLevel, SandboxNetwork};

/// The restrictions inside namespaces. They allow the same files as the mounts, as a second line of defence.
pub(super) fn for_namespaces(system: &HostSystemView, spec: &SandboxSpec) -> PayloadConfinement {
    let mut read: Vec<PathBuf> = system.bound.clone();
    read.extend(["/etc", "/proc", "/opt/oubliette"].map(PathBuf::from));
    read.extend(mounts_with_access(spec, MountAccess::ReadOnly).map(|mount| mount.inside.clone()));
    let mut write: Vec<PathBuf> = [HOME, "/tmp", "/run", "/dev/shm"].map(PathBuf::from).into();
    write.extend(spec.workspace.iter().map(|_| PathBuf::from(WORKSPACE)));
    write.extend(mounts_with_access(spec, MountAccess::ReadWrite).map(|mount| mount.inside.clone()));
    PayloadConfinement {
        read,
        write,
        list: vec!["/".into()],
        devices: vec!["/dev".into()],
        inet: allows_inet(IsolationLevel::Namespaces, spec.network),
        landlock_required: false,
    }
}

/// The restrictions where Landlock is the only isolation: host paths, and of the host's system only what programs
/// need.
pub(super) fn for_landlock_only(spec: &SandboxSpec, client: &Path, tmp: &Path) -> PayloadConfinement {
    let mut read: Vec<PathBuf> = [
        "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/proc",
    ]
    .map(PathBuf::from)
    .into();
    read.extend(READABLE_ETC.iter().map(|name| Path::new("/etc").join(name)));
    if spec.network == SandboxNetwork::Host {
        read.extend(["/etc/resolv.conf", "/etc/hosts"].map(PathBuf::from));
    }
    read.push(client.to_path_buf());
    read.extend(mounts_with_access(spec, MountAccess::ReadOnly).map(|mount| mount.host.clone()));
    let mut write: Vec<PathBuf> = vec![tmp.to_path_buf()];
    write.extend(spec.workspace.iter().chain(&spec.home).cloned());
    write.extend(mounts_with_access(spec, MountAccess::ReadWrite).map(|mount| mount.host.clone()));
    PayloadConfinement {
        read,
        write,
        list: Vec::new(),
        devices: DEVICES.map(|name| Path::new("/dev").join(name)).into(),
        inet: allows_inet(IsolationLevel::Landlock, spec.network),
        landlock_required: true,
    }
}

/// Names in `/etc` that programs need and that hold no secret.
const READABLE_ETC: [&str; 13] = [
    "ssl",
    "pki",
    "ca-certificates",
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "localtime",
    "timezone",
    "passwd",
    "group",
    "nsswitch.conf",
    "services",
    "protocols",
];

/// Names in `/dev` that programs may use.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

fn mounts_with_access(spec: &SandboxSpec, access: MountAccess) -> impl Iterator<Item = &crate::BindMount> {
    spec.mounts.iter().filter(move |mount| mount.access == access)
}
