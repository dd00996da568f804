//! The part of the host's system that every sandbox sees: programs and libraries, certificates, and a generated
//! `/etc` that names no user of the host.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Directories at the root that hold programs and libraries. On most hosts all but `/usr` are links into it.
const SYSTEM_DIRS: [&str; 7] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"];

/// Parts of `/etc` that are mounted from the host: they may change while the server runs, and hold no secret.
const ETC_LIVE: [&str; 5] = ["ssl", "pki", "alternatives", "ld.so.cache", "crypto-policies"];

/// Small files of `/etc` that are copied once, because every additional mount makes each start slower.
const ETC_COPIED: [&str; 8] = [
    "ld.so.conf",
    "services",
    "protocols",
    "mime.types",
    "debian_version",
    "os-release",
    "timezone",
    "locale.conf",
];

/// The host's system as every sandbox sees it.
#[derive(Debug)]
pub(crate) struct HostSystemView {
    /// Directories mounted read-only at the same path.
    pub(crate) bound: Vec<PathBuf>,
    /// Symbolic links: path and target.
    pub(crate) links: Vec<(PathBuf, PathBuf)>,
    /// Host path of the generated `/etc`.
    pub(crate) etc: PathBuf,
    /// Names in `/etc` that are mounted from the host.
    pub(crate) etc_live: Vec<&'static str>,
}

impl HostSystemView {
    /// Inspects the host and generates `/etc` under `run_dir`.
    pub(crate) fn discover(run_dir: &Path) -> io::Result<Self> {
        let (mut bound, mut links) = (Vec::new(), Vec::new());
        for name in SYSTEM_DIRS {
            let path = Path::new("/").join(name);
            match std::fs::read_link(&path) {
                Ok(target) => links.push((path, target)),
                Err(_) if path.is_dir() => bound.push(path),
                Err(_) => {}
            }
        }
        let etc_live: Vec<&'static str> = ETC_LIVE
            .into_iter()
            .filter(|name| Path::new("/etc").join(name).exists())
            .collect();
        let etc = run_dir.join("sandbox-etc");
        write_etc(&etc, &etc_live)?;
        Ok(Self {
            bound,
            links,
            etc,
            etc_live,
        })
    }

    /// Creates a mount point in the generated `/etc`.
    pub(crate) fn create_etc_mount_point(&self, name: &Path, host: &Path) -> io::Result<()> {
        let place = self.etc.join(name);
        if place.exists() {
            return Ok(());
        }
        if host.is_dir() {
            return std::fs::create_dir_all(place);
        }
        place.parent().map(std::fs::create_dir_all).transpose()?;
        std::fs::write(place, "")
    }
}

fn write_etc(etc: &Path, live: &[&str]) -> io::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(etc)?;
    let file = |name: &str, text: &str| replace_file(etc, name, text.as_bytes());
    file(
        "passwd",
        "agent:x:1000:1000:agent:/home/agent:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    )?;
    file("group", "agent:x:1000:\nnogroup:x:65534:\n")?;
    file("hosts", "127.0.0.1 localhost oubliette\n::1 localhost\n")?;
    file("hostname", "oubliette\n")?;
    file("host.conf", "multi on\n")?;
    file(
        "nsswitch.conf",
        "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
    )?;
    file("resolv.conf", "")?;
    file("shells", "/bin/sh\n/bin/bash\n")?;
    for name in ETC_COPIED {
        if let Ok(bytes) = std::fs::read(Path::new("/etc").join(name)) {
            replace_file(etc, name, &bytes)?;
        }
    }
    // Usually a link into /usr/share/zoneinfo, which the sandbox sees.
    if let Ok(zone) = std::fs::read_link("/etc/localtime") {
        let _ = std::fs::remove_file(etc.join("localtime"));
        std::os::unix::fs::symlink(zone, etc.join("localtime"))?;
    }
    for name in live {
        let place = etc.join(name);
        if place.exists() {
            continue;
        }
        if Path::new("/etc").join(name).is_dir() {
            std::fs::create_dir(place)?;
        } else {
            std::fs::write(place, "")?;
        }
    }
    Ok(())
}

/// Writes a file of the generated `/etc` by rename, because running sandboxes may be reading it.
fn replace_file(etc: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let path = etc.join(name);
    if std::fs::read(&path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let aside = etc.join(format!(".{name}.new"));
    std::fs::write(&aside, bytes)?;
    std::fs::rename(aside, path)
}
