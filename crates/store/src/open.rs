//! Opening the database: one process at a time, migrated to what this program knows.

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

use crate::fault::{code, primary_code};

static MIGRATIONS: Migrator = sqlx::migrate!("./migrations");

/// How long to wait for another program to let go of the database.
const PATIENCE: Duration = Duration::from_secs(2);
/// Page caches are small: the operating system caches the same file.
const WRITER_CACHE_KIB: &str = "-1024";
const READER_CACHE_KIB: &str = "-512";
/// What the write-ahead log is cut down to when it has been taken over.
const WAL_BYTES: &str = "16777216";
const PAGE_BYTES: u64 = 4096;

/// How to open a database.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The most it may grow to, in bytes; past it writes fail as on a full disk.
    pub max_bytes: Option<u64>,
}

/// Why the database cannot be opened, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another Oubliette has it.
    #[error("{} is in use by another oubliette: stop that one, or use it through its own address", .0.display())]
    InUse(PathBuf),
    /// Another program has it.
    #[error("{} is locked by another program: close that program and try again", .0.display())]
    Locked(PathBuf),
    /// It is no database, or no longer a whole one.
    #[error("{} is damaged ({detail}): put a backup in its place, or move it away to start with an empty one", path.display())]
    Damaged {
        /// The database.
        path: PathBuf,
        /// What the database says.
        detail: String,
    },
    /// No room.
    #[error("the disk of {} is full: free some space and try again", .0.display())]
    DiskFull(PathBuf),
    /// A newer Oubliette has migrated it.
    #[error("{} was made by a newer oubliette (schema {version}): use that version, or a backup from before", path.display())]
    Newer {
        /// The database.
        path: PathBuf,
        /// Its schema's version.
        version: i64,
    },
    /// Not ours to read or write.
    #[error("cannot open {}: {cause}; give the user the server runs as the right to the file and its folder", path.display())]
    Denied {
        /// The database or its folder.
        path: PathBuf,
        /// What the system says.
        cause: String,
    },
    /// Anything else.
    #[error("cannot open {}: {cause}", path.display())]
    Other {
        /// The database.
        path: PathBuf,
        /// What happened.
        cause: String,
    },
}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Self {
        Error::unavailable(error.to_string())
    }
}

/// The opened database.
pub(crate) struct Opened {
    pub(crate) writer: SqliteConnection,
    pub(crate) readers: SqlitePool,
    /// How to connect the writer again.
    pub(crate) again: SqliteConnectOptions,
    /// Held as long as this process writes.
    pub(crate) lock: File,
}

pub(crate) async fn open(path: &Path, options: &Options) -> Result<Opened, OpenError> {
    let io_failed = |e: io::Error| from_io(path, &e);
    // The lock first: what the writer keeps in memory holds only while nobody else writes. It is a file
    // of its own because closing the database's file would drop SQLite's locks on it.
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
    // Made here rather than by SQLite, so that it is private from the first moment on.
    drop(private_file().truncate(false).open(path).map_err(io_failed)?);

    let base = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(false)
        .busy_timeout(PATIENCE)
        .foreign_keys(true)
        .pragma("temp_store", "MEMORY")
        .disable_statement_logging();
    let mut again = base
        .clone()
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Normal)
        .pragma("cache_size", WRITER_CACHE_KIB)
        .pragma("journal_size_limit", WAL_BYTES)
        .statement_cache_capacity(64);
    if let Some(bytes) = options.max_bytes {
        again = again.pragma("max_page_count", (bytes / PAGE_BYTES).max(1).to_string());
    }
    let mut writer = again.connect().await.map_err(|e| from_sqlx(path, &e))?;
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
    Ok(Opened {
        writer,
        readers,
        again,
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
