//! Makes the archive under a temporary name beside its place; it gets its own name when it is whole and on the disk.

use std::{
    ffi::OsStr,
    fs::{File, Permissions},
    io::{self, BufWriter, Read, Write},
    os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _},
    path::{Path, PathBuf},
};

use flate2::{Compression, write::GzEncoder};
use oubliette_home::safe_fs::io_error;
use oubliette_protocol::{Error, Result};
use oubliette_store::{RowChunk, TableDigest};
use serde::Serialize;
use tempfile::NamedTempFile;

use super::{
    CancelFlag, DATABASE_FOLDER, HEADER_NAME, HOME_FOLDER, MANIFEST_NAME,
    manifest::{BackupHeader, BackupManifest, EntryHasher, FileDigests, HomeEntryKind},
    walk::WalkedEntry,
};

/// An archive that is being made. It is removed when this is dropped before it is finished.
pub(crate) struct BackupWriter {
    tar: tar::Builder<GzEncoder<BufWriter<NamedTempFile>>>,
    place: PathBuf,
    header: BackupHeader,
    files: FileDigests,
    cancel: CancelFlag,
    /// Bytes of content that were put in.
    bytes: u64,
}

impl BackupWriter {
    /// Begins an archive.
    pub(crate) fn create(place: &Path, header: BackupHeader, cancel: CancelFlag) -> Result<Self> {
        let temporary = tempfile::Builder::new()
            .prefix(".oubliette-backup-")
            .permissions(Permissions::from_mode(0o600))
            .tempfile_in(folder_of(place))
            .map_err(|e| io_error("write to the folder of", place, e))?;
        let gz = GzEncoder::new(
            BufWriter::with_capacity(256 * 1024, temporary),
            Compression::fast(),
        );
        let mut writer = Self {
            tar: tar::Builder::new(gz),
            place: place.to_owned(),
            header: header.clone(),
            files: FileDigests::default(),
            cancel,
            bytes: 0,
        };
        writer.add_json(HEADER_NAME, &header)?;
        Ok(writer)
    }

    /// Bytes of content so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds rows of the database.
    pub(crate) fn add_rows(&mut self, chunk: &RowChunk) -> Result<()> {
        self.cancel.check()?;
        let name = format!(
            "{DATABASE_FOLDER}/{}/{:012}.jsonl",
            chunk.table, chunk.rows_before
        );
        self.append(&name, &chunk.lines)
    }

    /// Adds an entry of the home.
    pub(crate) fn add_entry(&mut self, entry: WalkedEntry) -> Result<()> {
        let WalkedEntry {
            path,
            kind,
            mode,
            modified,
            file,
        } = entry;
        let name = archive_name(path.as_bytes());
        let mut header = tar::Header::new_gnu();
        header.set_mode(mode);
        header.set_mtime(modified);
        header.set_size(0);
        let failed = |e: io::Error| io_error("write", &self.place, e);
        let (hash, bytes) = match (&kind, file) {
            (HomeEntryKind::Link(target), _) => {
                header.set_entry_type(tar::EntryType::Symlink);
                append_link(&mut self.tar, header, &name, target).map_err(failed)?;
                EntryHasher::new(&path, &kind, mode, io::empty()).finish()
            }
            (HomeEntryKind::File, Some((file, size))) => {
                header.set_entry_type(tar::EntryType::Regular);
                header.set_size(size);
                // As long as its header says, whatever happens to the file meanwhile.
                let content = CancelledRead(file.take(size).chain(io::repeat(0)).take(size), &self.cancel);
                let mut content = EntryHasher::new(&path, &kind, mode, content);
                let appended = self.tar.append_data(&mut header, &name, &mut content);
                self.cancel.check()?;
                appended.map_err(failed)?;
                content.finish()
            }
            (HomeEntryKind::Folder | HomeEntryKind::File, _) => {
                header.set_entry_type(tar::EntryType::Directory);
                self.tar
                    .append_data(&mut header, &name, io::empty())
                    .map_err(failed)?;
                EntryHasher::new(&path, &kind, mode, io::empty()).finish()
            }
        };
        self.files.add(&path, &hash, bytes);
        self.bytes += bytes;
        Ok(())
    }

    /// Adds the manifest, makes sure that everything is on the disk and gives the file its name. Returns what it holds and how large
    /// it is.
    pub(crate) fn finish(mut self, tables: Vec<TableDigest>) -> Result<(BackupManifest, u64)> {
        let manifest = BackupManifest {
            backup: self.header.clone(),
            tables,
            files: self.files.groups(),
        };
        self.add_json(MANIFEST_NAME, &manifest)?;
        let place = self.place.clone();
        let written = || -> io::Result<u64> {
            let buffered = self.tar.into_inner()?.finish()?;
            let temporary = buffered.into_inner().map_err(io::IntoInnerError::into_error)?;
            // Synchronised before it gets its name: a power cut leaves the old file or the new one.
            temporary.as_file().sync_all()?;
            let size = temporary.as_file().metadata()?.len();
            self.cancel
                .check()
                .map_err(|error| io::Error::other(error.message))?;
            temporary.persist(&place).map_err(|e| e.error)?;
            File::open(folder_of(&place))?.sync_all()?;
            Ok(size)
        };
        let size = written().map_err(|e| io_error("write", &place, e))?;
        Ok((manifest, size))
    }

    fn add_json(&mut self, name: &str, value: &impl Serialize) -> Result<()> {
        let mut json = serde_json::to_vec_pretty(value).map_err(Error::internal)?;
        json.push(b'\n');
        self.append(name, &json)
    }

    fn append(&mut self, name: &str, content: &[u8]) -> Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Regular);
        header.set_mode(0o600);
        header.set_mtime(u64::try_from(self.header.created_at.as_second()).unwrap_or(0));
        header.set_size(content.len() as u64);
        self.bytes += content.len() as u64;
        self.tar
            .append_data(&mut header, name, content)
            .map_err(|e| io_error("write", &self.place, e))
    }
}

/// Appends a link with its target as it is; the library would leave out parts such as `.`.
fn append_link(
    tar: &mut tar::Builder<impl Write>,
    mut header: tar::Header,
    name: &Path,
    target: &[u8],
) -> io::Result<()> {
    if header.set_link_name_literal(target).is_err() {
        let mut long = tar::Header::new_gnu();
        long.set_path("././@LongLink")?;
        long.set_entry_type(tar::EntryType::GNULongLink);
        long.set_mode(0o644);
        long.set_size(target.len() as u64);
        long.set_cksum();
        tar.append(&long, target)?;
    }
    tar.append_data(&mut header, name, io::empty())
}

fn archive_name(path: &[u8]) -> PathBuf {
    Path::new(HOME_FOLDER).join(OsStr::from_bytes(path))
}

/// The folder that a file is in.
pub(crate) fn folder_of(place: &Path) -> &Path {
    match place.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Reads until the work is given up: a file may be large.
struct CancelledRead<'c, R>(R, &'c CancelFlag);

impl<R: Read> Read for CancelledRead<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.1.check().map_err(|error| io::Error::other(error.message))?;
        self.0.read(buffer)
    }
}
