//! Who may write. One server holds the lease: an advisory lock of PostgreSQL on the connection that writes, and a number,
//! the epoch, that grows with every server that takes it.
//!
//! The lock ends with its connection, so a server that was killed is followed at once and nothing has to expire. The
//! number makes it safe: each transaction reads it, and locks its row against a change, before it writes. A server whose
//! connection broke and whose lease was taken meanwhile finds another number and writes nothing any more.
//!
//! Servers of a cluster share the lock, which keeps out a server that wants the database alone, and each has a lease of its
//! own: its row in `server_leases`, which is deleted when it is declared dead.

use std::time::Duration;

use jiff::Timestamp;
use oubliette_protocol::{Error, ServerId, SessionId};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, Row, postgres::PgConnectOptions};

use super::{
    lease_holder::{LeaseHolder, read_holder, read_members},
    notice::{CommitNotice, to_payloads},
    open_error::{PostgresOpenError, from_sqlx},
    url::DatabaseUrl,
};
use crate::{db_error::WriteError, writer::Survives};

/// The first half of the advisory lock's key; the second is the schema's hash.
pub(super) const LOCK_CLASS: i32 = 0x0b11;
/// How long a lock is waited for whose holder seems to be gone: PostgreSQL notices a closed connection within moments.
const DEAD_HOLDER_TIMEOUT: Duration = Duration::from_secs(5);
/// How often such a lock is tried.
const LOCK_POLL: Duration = Duration::from_millis(50);
/// How long a database that is away is waited for to learn what became of a commit.
const OUTCOME_TIMEOUT: Duration = Duration::from_secs(60);
/// How long to wait before connecting again.
const RECONNECT_WAIT: Duration = Duration::from_millis(500);
/// How long connecting may take.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Settings of the connection that writes. A peer that is gone is noticed within 30 s, so that its lock is released; a
/// server that stops in the middle of a transaction holds its locks for a minute.
const SESSION_SETTINGS: &str = "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; \
    SET tcp_keepalives_count = 4; SET statement_timeout = '60s'; SET lock_timeout = '20s'; \
    SET idle_in_transaction_session_timeout = '60s'; \
    SET client_min_messages = warning; SET default_transaction_isolation = 'read committed'";

/// Settings of a member's connections that write, besides. A member that freezes in a transaction keeps the others from
/// taking over its sessions until the transaction has ended.
pub(super) const MEMBER_SETTINGS: &str =
    "SET lock_timeout = '5s'; SET statement_timeout = '20s'; SET idle_in_transaction_session_timeout = '4s'";

/// The database's clock in milliseconds.
pub(crate) const DATABASE_CLOCK: &str = "(EXTRACT(EPOCH FROM clock_timestamp()) * 1000)::bigint";

/// Who shares a database with whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LockMode {
    /// One server alone.
    Exclusive,
    /// A server of a cluster.
    Shared,
}

/// The lease, as the server that holds it knows it.
pub(crate) struct WriteLease {
    url: DatabaseUrl,
    /// Where notices of commits go.
    channel: String,
    kind: LeaseKind,
    /// The number of the transaction under way, by which its outcome can be asked for on another connection.
    transaction: Option<i64>,
    /// Another server has taken the lease.
    lost: bool,
}

/// What a lease is checked by.
enum LeaseKind {
    /// One server alone: by this number.
    Sole { epoch: i64 },
    /// A server of a cluster: by its row.
    Member(ServerId),
}

/// What a server learns as its transaction begins.
#[derive(Default)]
pub(crate) struct BegunTransaction {
    /// Of the trees it asked for, those it owns.
    pub(crate) owned: Vec<SessionId>,
    /// The database's time, of a server of a cluster: whose own clock is wrong writes no other times than the others.
    pub(crate) now: Option<Timestamp>,
}

/// What became of a commit whose answer did not arrive.
pub(crate) enum CommitOutcome {
    Committed(Box<PgConnection>),
    RolledBack(Box<PgConnection>),
    /// The database cannot be asked.
    Unknown,
}

/// The channel of a schema's notices.
pub(super) async fn notice_channel(db: &mut PgConnection) -> Result<String, sqlx::Error> {
    let hash: i32 = sqlx::query_scalar("SELECT hashtext(current_schema())")
        .fetch_one(db)
        .await?;
    Ok(format!("oubliette_{:08x}", hash.cast_unsigned()))
}

/// Connects for writing.
pub(super) async fn connect(options: &PgConnectOptions) -> Result<PgConnection, sqlx::Error> {
    let connecting = async {
        let mut db = options.connect().await?;
        sqlx::raw_sql(SESSION_SETTINGS).execute(&mut db).await?;
        // What must survive a power cut waits for the disk, whatever the database's default is.
        let level: String = sqlx::query_scalar("SHOW synchronous_commit")
            .fetch_one(&mut db)
            .await?;
        if level == "off" {
            sqlx::raw_sql("SET synchronous_commit = on")
                .execute(&mut db)
                .await?;
        }
        Ok(db)
    };
    match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
        Ok(connected) => connected,
        Err(_) => Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())),
    }
}

/// Takes the lock. An error that names the holder if another server has it.
pub(super) async fn lock(
    url: &DatabaseUrl,
    db: &mut PgConnection,
    mode: LockMode,
) -> Result<(), PostgresOpenError> {
    let failed = |error: sqlx::Error| from_sqlx(url, &error);
    let give_up = tokio::time::Instant::now() + DEAD_HOLDER_TIMEOUT;
    let sql = match mode {
        LockMode::Exclusive => "SELECT pg_try_advisory_lock($1, hashtext(current_schema()))",
        LockMode::Shared => "SELECT pg_try_advisory_lock_shared($1, hashtext(current_schema()))",
    };
    loop {
        let locked: bool = sqlx::query_scalar(sql)
            .bind(LOCK_CLASS)
            .fetch_one(&mut *db)
            .await
            .map_err(failed)?;
        if locked {
            return Ok(());
        }
        let held = held_mode(db).await.map_err(failed)?;
        let holders = match held {
            Some(LockMode::Shared) => read_members(db).await.map_err(failed)?,
            Some(LockMode::Exclusive) | None => read_holder(db).await.map_err(failed)?.into_iter().collect(),
        };
        let runs = holders.iter().any(LeaseHolder::runs);
        if runs || tokio::time::Instant::now() >= give_up {
            let holder = holders.into_iter().next().unwrap_or_else(|| LeaseHolder {
                host: "an unknown host".into(),
                machine: String::new(),
                pid: 0,
                version: "of an unknown version".into(),
                since: None,
            });
            let database = url.to_string();
            return Err(match (mode, held) {
                (LockMode::Exclusive, Some(LockMode::Shared)) => {
                    PostgresOpenError::SharedByCluster { database, holder }
                }
                (LockMode::Shared, _) => PostgresOpenError::UsedAlone { database, holder },
                (LockMode::Exclusive, _) => PostgresOpenError::InUse { database, holder },
            });
        }
        tokio::time::sleep(LOCK_POLL).await;
    }
}

/// How the lock is held by others; none if it is not, or is no longer.
async fn held_mode(db: &mut PgConnection) -> Result<Option<LockMode>, sqlx::Error> {
    let mode: Option<String> = sqlx::query_scalar(
        "SELECT mode FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2
             AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
             AND classid::bigint = $1 AND objid::bigint = (hashtext(current_schema())::bigint & 4294967295)
         LIMIT 1",
    )
    .bind(i64::from(LOCK_CLASS))
    .fetch_optional(db)
    .await?;
    Ok(mode.map(|mode| match mode.as_str() {
        "ShareLock" => LockMode::Shared,
        _ => LockMode::Exclusive,
    }))
}

impl WriteLease {
    /// Takes the lease: the lock is held, the schema is there.
    pub(super) async fn take(url: DatabaseUrl, db: &mut PgConnection) -> Result<Self, sqlx::Error> {
        let this = LeaseHolder::this_process();
        let epoch = sqlx::query_scalar(
            "INSERT INTO server_lease (name, epoch, host, machine, pid, version, taken_at)
             VALUES ('writer', 1, $1, $2, $3, $4, $5)
             ON CONFLICT (name) DO UPDATE SET epoch = server_lease.epoch + 1, host = $1, machine = $2, pid = $3,
                 version = $4, taken_at = $5
             RETURNING epoch",
        )
        .bind(&this.host)
        .bind(&this.machine)
        .bind(this.pid)
        .bind(&this.version)
        .bind(crate::now().as_millisecond())
        .fetch_one(&mut *db)
        .await?;
        // Servers of a cluster are all gone, because their lock is this one's. One that comes back finds itself declared dead.
        sqlx::raw_sql("DELETE FROM server_leases; DELETE FROM servers; DELETE FROM session_owners")
            .execute(&mut *db)
            .await?;
        Ok(Self {
            channel: notice_channel(db).await?,
            url,
            kind: LeaseKind::Sole { epoch },
            transaction: None,
            lost: false,
        })
    }

    /// The lease of a server of a cluster, which has joined it.
    pub(super) async fn of_member(
        url: DatabaseUrl,
        db: &mut PgConnection,
        server: ServerId,
    ) -> Result<Self, sqlx::Error> {
        Ok(Self {
            channel: notice_channel(db).await?,
            url,
            kind: LeaseKind::Member(server),
            transaction: None,
            lost: false,
        })
    }

    /// The database.
    pub(crate) fn url(&self) -> &DatabaseUrl {
        &self.url
    }

    /// Where notices of commits go.
    pub(crate) fn channel(&self) -> &str {
        &self.channel
    }

    /// This server's id, if it is one of a cluster.
    pub(crate) fn member(&self) -> Option<&ServerId> {
        match &self.kind {
            LeaseKind::Sole { .. } => None,
            LeaseKind::Member(server) => Some(server),
        }
    }

    /// Begins a transaction, if the lease is still held. Of a server of a cluster, says which of these trees it owns.
    pub(crate) async fn begin(
        &mut self,
        db: &mut PgConnection,
        survives: Survives,
        roots: &[SessionId],
    ) -> Result<BegunTransaction, WriteError> {
        self.transaction = None;
        if self.lost {
            return Err(WriteError::Broken(self.lost_error()));
        }
        // One round trip. `FOR SHARE` waits for a server that is taking the lease, and makes one that wants to wait for
        // this transaction.
        let level = match survives {
            Survives::Crash => "SET LOCAL synchronous_commit = off;",
            Survives::PowerCut => "",
        };
        let lease = match &self.kind {
            LeaseKind::Sole { .. } => {
                "SELECT epoch, pg_current_xact_id()::text::bigint FROM server_lease WHERE name = 'writer' FOR SHARE".to_owned()
            }
            // An id has no character that would need quoting.
            LeaseKind::Member(server) => format!(
                "SELECT {DATABASE_CLOCK}, pg_current_xact_id()::text::bigint FROM server_leases WHERE server_id = '{server}' FOR SHARE{}",
                owned_query(server, roots)
            ),
        };
        let sql = format!("BEGIN;{level}{lease}");
        let mut rows = sqlx::raw_sql(AssertSqlSafe(sql))
            .fetch_all(&mut *db)
            .await?
            .into_iter();
        let (number, transaction): (i64, i64) = match rows.next() {
            Some(row) if row.len() == 2 => (row.try_get(0)?, row.try_get(1)?),
            Some(_) | None => (-1, 0),
        };
        let is_held = match &self.kind {
            LeaseKind::Sole { epoch } => number == *epoch,
            LeaseKind::Member(_) => number >= 0,
        };
        if !is_held {
            self.lost = true;
            return Err(WriteError::Broken(self.lost_error()));
        }
        self.transaction = Some(transaction);
        let mut owned = Vec::new();
        for row in rows {
            owned.push(row.try_get::<String, _>(0)?.parse()?);
        }
        let now = match &self.kind {
            LeaseKind::Sole { .. } => None,
            LeaseKind::Member(_) => Timestamp::from_millisecond(number).ok(),
        };
        Ok(BegunTransaction { owned, now })
    }

    /// Commits the transaction and, with it, tells other servers what it changed.
    pub(crate) async fn commit(
        &mut self,
        db: &mut PgConnection,
        notices: &[CommitNotice],
    ) -> Result<(), sqlx::Error> {
        let mut sql = String::new();
        for payload in to_payloads(notices) {
            // A payload has ids and numbers only; quoted all the same.
            let payload = payload.replace('\'', "''");
            sql.push_str(&format!("SELECT pg_notify('{}', '{payload}');", self.channel));
        }
        sql.push_str("COMMIT");
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *db).await?;
        self.transaction = None;
        Ok(())
    }

    /// What became of the transaction whose commit was not answered. Asked on a new connection, which has the lock: so the
    /// old one has ended, and the transaction with it.
    pub(crate) async fn commit_outcome(&mut self) -> CommitOutcome {
        let Some(transaction) = self.transaction.take() else {
            return CommitOutcome::Unknown;
        };
        let give_up = tokio::time::Instant::now() + OUTCOME_TIMEOUT;
        let mut db = loop {
            match self.reconnect().await {
                Ok(db) => break db,
                Err(_) if self.lost || tokio::time::Instant::now() >= give_up => {
                    return CommitOutcome::Unknown;
                }
                Err(_) => tokio::time::sleep(RECONNECT_WAIT).await,
            }
        };
        loop {
            let status = sqlx::query_scalar::<_, Option<String>>("SELECT pg_xact_status($1::text::xid8)")
                .bind(transaction.to_string())
                .fetch_one(&mut db)
                .await;
            match status.ok().flatten().as_deref() {
                Some("committed") => return CommitOutcome::Committed(Box::new(db)),
                Some("aborted") => return CommitOutcome::RolledBack(Box::new(db)),
                // The lock that servers of a cluster share does not tell that the old connection has ended.
                Some("in progress") if tokio::time::Instant::now() < give_up => {
                    tokio::time::sleep(LOCK_POLL).await;
                }
                _ => return CommitOutcome::Unknown,
            }
        }
    }

    /// Whether another server has taken the lease.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    /// A new connection in the place of one that broke. An error if another server has taken the lease meanwhile.
    pub(crate) async fn reconnect(&mut self) -> Result<PgConnection, Error> {
        if self.lost {
            return Err(self.lost_error());
        }
        let failed = |error: sqlx::Error| Error::unavailable(from_sqlx(&self.url, &error).to_string());
        let (mode, mut db) = match &self.kind {
            LeaseKind::Sole { .. } => {
                let db = connect(&self.url.connect_options()).await.map_err(failed)?;
                (LockMode::Exclusive, db)
            }
            LeaseKind::Member(server) => {
                let db = connect_member(&self.url, server).await.map_err(failed)?;
                (LockMode::Shared, db)
            }
        };
        // Before the lock, which another server may have for itself now.
        let lost = match &self.kind {
            LeaseKind::Sole { .. } => false,
            LeaseKind::Member(server) => !has_lease(&mut db, server).await.map_err(failed)?,
        };
        if !lost {
            match lock(&self.url, &mut db, mode).await {
                Ok(()) => {}
                Err(error) => return Err(Error::unavailable(error.to_string())),
            }
        }
        let lost = lost
            || match &self.kind {
                LeaseKind::Sole { epoch } => {
                    let current: Option<i64> =
                        sqlx::query_scalar("SELECT epoch FROM server_lease WHERE name = 'writer'")
                            .fetch_optional(&mut db)
                            .await
                            .map_err(failed)?;
                    current != Some(*epoch)
                }
                LeaseKind::Member(server) => !has_lease(&mut db, server).await.map_err(failed)?,
            };
        if lost {
            self.lost = true;
            // Closed at once: this server must not hold the lock.
            let _ = db.close().await;
            return Err(self.lost_error());
        }
        Ok(db)
    }

    fn lost_error(&self) -> Error {
        match &self.kind {
            LeaseKind::Sole { .. } => Error::unavailable(
                "another oubliette has taken over the database: stop this server, or start it again",
            ),
            LeaseKind::Member(_) => fenced_error(),
        }
    }
}

/// What a server is told that the others have declared dead.
pub(crate) fn fenced_error() -> Error {
    Error::unavailable(
        "this server was not heard of for too long, and another one has taken over its sessions: it starts anew; try again",
    )
}

/// Connects for writing as a server of a cluster. The connection has the server's id as its name, by which the others end
/// it if the server is declared dead.
pub(super) async fn connect_member(
    url: &DatabaseUrl,
    server: &ServerId,
) -> Result<PgConnection, sqlx::Error> {
    let options = url.connect_options().application_name(&connection_name(server));
    let mut db = connect(&options).await?;
    sqlx::raw_sql(MEMBER_SETTINGS).execute(&mut db).await?;
    Ok(db)
}

/// The name of a server's connections.
pub(super) fn connection_name(server: &ServerId) -> String {
    format!("oubliette {server}")
}

/// Whether a server may write.
pub(super) async fn has_lease(db: &mut PgConnection, server: &ServerId) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM server_leases WHERE server_id = $1)")
        .bind(server.as_str())
        .fetch_one(db)
        .await
}

/// The statement, after another one, that asks which trees a server owns. Nothing for no trees. It locks nothing: a tree changes
/// hands only in a transaction of its owner, or in one that deletes its owner's lease, which the transaction has locked.
fn owned_query(server: &ServerId, roots: &[SessionId]) -> String {
    if roots.is_empty() {
        return String::new();
    }
    let roots: Vec<String> = roots.iter().map(|root| format!("'{root}'")).collect();
    format!(
        ";SELECT root_id FROM session_owners WHERE server_id = '{server}' AND root_id IN ({})",
        roots.join(",")
    )
}
