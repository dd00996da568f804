//! Putting an archive that a client sent into a workspace. It is received whole and checked before anything of the
//! workspace changes.

use std::{
    collections::HashMap,
    fs::File,
    io::{Seek as _, SeekFrom},
    os::unix::fs::DirBuilderExt as _,
    path::Path,
    time::Duration,
};

use axum::body::Body;
use http_body_util::BodyExt as _;
use oubliette_os::AdmittedWrite;
use oubliette_protocol::{Error, Result, id::quoted};
use tokio::io::AsyncWriteExt as _;

use super::{
    archive::reader::{ArchiveEntryKind, ArchiveLimits, ArchiveTotals, read_archive},
    writer::WorkspaceWriter,
};

/// Maximum number of entries of an archive.
pub(crate) const MAX_ENTRIES: u64 = 200_000;
/// Maximum memory for the paths of an archive while it is checked, in bytes.
const MAX_PATH_BYTES: usize = 64 << 20;
/// Memory of a path besides its text, in bytes.
const PATH_OVERHEAD_BYTES: usize = 64;
/// How long a client may send nothing before its upload is given up.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// How much of an archive is admitted at once, in bytes: an eighth of what was received, within these.
const ADMIT_BYTES: std::ops::RangeInclusive<u64> = 64 << 10..=64 << 20;

/// Receives an archive into a file without a name in the project's upload directory, so that nothing is left of one
/// that is broken off. `admit` is asked before a part of it is written, with the number of its bytes, and may block: what is
/// being received counts as part of the workspace, so that many uploads at once are no more than one.
pub(crate) async fn receive(
    uploads: &Path,
    body: Body,
    max_bytes: u64,
    admit: impl Fn(u64) -> Result<AdmittedWrite> + Clone + Send + 'static,
) -> Result<File> {
    let dir = uploads.to_owned();
    let file = crate::actions::run_blocking(move || {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .and_then(|()| tempfile::tempfile_in(&dir))
            .map_err(Error::internal)
    })
    .await?;
    let mut writer = tokio::fs::File::from_std(file);
    let (mut body, mut received) = (body, 0);
    let (mut admitted, mut admitted_bytes) = (Vec::new(), 0);
    loop {
        let frame = tokio::time::timeout(STALL_TIMEOUT, body.frame());
        let frame = frame.await.map_err(|_| incomplete())?;
        let Some(frame) = frame else { break };
        let Ok(data) = frame.map_err(|_| incomplete())?.into_data() else {
            continue;
        };
        received += data.len() as u64;
        if received > max_bytes {
            return Err(Error::limit_exceeded(format!(
                "the archive is larger than the workspace may be, {} MiB",
                max_bytes >> 20
            )));
        }
        while received > admitted_bytes {
            let part = (admitted_bytes / 8).clamp(*ADMIT_BYTES.start(), *ADMIT_BYTES.end());
            let admit = admit.clone();
            admitted.push(crate::actions::run_blocking(move || admit(part)).await?);
            admitted_bytes += part;
        }
        writer.write_all(&data).await.map_err(disk_error)?;
    }
    writer.flush().await.map_err(disk_error)?;
    Ok(writer.into_std().await)
}

/// Unpacks a received archive into a workspace: first it is read to its end and checked, then `admit` is asked with the size
/// of its files, then they are put in place one by one. What has the same name is replaced, everything else stays.
pub(crate) fn unpack(
    mut archive: File,
    uploads: &Path,
    workspace: &Path,
    max_bytes: u64,
    admit: impl FnOnce(u64) -> Result<()>,
) -> Result<ArchiveTotals> {
    let limits = ArchiveLimits {
        entries: MAX_ENTRIES,
        bytes: max_bytes,
    };
    archive.seek(SeekFrom::Start(0)).map_err(disk_error)?;
    let writer = WorkspaceWriter::open(uploads, workspace)?;
    let mut paths = ArchivePaths::default();
    let totals = read_archive(&archive, limits, |entry| {
        paths.add(&entry.path.to_string(), entry.kind == ArchiveEntryKind::Folder)?;
        writer.check(&entry.path, &entry.kind)
    })?;
    admit(totals.bytes)?;
    archive.seek(SeekFrom::Start(0)).map_err(disk_error)?;
    read_archive(&archive, limits, |entry| match &entry.kind {
        ArchiveEntryKind::Folder => writer.make_folder(&entry.path, entry.mode),
        ArchiveEntryKind::Link(target) => writer.place_link(&entry.path, target),
        ArchiveEntryKind::File => writer.place_file(&entry.path, entry.mode, entry.content),
    })
}

/// The paths of an archive, so that one that contradicts itself is refused before it is half unpacked.
#[derive(Default)]
struct ArchivePaths {
    /// Whether each path is a folder.
    known: HashMap<String, bool>,
    bytes: usize,
}

impl ArchivePaths {
    /// Adds a path and the folders above it. Fails if a file or link of the archive is in the place of a folder.
    fn add(&mut self, path: &str, is_folder: bool) -> Result<()> {
        let (mut path, mut is_folder) = (path, is_folder);
        loop {
            match self.known.get(path) {
                Some(known) if *known != is_folder => {
                    return Err(Error::invalid(format!(
                        "{} is a folder and something else in the archive",
                        quoted(path)
                    )));
                }
                // The folders above it are known too.
                Some(_) => return Ok(()),
                None => {}
            }
            self.bytes += path.len() + PATH_OVERHEAD_BYTES;
            if self.bytes > MAX_PATH_BYTES {
                return Err(Error::limit_exceeded(
                    "the archive has too many or too long paths",
                ));
            }
            self.known.insert(path.to_owned(), is_folder);
            match path.rsplit_once('/') {
                Some((parent, _)) => (path, is_folder) = (parent, true),
                None => return Ok(()),
            }
        }
    }
}

fn incomplete() -> Error {
    Error::invalid("the archive is incomplete; nothing was changed")
}

fn disk_error(error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            Error::unavailable("the server's disk is full; free some space and try again")
        }
        _ => Error::internal(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_that_contradicts_itself_is_refused() {
        let add = |entries: &[(&str, bool)]| {
            let mut paths = ArchivePaths::default();
            entries
                .iter()
                .try_for_each(|(path, is_folder)| paths.add(path, *is_folder))
        };
        assert!(add(&[("a/b/c", false), ("a/b", true), ("a/d", false), ("a/d", false)]).is_ok());
        for wrong in [
            [("l", false), ("l/x", false)],
            [("l/x", false), ("l", false)],
            [("l", true), ("l", false)],
            [("a", false), ("a/b/c", true)],
        ] {
            assert!(add(&wrong).is_err(), "{wrong:?}");
        }
        let mut paths = ArchivePaths::default();
        let long = "d/".repeat(2000);
        let many = (0..100_000).try_for_each(|n| paths.add(&format!("{n}/{long}x"), false));
        assert!(many.is_err());
    }
}
