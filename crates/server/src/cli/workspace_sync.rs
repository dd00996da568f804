//! `oubliette workspace push` and `pull`: a folder of this machine into a workspace, and back.

use std::{
    fs::File,
    io::{self, IsTerminal as _, Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use oubliette_protocol::{Error, Result, id::quoted};
use serde_json::{Value, json};

use super::{
    client::ActionClient,
    gitignore::{ParentIgnoreFiles, walk},
    output::OutputFormat,
    resolve,
};
use crate::workspace::{
    archive::reader::{ArchiveEntryKind, ArchiveLimits, ArchiveTotals, read_archive, stays_inside},
    files::WorkspacePath,
};

/// Maximum number of files and folders that are pushed.
const MAX_PUSHED: usize = 100_000;
/// How much is pulled at most.
const PULL_LIMITS: ArchiveLimits = ArchiveLimits {
    entries: 1_000_000,
    bytes: 64 << 30,
};

/// Which workspace is meant.
#[derive(Debug, clap::Args)]
pub(crate) struct WorkspaceSelector {
    /// The project's id or name, whose default workspace is meant; the only project when left out.
    #[arg(long, value_name = "PROJECT", conflicts_with = "workspace")]
    pub(crate) project: Option<String>,
    /// The workspace's id.
    #[arg(long, value_name = "ID")]
    pub(crate) workspace: Option<String>,
}

impl WorkspaceSelector {
    /// The workspace's id.
    pub(crate) async fn resolve(&self, client: &ActionClient) -> Result<String> {
        if let Some(id) = &self.workspace {
            let id: oubliette_protocol::WorkspaceId = id.parse()?;
            return Ok(id.to_string());
        }
        let project = resolve::project_id_or_only(client, self.project.as_deref()).await?;
        let project = client
            .call("project_get", json!({ "project_id": project }))
            .await?;
        Ok(project["default_workspace_id"]
            .as_str()
            .unwrap_or_default()
            .to_owned())
    }
}

/// Shows how far something is, on a terminal only.
pub(crate) struct TerminalProgress {
    shown: bool,
}

impl TerminalProgress {
    pub(crate) fn new(output: OutputFormat) -> Self {
        Self {
            shown: output == OutputFormat::Text && io::stderr().is_terminal(),
        }
    }

    pub(crate) fn show(&self, text: &str) {
        if self.shown {
            let _ = write!(io::stderr(), "\r\x1b[K{text}");
        }
    }
}

impl Drop for TerminalProgress {
    fn drop(&mut self) {
        self.show("");
    }
}

/// Something to push.
struct PushedEntry {
    path: PathBuf,
    name: String,
    kind: ArchiveEntryKind,
}

/// Sends a folder to a workspace. Returns what was sent.
pub(crate) async fn push(
    client: &ActionClient,
    dir: &Path,
    workspace: &str,
    output: OutputFormat,
) -> Result<Value> {
    let (dir, progress) = (dir.to_owned(), TerminalProgress::new(output));
    let (archive, totals, progress) = crate::actions::run_blocking(move || {
        let entries = collect(&dir)?;
        let (archive, totals) = pack(&entries, &progress)?;
        Ok((archive, totals, progress))
    })
    .await?;
    let path = format!("/api/workspaces/{workspace}/archive");
    client
        .upload(&path, archive, move |sent, all| {
            progress.show(&format!("sent {} of {}", mebibytes(sent), mebibytes(all)));
        })
        .await?;
    Ok(json!({ "workspace_id": workspace, "files": totals.files, "bytes": totals.bytes }))
}

/// What is pushed of a folder: everything but `.git` and what `.gitignore` files name.
fn collect(dir: &Path) -> Result<Vec<PushedEntry>> {
    let root =
        std::fs::canonicalize(dir).map_err(|error| Error::invalid(format!("{}: {error}", dir.display())))?;
    if !root.is_dir() {
        return Err(Error::invalid(format!("{} is not a folder", dir.display())));
    }
    let mut entries = Vec::new();
    walk(&root, ParentIgnoreFiles::Count, |entry| {
        if entries.len() == MAX_PUSHED {
            return Err(Error::limit_exceeded(format!(
                "{} has more than {MAX_PUSHED} files; push a folder within it, or name what need not be pushed in .gitignore",
                dir.display()
            )));
        }
        entries.push(check_entry(&root, &entry.path)?);
        Ok(())
    })?;
    Ok(entries)
}

fn check_entry(root: &Path, path: &Path) -> Result<PushedEntry> {
    let below = path.strip_prefix(root).map_err(Error::internal)?;
    let refused = |why: &str| {
        Error::invalid(format!(
            "{} {why}; remove it, or name it in .gitignore",
            quoted(&below.to_string_lossy())
        ))
    };
    let name = below.to_str().ok_or_else(|| refused("is not named in UTF-8"))?;
    let found =
        std::fs::symlink_metadata(path).map_err(|error| refused(&format!("cannot be read: {error}")))?;
    let kind = found.file_type();
    let kind = if kind.is_file() {
        ArchiveEntryKind::File
    } else if kind.is_dir() {
        ArchiveEntryKind::Folder
    } else if kind.is_symlink() {
        let target =
            std::fs::read_link(path).map_err(|error| refused(&format!("cannot be read: {error}")))?;
        let target = target
            .to_str()
            .ok_or_else(|| refused("has a target that is not UTF-8"))?;
        if !stays_inside(&WorkspacePath::parse(name)?, target) {
            return Err(refused(&format!(
                "is a link that leads outside, to {}",
                quoted(target)
            )));
        }
        ArchiveEntryKind::Link(target.to_owned())
    } else if kind.is_socket() {
        return Err(refused("is a socket, which cannot be pushed"));
    } else if kind.is_fifo() {
        return Err(refused("is a pipe, which cannot be pushed"));
    } else {
        return Err(refused("is a device, which cannot be pushed"));
    };
    Ok(PushedEntry {
        path: path.to_owned(),
        name: name.to_owned(),
        kind,
    })
}

/// Packs entries into a temporary file.
fn pack(entries: &[PushedEntry], progress: &TerminalProgress) -> Result<(File, ArchiveTotals)> {
    let file = tempfile::tempfile().map_err(Error::internal)?;
    let gz = flate2::write::GzEncoder::new(io::BufWriter::new(file), flate2::Compression::fast());
    let mut tar = tar::Builder::new(gz);
    let mut totals = ArchiveTotals::default();
    for (number, entry) in entries.iter().enumerate() {
        let at = |error: io::Error| Error::invalid(format!("{}: {error}", quoted(&entry.name)));
        totals.entries += 1;
        let mut header = tar::Header::new_gnu();
        header.set_size(0);
        match &entry.kind {
            ArchiveEntryKind::Link(target) => {
                header.set_mode(0o777);
                header.set_entry_type(tar::EntryType::Symlink);
                tar.append_link(&mut header, &entry.name, target).map_err(at)?;
            }
            ArchiveEntryKind::Folder => {
                let found = std::fs::symlink_metadata(&entry.path).map_err(at)?;
                header.set_mode(found.permissions().mode() & 0o777);
                header.set_entry_type(tar::EntryType::Directory);
                tar.append_data(&mut header, &entry.name, io::empty())
                    .map_err(at)?;
            }
            ArchiveEntryKind::File => {
                // NONBLOCK and the check after it: it may have become a pipe since it was looked at.
                let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
                let opened = std::fs::OpenOptions::new()
                    .read(true)
                    .custom_flags(flags.bits() as i32)
                    .open(&entry.path)
                    .map_err(at)?;
                let found = opened.metadata().map_err(at)?;
                if !found.is_file() {
                    return Err(at(io::Error::other("changed while it was read")));
                }
                header.set_mode(found.permissions().mode() & 0o777);
                header.set_size(found.len());
                // As long as it was said to be, whatever happens to the file meanwhile.
                let content = opened.take(found.len()).chain(io::repeat(0)).take(found.len());
                tar.append_data(&mut header, &entry.name, content).map_err(at)?;
                totals.files += 1;
                totals.bytes += found.len();
            }
        }
        if number % 64 == 0 {
            progress.show(&format!(
                "packed {} files, {}",
                totals.files,
                mebibytes(totals.bytes)
            ));
        }
    }
    let written = tar.into_inner().and_then(flate2::write::GzEncoder::finish);
    let file = written.and_then(|buffer| buffer.into_inner().map_err(io::IntoInnerError::into_error));
    let mut file = file.map_err(Error::internal)?;
    file.seek(SeekFrom::Start(0)).map_err(Error::internal)?;
    Ok((file, totals))
}

/// Brings a workspace into a folder. What has the same name is replaced, everything else of the folder stays.
pub(crate) async fn pull(
    client: &ActionClient,
    dir: &Path,
    workspace: &str,
    output: OutputFormat,
) -> Result<Value> {
    let dir = dir.to_owned();
    let progress = TerminalProgress::new(output);
    std::fs::create_dir_all(&dir).map_err(|error| Error::invalid(format!("{}: {error}", dir.display())))?;
    let mut archive = tempfile::tempfile().map_err(Error::internal)?;
    let path = format!("/api/workspaces/{workspace}/archive");
    client
        .download(&path, &mut archive, |received| {
            progress.show(&format!("received {}", mebibytes(received)));
        })
        .await?;
    let pulled = crate::actions::run_blocking(move || unpack(archive, &dir)).await?;
    drop(progress);
    Ok(json!({
        "workspace_id": workspace,
        "files": pulled.files,
        "bytes": pulled.bytes,
        "skipped": pulled.skipped,
    }))
}

/// What was pulled.
#[derive(Debug, Default, PartialEq, Eq)]
struct PulledFiles {
    files: u64,
    bytes: u64,
    /// Links that lead outside.
    skipped: u64,
}

/// Unpacks an archive, whose files an agent may have written, into a folder: first beside its files, then what is not
/// ignored is moved into place, never through a link.
fn unpack(mut archive: File, dir: &Path) -> Result<PulledFiles> {
    archive.seek(SeekFrom::Start(0)).map_err(Error::internal)?;
    let beside = tempfile::Builder::new()
        .prefix(".oubliette-pull-")
        .tempdir_in(dir)
        .map_err(|error| Error::invalid(format!("{}: {error}", dir.display())))?;
    let mut pulled = PulledFiles::default();
    read_archive(archive, PULL_LIMITS, |entry| {
        let below = PathBuf::from(entry.path.to_string());
        let path = beside.path().join(&below);
        // A link that the archive made itself is not followed: of `a` and `a/b` the second would lead where `a` does.
        let make_parents = || make_folders(beside.path(), &below);
        let at = |error: io::Error| Error::invalid(format!("{}: {error}", quoted(&entry.path.to_string())));
        match &entry.kind {
            ArchiveEntryKind::Folder => make_folders(beside.path(), &below.join("-")).map_err(at),
            ArchiveEntryKind::Link(target) => match stays_inside(&entry.path, target) {
                true => make_parents()
                    .and_then(|()| std::os::unix::fs::symlink(target, &path))
                    .map_err(at),
                false => {
                    pulled.skipped += 1;
                    Ok(())
                }
            },
            ArchiveEntryKind::File => {
                make_parents().map_err(at)?;
                let mut file = std::fs::OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .mode(entry.mode | 0o600)
                    .open(&path)
                    .map_err(at)?;
                io::copy(entry.content, &mut file).map_err(at)?;
                let mode = std::fs::Permissions::from_mode(entry.mode | 0o600);
                file.set_permissions(mode).map_err(at)
            }
        }
    })?;
    walk(beside.path(), ParentIgnoreFiles::Ignore, |entry| {
        let below = entry.path.strip_prefix(beside.path()).map_err(Error::internal)?;
        let at = |error: io::Error| Error::invalid(format!("{}: {error}", quoted(&below.to_string_lossy())));
        if entry.is_folder {
            // Empty ones too.
            return make_folders(dir, &below.join("-")).map_err(at);
        }
        let target = dir.join(below);
        make_folders(dir, below).map_err(at)?;
        if std::fs::symlink_metadata(&target).is_ok_and(|there| there.is_dir()) {
            return Err(at(io::Error::other(
                "is a folder here and a file in the workspace",
            )));
        }
        let found = std::fs::symlink_metadata(&entry.path).map_err(at)?;
        std::fs::rename(&entry.path, &target).map_err(at)?;
        if found.is_file() {
            pulled.files += 1;
            pulled.bytes += found.len();
        }
        Ok(())
    })?;
    Ok(pulled)
}

/// Makes the folders above a file, each of which must be a real one.
fn make_folders(dir: &Path, below: &Path) -> io::Result<()> {
    let mut folder = dir.to_owned();
    for part in below.parent().into_iter().flat_map(Path::components) {
        folder.push(part);
        match std::fs::symlink_metadata(&folder) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(io::Error::other("a file or link is in the place of its folder")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => std::fs::create_dir(&folder)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
