//! File operations that withstand crashes and hostile links: atomic writes, reads confined to a root, private
//! directories.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::Path,
};

use oubliette_protocol::{Error, Result};
use rustix::fs::{Mode, OFlags};

/// Creates a directory and its missing parents with mode 0700. An existing directory is left as it is.
pub fn create_private_dir(dir: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|e| io_error("make the directory", dir, e))
}

/// Checks that a directory belongs to this user and is not a symbolic link, which somebody else could have
/// planted; removes other users' access if it has any.
pub(crate) fn ensure_owned_dir(dir: &Path) -> Result<()> {
    let seen = fs::symlink_metadata(dir).map_err(|e| io_error("look at", dir, e))?;
    if !seen.is_dir() || seen.uid() != rustix::process::geteuid().as_raw() {
        return Err(Error::unavailable(format!(
            "{} is not a directory of yours: remove it and try again",
            dir.display()
        )));
    }
    match seen.mode() & 0o077 {
        0 => Ok(()),
        _ => fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
            .map_err(|e| io_error("close to others", dir, e)),
    }
}

/// Replaces a file atomically: writes a temporary file beside it, syncs that and renames it over the target.
/// No reader sees a partial file, and a power cut leaves the old or the new one.
pub fn write_atomic(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let dir = path
        .parent()
        .ok_or_else(|| Error::internal(format!("{} has no folder", path.display())))?;
    let write = || -> io::Result<()> {
        let mut file = tempfile::Builder::new()
            .prefix(".writing-")
            .permissions(fs::Permissions::from_mode(mode))
            .tempfile_in(dir)?;
        file.write_all(bytes)?;
        // Synced before the rename: otherwise a power cut could leave the target name on an empty file.
        file.as_file().sync_all()?;
        file.persist(path).map_err(|e| e.error)?;
        sync_dir(dir)
    };
    write().map_err(|e| io_error("write", path, e))
}

/// Syncs a directory, so that renames and removals in it survive a power cut.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Why a file could not be read.
#[derive(Debug)]
pub(crate) enum FileReadError {
    /// It does not exist.
    Missing,
    /// It exists but must not or cannot be read; the reason, to follow the file's name.
    Refused(String),
}

/// Reads a UTF-8 file of at most `most` bytes whose canonical path is beneath `root` (itself canonical), so
/// that no symbolic link leads out of it. Never blocks: it opens with O_NONBLOCK and refuses anything but a
/// regular file.
pub(crate) fn read_beneath(root: &Path, path: &Path, most: usize) -> Result<String, FileReadError> {
    let refused = |why: String| FileReadError::Refused(why);
    let real = match fs::canonicalize(path) {
        Ok(real) => real,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return match fs::symlink_metadata(path) {
                Ok(_) => Err(refused("is a symbolic link to nothing".into())),
                Err(_) => Err(FileReadError::Missing),
            };
        }
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => return Err(FileReadError::Missing),
        Err(e) => return Err(refused(format!("cannot be read: {e}"))),
    };
    if !real.starts_with(root) {
        return Err(refused(
            "leads out of the home through a symbolic link, which is not followed".into(),
        ));
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = match rustix::fs::open(&real, flags, Mode::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::NOENT) => return Err(FileReadError::Missing),
        Err(e) => return Err(refused(format!("cannot be read: {}", io::Error::from(e)))),
    };
    let file = File::from(fd);
    let kind = file
        .metadata()
        .map_err(|e| refused(format!("cannot be read: {e}")))?;
    if !kind.is_file() {
        return Err(refused("is not a plain file".into()));
    }
    let mut bytes = Vec::with_capacity((kind.len() as usize).min(most) + 1);
    file.take(most as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| refused(format!("cannot be read: {e}")))?;
    if bytes.len() > most {
        return Err(refused(format!("is larger than {} KiB", most / 1024)));
    }
    String::from_utf8(bytes).map_err(|_| refused("is not UTF-8 text".into()))
}

/// An error for a failed file operation (`what` is its verb), with what to do about it.
pub fn io_error(what: &str, path: &Path, error: io::Error) -> Error {
    let remedy = match error.kind() {
        io::ErrorKind::StorageFull => return no_space_error(what, path, "the disk is full", error),
        io::ErrorKind::QuotaExceeded => return no_space_error(what, path, "the disk quota is full", error),
        io::ErrorKind::PermissionDenied => "give the user the server runs as the right to it",
        io::ErrorKind::ReadOnlyFilesystem => "make the file system writable or choose another home",
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "something else is in its place: move it away"
        }
        _ => "look at the path and try again",
    };
    let message = format!("cannot {what} {}: {error}; {remedy}", path.display());
    Error::unavailable(message).with_cause(error)
}

fn no_space_error(what: &str, path: &Path, why: &str, error: io::Error) -> Error {
    let message = format!(
        "cannot {what} {}: {why}; free some space and try again",
        path.display()
    );
    Error::unavailable(message).with_cause(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn read(root: &Path, name: &str) -> Result<String, String> {
        read_beneath(root, &root.join(name), 1024).map_err(|unread| match unread {
            FileReadError::Missing => "missing".into(),
            FileReadError::Refused(why) => why,
        })
    }

    #[test]
    fn a_written_file_is_complete_private_and_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        write_atomic(&path, b"one", 0o600).unwrap();
        write_atomic(&path, b"two", 0o600).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_write_keeps_the_old_file_and_names_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub");
        fs::create_dir_all(path.join("full")).unwrap();
        let error = write_atomic(&path, b"x", 0o600).unwrap_err();
        assert!(error.message.contains("sub"), "{error}");
        assert!(path.join("full").is_dir());
    }

    #[test]
    fn a_full_disk_is_said_to_be_full_with_the_path_and_what_to_do() {
        for (errno, why) in [
            (rustix::io::Errno::NOSPC, "the disk is full"),
            (rustix::io::Errno::DQUOT, "the disk quota is full"),
        ] {
            let error = io_error("write", Path::new("/h/x"), errno.into());
            let said = format!("cannot write /h/x: {why}; free some space and try again");
            assert_eq!(error.message, said);
        }
    }

    #[test]
    fn links_are_followed_within_the_root_only() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let outside = tempfile::NamedTempFile::new().unwrap();
        fs::write(outside.path(), "secret").unwrap();
        fs::write(root.join("real"), "text").unwrap();
        symlink(root.join("real"), root.join("inside")).unwrap();
        symlink(outside.path(), root.join("outside")).unwrap();
        symlink("/nowhere/at/all", root.join("dangling")).unwrap();
        assert_eq!(read(&root, "real").unwrap(), "text");
        assert_eq!(read(&root, "inside").unwrap(), "text");
        assert!(read(&root, "outside").unwrap_err().contains("out of the home"));
        assert!(read(&root, "dangling").unwrap_err().contains("nothing"));
        assert_eq!(read(&root, "none").unwrap_err(), "missing");
    }

    #[test]
    fn pipes_directories_and_large_files_are_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (owner, kind) = (Mode::RUSR | Mode::WUSR, rustix::fs::FileType::Fifo);
        rustix::fs::mknodat(rustix::fs::CWD, root.join("pipe"), kind, owner, 0).unwrap();
        fs::create_dir(root.join("dir")).unwrap();
        fs::write(root.join("big"), "x".repeat(1025)).unwrap();
        fs::write(root.join("bytes"), [0xff, 0xfe]).unwrap();
        assert!(read(&root, "pipe").unwrap_err().contains("plain file"));
        assert!(read(&root, "dir").unwrap_err().contains("plain file"));
        assert!(read(&root, "big").unwrap_err().contains("1 KiB"));
        assert!(read(&root, "bytes").unwrap_err().contains("UTF-8"));
    }

    #[test]
    fn a_symbolic_link_in_place_of_an_owned_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("theirs")).unwrap();
        symlink(dir.path().join("theirs"), dir.path().join("run")).unwrap();
        assert!(
            ensure_owned_dir(&dir.path().join("run"))
                .unwrap_err()
                .message
                .contains("not a directory of yours")
        );
    }
}
