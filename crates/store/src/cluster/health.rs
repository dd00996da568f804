//! How the servers of a cluster fare, as the database has it: for `doctor`, also of one that is stopped.

use std::time::Duration;

use jiff::Timestamp;
use oubliette_protocol::{Error, Result, ServerId};

use crate::{
    db::{DbPool, DbRow, QueryBuilder, postgres::lease::DATABASE_CLOCK},
    db_error::read_error,
    store::Store,
};

/// What the database knows of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterHealth {
    /// The servers, the oldest first.
    pub servers: Vec<ServerHealth>,
    /// The code made with the cluster's key; none if no server has joined yet.
    pub key_fingerprint: Option<String>,
    /// How far this machine's clock is ahead of the database's, in milliseconds.
    pub clock_ahead_ms: i64,
}

/// A server of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerHealth {
    /// Its id.
    pub server_id: ServerId,
    /// Where the other servers reach it.
    pub address: String,
    /// The name of its host.
    pub host: String,
    /// Its version.
    pub version: String,
    /// When it started, by the database's clock.
    pub since: Timestamp,
    /// How long it has not been heard of.
    pub silent_for: Duration,
    /// How far its clock is ahead of the database's, in milliseconds; none of a version that does not say.
    pub clock_ahead_ms: Option<i64>,
}

impl Store {
    /// How the servers that share this database fare; none without PostgreSQL.
    pub async fn cluster_health(&self) -> Result<Option<ClusterHealth>> {
        match self.readers() {
            DbPool::Sqlite(_) => return Ok(None),
            DbPool::Postgres(_) => {}
        }
        let mut query = QueryBuilder::new(format!(
            "SELECT (SELECT fingerprint FROM cluster_key WHERE name = 'current'), -{DATABASE_CLOCK} + "
        ));
        query.push_bind(crate::now().as_millisecond());
        let head = query
            .build()
            .fetch_one(self.readers())
            .await
            .map_err(read_error)?;
        let query = QueryBuilder::new(format!(
            "SELECT server_id, address, host, version, started_at, {DATABASE_CLOCK} - last_seen, clock_ahead
             FROM servers ORDER BY started_at, server_id"
        ));
        let rows = query
            .build()
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        Ok(Some(ClusterHealth {
            servers: rows.iter().map(server_from_row).collect::<Result<_>>()?,
            key_fingerprint: head.try_get(0).map_err(read_error)?,
            clock_ahead_ms: head.try_get(1).map_err(read_error)?,
        }))
    }
}

fn server_from_row(row: &DbRow) -> Result<ServerHealth> {
    let text = |at: usize| row.try_get::<String>(at).map_err(read_error);
    let silent_ms: i64 = row.try_get(5).map_err(read_error)?;
    Ok(ServerHealth {
        server_id: text(0)?.parse()?,
        address: text(1)?,
        host: text(2)?,
        version: text(3)?,
        since: Timestamp::from_millisecond(row.try_get(4).map_err(read_error)?).map_err(Error::internal)?,
        silent_for: Duration::from_millis(silent_ms.max(0).unsigned_abs()),
        clock_ahead_ms: row.try_get(6).map_err(read_error)?,
    })
}
