//! A spec as Landlock's rules and seccomp's choices.

use std::path::{Path, PathBuf};

use super::inet;
use super::system::System;
use crate::spec::{Access, HOME, Spec, WORKSPACE};
use crate::wire::Confine;
use crate::{Level, Network};

/// The same view the mounts give, said once more: a second wall behind the first.
pub(super) fn in_namespaces(system: &System, spec: &Spec) -> Confine {
    let mut read: Vec<PathBuf> = system.bound.clone();
    read.extend(["/etc", "/proc", "/opt/oubliette"].map(PathBuf::from));
    read.extend(with_access(spec, Access::ReadOnly).map(|mount| mount.inside.clone()));
    let mut write: Vec<PathBuf> = [HOME, "/tmp", "/run", "/dev/shm"].map(PathBuf::from).into();
    write.extend(spec.workspace.iter().map(|_| PathBuf::from(WORKSPACE)));
    write.extend(with_access(spec, Access::ReadWrite).map(|mount| mount.inside.clone()));
    Confine {
        read,
        write,
        list: vec!["/".into()],
        devices: vec!["/dev".into()],
        inet: inet(Level::Namespaces, spec.network),
        landlock_required: false,
    }
}

/// The only wall: host paths, and of the host's system just what programs need.
pub(super) fn alone(spec: &Spec, client: &Path, tmp: &Path) -> Confine {
    let mut read: Vec<PathBuf> = [
        "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/proc",
    ]
    .map(PathBuf::from)
    .into();
    read.extend(ETC.iter().map(|name| Path::new("/etc").join(name)));
    if spec.network == Network::Host {
        read.extend(["/etc/resolv.conf", "/etc/hosts"].map(PathBuf::from));
    }
    read.push(client.to_path_buf());
    read.extend(with_access(spec, Access::ReadOnly).map(|mount| mount.host.clone()));
    let mut write: Vec<PathBuf> = vec![tmp.to_path_buf()];
    write.extend(spec.workspace.iter().chain(&spec.home).cloned());
    write.extend(with_access(spec, Access::ReadWrite).map(|mount| mount.host.clone()));
    Confine {
        read,
        write,
        list: Vec::new(),
        devices: DEVICES.map(|name| Path::new("/dev").join(name)).into(),
        inet: inet(Level::Landlock, spec.network),
        landlock_required: true,
    }
}

const ETC: [&str; 13] = [
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

const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

fn with_access(spec: &Spec, access: Access) -> impl Iterator<Item = &crate::Mount> {
    spec.mounts.iter().filter(move |mount| mount.access == access)
}
