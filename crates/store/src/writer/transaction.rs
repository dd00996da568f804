//! The transaction of a group: how it begins, commits and is rolled back on either database.

use std::time::Duration;

use oubliette_protocol::{Error, SessionId};

use super::{
    group::{DatabaseWriter, MAX_CACHED_SESSIONS},
    job::{Survives, TouchedCaches},
    slot::GroupSlot,
};
use crate::{
    db::{
        DbConnection,
        batch::{self, TransactionEnds},
        connection::DbConnector,
        postgres::{lease::CommitOutcome, notice::CommitNotice},
    },
    db_error::WriteError,
};

/// How long PostgreSQL may take for the statements of a group; it ends a single one after a minute by itself.
const STATEMENTS_TIMEOUT: Duration = Duration::from_secs(90);
/// How long it may take to roll back.
const ROLLBACK_TIMEOUT: Duration = Duration::from_secs(5);

/// How a group's transaction begins and ends.
pub(super) enum TransactionPlan {
    /// By statements of their own.
    Separate,
    /// With the first and last of its statements, all of which are `INSERT`s: of events of logs whose position is cached,
    /// and of audit entries.
    WithStatements(TransactionEnds),
}

impl DatabaseWriter {
    /// How the transaction of these begins and ends.
    pub(super) fn plan_transaction(&self, slots: &[GroupSlot]) -> TransactionPlan {
        if self.tx.db.is_postgres() {
            return TransactionPlan::Separate;
        }
        let (mut events, mut entries) = (0, 0);
        let only_inserts = slots.iter().all(|slot| match slot {
            GroupSlot::Events { job, .. } => {
                events += job.bodies.len();
                job.row_change.is_none()
                    && self.positions.contains_key(&job.session)
                    && !self.webhooks.wants(&job.bodies)
            }
            GroupSlot::Audit { job, .. } => {
                entries += job.entries.len();
                self.audit.is_known()
            }
            GroupSlot::Work { .. } | GroupSlot::Debug { .. } => false,
        });
        // Above the maximum, `prepare` clears the positions.
        if !only_inserts || self.positions.len() > MAX_CACHED_SESSIONS {
            return TransactionPlan::Separate;
        }
        let is_one_statement = match (events, entries) {
            (rows, 0) | (0, rows) => batch::is_single_statement(rows),
            _ => false,
        };
        // A single statement is a transaction by itself.
        TransactionPlan::WithStatements(TransactionEnds {
            begin: !is_one_statement,
            commit: !is_one_statement,
        })
    }

    /// Begins a transaction that appends to the sessions of these trees, if this is a server of a cluster.
    pub(super) async fn begin(
        &mut self,
        survives: Survives,
        roots: Vec<SessionId>,
    ) -> Result<(), WriteError> {
        self.prepare(survives).await?;
        match (&mut self.connector, &mut self.tx.db) {
            (DbConnector::Postgres(lease), DbConnection::Postgres(db)) => {
                let begun = within_limit(lease.begin(db, survives, &roots)).await?;
                self.trees.begin_transaction(begun.owned);
                if let Some(now) = begun.now {
                    self.tx.now = now;
                }
                Ok(())
            }
            (_, db) => Ok(db.run("BEGIN IMMEDIATE").await?),
        }
    }

    /// Sets the durability level and resets what the transaction collects.
    pub(super) async fn prepare(&mut self, survives: Survives) -> Result<(), WriteError> {
        #[cfg(feature = "test-support")]
        if self.write_fault.load(std::sync::atomic::Ordering::SeqCst) {
            return Err(WriteError::Broken(Error::unavailable("the disk is full")));
        }
        // On PostgreSQL the level belongs to the transaction.
        if self.sync_level != survives && !self.tx.db.is_postgres() {
            // SQLite does not change it within a transaction.
            let level = match survives {
                Survives::Crash => "PRAGMA synchronous = NORMAL",
                Survives::PowerCut => "PRAGMA synchronous = FULL",
            };
            self.tx.db.run(level).await?;
            self.sync_level = survives;
        }
        if self.positions.len() > MAX_CACHED_SESSIONS {
            // Only between groups: within one, positions run ahead of the database.
            self.positions.clear();
            self.trees.forget();
        }
        self.tx.now = crate::now();
        self.outbox_filled = false;
        self.tx.deleted_sessions.clear();
        self.tx.moved_trees.clear();
        self.tx.revoked_tokens.clear();
        self.tx.touched = TouchedCaches::default();
        Ok(())
    }

    /// Commits the transaction and tells other servers. On PostgreSQL, if the answer does not arrive, a new connection is asked what
    /// became of it, so that nothing is written twice and nothing written is reported as lost.
    pub(super) async fn commit_transaction(&mut self, notices: Vec<CommitNotice>) -> Result<(), WriteError> {
        let (DbConnector::Postgres(lease), DbConnection::Postgres(db)) =
            (&mut self.connector, &mut self.tx.db)
        else {
            return Ok(self.tx.db.run("COMMIT").await?);
        };
        let Err(error) = within_limit(async { Ok(lease.commit(db, &notices).await?) }).await else {
            return Ok(());
        };
        if !matches!(error, WriteError::Disconnected(_)) {
            return Err(error);
        }
        match lease.commit_outcome().await {
            CommitOutcome::Committed(db) => {
                self.tx.db = DbConnection::Postgres(db);
                tracing::info!("the connection to the database broke at a commit, which had succeeded");
                Ok(())
            }
            CommitOutcome::RolledBack(db) => {
                self.tx.db = DbConnection::Postgres(db);
                Err(error)
            }
            CommitOutcome::Unknown => Err(WriteError::OutcomeUnknown(Error::unavailable(
                "the database went away while this was written: whether it was is not known",
            ))),
        }
    }

    /// Rolls back a failed transaction, clears every cache it may have made stale and reconnects if the
    /// connection is broken. Returns the error for the callers.
    pub(super) async fn roll_back(&mut self, error: WriteError) -> Error {
        // Indexes assigned in it were not used; positions have to be read from the database again.
        self.positions.clear();
        self.session_projects.clear();
        self.trees.forget();
        self.audit.forget_position();
        self.tx.deleted_sessions.clear();
        // A `COMMIT` that reported an error may still have reached the disk.
        self.invalidate_caches();
        if !self.end_transaction(&error).await {
            match self.connector.reconnect().await {
                Ok(db) => (self.tx.db, self.sync_level) = (db, Survives::Crash),
                Err(error) => {
                    tracing::error!(error = %error.for_log(), "reconnecting to the database failed");
                }
            }
        }
        if self.connector.is_lost() {
            // Another server writes now: what is cached here may be stale at any time.
            self.caches.disable();
        }
        let error = error.into_error();
        if self.last_error.lock().replace(error.clone()).is_none() {
            tracing::error!(error = %error.for_log(), "committing to the database failed");
        }
        error
    }

    /// Ends a transaction that failed. Returns whether the connection can be used again.
    async fn end_transaction(&mut self, error: &WriteError) -> bool {
        if matches!(error, WriteError::Disconnected(_) | WriteError::OutcomeUnknown(_)) {
            return false;
        }
        let db = &mut self.tx.db;
        let is_postgres = db.is_postgres();
        let ending = async {
            // Fails when SQLite has already rolled back by itself.
            let _ = db.run("ROLLBACK").await;
            db.run("SELECT 1").await.is_ok()
        };
        match is_postgres {
            true => tokio::time::timeout(ROLLBACK_TIMEOUT, ending)
                .await
                .unwrap_or(false),
            false => ending.await,
        }
    }
}

/// Waits for PostgreSQL, which may be on another machine that does not answer any more.
pub(super) async fn within_limit<T>(
    answer: impl Future<Output = Result<T, WriteError>>,
) -> Result<T, WriteError> {
    match tokio::time::timeout(STATEMENTS_TIMEOUT, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(WriteError::Disconnected(Error::unavailable(
            "the database does not answer: look at the server's log",
        ))),
    }
}
