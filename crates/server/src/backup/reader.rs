//! Reads a backup that may be cut off, changed or hostile. Names, kinds, counts and sizes of entries are checked before anything is
//! kept in memory, and at the end every hash is compared with the manifest.

use std::{
    collections::HashMap,
    io::{BufRead, Read},
};

use flate2::bufread::GzDecoder;
use oubliette_protocol::{Error, Result, id::quoted};
use oubliette_store::transfer::{MAX_CHUNK_BYTES, RowDigest};

use super::{
    CancelFlag, DATABASE_FOLDER, HEADER_NAME, HOME_FOLDER, MANIFEST_NAME,
    home_path::HomePath,
    manifest::{BackupHeader, BackupManifest, EntryHasher, FORMAT, FileDigests, HomeEntryKind},
};

/// Maximum length of a name or of a link's target, in bytes.
const MAX_NAME_BYTES: u64 = 8200;
/// Maximum size of the first and the last entry, in bytes.
const MAX_JSON_BYTES: u64 = 4 << 20;
/// Maximum number of entries.
const MAX_ENTRIES: u64 = 50_000_000;
/// How much is read after the last entry, in bytes.
const MAX_PADDING_BYTES: u64 = 1 << 20;

/// An entry of the home.
pub(crate) struct HomeEntry<'a> {
    pub(crate) path: HomePath,
    pub(crate) kind: HomeEntryKind,
    /// Permissions, without set-id bits.
    pub(crate) mode: u32,
    /// When its content last changed, in seconds since 1970.
    pub(crate) modified: u64,
    /// A file's content.
    pub(crate) content: &'a mut dyn Read,
}

/// What takes the contents of a backup.
pub(crate) trait BackupSink {
    /// What made the backup, before anything else. An error refuses it.
    fn header(&mut self, header: &BackupHeader) -> Result<()>;
    /// Rows of a table, as lines of JSON.
    fn rows(&mut self, table: &str, lines: Vec<u8>) -> Result<()>;
    /// An entry of the home.
    fn entry(&mut self, entry: HomeEntry<'_>) -> Result<()>;
    /// How many more bytes of files there is room for than was known before the last entry.
    fn more_room(&mut self) -> u64 {
        0
    }
}

/// How much a backup may hold, so that a small file cannot fill the disk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BackupLimits {
    /// Maximum size of all files together, in bytes.
    pub(crate) file_bytes: u64,
    /// Maximum size of all rows together, in bytes.
    pub(crate) row_bytes: u64,
}

/// Reads a backup to its end. With an error, what the sink has taken is not to be used.
pub(crate) fn read_backup(
    source: impl BufRead,
    limits: BackupLimits,
    cancel: &CancelFlag,
    sink: &mut dyn BackupSink,
) -> Result<BackupManifest> {
    let mut reading = BackupReading {
        limits,
        header: None,
        tables: HashMap::new(),
        files: FileDigests::default(),
        manifest: None,
    };
    let read = read_entries(source, cancel, &mut reading, sink);
    // Without a header it is something else, whatever is wrong with it as an archive.
    if reading.header.is_none() {
        cancel.check()?;
        return Err(not_a_backup());
    }
    read?;
    reading
        .manifest
        .ok_or_else(|| damaged("it was cut off: its manifest is missing"))
}

fn read_entries(
    source: impl BufRead,
    cancel: &CancelFlag,
    reading: &mut BackupReading,
    sink: &mut dyn BackupSink,
) -> Result<()> {
    let mut archive = tar::Archive::new(GzDecoder::new(source));
    // Raw: the library would read a long name whole, however long it is.
    let entries = archive.entries().map_err(unreadable)?.raw(true);
    let (mut long_name, mut long_target) = (None, None);
    for (number, entry) in (0..).zip(entries) {
        cancel.check()?;
        let mut entry = entry.map_err(unreadable)?;
        if number > MAX_ENTRIES {
            return Err(Error::limit_exceeded("the backup has too many entries"));
        }
        let size = entry.header().entry_size().map_err(unreadable)?;
        let entry_type = entry.header().entry_type();
        if entry_type.is_gnu_longname() {
            long_name = Some(read_name(&mut entry, size)?);
            continue;
        }
        if entry_type.is_gnu_longlink() {
            long_target = Some(read_name(&mut entry, size)?);
            continue;
        }
        let name = match long_name.take() {
            Some(name) => name,
            None => entry.header().path_bytes().into_owned(),
        };
        let target = long_target.take();
        let kind = if entry_type.is_file() {
            HomeEntryKind::File
        } else if entry_type.is_dir() {
            HomeEntryKind::Folder
        } else if entry_type.is_symlink() {
            let target = target.or_else(|| entry.header().link_name_bytes().map(Into::into));
            HomeEntryKind::Link(target.unwrap_or_default())
        } else {
            return Err(damaged(&format!(
                "{} is not a file, folder or symbolic link",
                quoted(&String::from_utf8_lossy(&name))
            )));
        };
        let mode = entry.header().mode().map_err(unreadable)? & 0o777;
        let modified = entry.header().mtime().unwrap_or(0);
        reading.take_entry(&name, kind, size, (mode, modified), &mut entry, sink)?;
    }
    // To the end of the compressed data, where its checksum is.
    let mut rest = archive.into_inner();
    std::io::copy(&mut (&mut rest).take(MAX_PADDING_BYTES), &mut std::io::sink()).map_err(unreadable)?;
    let mut after = rest.into_inner();
    if !after.fill_buf().map_err(unreadable)?.is_empty() {
        return Err(damaged("something follows its end"));
    }
    Ok(())
}

/// What has been read.
struct BackupReading {
    /// What is left of them.
    limits: BackupLimits,
    header: Option<BackupHeader>,
    tables: HashMap<String, RowDigest>,
    files: FileDigests,
    manifest: Option<BackupManifest>,
}

impl BackupReading {
    fn take_entry(
        &mut self,
        name: &[u8],
        kind: HomeEntryKind,
        size: u64,
        (mode, modified): (u32, u64),
        content: &mut dyn Read,
        sink: &mut dyn BackupSink,
    ) -> Result<()> {
        if self.manifest.is_some() {
            return Err(damaged("something follows its manifest"));
        }
        if self.header.is_none() {
            if name != HEADER_NAME.as_bytes() || kind != HomeEntryKind::File {
                return Err(not_a_backup());
            }
            let json = read_json(content, size)?;
            let header: BackupHeader = serde_json::from_slice(&json).map_err(|_| not_a_backup())?;
            let header = self.header.insert(header);
            check_format(header)?;
            return sink.header(header);
        }
        if name == MANIFEST_NAME.as_bytes() && kind == HomeEntryKind::File {
            let json = read_json(content, size)?;
            let manifest = serde_json::from_slice(&json)
                .map_err(|error| damaged(&format!("its manifest cannot be read ({error})")))?;
            self.compare(&manifest)?;
            self.manifest = Some(manifest);
            return Ok(());
        }
        let name_text = String::from_utf8_lossy(name);
        let rows_of = name_text
            .strip_prefix(DATABASE_FOLDER)
            .and_then(|rest| rest.strip_prefix('/'))
            .and_then(|rest| rest.split_once('/'));
        if let (Some((table, _)), HomeEntryKind::File) = (rows_of, &kind) {
            return self.take_rows(table, size, content, sink);
        }
        let path = name
            .strip_prefix(HOME_FOLDER.as_bytes())
            .and_then(|rest| rest.strip_prefix(b"/"))
            .ok_or_else(|| damaged(&format!("{} does not belong into it", quoted(&name_text))))?;
        let path = HomePath::parse(path, &kind)?;
        take_from(&mut self.limits.file_bytes, size)?;
        let mut content = EntryHasher::new(&path, &kind, mode, content);
        sink.entry(HomeEntry {
            path: path.clone(),
            kind,
            mode,
            modified,
            content: &mut content,
        })?;
        self.limits.file_bytes = self.limits.file_bytes.saturating_add(sink.more_room());
        std::io::copy(&mut content, &mut std::io::sink()).map_err(unreadable)?;
        let (hash, read) = content.finish();
        if read != size {
            return Err(damaged(&format!("it ends within {path}")));
        }
        self.files.add(&path, &hash, read);
        Ok(())
    }

    fn take_rows(
        &mut self,
        table: &str,
        size: u64,
        content: &mut dyn Read,
        sink: &mut dyn BackupSink,
    ) -> Result<()> {
        // A newline follows the largest row.
        if size > MAX_CHUNK_BYTES as u64 + 1 {
            return Err(damaged(&format!(
                "a part of table {} is too large",
                quoted(table)
            )));
        }
        take_from(&mut self.limits.row_bytes, size)?;
        // Not allocated by what the header says: it may lie.
        let mut lines = Vec::new();
        content.take(size).read_to_end(&mut lines).map_err(unreadable)?;
        if lines.len() as u64 != size || lines.last() != Some(&b'\n') {
            return Err(damaged(&format!("it ends within table {}", quoted(table))));
        }
        let digest = self.tables.entry(table.to_owned()).or_default();
        for line in lines[..lines.len() - 1].split(|b| *b == b'\n') {
            digest.add(line);
        }
        sink.rows(table, lines)
    }

    /// Compares what was read with what the manifest says.
    fn compare(&mut self, manifest: &BackupManifest) -> Result<()> {
        if Some(&manifest.backup) != self.header.as_ref() {
            return Err(damaged("its manifest belongs to another backup"));
        }
        for expected in &manifest.tables {
            let found = self.tables.remove(&expected.table.name).unwrap_or_default();
            if (found.rows(), found.to_hex()) != (expected.rows, expected.sha256.clone()) {
                return Err(damaged(&format!(
                    "table {} has {} rows that are not the {} rows of its manifest",
                    quoted(&expected.table.name),
                    found.rows(),
                    expected.rows
                )));
            }
        }
        if let Some(table) = self.tables.keys().next() {
            return Err(damaged(&format!("its manifest has no table {}", quoted(table))));
        }
        let found = self.files.groups();
        if found != manifest.files {
            let differs = |name: &&String| found.get(*name) != manifest.files.get(*name);
            let names: Vec<_> = found
                .keys()
                .chain(manifest.files.keys())
                .filter(differs)
                .map(|name| quoted(name))
                .collect();
            return Err(damaged(&format!(
                "the files of {} are not those of its manifest",
                names.first().cloned().unwrap_or_default()
            )));
        }
        Ok(())
    }
}

fn take_from(left: &mut u64, size: u64) -> Result<()> {
    *left = left.checked_sub(size).ok_or_else(|| {
        Error::limit_exceeded(
            "the backup holds more than the disk has room for: free some space and try again; nothing was changed",
        )
    })?;
    Ok(())
}

fn check_format(header: &BackupHeader) -> Result<()> {
    if header.format > FORMAT {
        return Err(Error::invalid(format!(
            "the backup was made by oubliette {}, which is newer (format {}; this is {} and knows {FORMAT}): restore it with that \
             version",
            quoted(&header.version),
            header.format,
            env!("CARGO_PKG_VERSION")
        )));
    }
    Ok(())
}

fn read_json(content: &mut dyn Read, size: u64) -> Result<Vec<u8>> {
    if size > MAX_JSON_BYTES {
        return Err(damaged("its manifest is too large"));
    }
    let mut json = Vec::new();
    content.take(size).read_to_end(&mut json).map_err(unreadable)?;
    Ok(json)
}

/// Reads the name that an entry holds for the next one.
fn read_name(entry: &mut impl Read, size: u64) -> Result<Vec<u8>> {
    if size > MAX_NAME_BYTES {
        return Err(damaged("a name in it is too long"));
    }
    let mut name = Vec::new();
    entry.take(size).read_to_end(&mut name).map_err(unreadable)?;
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    name.truncate(end);
    Ok(name)
}

fn damaged(why: &str) -> Error {
    Error::invalid(format!(
        "the backup is damaged: {why}; nothing was changed; use another copy of it"
    ))
}

fn unreadable(error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => damaged("it was cut off"),
        _ => damaged(&error.to_string()),
    }
}

fn not_a_backup() -> Error {
    Error::invalid(
        "the file is not a backup, or no more than the first bytes of one: `oubliette backup FILE` makes one; nothing was changed",
    )
}
