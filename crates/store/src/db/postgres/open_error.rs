//! Why a PostgreSQL database cannot be used, and what to do about it. No text has a password in it.

use sqlx::migrate::MigrateError;

use super::{lease_holder::LeaseHolder, url::DatabaseUrl};

/// Why a PostgreSQL database cannot be used, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostgresOpenError {
    /// The address is not one.
    #[error(
        "the store's url is not the address of a PostgreSQL database: {0}; its form is postgres://USER:PASSWORD@HOST:PORT/DATABASE"
    )]
    BadUrl(String),
    /// Nobody answers there.
    #[error(
        "cannot reach {database}: {cause}; check host and port, and that PostgreSQL runs and accepts connections from here"
    )]
    Unreachable {
        /// The database.
        database: String,
        /// The connection's error.
        cause: String,
    },
    /// The user or the password is refused.
    #[error(
        "{database} refuses the login: {cause}; check user and password, and pg_hba.conf of the database"
    )]
    Login {
        /// The database.
        database: String,
        /// PostgreSQL's message.
        cause: String,
    },
    /// There is no such database.
    #[error("{0} does not exist: create it first (CREATE DATABASE … ENCODING 'UTF8')")]
    NoDatabase(String),
    /// The schema of the search path does not exist.
    #[error(
        "{0} has no schema of its search_path: create it first (CREATE SCHEMA …), or leave search_path out"
    )]
    NoSchema(String),
    /// PostgreSQL is too old.
    #[error("{database} is PostgreSQL {version}: oubliette needs 15 or later; upgrade it, or use another")]
    TooOld {
        /// The database.
        database: String,
        /// Its version.
        version: String,
    },
    /// It stores text in another encoding.
    #[error("{database} stores text as {encoding}: create one with ENCODING 'UTF8'")]
    Encoding {
        /// The database.
        database: String,
        /// Its encoding.
        encoding: String,
    },
    /// It can only be read.
    #[error(
        "{0} can only be read: it is a standby, or default_transaction_read_only is on; use the address of the primary"
    )]
    ReadOnly(String),
    /// It holds tables of something else.
    #[error(
        "{database} holds tables of another program ({tables}): give oubliette a database or a schema of its own"
    )]
    OtherProgram {
        /// The database.
        database: String,
        /// Some of the tables.
        tables: String,
    },
    /// It holds no tables of Oubliette, and whoever opened it only reads.
    #[error("{0} holds no store yet: start a server with this url first")]
    Empty(String),
    /// A newer Oubliette has migrated it.
    #[error(
        "{database} was made by a newer oubliette (schema {version}), and this one cannot use its tables: use that version, or a backup from before"
    )]
    Newer {
        /// The database.
        database: String,
        /// Its schema version.
        version: i64,
    },
    /// It has to be migrated in a way that servers of older versions, which run, cannot work with.
    #[error(
        "{database} cannot be migrated while older servers run that could not use its new tables ({servers}): stop them first; one that is gone is noticed within 8 s"
    )]
    OlderServersRun {
        /// The database.
        database: String,
        /// Their versions and addresses.
        servers: String,
    },
    /// An older Oubliette has made it, and whoever opened it only reads.
    #[error("{0} was made by an older oubliette: start this version's server on it once, which migrates it")]
    Older(String),
    /// Its tables are not those that this program made.
    #[error(
        "the tables of {database} were changed by hand ({detail}): restore a backup into an empty database"
    )]
    Changed {
        /// The database.
        database: String,
        /// The migrator's message.
        detail: String,
    },
    /// Another server uses it.
    #[error(
        "{database} is in use by {holder}: stop that one, or use it through its own address; one that is gone is noticed within 30 s"
    )]
    InUse {
        /// The database.
        database: String,
        /// Who uses it.
        holder: LeaseHolder,
    },
    /// One server uses it for itself, and another wants to share it.
    #[error(
        "{database} is in use by {holder}, which has no [cluster] section: stop that one and give it one, or leave [cluster] out here and use another database"
    )]
    UsedAlone {
        /// The database.
        database: String,
        /// Who uses it.
        holder: LeaseHolder,
    },
    /// Servers of a cluster use it, and another wants it for itself.
    #[error(
        "{database} is shared by a cluster ({holder} and maybe others): give this server a [cluster] section with the same key, or stop all of them first; one that is gone is noticed within 30 s"
    )]
    SharedByCluster {
        /// The database.
        database: String,
        /// One of them.
        holder: LeaseHolder,
    },
    /// The servers that share it have another key.
    #[error(
        "the servers that share {database} have another cluster key than this one: put the same key into the variable that [cluster] key_env names; to change the key, stop all of them first"
    )]
    OtherClusterKey {
        /// The database.
        database: String,
    },
    /// The user may not do what is needed.
    #[error(
        "{database}: {cause}; as the database's owner run GRANT CREATE, USAGE ON SCHEMA public TO \"{user}\", or make that user the owner"
    )]
    Denied {
        /// The database.
        database: String,
        /// PostgreSQL's message.
        cause: String,
        /// Who connects.
        user: String,
    },
    /// The disk is full.
    #[error("the disk of {0} is full: free some space and try again")]
    DiskFull(String),
    /// It has no room for another connection.
    #[error("{0} has no connection left: raise max_connections, or close some")]
    TooManyConnections(String),
    /// Anything else.
    #[error("cannot use {database}: {cause}")]
    Other {
        /// The database.
        database: String,
        /// The underlying error.
        cause: String,
    },
}

/// What an error of PostgreSQL means while a database is opened.
pub(super) fn from_sqlx(url: &DatabaseUrl, error: &sqlx::Error) -> PostgresOpenError {
    let database = url.to_string();
    let cause = match error {
        sqlx::Error::Database(cause) => cause.message().to_owned(),
        error => error.to_string(),
    };
    let state = error.as_database_error().and_then(|cause| cause.code());
    match (state.as_deref(), error) {
        (Some("28P01" | "28000"), _) => PostgresOpenError::Login { database, cause },
        (Some("3D000"), _) => PostgresOpenError::NoDatabase(database),
        (Some("25006"), _) => PostgresOpenError::ReadOnly(database),
        (Some("42501"), _) => PostgresOpenError::Denied {
            database,
            cause,
            user: url.user().to_owned(),
        },
        (Some("OU001"), _) => PostgresOpenError::OlderServersRun {
            database,
            servers: cause,
        },
        (Some("53100"), _) => PostgresOpenError::DiskFull(database),
        (Some("53300"), _) => PostgresOpenError::TooManyConnections(database),
        (Some("57P01" | "57P02" | "57P03"), _)
        | (None, sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::PoolTimedOut) => {
            PostgresOpenError::Unreachable { database, cause }
        }
        _ => PostgresOpenError::Other { database, cause },
    }
}

/// What an error of the migrator means.
pub(super) fn from_migrate(url: &DatabaseUrl, newest: i64, error: &MigrateError) -> PostgresOpenError {
    let database = url.to_string();
    match error {
        MigrateError::VersionMissing(version) if *version > newest => PostgresOpenError::Newer {
            database,
            version: *version,
        },
        MigrateError::VersionMissing(_) | MigrateError::VersionMismatch(_) | MigrateError::Dirty(_) => {
            PostgresOpenError::Changed {
                database,
                detail: error.to_string(),
            }
        }
        MigrateError::Execute(cause) | MigrateError::ExecuteMigration(cause, _) => from_sqlx(url, cause),
        _ => PostgresOpenError::Other {
            database,
            cause: error.to_string(),
        },
    }
}
