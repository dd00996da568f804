//! A restore from beginning to end. The file is read to its end and every hash compared before anything is written; then the
//! database and the files are made beside their places; only then is anything moved.

use std::{
    fs::File,
    io::{BufReader, Read as _, Seek as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use oubliette_home::{HomeDir, safe_fs};
use oubliette_os::remove_tree_blocking;
use oubliette_protocol::{Error, Result, id::quoted};
use oubliette_store::{
    DatabaseLock, Store, StoreLoader, StoreLocation, StoreOptions, StoreSnapshot, transfer,
};
use tokio::sync::mpsc;

use super::{
    CONFIG_NAME, CancelFlag, ReportProgress,
    home_path::{DEFINITION_FOLDERS, FOLDERS, PROJECTS_FOLDER, folder_place},
    manifest::{BackupHeader, BackupManifest},
    mebibytes,
    reader::{BackupLimits, BackupSink, HomeEntry, read_backup},
    staging::{MovedAway, RevertibleMoves, StagedFiles},
};
use crate::definitions::DefinitionEditor;

/// Maximum size of a backup's configuration that is looked into, in bytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Chunks of rows that wait to be inserted, while the next one is read.
const CHUNKS_AHEAD: usize = 2;

/// What a restore does with data that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExistingData {
    /// It refuses.
    Refuse,
    /// It moves it into a folder of the home.
    MoveAway,
}

/// What a restore came to.
pub(crate) struct FinishedRestore {
    pub(crate) manifest: BackupManifest,
    /// Where the data is that was there.
    pub(crate) moved_to: Option<PathBuf>,
    /// Where projects and their workspaces are, if they are not in the home.
    pub(crate) projects_dir: Option<PathBuf>,
    /// Where the projects are that were there, if they are not in the home.
    pub(crate) projects_moved_to: Option<PathBuf>,
    /// Whether the configuration is the backup's, not one that was there.
    pub(crate) has_config: bool,
    /// Why definitions are not where this home has them: the next start of the server tries again.
    pub(crate) definition_error: Option<Error>,
}

/// Restores a backup into a home and the database that it names. No server may run. Dropping the future gives up and leaves
/// everything as it was.
pub(crate) async fn restore(
    home: &HomeDir,
    location: &StoreLocation,
    backup: &Path,
    existing: ExistingData,
    progress: ReportProgress,
) -> Result<FinishedRestore> {
    let file = File::open(backup).map_err(|e| safe_fs::io_error("read", backup, e))?;
    if !file.metadata().is_ok_and(|found| found.is_file()) {
        return Err(Error::invalid(format!(
            "{} is not a file: name one that `oubliette backup FILE` made",
            backup.display()
        )));
    }
    check_owner(home)?;
    if existing == ExistingData::Refuse {
        check_unused(home, location).await?;
    }
    let cancel = CancelFlag::default();
    let _guard = cancel.guard();
    let free = free_bytes(home.root());
    let limits = BackupLimits {
        file_bytes: free.saturating_add(room_elsewhere(home)),
        row_bytes: match location {
            StoreLocation::File(_) => free,
            StoreLocation::Postgres(_) => u64::MAX,
        },
    };
    let archive = ArchiveFile {
        file,
        limits,
        cancel,
        progress,
    };
    let (archive, manifest, home) = archive.check(home.clone()).await?;
    let home = &home;
    let projects_dir = Some(home.projects_dir()).filter(|dir| *dir != home.root().join(PROJECTS_FOLDER));

    home.create()?;
    let lock = DatabaseLock::take(&home.database_path()).await?;
    let mut moved_away = RevertibleMoves::new(home);
    let moved_to = match existing {
        ExistingData::Refuse => {
            // Again: before the lock was held, a server may have run.
            check_unused(home, location).await?;
            None
        }
        ExistingData::MoveAway => match find_data(home, location).await? {
            Some(_) => Some(moved_away.move_away(home)?),
            None => None,
        },
    };
    let (moved_to, projects_moved_to) = match moved_to {
        Some(MovedAway { home, projects }) => (Some(home), projects),
        None => (None, None),
    };
    let mut loader = StoreLoader::create(location, manifest.backup.schema).await?;
    let staged = StagedFiles::create(home)?;
    let staged = archive.load(staged, &mut loader, &manifest).await?;
    loader.compare(&manifest.tables).await?;
    // Declared after the others, so that on an error it is undone before they are.
    let mut moved_in = RevertibleMoves::new(home);
    let has_config = staged.move_into(home, &mut moved_in)?;
    // Last: until it is there, a server finds nothing.
    loader.publish().await?;
    moved_in.keep();
    moved_away.keep();
    drop(lock);
    let definition_error = place_definitions(home, location).await.err();
    Ok(FinishedRestore {
        definition_error,
        manifest,
        moved_to,
        projects_dir,
        projects_moved_to,
        has_config,
    })
}

/// `[workspaces] dir` of a backup's configuration.
fn workspaces_dir_of(config: &str) -> Result<Option<PathBuf>> {
    let parsed: toml::Table = config
        .parse()
        .map_err(|error| Error::invalid(format!("oubliette.toml of the backup is not valid: {error}")))?;
    let dir = parsed.get("workspaces").and_then(|section| section.get("dir"));
    let dir = dir.and_then(toml::Value::as_str).map(PathBuf::from);
    Ok(dir.filter(|dir| dir.is_absolute()))
}

/// Puts definitions where this home has them: a backup of a home with SQLite has them as files, one with PostgreSQL as rows.
async fn place_definitions(home: &HomeDir, location: &StoreLocation) -> Result<()> {
    let options = StoreOptions {
        lock_file: Some(home.database_path()),
        ..StoreOptions::default()
    };
    let store = Store::open_at(location, &options).await?;
    let opened = DefinitionEditor::open(home, &store, location).await;
    store.close().await;
    let opened = opened?;
    if let Some(error) = opened.import_error() {
        return Err(Error::invalid(error));
    }
    if matches!(location, StoreLocation::Postgres(_)) {
        // They came from the backup and have no effect as files.
        for name in DEFINITION_FOLDERS {
            let dir = home.root().join(name);
            remove_tree_blocking(&dir).map_err(|e| safe_fs::io_error("remove", &dir, e))?;
        }
        home.create()?;
    }
    Ok(())
}

/// Files that are restored belong to the user who restores them, so that has to be the server's.
fn check_owner(home: &HomeDir) -> Result<()> {
    let Ok(found) = std::fs::metadata(home.root()) else {
        return Ok(());
    };
    match found.uid() == rustix::process::geteuid().as_raw() {
        true => Ok(()),
        false => Err(Error::permission_denied(format!(
            "{} belongs to user {}: run this as that user, who has to own the files",
            home.root().display(),
            found.uid()
        ))),
    }
}

/// What data a home or its database holds: a path or a table.
async fn find_data(home: &HomeDir, location: &StoreLocation) -> Result<Option<String>> {
    for name in FOLDERS {
        let dir = folder_place(home, name);
        // What begins with a dot is not a part of it, such as what a restore moved aside.
        let is_data = |entry: std::io::Result<std::fs::DirEntry>| {
            entry.is_ok_and(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."))
        };
        if std::fs::read_dir(&dir).is_ok_and(|mut entries| entries.any(is_data)) {
            return Ok(Some(dir.display().to_string()));
        }
    }
    let StoreLocation::File(database) = location else {
        // A PostgreSQL database is looked at when it is opened for loading.
        return Ok(None);
    };
    if !database.exists() {
        return Ok(None);
    }
    let used = StoreSnapshot::open(location).await?.used_table().await?;
    Ok(used.map(|table| format!("table {table} of {}", database.display())))
}

async fn check_unused(home: &HomeDir, location: &StoreLocation) -> Result<()> {
    match find_data(home, location).await? {
        None => Ok(()),
        Some(data) => Err(Error::conflict(format!(
            "{} holds data already ({data}): restore into another home with --home, or add --force, which moves what is there \
             into a folder of it; projects go where [workspaces] dir of an oubliette.toml in the new home says",
            home.root().display()
        ))),
    }
}

/// The space that is free where the home is or will be.
fn free_bytes(root: &Path) -> u64 {
    let there = root
        .ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("/"));
    rustix::fs::statvfs(there).map_or(u64::MAX, |disk| disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// The space that is free where projects belong, if that is on another file system than the home.
fn room_elsewhere(home: &HomeDir) -> u64 {
    let device = |path: &Path| {
        let there = path.ancestors().find(|path| path.exists())?;
        std::fs::metadata(there).ok().map(|found| found.dev())
    };
    let projects = home.projects_dir();
    match device(&projects) == device(home.root()) {
        true => 0,
        false => free_bytes(&projects),
    }
}

/// The file that is restored.
struct ArchiveFile {
    file: File,
    limits: BackupLimits,
    cancel: CancelFlag,
    progress: ReportProgress,
}

impl ArchiveFile {
    /// Reads it to its end and compares every hash. Returns the home too, with its projects where they belong: a configuration
    /// that is there counts, else the backup's will, whose `[workspaces] dir` says where.
    async fn check(mut self, home: HomeDir) -> Result<(Self, BackupManifest, HomeDir)> {
        crate::actions::run_blocking(move || {
            let mut sink = CheckSink {
                progress: self.progress.clone(),
                bytes: 0,
                has_config: home.config_path().exists(),
                home,
                more_room: 0,
            };
            let manifest = self.read(&mut sink)?;
            if !sink.has_config {
                let more_room = room_elsewhere(&sink.home);
                self.limits.file_bytes = self.limits.file_bytes.saturating_add(more_room);
            }
            Ok((self, manifest, sink.home))
        })
        .await
    }

    fn read(&mut self, sink: &mut dyn BackupSink) -> Result<BackupManifest> {
        self.file.rewind().map_err(Error::internal)?;
        let source = BufReader::with_capacity(256 * 1024, &self.file);
        read_backup(source, self.limits, &self.cancel, sink)
    }

    /// Puts its rows into the database and its files beside their places.
    async fn load(
        mut self,
        staged: StagedFiles,
        loader: &mut StoreLoader,
        manifest: &BackupManifest,
    ) -> Result<StagedFiles> {
        let (chunks, mut arriving) = mpsc::channel::<(String, Vec<u8>)>(CHUNKS_AHEAD);
        let expected = manifest.clone();
        let reading = tokio::task::spawn_blocking(move || {
            let mut sink = LoadSink {
                staged,
                chunks,
                progress: self.progress.clone(),
                entries: 0,
            };
            // The hashes once more: the file may have been changed since they were compared.
            match self.read(&mut sink)? == expected {
                true => Ok(sink.staged),
                false => Err(Error::conflict("the backup was changed while it was read")),
            }
        });
        let mut inserted = Ok(());
        while let Some((table, lines)) = arriving.recv().await {
            inserted = loader.insert(&table, &lines).await;
            if inserted.is_err() {
                break;
            }
        }
        // The thread stops when nobody takes its rows.
        drop(arriving);
        let staged = reading.await.map_err(Error::internal)?;
        inserted?;
        staged
    }
}

/// Takes nothing but the configuration: only the hashes matter.
struct CheckSink {
    progress: ReportProgress,
    bytes: u64,
    home: HomeDir,
    /// Whether the home has a configuration.
    has_config: bool,
    /// How much more room the projects have elsewhere.
    more_room: u64,
}

impl BackupSink for CheckSink {
    fn header(&mut self, header: &BackupHeader) -> Result<()> {
        let newest = transfer::newest_schema();
        if header.schema > newest {
            return Err(Error::invalid(format!(
                "the backup was made by oubliette {}, which is newer (schema {}; this is {} and knows {newest}): restore it \
                 with that version",
                quoted(&header.version),
                header.schema,
                env!("CARGO_PKG_VERSION")
            )));
        }
        Ok(())
    }

    fn rows(&mut self, table: &str, lines: Vec<u8>) -> Result<()> {
        self.bytes += lines.len() as u64;
        (self.progress)(&format!("checking table {table}, {}", mebibytes(self.bytes)));
        Ok(())
    }

    fn entry(&mut self, entry: HomeEntry<'_>) -> Result<()> {
        if !self.has_config && entry.path.as_bytes() == CONFIG_NAME.as_bytes() {
            let mut text = String::new();
            let mut content = entry.content.take(MAX_CONFIG_BYTES);
            content.read_to_string(&mut text).map_err(|error| {
                Error::invalid(format!("oubliette.toml of the backup cannot be read: {error}"))
            })?;
            let home = self.home.clone();
            self.home = home.with_projects_dir(workspaces_dir_of(&text)?);
            self.more_room = room_elsewhere(&self.home);
        }
        Ok(())
    }

    fn more_room(&mut self) -> u64 {
        std::mem::take(&mut self.more_room)
    }
}

/// Puts files in place and sends rows to the loader.
struct LoadSink {
    staged: StagedFiles,
    chunks: mpsc::Sender<(String, Vec<u8>)>,
    progress: ReportProgress,
    entries: u64,
}

impl BackupSink for LoadSink {
    fn header(&mut self, _header: &BackupHeader) -> Result<()> {
        Ok(())
    }

    fn rows(&mut self, table: &str, lines: Vec<u8>) -> Result<()> {
        (self.progress)(&format!("restoring table {table}"));
        self.chunks
            .blocking_send((table.to_owned(), lines))
            .map_err(|_| Error::unavailable("the rows could not be inserted"))
    }

    fn entry(&mut self, entry: HomeEntry<'_>) -> Result<()> {
        self.entries += 1;
        if self.entries.is_multiple_of(64) {
            (self.progress)(&format!("restoring files: {}", self.entries));
        }
        self.staged.place(entry)
    }
}
