//! Replacing a file of a workspace in one step.
//!
//! The new content is first written to a file in the project's upload directory, and then moved. A killed server leaves
//! its unfinished files there, not in a workspace, and the next one removes them; and no agent can change one of them
//! before it is in place.

use std::{
    fs::File,
    io::{self, Write as _},
    os::{fd::OwnedFd, unix::fs::DirBuilderExt as _},
    path::Path,
    time::Duration,
};

use rustix::{
    fs::{AtFlags, Mode, OFlags},
    io::Errno,
};

/// Replaces `name` in `folder`, or creates it.
pub(super) fn replace_file(uploads: &Path, folder: &OwnedFd, name: &str, content: &[u8]) -> io::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(uploads)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let staging = rustix::fs::open(uploads, flags, Mode::empty())?;
    match write_and_move(&staging, folder, name, content) {
        // The operator has put this workspace on another file system.
        Err(error) if error.raw_os_error() == Some(Errno::XDEV.raw_os_error()) => {
            write_and_move(folder, folder, name, content)
        }
        done => done,
    }
}

fn write_and_move(staging: &OwnedFd, folder: &OwnedFd, name: &str, content: &[u8]) -> io::Result<()> {
    let temporary = format!(".oubliette-{}", uuid::Uuid::new_v4().simple());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(staging, temporary.as_str(), flags, Mode::from_raw_mode(0o644))?;
    let moved = (|| {
        let mut file = File::from(fd);
        file.write_all(content)?;
        file.sync_all()?;
        rustix::fs::renameat(staging, temporary.as_str(), folder, name)?;
        oubliette_os::give_to_owner_of(folder, name);
        Ok(())
    })();
    moved.inspect_err(|_| {
        let _ = rustix::fs::unlinkat(staging, temporary.as_str(), AtFlags::empty());
    })
}

/// Removes what killed servers left in the upload directories of all projects, if it has not changed for `left_for`. Blocks the
/// thread.
pub(crate) fn remove_unfinished_uploads(projects: &Path, left_for: Duration) {
    let is_left = |file: &std::fs::DirEntry| {
        let changed = file.metadata().and_then(|data| data.modified());
        left_for.is_zero() || changed.is_ok_and(|at| at.elapsed().is_ok_and(|age| age >= left_for))
    };
    let entries = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten();
    for project in entries(projects) {
        for file in entries(&project.path().join("uploads")).filter(&is_left) {
            if let Err(error) = std::fs::remove_file(file.path()) {
                tracing::warn!(%error, file = %file.path().display(), "removing an unfinished upload failed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let (project, workspace) = (dir.path().join("p"), dir.path().join("p/workspaces/w"));
        std::fs::create_dir_all(&workspace).unwrap();
        let folder = OwnedFd::from(File::open(&workspace).unwrap());
        let uploads = project.join("uploads");
        for content in ["one", "two"] {
            replace_file(&uploads, &folder, "f", content.as_bytes()).unwrap();
            assert_eq!(std::fs::read_to_string(workspace.join("f")).unwrap(), content);
        }
        std::fs::create_dir(workspace.join("d")).unwrap();
        assert!(replace_file(&uploads, &folder, "d", b"x").is_err());
        let names = |dir: &Path| {
            let mut names: Vec<_> = std::fs::read_dir(dir)
                .unwrap()
                .map(|e| e.unwrap().file_name())
                .collect();
            names.sort();
            names
        };
        assert_eq!(names(&uploads), Vec::<std::ffi::OsString>::new());
        assert_eq!(names(&workspace), ["d", "f"]);
        std::fs::write(uploads.join(".oubliette-left"), "x").unwrap();
        remove_unfinished_uploads(dir.path(), Duration::from_secs(60));
        assert_eq!(
            names(&uploads),
            [".oubliette-left"],
            "another server may be writing it"
        );
        remove_unfinished_uploads(dir.path(), Duration::ZERO);
        assert_eq!(names(&uploads), Vec::<std::ffi::OsString>::new());
        assert_eq!(names(&workspace), ["d", "f"]);
    }
}
