//! A connection and a pool of either database, and how a transaction begins and ends.

use oubliette_protocol::ServerId;
use sqlx::{
    ConnectOptions, Connection, PgConnection, PgPool, SqliteConnection, SqlitePool,
    sqlite::SqliteConnectOptions,
};

use super::postgres::lease::WriteLease;

/// The connection that writes.
pub(crate) enum DbConnection {
    Sqlite(SqliteConnection),
    // Boxed like SQLite's is inside, so that a row or error does not carry its size along.
    Postgres(Box<PgConnection>),
}

/// How the connection that writes is replaced when it breaks.
pub(crate) enum DbConnector {
    Sqlite(Box<SqliteConnectOptions>),
    Postgres(Box<WriteLease>),
}

impl DbConnector {
    /// A new connection.
    pub(crate) async fn reconnect(&mut self) -> Result<DbConnection, oubliette_protocol::Error> {
        match self {
            DbConnector::Sqlite(options) => {
                let db = options.connect().await.map_err(crate::db_error::read_error)?;
                Ok(DbConnection::Sqlite(db))
            }
            DbConnector::Postgres(lease) => Ok(DbConnection::Postgres(Box::new(lease.reconnect().await?))),
        }
    }

    /// This server, if it is one of a cluster.
    pub(crate) fn member(&self) -> Option<&ServerId> {
        match self {
            DbConnector::Sqlite(_) => None,
            DbConnector::Postgres(lease) => lease.member(),
        }
    }

    /// Whether this process may not write any more, because another server has taken over.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self, DbConnector::Postgres(lease) if lease.is_lost())
    }
}

/// The connections that read.
#[derive(Debug, Clone)]
pub(crate) enum DbPool {
    Sqlite(SqlitePool),
    Postgres(PgPool),
}

/// What a statement is executed on.
pub(crate) enum DbExecutor<'c> {
    SqlitePool(&'c SqlitePool),
    Sqlite(&'c mut SqliteConnection),
    PostgresPool(&'c PgPool),
    Postgres(&'c mut PgConnection),
}

impl<'c> From<&'c DbPool> for DbExecutor<'c> {
    fn from(pool: &'c DbPool) -> Self {
        match pool {
            DbPool::Sqlite(pool) => DbExecutor::SqlitePool(pool),
            DbPool::Postgres(pool) => DbExecutor::PostgresPool(pool),
        }
    }
}

impl<'c> From<&'c mut DbConnection> for DbExecutor<'c> {
    fn from(db: &'c mut DbConnection) -> Self {
        match db {
            DbConnection::Sqlite(db) => DbExecutor::Sqlite(db),
            DbConnection::Postgres(db) => DbExecutor::Postgres(db),
        }
    }
}

impl DbPool {
    /// Closes its connections.
    pub(crate) async fn close(&self) {
        match self {
            DbPool::Sqlite(pool) => pool.close().await,
            DbPool::Postgres(pool) => pool.close().await,
        }
    }
}

impl DbConnection {
    /// Whether it is one to PostgreSQL, where a failed statement fails its whole transaction.
    pub(crate) fn is_postgres(&self) -> bool {
        matches!(self, DbConnection::Postgres(_))
    }

    /// Executes a statement without values.
    pub(crate) async fn run(&mut self, sql: &'static str) -> Result<(), sqlx::Error> {
        match self {
            DbConnection::Sqlite(db) => sqlx::query(sql).execute(db).await.map(drop),
            DbConnection::Postgres(db) => sqlx::raw_sql(sql).execute(&mut **db).await.map(drop),
        }
    }

    /// Ends it in an orderly way.
    pub(crate) async fn close(self) -> Result<(), sqlx::Error> {
        match self {
            DbConnection::Sqlite(db) => db.close().await,
            DbConnection::Postgres(db) => db.close().await,
        }
    }
}
