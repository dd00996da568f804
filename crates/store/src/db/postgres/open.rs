//! Opening a PostgreSQL database: checked, locked, migrated.

use std::time::Duration;

use oubliette_protocol::ServerId;
use sqlx::{Connection, PgConnection, PgPool, Row, migrate::Migrator, postgres::PgPoolOptions};

use super::{
    lease::{self, LockMode, WriteLease},
    membership,
    open_error::{PostgresOpenError, from_migrate, from_sqlx},
    url::DatabaseUrl,
};
use crate::{
    cluster::ClusterOptions,
    db::schema_version::{FoundSchema, READ_MIN_SCHEMA, SchemaFit, beside_newer, newest_version},
};

static MIGRATIONS: Migrator = sqlx::migrate!("./migrations/postgres");
/// The oldest version that is supported, as `server_version_num` has it.
const OLDEST_VERSION: i64 = 150_000;
/// Maximum connections that read.
const READERS: u32 = 8;
/// A table of every schema that this program made.
const OWN_TABLE: &str = "event_logs";
/// The tables that are made before it.
const FIRST_TABLES: [&str; 2] = ["_sqlx_migrations", "server_lease"];
/// Settings of connections that read.
const READER_SETTINGS: &str = "SET default_transaction_read_only = on; SET statement_timeout = '60s'; \
    SET client_min_messages = warning";

/// Settings of connections that read or write everything in one transaction.
const NO_TIMEOUTS: &str = "SET statement_timeout = 0; SET idle_in_transaction_session_timeout = 0";

/// A database that this process may write.
pub(crate) struct OpenedForWriting {
    pub(crate) writer: PgConnection,
    pub(crate) readers: PgPool,
    pub(crate) lease: WriteLease,
}

/// A database that this process only reads.
pub(crate) struct OpenedForReading {
    pub(crate) readers: PgPool,
    /// Where notices of commits come from.
    pub(crate) channel: String,
}

/// Opens a database for writing, alone or as a server of a cluster.
pub(crate) async fn open(
    url: &DatabaseUrl,
    cluster: Option<&ClusterOptions>,
) -> Result<OpenedForWriting, PostgresOpenError> {
    match cluster {
        None => open_alone(url).await,
        Some(cluster) => open_shared(url, cluster).await,
    }
}

async fn open_shared(
    url: &DatabaseUrl,
    cluster: &ClusterOptions,
) -> Result<OpenedForWriting, PostgresOpenError> {
    let failed = |error: sqlx::Error| from_sqlx(url, &error);
    let server = ServerId::generate();
    let mut writer = lease::connect_member(url, &server).await.map_err(failed)?;
    check_and_lock(url, &mut writer, LockMode::Shared).await?;
    // Of servers that start together one migrates and the others wait: the migrator has a lock of its own.
    migrate(url, &mut writer).await?;
    membership::join(url, &mut writer, &server, cluster).await?;
    let lease = WriteLease::of_member(url.clone(), &mut writer, server)
        .await
        .map_err(failed)?;
    Ok(OpenedForWriting {
        writer,
        readers: reader_pool(url),
        lease,
    })
}

async fn migrate(url: &DatabaseUrl, db: &mut PgConnection) -> Result<(), PostgresOpenError> {
    check_schema(url, db).await?;
    beside_newer(&MIGRATIONS)
        .run(&mut *db)
        .await
        .map_err(|error| from_migrate(url, newest_migration(), &error))?;
    // Again, because a newer server may have migrated it while this one waited for the migrator's lock.
    check_schema(url, db).await
}

/// An error if the tables are such that this program cannot use them.
pub(super) async fn check_schema(url: &DatabaseUrl, db: &mut PgConnection) -> Result<(), PostgresOpenError> {
    let found = read_schema(db).await.map_err(|error| from_sqlx(url, &error))?;
    match found.fit(&MIGRATIONS) {
        SchemaFit::Known => Ok(()),
        SchemaFit::Newer => {
            tracing::info!(database = %url, "the tables are those of a newer version, which this one can use");
            Ok(())
        }
        SchemaFit::TooNew(version) => Err(PostgresOpenError::Newer {
            database: url.to_string(),
            version,
        }),
        SchemaFit::Foreign(version) => Err(PostgresOpenError::Changed {
            database: url.to_string(),
            detail: format!("migration {version} was applied, which no version had"),
        }),
    }
}

/// The schema of a database, which may be empty.
async fn read_schema(db: &mut PgConnection) -> Result<FoundSchema, sqlx::Error> {
    let row = sqlx::query(
        "SELECT to_regclass('_sqlx_migrations') IS NOT NULL, to_regclass('schema_compatibility') IS NOT NULL",
    )
    .fetch_one(&mut *db)
    .await?;
    let mut found = FoundSchema::default();
    if row.try_get(0)? {
        found.applied = sqlx::query_scalar("SELECT version FROM _sqlx_migrations ORDER BY version")
            .fetch_all(&mut *db)
            .await?;
    }
    if row.try_get(1)? {
        found.min_schema = sqlx::query_scalar(READ_MIN_SCHEMA).fetch_optional(db).await?;
    }
    Ok(found)
}

async fn open_alone(url: &DatabaseUrl) -> Result<OpenedForWriting, PostgresOpenError> {
    let failed = |error: sqlx::Error| from_sqlx(url, &error);
    let mut writer = connect_and_lock(url).await?;
    migrate(url, &mut writer).await?;
    let lease = WriteLease::take(url.clone(), &mut writer).await.map_err(failed)?;
    Ok(OpenedForWriting {
        writer,
        readers: reader_pool(url),
        lease,
    })
}

/// Connects to a database that can be written, and takes its lock.
async fn connect_and_lock(url: &DatabaseUrl) -> Result<PgConnection, PostgresOpenError> {
    let failed = |error: sqlx::Error| from_sqlx(url, &error);
    let mut writer = lease::connect(&url.connect_options()).await.map_err(failed)?;
    check_and_lock(url, &mut writer, LockMode::Exclusive).await?;
    Ok(writer)
}

/// Checks that a database can be written and is not another program's, and takes its lock.
async fn check_and_lock(
    url: &DatabaseUrl,
    writer: &mut PgConnection,
    mode: LockMode,
) -> Result<(), PostgresOpenError> {
    let failed = |error: sqlx::Error| from_sqlx(url, &error);
    check_server(url, writer).await?;
    if is_read_only(writer).await.map_err(failed)? {
        return Err(PostgresOpenError::ReadOnly(url.to_string()));
    }
    check_tables(url, writer).await?;
    // Before the schema is touched, so that only one server migrates it.
    lease::lock(url, writer, mode).await
}

/// Opens a database for reading all of it as it is now, beside a server that writes it.
pub(crate) async fn open_snapshot(url: &DatabaseUrl) -> Result<PgConnection, PostgresOpenError> {
    let failed = |error: sqlx::Error| from_sqlx(url, &error);
    let mut db = lease::connect(&url.connect_options()).await.map_err(failed)?;
    check_server(url, &mut db).await?;
    if check_tables(url, &mut db).await? == ExistingTables::None {
        return Err(PostgresOpenError::Empty(url.to_string()));
    }
    for sql in [NO_TIMEOUTS, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"] {
        sqlx::raw_sql(sql).execute(&mut db).await.map_err(failed)?;
    }
    Ok(db)
}

/// Opens a database, with its lock, that has or gets the tables of this schema version.
pub(crate) async fn open_for_loading(
    url: &DatabaseUrl,
    schema: i64,
) -> Result<PgConnection, PostgresOpenError> {
    let failed = |error: sqlx::Error| from_sqlx(url, &error);
    let mut db = connect_and_lock(url).await?;
    let applied = match check_tables(url, &mut db).await? {
        ExistingTables::None => 0,
        ExistingTables::Ours => applied_migration(&mut db).await.map_err(failed)?,
    };
    if applied > schema {
        return Err(PostgresOpenError::Other {
            database: url.to_string(),
            cause: format!(
                "it has tables of schema {applied} and the rows are of schema {schema}; name an empty database or schema"
            ),
        });
    }
    MIGRATIONS
        .run_to(schema, &mut db)
        .await
        .map_err(|error| from_migrate(url, newest_migration(), &error))?;
    sqlx::raw_sql(NO_TIMEOUTS)
        .execute(&mut db)
        .await
        .map_err(failed)?;
    Ok(db)
}

/// Migrates a filled database to the newest schema and releases it.
pub(crate) async fn finish_loading(url: &DatabaseUrl, mut db: PgConnection) -> Result<(), PostgresOpenError> {
    MIGRATIONS
        .run(&mut db)
        .await
        .map_err(|error| from_migrate(url, newest_migration(), &error))?;
    db.close().await.map_err(|error| from_sqlx(url, &error))
}

/// The version of a database's schema.
async fn applied_migration(db: &mut PgConnection) -> Result<i64, sqlx::Error> {
    let applied: Option<i64> = sqlx::query_scalar("SELECT MAX(version) FROM _sqlx_migrations")
        .fetch_one(db)
        .await?;
    Ok(applied.unwrap_or(0))
}

/// Opens a database for reading, beside a server that writes it.
pub(crate) async fn open_for_reading(url: &DatabaseUrl) -> Result<OpenedForReading, PostgresOpenError> {
    let failed = |error: sqlx::Error| from_sqlx(url, &error);
    let mut db = lease::connect(&url.connect_options()).await.map_err(failed)?;
    check_server(url, &mut db).await?;
    if check_tables(url, &mut db).await? == ExistingTables::None {
        return Err(PostgresOpenError::Empty(url.to_string()));
    }
    check_schema(url, &mut db).await?;
    if applied_migration(&mut db).await.map_err(failed)? < newest_migration() {
        return Err(PostgresOpenError::Older(url.to_string()));
    }
    Ok(OpenedForReading {
        channel: lease::notice_channel(&mut db).await.map_err(failed)?,
        readers: reader_pool(url),
    })
}

/// What a schema holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExistingTables {
    None,
    Ours,
}

async fn check_server(url: &DatabaseUrl, db: &mut PgConnection) -> Result<(), PostgresOpenError> {
    let failed = |error: sqlx::Error| from_sqlx(url, &error);
    let row = sqlx::query(
        "SELECT current_setting('server_version_num')::bigint, current_setting('server_version'),
                current_setting('server_encoding'), current_schema(), current_setting('fsync')",
    )
    .fetch_one(db)
    .await
    .map_err(failed)?;
    let version: i64 = row.try_get(0).map_err(failed)?;
    if version < OLDEST_VERSION {
        return Err(PostgresOpenError::TooOld {
            database: url.to_string(),
            version: row.try_get(1).map_err(failed)?,
        });
    }
    let encoding: String = row.try_get(2).map_err(failed)?;
    if encoding != "UTF8" {
        return Err(PostgresOpenError::Encoding {
            database: url.to_string(),
            encoding,
        });
    }
    if row.try_get::<Option<String>, _>(3).map_err(failed)?.is_none() {
        return Err(PostgresOpenError::NoSchema(url.to_string()));
    }
    if row.try_get::<String, _>(4).map_err(failed)? == "off" {
        tracing::warn!(database = %url, "PostgreSQL runs with fsync = off: nothing survives a power cut");
    }
    Ok(())
}

async fn is_read_only(db: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let setting: String = sqlx::query_scalar("SHOW transaction_read_only")
        .fetch_one(db)
        .await?;
    Ok(setting == "on")
}

/// Whether the schema is empty or this program's; an error if it is another's.
async fn check_tables(url: &DatabaseUrl, db: &mut PgConnection) -> Result<ExistingTables, PostgresOpenError> {
    let tables: Vec<String> = sqlx::query_scalar(
        "SELECT c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v', 'm', 'f') ORDER BY 1",
    )
    .fetch_all(db)
    .await
    .map_err(|error| from_sqlx(url, &error))?;
    match tables.iter().any(|table| table == OWN_TABLE) {
        true => Ok(ExistingTables::Ours),
        // These come first, so a first start that was cut short leaves just them.
        false if tables.iter().all(|table| FIRST_TABLES.contains(&table.as_str())) => {
            Ok(ExistingTables::None)
        }
        false => Err(PostgresOpenError::OtherProgram {
            database: url.to_string(),
            tables: tables.into_iter().take(3).collect::<Vec<_>>().join(", "),
        }),
    }
}

pub(super) fn newest_migration() -> i64 {
    newest_version(&MIGRATIONS)
}

fn reader_pool(url: &DatabaseUrl) -> PgPool {
    PgPoolOptions::new()
        .min_connections(0)
        .max_connections(READERS)
        .idle_timeout(Duration::from_secs(300))
        .acquire_timeout(Duration::from_secs(10))
        .after_connect(|db, _| {
            Box::pin(async move {
                sqlx::raw_sql(READER_SETTINGS).execute(db).await?;
                Ok(())
            })
        })
        .connect_lazy_with(url.connect_options())
}
