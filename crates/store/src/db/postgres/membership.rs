//! Being a server of a cluster: joining it, being heard of every two seconds, declaring others dead, leaving.
//!
//! A server that is not heard of for [`DEAD_AFTER_MS`] is declared dead in one transaction: its lease is deleted, which waits for a
//! transaction of it that is under way, and its trees become those of the server that declares it. A server that cannot
//! reach the database stops its agents after [`ISOLATED_AFTER`], which is shorter, so that nothing is run twice. Only the
//! database's clock decides; a server's own measures nothing but how long it has waited.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use oubliette_protocol::{ServerId, SessionId};
use parking_lot::Mutex;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};
use tokio::{
    sync::{Notify, mpsc, watch},
    time::Instant,
};

use super::{
    lease::{self, DATABASE_CLOCK as CLOCK, LOCK_CLASS},
    lease_holder::{LeaseHolder, holder_of},
    notice::{CommitNotice, to_payloads},
    open::{check_schema, newest_migration},
    open_error::{PostgresOpenError, from_sqlx},
    url::DatabaseUrl,
};
use crate::cluster::{ClusterOptions, MemberState, OwnMemberState};

/// How often a server is heard of, and looks whether the others are.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// After how long, in milliseconds, a server that is not heard of is dead.
const DEAD_AFTER_MS: i64 = 8_000;
/// After how long a server that cannot reach the database stops what it runs. Counted from when it last asked and was answered.
const ISOLATED_AFTER: Duration = Duration::from_secs(6);
/// How long the database may take to answer one look.
const LOOK_TIMEOUT: Duration = Duration::from_secs(3);
/// How long declaring a server dead may take: its connections are ended first, so nothing holds it up for long.
const DECLARE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait before connecting again.
const RECONNECT_WAIT: Duration = Duration::from_millis(250);
/// How long leaving may take; a server that does not manage to is declared dead instead.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum trees without a server that one look finds.
const MAX_ORPHANS: i64 = 200;

/// The servers that run in this process: one, but for tests.
static MEMBERS_HERE: Mutex<BTreeSet<ServerId>> = Mutex::new(BTreeSet::new());

/// Makes a server one of the cluster.
pub(super) async fn join(
    url: &DatabaseUrl,
    db: &mut PgConnection,
    server: &ServerId,
    options: &ClusterOptions,
) -> Result<(), PostgresOpenError> {
    let failed = |error: sqlx::Error| from_sqlx(url, &error);
    let mut tx = db.begin().await.map_err(failed)?;
    // One at a time, so that of two first servers with different keys one is refused.
    sqlx::query("SELECT pg_advisory_xact_lock($1, hashtext(current_schema()))")
        .bind(LOCK_CLASS + 1)
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    let row = sqlx::query(AssertSqlSafe(format!(
        "SELECT (SELECT fingerprint FROM cluster_key WHERE name = 'current'),
                EXISTS (SELECT 1 FROM servers JOIN server_leases USING (server_id) WHERE last_seen >= {CLOCK} - $1)"
    )))
    .bind(DEAD_AFTER_MS)
    .fetch_one(&mut *tx)
    .await
    .map_err(failed)?;
    let known: Option<String> = row.try_get(0).map_err(failed)?;
    let has_others: bool = row.try_get(1).map_err(failed)?;
    if has_others && known.as_ref() != Some(&options.key_fingerprint) {
        return Err(PostgresOpenError::OtherClusterKey {
            database: url.to_string(),
        });
    }
    sqlx::query(
        "INSERT INTO cluster_key (name, fingerprint) VALUES ('current', $1)
         ON CONFLICT (name) DO UPDATE SET fingerprint = $1",
    )
    .bind(&options.key_fingerprint)
    .execute(&mut *tx)
    .await
    .map_err(failed)?;
    let this = LeaseHolder::this_process();
    sqlx::query(AssertSqlSafe(format!(
        "INSERT INTO servers (server_id, address, host, machine, pid, version, schema_version, started_at, last_seen,
             clock_ahead)
         VALUES ($1, $2, $3, $4, $5, $6, $7, {CLOCK}, {CLOCK}, $8 - {CLOCK})"
    )))
    .bind(server.as_str())
    .bind(&options.address)
    .bind(&this.host)
    .bind(&this.machine)
    .bind(this.pid)
    .bind(&this.version)
    .bind(newest_migration())
    .bind(crate::now().as_millisecond())
    .execute(&mut *tx)
    .await
    .map_err(failed)?;
    // Of a newer server that migrates at the same time and this one, one waits for the other at the row above.
    check_schema(url, &mut tx).await?;
    sqlx::query("INSERT INTO server_leases (server_id) VALUES ($1)")
        .bind(server.as_str())
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    // Before anybody can see it, so that nobody in this process takes it for one that is gone.
    MEMBERS_HERE.lock().insert(server.clone());
    tx.commit().await.map_err(failed)
}

/// Keeps a server in its cluster.
pub(crate) struct Membership {
    pub(crate) url: DatabaseUrl,
    pub(crate) server: ServerId,
    /// Where notices go.
    pub(crate) channel: String,
    pub(crate) state: Arc<OwnMemberState>,
    /// Whether this server does what one does for all: while this connection holds the lock of it.
    pub(crate) duty: Arc<watch::Sender<bool>>,
    /// Gets trees whose server is gone.
    pub(crate) left_trees: mpsc::UnboundedSender<Vec<SessionId>>,
    /// Has it look before the next time is due.
    pub(crate) look_now: Arc<Notify>,
}

/// What one look found.
enum LeaseCheck {
    /// This server is one of the cluster.
    Member,
    /// It was declared dead.
    DeclaredDead,
}

/// Another server, as a look finds it.
struct OtherServer {
    id: ServerId,
    holder: LeaseHolder,
    is_silent: bool,
}

impl OtherServer {
    /// Whether its process is known to be gone: it was on this machine, or is this one before it started anew.
    fn is_gone(&self) -> bool {
        if !self.holder.is_of_this_machine() {
            return false;
        }
        match i32::try_from(self.holder.pid) {
            Ok(_) if self.holder.pid == i64::from(std::process::id()) => {
                !MEMBERS_HERE.lock().contains(&self.id)
            }
            Ok(pid) => !oubliette_os::process_runs(pid),
            Err(_) => false,
        }
    }
}

impl Membership {
    /// Runs until the store is closed, or this server is fenced.
    pub(crate) async fn run(self, closed: watch::Receiver<bool>) {
        self.keep_up(closed).await;
        self.duty.send_replace(false);
        MEMBERS_HERE.lock().remove(&self.server);
    }

    async fn keep_up(&self, mut closed: watch::Receiver<bool>) {
        let mut db = None;
        // Side by side, on connections of their own: however long declaring another server dead takes, this one is heard of.
        tokio::select! {
            () = self.be_heard_of(&mut db) => return,
            () = self.watch_others() => return,
            _ = closed.wait_for(|closed| *closed) => {}
        }
        if tokio::time::timeout(LEAVE_TIMEOUT, self.leave(&mut db))
            .await
            .is_err()
        {
            tracing::warn!("leaving the cluster took too long; the other servers notice within seconds");
        }
    }

    /// Writes every two seconds that this server runs, until it is fenced.
    async fn be_heard_of(&self, db: &mut Option<PgConnection>) {
        let mut answered = Instant::now();
        loop {
            let asked = Instant::now();
            let limit = match self.state.current() {
                MemberState::Active => (answered + ISOLATED_AFTER).min(asked + LOOK_TIMEOUT),
                MemberState::Isolated | MemberState::Fenced => asked + LOOK_TIMEOUT,
            };
            let mut wait = HEARTBEAT;
            match tokio::time::timeout_at(limit, self.look(db)).await {
                Ok(Ok(LeaseCheck::Member)) if self.state.current() == MemberState::Isolated => {
                    // What it ran has been stopped, unrecorded: it begins anew, and its trees are recovered.
                    tracing::warn!("the database is reachable again; this server starts anew");
                    self.state.fence();
                    return;
                }
                Ok(Ok(LeaseCheck::Member)) => answered = asked,
                Ok(Ok(LeaseCheck::DeclaredDead)) => {
                    tracing::error!(
                        "this server was declared dead; it lets go of its sessions and starts anew"
                    );
                    self.state.fence();
                    return;
                }
                Ok(Err(error)) => {
                    tracing::warn!(%error, "the database does not answer this server's heartbeat; trying again");
                    (*db, wait) = (None, RECONNECT_WAIT);
                }
                Err(_) => {
                    tracing::warn!(
                        "the database does not answer this server's heartbeat in time; trying again"
                    );
                    (*db, wait) = (None, RECONNECT_WAIT);
                }
            }
            if answered.elapsed() >= ISOLATED_AFTER && self.state.isolate() {
                self.duty.send_replace(false);
                tracing::error!(
                    "the database has not answered for {} s: sessions are stopped, because other servers take them over",
                    ISOLATED_AFTER.as_secs()
                );
            }
            tokio::time::sleep_until(asked + wait).await;
        }
    }

    /// Looks every two seconds, and when a server has left, for servers that are gone and trees that nobody runs.
    async fn watch_others(&self) {
        let mut db = None;
        loop {
            if self.state.is_active()
                && let Err(error) = self.find_work(&mut db).await
            {
                tracing::warn!(%error, "looking for servers that are gone failed; trying again");
                db = None;
                self.duty.send_replace(false);
            }
            tokio::select! {
                () = tokio::time::sleep(HEARTBEAT) => {}
                () = self.look_now.notified() => {}
            }
        }
    }

    async fn look(&self, db: &mut Option<PgConnection>) -> Result<LeaseCheck, sqlx::Error> {
        let db = self.connected(db).await?;
        let heard = sqlx::query(AssertSqlSafe(format!(
            "UPDATE servers SET last_seen = {CLOCK}, clock_ahead = $2 - {CLOCK} WHERE server_id = $1
             AND EXISTS (SELECT 1 FROM server_leases WHERE server_leases.server_id = $1)"
        )))
        .bind(self.server.as_str())
        .bind(crate::now().as_millisecond())
        .execute(&mut *db)
        .await?;
        Ok(match heard.rows_affected() {
            0 => LeaseCheck::DeclaredDead,
            _ => LeaseCheck::Member,
        })
    }

    /// Declares servers dead that are, and finds trees that nobody runs and that have something left to do.
    async fn find_work(&self, db: &mut Option<PgConnection>) -> Result<(), sqlx::Error> {
        let others = self.others(self.connected(db).await?);
        for other in timed(LOOK_TIMEOUT, others).await? {
            let is_gone = other.is_gone();
            if !other.is_silent && !is_gone {
                continue;
            }
            let declaring = self.declare_dead(self.connected(db).await?, &other, is_gone);
            match timed(DECLARE_TIMEOUT, declaring).await {
                Ok(Some(trees)) => {
                    tracing::warn!(server = %other.id, host = other.holder.host, sessions = trees.len(),
                        "a server is gone; this one takes over its sessions");
                    let _ = self.left_trees.send(trees);
                }
                Ok(None) => {}
                Err(error) => {
                    // Its transaction, if it has one, ends with its connection, and so does the lock of the duty.
                    *db = None;
                    self.duty.send_replace(false);
                    tracing::warn!(server = %other.id, %error, "declaring a server dead failed; trying again");
                }
            }
        }
        let has_duty = *self.duty.borrow();
        if !has_duty {
            let taking = sqlx::query_scalar("SELECT pg_try_advisory_lock($1, hashtext(current_schema()))")
                .bind(LOCK_CLASS + 2)
                .fetch_one(self.connected(db).await?);
            if timed(LOOK_TIMEOUT, taking).await? {
                self.duty.send_replace(true);
            }
        }
        let orphans = self.orphans(self.connected(db).await?);
        let orphans = timed(LOOK_TIMEOUT, orphans).await?;
        if !orphans.is_empty() {
            let _ = self.left_trees.send(orphans);
        }
        Ok(())
    }

    async fn others(&self, db: &mut PgConnection) -> Result<Vec<OtherServer>, sqlx::Error> {
        let rows = sqlx::query(AssertSqlSafe(format!(
            "SELECT host, machine, pid, version, started_at, server_id, last_seen < {CLOCK} - $2
             FROM servers WHERE server_id <> $1"
        )))
        .bind(self.server.as_str())
        .bind(DEAD_AFTER_MS)
        .fetch_all(db)
        .await?;
        let mut others = Vec::with_capacity(rows.len());
        for row in rows {
            let id: String = row.try_get(5)?;
            // An id that is none was not written by a server.
            let Ok(id) = id.parse() else { continue };
            others.push(OtherServer {
                id,
                holder: holder_of(&row)?,
                is_silent: row.try_get(6)?,
            });
        }
        Ok(others)
    }

    /// Declares a server dead and takes its trees. None if it has been heard of meanwhile, or another server was faster.
    async fn declare_dead(
        &self,
        db: &mut PgConnection,
        other: &OtherServer,
        is_gone: bool,
    ) -> Result<Option<Vec<SessionId>>, sqlx::Error> {
        // A frozen server may have a transaction open, which the deletion of its lease would wait for.
        let ended = sqlx::query(AssertSqlSafe(format!(
            "SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a, servers s
             WHERE s.server_id = $1 AND (s.last_seen < {CLOCK} - $2 OR $3)
                 AND a.datname = current_database() AND a.application_name = $4"
        )))
        .bind(other.id.as_str())
        .bind(DEAD_AFTER_MS)
        .bind(is_gone)
        .bind(lease::connection_name(&other.id))
        .execute(&mut *db)
        .await;
        if let Err(error) = ended {
            tracing::warn!(server = %other.id, %error, "ending a dead server's connections failed; waiting for its transaction instead");
        }
        let mut tx = db.begin().await?;
        // This server may have been declared dead itself.
        let own = sqlx::query("SELECT 1 FROM server_leases WHERE server_id = $1 FOR SHARE")
            .bind(self.server.as_str())
            .fetch_optional(&mut *tx)
            .await?;
        let dead = sqlx::query(AssertSqlSafe(format!(
            "SELECT 1 FROM servers WHERE server_id = $1 AND (last_seen < {CLOCK} - $2 OR $3) FOR UPDATE"
        )))
        .bind(other.id.as_str())
        .bind(DEAD_AFTER_MS)
        .bind(is_gone)
        .fetch_optional(&mut *tx)
        .await?;
        if own.is_none() || dead.is_none() {
            tx.rollback().await?;
            return Ok(None);
        }
        sqlx::query("DELETE FROM server_leases WHERE server_id = $1")
            .bind(other.id.as_str())
            .execute(&mut *tx)
            .await?;
        let rows =
            sqlx::query("UPDATE session_owners SET server_id = $1 WHERE server_id = $2 RETURNING root_id")
                .bind(self.server.as_str())
                .bind(other.id.as_str())
                .fetch_all(&mut *tx)
                .await?;
        sqlx::query("DELETE FROM servers WHERE server_id = $1")
            .bind(other.id.as_str())
            .execute(&mut *tx)
            .await?;
        self.notify(&mut tx).await?;
        tx.commit().await?;
        let mut trees = Vec::with_capacity(rows.len());
        for row in rows {
            trees.extend(row.try_get::<String, _>(0)?.parse());
        }
        Ok(Some(trees))
    }

    /// Trees that no server runs and in which a turn was under way, a message or a call waits, or an agent's key is valid.
    async fn orphans(&self, db: &mut PgConnection) -> Result<Vec<SessionId>, sqlx::Error> {
        let rows = sqlx::query(
            "SELECT DISTINCT s.root_id FROM (
                 SELECT session_id FROM sessions WHERE status IN ('starting', 'running', 'switching')
                 UNION SELECT session_id FROM queue
                 UNION SELECT session_id FROM approvals WHERE status = 'pending'
                 UNION SELECT session_id FROM tokens WHERE session_id IS NOT NULL AND revoked_at IS NULL
             ) work JOIN sessions s ON s.session_id = work.session_id
             WHERE NOT EXISTS (
                 SELECT 1 FROM session_owners o JOIN server_leases l ON l.server_id = o.server_id
                 WHERE o.root_id = s.root_id)
             LIMIT $1",
        )
        .bind(MAX_ORPHANS)
        .fetch_all(db)
        .await?;
        let mut trees = Vec::with_capacity(rows.len());
        for row in rows {
            trees.extend(row.try_get::<String, _>(0)?.parse());
        }
        Ok(trees)
    }

    /// Leaves the cluster: the others may take everything at once.
    async fn leave(&self, db: &mut Option<PgConnection>) {
        let leaving = async {
            let mut tx = self.connected(db).await?.begin().await?;
            for sql in [
                "DELETE FROM server_leases WHERE server_id = $1",
                "DELETE FROM session_owners WHERE server_id = $1",
                "DELETE FROM servers WHERE server_id = $1",
            ] {
                sqlx::query(sql)
                    .bind(self.server.as_str())
                    .execute(&mut *tx)
                    .await?;
            }
            self.notify(&mut tx).await?;
            tx.commit().await
        };
        if let Err(error) = leaving.await {
            tracing::warn!(%error, "leaving the cluster failed; the other servers notice within seconds");
        }
        if let Some(db) = db.take() {
            let _ = db.close().await;
        }
    }

    /// Tells the others, when the transaction commits, that a server is gone.
    async fn notify(&self, tx: &mut PgConnection) -> Result<(), sqlx::Error> {
        for payload in to_payloads(&[CommitNotice::Servers]) {
            sqlx::query("SELECT pg_notify($1, $2)")
                .bind(&self.channel)
                .bind(payload)
                .execute(&mut *tx)
                .await?;
        }
        Ok(())
    }

    async fn connected<'db>(
        &self,
        db: &'db mut Option<PgConnection>,
    ) -> Result<&'db mut PgConnection, sqlx::Error> {
        if db.is_none() {
            let new = lease::connect_member(&self.url, &self.server).await?;
            return Ok(db.insert(new));
        }
        db.as_mut()
            .ok_or_else(|| sqlx::Error::Io(std::io::ErrorKind::NotConnected.into()))
    }
}

async fn timed<T>(
    limit: Duration,
    answer: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    tokio::time::timeout(limit, answer)
        .await
        .unwrap_or_else(|_| Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())))
}
