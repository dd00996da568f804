//! Opens a path that cannot lead out of a directory (`openat2`).
//!
//! Comparing strings cannot keep a path inside: between checking and opening, a directory can be replaced by a link.
//! The kernel checks while it opens.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{Mode, OFlags, ResolveFlags, openat2},
    io::{Errno, Result},
};

/// Which symbolic links are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SymlinkPolicy {
    /// Those that stay beneath the starting directory.
    Inside,
    /// None.
    Never,
}

/// Opens a path beneath a directory; "." is the directory itself. A path that leads out of it fails with `XDEV`, and
/// a link that is not followed with `LOOP`. The descriptor is closed on exec.
pub fn open_beneath(
    dir: impl AsFd,
    path: &Path,
    flags: OFlags,
    mode: Mode,
    links: SymlinkPolicy,
) -> Result<OwnedFd> {
    const TRIES: usize = 64;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let resolve = match links {
        SymlinkPolicy::Inside => resolve,
        SymlinkPolicy::Never => resolve | ResolveFlags::NO_SYMLINKS,
    };
    for _ in 0..TRIES {
        // EAGAIN: something was renamed during the lookup, so the kernel could not guarantee `BENEATH`.
        match openat2(&dir, path, flags | OFlags::CLOEXEC, mode, resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            result => return result,
        }
    }
    Err(Errno::AGAIN)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn no_path_and_no_link_leads_out_of_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("inside")).unwrap();
        std::fs::write(dir.path().join("inside/file"), "text").unwrap();
        std::fs::write(dir.path().join("outside"), "secret").unwrap();
        symlink("file", dir.path().join("inside/link")).unwrap();
        symlink("../outside", dir.path().join("inside/out")).unwrap();
        let root = std::fs::File::open(dir.path().join("inside")).unwrap();
        let open = |path: &str, links| {
            open_beneath(&root, Path::new(path), OFlags::RDONLY, Mode::empty(), links).map(|_| ())
        };
        assert_eq!(open("file", SymlinkPolicy::Never), Ok(()));
        assert_eq!(open(".", SymlinkPolicy::Never), Ok(()));
        assert_eq!(open("link", SymlinkPolicy::Inside), Ok(()));
        assert_eq!(open("link", SymlinkPolicy::Never), Err(Errno::LOOP));
        for links in [SymlinkPolicy::Inside, SymlinkPolicy::Never] {
            assert!(
                matches!(open("out", links), Err(Errno::XDEV | Errno::LOOP)),
                "{links:?}"
            );
            assert_eq!(open("../outside", links), Err(Errno::XDEV), "{links:?}");
            assert_eq!(open("/etc/passwd", links), Err(Errno::XDEV), "{links:?}");
        }
    }
}
