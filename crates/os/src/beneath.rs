//! Opens a path that cannot lead out of a directory (`openat2`), and writes a file in a directory of somebody else.
//!
//! Comparing strings cannot keep a path inside: between checking and opening, a directory can be replaced by a link.
//! The kernel checks while it opens.

use std::{
    fs::File,
    io::{self, Write as _},
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{AtFlags, Gid, Mode, OFlags, ResolveFlags, Uid, openat2, renameat, unlinkat},
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

/// Gives an entry that this process has just made in a directory to the directory's owner, if this process is root: who
/// works in the directory must be able to change it. A link is not followed. Does nothing otherwise.
pub fn give_to_owner_of(dir: impl AsFd, name: &str) {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let (dir, flags) = (dir.as_fd(), AtFlags::SYMLINK_NOFOLLOW);
    if let Ok(owner) = rustix::fs::statat(dir, ".", AtFlags::empty())
        && owner.st_uid != 0
    {
        let (uid, gid) = (Uid::from_raw(owner.st_uid), Gid::from_raw(owner.st_gid));
        // It may have been exchanged for something else meanwhile, which is in the owner's directory all the same.
        let _ = rustix::fs::chownat(dir, name, Some(uid), Some(gid), flags);
    }
}

/// Writes a file in a directory that a program can write to, whatever the program put in its place: a link is replaced
/// and not followed, a directory is moved aside, and a file that the program holds open stays its own. Others see the
/// old content or the new one.
pub fn replace_file(dir: &Path, name: &str, content: &[u8], mode: Mode) -> io::Result<()> {
    const TRIES: usize = 16;
    if name.contains('/') || matches!(name, "" | "." | "..") {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::open(dir, flags, Mode::empty())?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
    for n in 0..TRIES {
        let temporary = format!("{name}.new-{}-{n}", std::process::id());
        let file = match open_beneath(&dir, Path::new(&temporary), flags, mode, SymlinkPolicy::Never) {
            Ok(file) => file,
            // A program took the name, or it was left by a process that was killed.
            Err(Errno::EXIST) => {
                let _ = unlinkat(&dir, temporary.as_str(), AtFlags::empty());
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let written = File::from(file).write_all(content);
        let renamed = written.and_then(|()| Ok(renameat(&dir, temporary.as_str(), &dir, name)?));
        let Err(error) = renamed else { return Ok(()) };
        let _ = unlinkat(&dir, temporary.as_str(), AtFlags::empty());
        if error.raw_os_error() != Some(Errno::ISDIR.raw_os_error()) {
            return Err(error);
        }
        let aside = format!("{name}.old-{}-{n}", std::process::id());
        let _ = renameat(&dir, name, &dir, aside.as_str());
    }
    Err(Errno::EXIST.into())
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

    #[test]
    fn a_file_replaces_whatever_is_in_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let (home, outside) = (dir.path().join("home"), dir.path().join("outside"));
        std::fs::create_dir(&home).unwrap();
        std::fs::write(&outside, "kept").unwrap();
        let file = home.join("config");
        let write =
            |content: &str| replace_file(&home, "config", content.as_bytes(), Mode::from_raw_mode(0o600));
        let read = || std::fs::read_to_string(&file).unwrap();
        write("first").unwrap();
        assert_eq!(read(), "first");
        symlink(&outside, home.join("link")).unwrap();
        std::fs::rename(home.join("link"), &file).unwrap();
        write("second").unwrap();
        assert!(file.symlink_metadata().unwrap().is_file());
        assert_eq!(
            (read(), std::fs::read_to_string(&outside).unwrap()),
            ("second".into(), "kept".into())
        );
        std::fs::remove_file(&file).unwrap();
        std::fs::hard_link(&outside, &file).unwrap();
        write("third").unwrap();
        assert_eq!(
            (read(), std::fs::read_to_string(&outside).unwrap()),
            ("third".into(), "kept".into())
        );
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir_all(file.join("in the way")).unwrap();
        let taken = format!("config.new-{}-0", std::process::id());
        symlink(&outside, home.join(taken)).unwrap();
        write("fourth").unwrap();
        assert_eq!(
            (read(), std::fs::read_to_string(&outside).unwrap()),
            ("fourth".into(), "kept".into())
        );
        assert!(replace_file(&home, "../outside", b"x", Mode::RWXU).is_err());
        symlink(&home, dir.path().join("home link")).unwrap();
        assert!(replace_file(&dir.path().join("home link"), "config", b"x", Mode::RWXU).is_err());
    }
}
