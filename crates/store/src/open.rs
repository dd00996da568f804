//! Where the database is, opening it, and why it cannot be opened.

use std::{fmt, fs::File, path::PathBuf};

use oubliette_protocol::Error;

pub use crate::db::postgres::{lease_holder::LeaseHolder, open_error::PostgresOpenError, url::DatabaseUrl};
use crate::{
    cluster::ClusterOptions,
    db::{DbConnection, DbPool, connection::DbConnector, postgres, sqlite},
};

/// Where the database is.
#[derive(Debug, Clone)]
pub enum StoreLocation {
    /// A SQLite database in a file.
    File(PathBuf),
    /// A PostgreSQL database.
    Postgres(DatabaseUrl),
}

impl fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreLocation::File(path) => path.display().fmt(f),
            StoreLocation::Postgres(url) => url.fmt(f),
        }
    }
}

/// Options for opening a database.
#[derive(Debug, Clone, Default)]
pub struct StoreOptions {
    /// Maximum size of the database in bytes; writes beyond it fail as on a full disk. Default: no limit. SQLite only.
    pub max_bytes: Option<u64>,
    /// A path beside which, with `.lock` appended, a lock file is held as long as the database is open, wherever that is.
    /// SQLite's own file is always locked like this.
    pub lock_file: Option<PathBuf>,
    /// Share the database with other servers. Default: use it alone. PostgreSQL only.
    pub cluster: Option<ClusterOptions>,
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
    #[error("{} was made by a newer oubliette (schema {version}), and this one cannot use its tables: use that version, or a backup from before", path.display())]
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
    /// A PostgreSQL database cannot be used.
    #[error(transparent)]
    Postgres(#[from] PostgresOpenError),
    /// Anything else.
    #[error("cannot open {}: {cause}", path.display())]
    Other {
        /// The database.
        path: PathBuf,
        /// The underlying error.
        cause: String,
    },
}

impl OpenError {
    /// Whether another Oubliette has it open.
    pub fn is_in_use(&self) -> bool {
        matches!(
            self,
            OpenError::InUse(_)
                | OpenError::Postgres(
                    PostgresOpenError::InUse { .. }
                        | PostgresOpenError::UsedAlone { .. }
                        | PostgresOpenError::SharedByCluster { .. }
                )
        )
    }
}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Self {
        Error::unavailable(error.to_string()).with_cause(error)
    }
}

/// An opened and migrated database.
pub(crate) struct OpenedDatabase {
    pub(crate) writer: DbConnection,
    pub(crate) readers: DbPool,
    /// How the writer is connected again if its connection breaks.
    pub(crate) connector: DbConnector,
    /// The lock file, held as long as this process writes.
    pub(crate) lock: Option<File>,
}

/// Opens a database for writing.
pub(crate) async fn open(
    location: &StoreLocation,
    options: &StoreOptions,
) -> Result<OpenedDatabase, OpenError> {
    match location {
        StoreLocation::File(path) => sqlite::open(path, options).await,
        StoreLocation::Postgres(url) => {
            let lock = match &options.lock_file {
                Some(path) => Some(sqlite::lock_database(path).await?),
                None => None,
            };
            let opened = postgres::open::open(url, options.cluster.as_ref()).await?;
            Ok(OpenedDatabase {
                writer: DbConnection::Postgres(Box::new(opened.writer)),
                readers: DbPool::Postgres(opened.readers),
                connector: DbConnector::Postgres(Box::new(opened.lease)),
                lock,
            })
        }
    }
}
