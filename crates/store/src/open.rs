//! Opening the database: locked to one process and migrated to this program's schema.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use oubliette_protocol::Error;
use sqlx::{
    ConnectOptions, SqliteConnection, SqlitePool,
    migrate::{MigrateError, Migrator},
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use crate::db_error::{code, primary_code};

static MIGRATIONS: Migrator = sqlx::migrate!("./migrations");

/// How long SQLite waits for another program's lock on the database.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);
/// SQLite's page caches (a negative `cache_size` is in KiB) are small: the operating system caches the same
/// file.
const WRITER_CACHE_KIB: &str = "-1024";
const READER_CACHE_KIB: &str = "-512";
/// The size in bytes the write-ahead log file is truncated to after a checkpoint.
const WAL_SIZE_LIMIT: &str = "16777216";
const PAGE_BYTES: u64 = 4096;

/// Options for opening a database.
#[derive(Debug, Clone, Default)]
pub struct StoreOptions {
    /// Maximum size of the database in bytes; writes beyond it fail as on a full disk. Default: no limit.
    pub max_bytes: Option<u64>,
}

/// Why the database cannot be opened, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another Oubliette process has it open.
    #[error("{} is in use by another oubliette: stop that one, or use it through its own address", .0.display())]
    InUse(PathBuf),
    /// Another program holds a lock on it.
    #[error("{} is locked by another program: close that program and try again", .0.display())]
    Locked(PathBuf),
    /// The file is not a database, or is corrupted.
    #[error("{} is damaged ({detail}): put a backup in its place, or move it away to start with an empty one", path.display())]
    Damaged {
        /// The database.
        path: PathBuf,
        /// SQLite's or the migrator's message.
        detail: String,
    },
    /// The disk is full.
    #[error("the disk of {} is full: free some space and try again", .0.display())]
    DiskFull(PathBuf),
    /// A newer Oubliette has migrated it to a schema this program does not know.
    #[error("{} was made by a newer oubliette (schema {version}): use that version, or a backup from before", path.display())]
    Newer {
        /// The database.
        path: PathBuf,
        /// The database's schema version.
        version: i64,
    },
    /// The server's user may not read or write it.
    #[error("cannot open {}: {cause}; give the user the server runs as the right to the file and its folder", path.display())]
    Denied {
        /// The database or its folder.
        path: PathBuf,
        /// The operating system's or SQLite's message.
        cause: String,
    },
    /// Anything else.
    #[error("cannot open {}: {cause}", path.display())]
    Other {
        /// The database.
        path: PathBuf,
        /// The underlying error.
        cause: String,
    },
}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Self {
        Error::unavailable(error.to_string()).with_cause(error)
    }
}

/// An opened and migrated database.
pub(crate) struct OpenedDatabase {
    pub(crate) writer: SqliteConnection,
    pub(crate) readers: SqlitePool,
    /// How the writer is connected; used again if its connection breaks.
    pub(crate) connect_options: SqliteConnectOptions,
    /// The lock file, held as long as this process writes.
    pub(crate) lock: File,
}

pub(crate) async fn open(path: &Path, options: &StoreOptions) -> Result<OpenedDatabase, OpenError> {
    let io_failed = |e: io::Error| from_io(path, &e);
    // The lock comes first: what the writer caches in memory is valid only while no other process writes.
    // It is a separate file because closing any descriptor of the database file would drop SQLite's POSIX
    // locks on it.
    let lock_path = with_suffix(path, ".lock");
    let lock = private_file()
        .truncate(false)
        .open(&lock_path)
        .map_err(io_failed)?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(OpenError::InUse(path.into())),
        Err(TryLockError::Error(e)) => return Err(io_failed(e)),
    }
    // Created here rather than by SQLite, so that it has mode 0600 from the start.
    drop(private_file().truncate(false).open(path).map_err(io_failed)?);

    let base = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(false)
        .busy_timeout(BUSY_TIMEOUT)
        .foreign_keys(true)
        .pragma("temp_store", "MEMORY")
        .disable_statement_logging();
    let mut connect_options = base
        .clone()
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Normal)
        .pragma("cache_size", WRITER_CACHE_KIB)
        .pragma("journal_size_limit", WAL_SIZE_LIMIT)
        .statement_cache_capacity(64);
    if let Some(bytes) = options.max_bytes {
        connect_options = connect_options.pragma("max_page_count", (bytes / PAGE_BYTES).max(1).to_string());
    }
    let mut writer = connect_options.connect().await.map_err(|e| from_sqlx(path, &e))?;
    MIGRATIONS
        .run(&mut writer)
        .await
        .map_err(|e| from_migrate(path, &e))?;

    let readers = SqlitePoolOptions::new()
        .min_connections(0)
        .max_connections(4)
        .idle_timeout(Duration::from_secs(30))
        .acquire_timeout(Duration::from_secs(10))
        .test_before_acquire(false)
        .connect_lazy_with(
            base.read_only(true)
                .pragma("cache_size", READER_CACHE_KIB)
                .statement_cache_capacity(32),
        );
    Ok(OpenedDatabase {
        writer,
        readers,
        connect_options,
        lock,
    })
}

fn private_file() -> fs::OpenOptions {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).create(true).mode(0o600);
    options
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn from_io(path: &Path, error: &io::Error) -> OpenError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => OpenError::DiskFull(path.into()),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => OpenError::Denied {
            path: path.into(),
            cause: error.to_string(),
        },
        _ => OpenError::Other {
            path: path.into(),
            cause: error.to_string(),
        },
    }
}

fn from_sqlx(path: &Path, error: &sqlx::Error) -> OpenError {
    let (path, cause) = (path.to_path_buf(), error.to_string());
    match primary_code(error) {
        Some(code::BUSY | code::LOCKED) => OpenError::Locked(path),
        Some(code::NOTADB | code::CORRUPT) => OpenError::Damaged { path, detail: cause },
        Some(code::FULL) => OpenError::DiskFull(path),
        Some(code::READONLY | code::PERM | code::CANTOPEN) => OpenError::Denied { path, cause },
        _ => OpenError::Other { path, cause },
    }
}

fn from_migrate(path: &Path, error: &MigrateError) -> OpenError {
    let newest = MIGRATIONS.iter().map(|m| m.version).max().unwrap_or(0);
    match error {
        MigrateError::VersionMissing(version) if *version > newest => OpenError::Newer {
            path: path.into(),
            version: *version,
        },
        MigrateError::VersionMissing(_) | MigrateError::VersionMismatch(_) | MigrateError::Dirty(_) => {
            OpenError::Damaged {
                path: path.into(),
                detail: error.to_string(),
            }
        }
        MigrateError::Execute(cause) | MigrateError::ExecuteMigration(cause, _) => from_sqlx(path, cause),
        _ => OpenError::Other {
            path: path.into(),
            cause: error.to_string(),
        },
    }
}
