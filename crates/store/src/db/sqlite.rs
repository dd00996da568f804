//! Opening a SQLite database: locked to one process and migrated to this program's schema; or for reading it whole, or for
//! filling a new one.

use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use sqlx::{
    ConnectOptions, Connection, SqliteConnection,
    migrate::{MigrateError, Migrator},
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use super::{
    connection::{DbConnection, DbConnector, DbPool},
    schema_version::{FoundSchema, READ_MIN_SCHEMA, SchemaFit, beside_newer, newest_version},
};
use crate::{
    db_error::{code, primary_code},
    open::{OpenError, OpenedDatabase, StoreOptions},
};

static MIGRATIONS: Migrator = sqlx::migrate!("./migrations/sqlite");

/// How long SQLite waits for another program's lock on the database.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);
/// SQLite's page caches (a negative `cache_size` is in KiB) are small: the operating system caches the same
/// file.
const WRITER_CACHE_KIB: &str = "-1024";
const READER_CACHE_KIB: &str = "-512";
/// Larger for a database that is being filled: its indexes are changed all over.
const LOADER_CACHE_KIB: &str = "-65536";
/// The size in bytes the write-ahead log file is truncated to after a checkpoint.
const WAL_SIZE_LIMIT: &str = "16777216";
const PAGE_BYTES: u64 = 4096;
/// How long a lock is waited for whose holder has been killed: a process that it was just starting has inherited the
/// descriptor, and holds the lock until it calls exec.
const DEAD_HOLDER_TIMEOUT: Duration = Duration::from_secs(5);
/// How often such a lock is tried: the kernel reports no event for its release that could be given up.
const LOCK_POLL: Duration = Duration::from_millis(10);
/// Less free space than this, in bytes, explains why SQLite could not make a file larger.
const FULL_DISK_BYTES: u64 = 64 * 1024;

pub(crate) async fn open(path: &Path, options: &StoreOptions) -> Result<OpenedDatabase, OpenError> {
    let io_failed = |e: io::Error| from_io(path, &e);
    // The lock comes first: what the writer caches in memory is valid only while no other process writes.
    // It is a separate file because closing any descriptor of the database file would drop SQLite's POSIX
    // locks on it.
    let lock = lock_database(path).await?;
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
    check_schema(path, &mut writer).await?;
    beside_newer(&MIGRATIONS)
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
        writer: DbConnection::Sqlite(writer),
        readers: DbPool::Sqlite(readers),
        connector: DbConnector::Sqlite(Box::new(connect_options)),
        lock: Some(lock),
    })
}

/// An error if the tables are such that this program cannot use them.
async fn check_schema(path: &Path, db: &mut SqliteConnection) -> Result<(), OpenError> {
    let found = read_schema(db).await.map_err(|e| from_sqlx(path, &e))?;
    match found.fit(&MIGRATIONS) {
        SchemaFit::Known => Ok(()),
        SchemaFit::Newer => {
            tracing::info!(database = %path.display(), "the tables are those of a newer version, which this one can use");
            Ok(())
        }
        SchemaFit::TooNew(version) => Err(OpenError::Newer {
            path: path.into(),
            version,
        }),
        SchemaFit::Foreign(version) => Err(OpenError::Damaged {
            path: path.into(),
            detail: format!("migration {version} was applied, which no version had"),
        }),
    }
}

/// The schema of a database, which may be empty.
async fn read_schema(db: &mut SqliteConnection) -> Result<FoundSchema, sqlx::Error> {
    let tables: Vec<String> = sqlx::query_scalar("SELECT name FROM sqlite_master WHERE type = 'table'")
        .fetch_all(&mut *db)
        .await?;
    let has = |name: &str| tables.iter().any(|table| table == name);
    let mut found = FoundSchema::default();
    if has("_sqlx_migrations") {
        found.applied = sqlx::query_scalar("SELECT version FROM _sqlx_migrations ORDER BY version")
            .fetch_all(&mut *db)
            .await?;
    }
    if has("schema_compatibility") {
        found.min_schema = sqlx::query_scalar(READ_MIN_SCHEMA).fetch_optional(db).await?;
    }
    Ok(found)
}

/// Opens a database for reading all of it as it is now, beside a server that writes: no lock is taken, and what is committed
/// later is not seen.
pub(crate) async fn open_snapshot(path: &Path) -> Result<SqliteConnection, OpenError> {
    let failed = |e: sqlx::Error| from_sqlx(path, &e);
    if let Err(error) = fs::metadata(path) {
        return Err(from_io(path, &error));
    }
    let mut db = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(false)
        .read_only(true)
        .busy_timeout(BUSY_TIMEOUT)
        .pragma("cache_size", READER_CACHE_KIB)
        .disable_statement_logging()
        .connect()
        .await
        .map_err(failed)?;
    // The moment that is read is that of the first statement.
    sqlx::query("BEGIN").execute(&mut db).await.map_err(failed)?;
    sqlx::query("SELECT 1 FROM sqlite_master LIMIT 1")
        .execute(&mut db)
        .await
        .map_err(failed)?;
    Ok(db)
}

/// Makes a new database with the tables of this schema version. Nothing is synchronised to the disk and nothing can be rolled
/// back: if filling it fails, the file is thrown away.
pub(crate) async fn open_for_loading(path: &Path, schema: i64) -> Result<SqliteConnection, OpenError> {
    drop(
        private_file()
            .truncate(true)
            .open(path)
            .map_err(|e| from_io(path, &e))?,
    );
    let mut db = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(false)
        .foreign_keys(true)
        .journal_mode(SqliteJournalMode::Memory)
        .synchronous(SqliteSynchronous::Off)
        .pragma("temp_store", "MEMORY")
        .pragma("cache_size", LOADER_CACHE_KIB)
        .disable_statement_logging()
        .connect()
        .await
        .map_err(|e| from_sqlx(path, &e))?;
    MIGRATIONS
        .run_to(schema, &mut db)
        .await
        .map_err(|e| from_migrate(path, &e))?;
    Ok(db)
}

/// Migrates a filled database to the newest schema and closes it.
pub(crate) async fn finish_loading(path: &Path, mut db: SqliteConnection) -> Result<(), OpenError> {
    MIGRATIONS
        .run(&mut db)
        .await
        .map_err(|e| from_migrate(path, &e))?;
    db.close().await.map_err(|e| from_sqlx(path, &e))
}

/// The version of this program's schema.
pub(crate) fn newest_migration() -> i64 {
    newest_version(&MIGRATIONS)
}

/// Whether this program's schema had this version.
pub(crate) fn is_migration(version: i64) -> bool {
    MIGRATIONS.iter().any(|m| m.version == version)
}

/// Takes the lock, and records in its file who holds it.
pub(crate) async fn lock_database(path: &Path) -> Result<File, OpenError> {
    let io_failed = |e: io::Error| from_io(path, &e);
    let lock = private_file()
        .truncate(false)
        .open(with_suffix(path, ".lock"))
        .map_err(io_failed)?;
    let give_up = tokio::time::Instant::now() + DEAD_HOLDER_TIMEOUT;
    loop {
        match lock.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if holder_runs(&lock) || tokio::time::Instant::now() >= give_up => {
                return Err(OpenError::InUse(path.into()));
            }
            Err(TryLockError::WouldBlock) => tokio::time::sleep(LOCK_POLL).await,
            Err(TryLockError::Error(e)) => return Err(io_failed(e)),
        }
    }
    // In place and always as long, so that it needs no more space than the last one did.
    if lock
        .write_all_at(format!("{:>10}\n", std::process::id()).as_bytes(), 0)
        .is_err()
    {
        // An empty file rather than the id of another process. The id is only used to wait for its end.
        let _ = lock.set_len(0);
    }
    Ok(lock)
}

/// Whether the process that recorded itself in the lock file runs.
fn holder_runs(lock: &File) -> bool {
    let mut text = [0; 16];
    let read = lock.read_at(&mut text, 0).unwrap_or(0);
    let pid = str::from_utf8(&text[..read])
        .ok()
        .and_then(|text| text.trim().parse().ok());
    pid.is_some_and(oubliette_os::process_runs)
}

/// Whether this file's disk has no space left. SQLite reports an I/O error when it finds none for its shared memory file.
fn disk_is_full(path: &Path) -> bool {
    rustix::fs::statvfs(path).is_ok_and(|disk| disk.f_bavail.saturating_mul(disk.f_frsize) < FULL_DISK_BYTES)
}

fn private_file() -> fs::OpenOptions {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).create(true).mode(0o600);
    options
}

pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
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
        Some(code::IOERR) if disk_is_full(&path) => OpenError::DiskFull(path),
        Some(code::READONLY | code::PERM | code::CANTOPEN) => OpenError::Denied { path, cause },
        _ => OpenError::Other { path, cause },
    }
}

fn from_migrate(path: &Path, error: &MigrateError) -> OpenError {
    let newest = newest_migration();
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
