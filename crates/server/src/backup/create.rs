//! A backup from beginning to end: the rows of the database as they are at one moment, then the files.

use std::path::{Path, PathBuf};

use oubliette_home::{HomeDir, safe_fs};
use oubliette_protocol::{Error, Result};
use oubliette_store::{RowChunk, StoreLocation, StoreSnapshot, TableDigest};
use tokio::sync::{mpsc, oneshot};

use super::{
    CONFIG_NAME, CancelFlag, ReportProgress,
    home_path::{DEFINITION_FOLDERS, FOLDERS, HomePath},
    manifest::{BackupHeader, BackupManifest, FORMAT, HomeEntryKind},
    mebibytes,
    walk::{SkippedEntries, WalkedEntry, walk_home},
    writer::{BackupWriter, folder_of},
};

/// Chunks of rows that wait to be written, while the next one is read.
const CHUNKS_AHEAD: usize = 2;
/// How much lower the priority of a backup is than that of the server beside it.
const NICENESS: i32 = 10;

/// What a backup came to.
pub(crate) struct FinishedBackup {
    pub(crate) manifest: BackupManifest,
    /// Size of the file, in bytes.
    pub(crate) bytes: u64,
    pub(crate) left_out: SkippedEntries,
    /// Whether the configuration is in it; not if its address of the store cannot be taken out.
    pub(crate) has_config: bool,
}

/// Backs up a home and its database into a file. The server may run; dropping the future gives up and leaves nothing.
pub(crate) async fn create(
    home: &HomeDir,
    location: &StoreLocation,
    place: &Path,
    progress: ReportProgress,
) -> Result<FinishedBackup> {
    check_place(home, place)?;
    if let StoreLocation::File(database) = location
        && !database.exists()
    {
        return Err(Error::not_found(format!(
            "there is nothing to back up: {} does not exist; name the home with --home",
            database.display()
        )));
    }
    // A server's calls go first. Failing is no reason not to back up.
    let _ = rustix::process::setpriority_process(None, NICENESS);
    let mut snapshot = StoreSnapshot::open(location).await?;
    let header = BackupHeader {
        format: FORMAT,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        schema: snapshot.schema(),
        created_at: oubliette_store::now(),
    };
    let cancel = CancelFlag::default();
    let _guard = cancel.guard();
    let (chunks, arriving) = mpsc::channel(CHUNKS_AHEAD);
    let (digests, all_digests) = oneshot::channel();
    // With PostgreSQL definitions are among the rows, and files in their old place have no effect.
    let folders = FOLDERS.into_iter().filter(|name| match location {
        StoreLocation::File(_) => true,
        StoreLocation::Postgres(_) => !DEFINITION_FOLDERS.contains(name),
    });
    let job = ArchiveJob {
        folders: folders.collect(),
        home: home.clone(),
        place: place.to_owned(),
        header,
        cancel,
        progress,
    };
    let writing = tokio::task::spawn_blocking(move || job.run(arriving, all_digests));
    let read = snapshot.read_all(&chunks).await;
    drop(chunks);
    // Ends the transaction, so that SQLite can reuse its write-ahead log.
    drop(snapshot);
    let (failed_read, written) = match read {
        Ok(read) => {
            let _ = digests.send(read);
            (None, writing.await)
        }
        Err(error) => {
            drop(digests);
            (Some(error), writing.await)
        }
    };
    match (failed_read, written.map_err(Error::internal)?) {
        (_, Ok(finished)) => Ok(finished),
        // A reader whose rows nobody takes has failed because the writer did, and the other way round.
        (Some(error), Err(WriteFailure::NoRows)) => Err(error),
        (None, Err(WriteFailure::NoRows)) => Err(Error::internal("the rows did not arrive")),
        (_, Err(WriteFailure::Failed(error))) => Err(error),
    }
}

/// Refuses a place that agents can read or that would be backed up itself.
fn check_place(home: &HomeDir, place: &Path) -> Result<()> {
    let folder = folder_of(place);
    let real = std::fs::canonicalize(folder).map_err(|e| safe_fs::io_error("write to", folder, e))?;
    let root = std::fs::canonicalize(home.root()).unwrap_or_else(|_| home.root().to_owned());
    let projects = home.projects_dir();
    let projects = std::fs::canonicalize(&projects).unwrap_or(projects);
    if real.starts_with(&projects) || FOLDERS.iter().any(|name| real.starts_with(root.join(name))) {
        return Err(Error::invalid(format!(
            "{} is in a folder that is backed up itself: choose a place outside it",
            place.display()
        )));
    }
    match std::fs::symlink_metadata(place) {
        Ok(there) if !there.is_file() => Err(Error::conflict(format!(
            "{} is there already and is not a file: choose another name",
            place.display()
        ))),
        _ => Ok(()),
    }
}

struct ArchiveJob {
    /// The folders of the home that are backed up.
    folders: Vec<&'static str>,
    home: HomeDir,
    place: PathBuf,
    header: BackupHeader,
    cancel: CancelFlag,
    progress: ReportProgress,
}

/// Why an archive was not written.
enum WriteFailure {
    /// The rows did not come to their end.
    NoRows,
    Failed(Error),
}

impl From<Error> for WriteFailure {
    fn from(error: Error) -> Self {
        WriteFailure::Failed(error)
    }
}

impl ArchiveJob {
    /// Writes the archive, on a thread of its own.
    fn run(
        self,
        mut arriving: mpsc::Receiver<RowChunk>,
        digests: oneshot::Receiver<Vec<TableDigest>>,
    ) -> Result<FinishedBackup, WriteFailure> {
        let mut writer = BackupWriter::create(&self.place, self.header.clone(), self.cancel.clone())?;
        while let Some(chunk) = arriving.blocking_recv() {
            writer.add_rows(&chunk)?;
            (self.progress)(&format!(
                "table {}: {} rows; {} read",
                chunk.table,
                chunk.rows_before + chunk.rows,
                mebibytes(writer.bytes())
            ));
        }
        let tables = digests.blocking_recv().map_err(|_| WriteFailure::NoRows)?;
        let has_config = self.add_config(&mut writer)?;
        let mut count: u64 = 0;
        let left_out = walk_home(&self.home, &self.folders, &self.cancel, &mut |entry| {
            count += 1;
            if count.is_multiple_of(64) {
                (self.progress)(&format!("{count} files; {} read", mebibytes(writer.bytes())));
            }
            writer.add_entry(entry)
        })?;
        let (manifest, bytes) = writer.finish(tables)?;
        Ok(FinishedBackup {
            manifest,
            bytes,
            left_out,
            has_config,
        })
    }

    /// Adds `oubliette.toml` without the address of the store. Returns whether it did, or had not to.
    fn add_config(&self, writer: &mut BackupWriter) -> Result<bool> {
        let path = self.home.config_path();
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(true),
            Err(error) => return Err(safe_fs::io_error("read", &path, error)),
        };
        let Some(text) = without_store_url(&text) else {
            return Ok(false);
        };
        let mut file = tempfile::tempfile().map_err(Error::internal)?;
        std::io::Write::write_all(&mut file, text.as_bytes()).map_err(Error::internal)?;
        std::io::Seek::rewind(&mut file).map_err(Error::internal)?;
        writer.add_entry(WalkedEntry {
            path: HomePath::parse(CONFIG_NAME.as_bytes(), &HomeEntryKind::File)?,
            kind: HomeEntryKind::File,
            mode: 0o600,
            modified: u64::try_from(self.header.created_at.as_second()).unwrap_or(0),
            file: Some((file, text.len() as u64)),
        })?;
        Ok(true)
    }
}

/// The configuration without `[store] url`, which may have a password in it and is about one database: a restore uses the
/// one that its home names. None if the setting is written in a way that is not found.
fn without_store_url(text: &str) -> Option<String> {
    let has_url = |text: &str| {
        let parsed = text.parse::<toml::Table>().ok()?;
        Some(parsed.get("store").and_then(|store| store.get("url")).is_some())
    };
    if !has_url(text)? {
        return Some(text.to_owned());
    }
    let mut in_store = false;
    let mut kept = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let trimmed = line.trim();
        if trimmed.starts_with('[') {
            in_store = trimmed.starts_with("[store]");
        }
        let name = trimmed.split('=').next().unwrap_or_default().trim();
        match in_store && name == "url" || name == "store.url" {
            true => kept.push_str("# url: not part of a backup\n"),
            false => kept.push_str(line),
        }
    }
    (has_url(&kept) == Some(false)).then_some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_the_store_is_not_backed_up() {
        let kept = |text: &str| without_store_url(text);
        let plain = "[server]\nlisten = \"127.0.0.1:1\"\n";
        assert_eq!(kept(plain).unwrap(), plain);
        for text in [
            "[store]\nurl = \"postgres://a:hunter2@h/d\"\n[log]\nlevel = \"info\"\n",
            "store.url = \"postgres://a:hunter2@h/d\"\n[log]\nlevel = \"info\"\n",
            "[log]\nlevel = \"info\"\n[store] # here\n  url=\"postgres://a:hunter2@h/d\"",
        ] {
            let kept = kept(text).unwrap();
            assert!(!kept.contains("hunter2") && kept.contains("level"), "{kept}");
        }
        // Left out whole rather than with a password.
        assert_eq!(kept("store = { url = \"postgres://a:hunter2@h/d\" }"), None);
        assert_eq!(
            kept("[store]\nurl = \"\"\"\npostgres://a:hunter2@h/d\"\"\""),
            None
        );
        assert_eq!(kept("no toml at all = ="), None);
    }
}
