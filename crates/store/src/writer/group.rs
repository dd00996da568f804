//! One group of writes, from `BEGIN` to `COMMIT`.
//!
//! A refused write is rolled back alone, to a savepoint; the rest of its group is committed. When the
//! transaction itself fails (a full disk, for example), all of it is rolled back and each write is retried in a
//! transaction of its own, so that one that cannot be written does not fail the others.

use std::{collections::HashMap, sync::Arc};

use oubliette_protocol::{Error, ProjectId, SessionId};
use parking_lot::Mutex;

use super::{
    apply::LogPosition,
    audit::AuditTail,
    job::{Survives, TouchedCaches, WriteTx, WriterTask},
    outbox::WebhookOutbox,
    owned_trees::OwnedTrees,
    slot::{GroupSlot, fail_all},
    transaction::{TransactionPlan, within_limit},
    unwritten::UnwrittenEvents,
};
use crate::{
    db::{DbConnection, batch::TransactionEnds, connection::DbConnector},
    db_error::WriteError,
    log::{
        debugger::{DebugJob, DebugQueue},
        tail::SessionTails,
    },
    store::StoreCaches,
    tables::purge,
};

/// Maximum sessions whose log position or project the writer caches; beyond it, the cache is cleared.
pub(super) const MAX_CACHED_SESSIONS: usize = 4096;

/// The writer's connection and caches.
pub(super) struct DatabaseWriter {
    pub(super) tx: WriteTx,
    /// Makes a new connection when this one breaks; on PostgreSQL with the lease that allows to write.
    pub(super) connector: DbConnector,
    pub(super) tails: Arc<SessionTails>,
    pub(super) debug_queue: Arc<DebugQueue>,
    pub(super) unwritten: Arc<UnwrittenEvents>,
    pub(super) caches: Arc<StoreCaches>,
    /// The error of the last commit, if it failed.
    pub(super) last_error: Arc<Mutex<Option<Error>>>,
    /// What the commit that failed last was to survive. A commit that survives less does not prove that it is over.
    failed_level: Survives,
    /// What the connection's `synchronous` setting guarantees now, on SQLite.
    pub(super) sync_level: Survives,
    /// Each session's next log position. Valid only while every commit succeeds.
    pub(super) positions: HashMap<SessionId, LogPosition>,
    /// Each session's project.
    pub(super) session_projects: HashMap<SessionId, ProjectId>,
    /// The trees of sessions, of a server of a cluster.
    pub(super) trees: OwnedTrees,
    /// The audit log's next position, and whether entries are to be synchronised to the disk.
    pub(super) audit: AuditTail,
    /// What webhooks want, and their outbox.
    pub(super) webhooks: Arc<WebhookOutbox>,
    /// Whether the transaction put something into the outbox.
    pub(super) outbox_filled: bool,
    /// Whether rows of deleted projects may be left to purge.
    pub(super) purging: bool,
    /// While true, every write fails as on a full disk.
    #[cfg(feature = "test-support")]
    pub(super) write_fault: Arc<std::sync::atomic::AtomicBool>,
}

/// Where a group's transaction failed.
enum GroupFailure {
    /// At `BEGIN`. Retrying the writes one by one would only wait for the same lock again.
    AtBegin(Error),
    /// While a write was applied, or at `COMMIT`.
    Within(Error),
    /// At `COMMIT`, and what became of it is not known: nothing of it may be tried again.
    OutcomeUnknown(Error),
}

impl DatabaseWriter {
    pub(super) fn new(
        db: DbConnection,
        connector: DbConnector,
        tails: Arc<SessionTails>,
        debug_queue: Arc<DebugQueue>,
        unwritten: Arc<UnwrittenEvents>,
        caches: Arc<StoreCaches>,
        last_error: Arc<Mutex<Option<Error>>>,
    ) -> Self {
        let tx = WriteTx {
            db,
            now: crate::now(),
            deleted_sessions: Vec::new(),
            needs_purge: false,
            touched: TouchedCaches::default(),
            member: connector.member().cloned(),
            moved_trees: Vec::new(),
            revoked_tokens: Vec::new(),
        };
        let (positions, session_projects) = Default::default();
        Self {
            tx,
            connector,
            tails,
            debug_queue,
            unwritten,
            caches,
            last_error,
            failed_level: Survives::Crash,
            sync_level: Survives::Crash,
            positions,
            session_projects,
            trees: OwnedTrees::default(),
            audit: AuditTail::default(),
            webhooks: Arc::default(),
            outbox_filled: false,
            purging: true,
            #[cfg(feature = "test-support")]
            write_fault: Arc::default(),
        }
    }

    /// Commits these tasks and debugger events, and events that could not be written before, as one group.
    pub(super) async fn commit_group(&mut self, tasks: &mut Vec<WriterTask>, debug: Vec<DebugJob>) {
        let recorded = debug.len();
        // First, so that no event overtakes an earlier one of its session.
        let unwritten = self.unwritten.begin_retry().into_iter().map(WriterTask::Events);
        self.commit(unwritten.chain(tasks.drain(..)), debug).await;
        self.unwritten.end_retry();
        self.debug_queue.mark_written(recorded);
    }

    /// Commits a group, publishes it to followers and answers its callers.
    async fn commit(&mut self, tasks: impl Iterator<Item = WriterTask>, debug: Vec<DebugJob>) {
        let tasks = tasks.filter_map(|task| match task {
            WriterTask::Events(job) => Some(GroupSlot::Events {
                job,
                events: Vec::new(),
                refused: None,
            }),
            WriterTask::Work(job) => Some(GroupSlot::Work { job, refused: None }),
            WriterTask::Audit(job) => Some(GroupSlot::Audit { job, first: 0 }),
            WriterTask::Close => None,
        });
        let debug = debug.into_iter().map(|job| GroupSlot::Debug {
            job: Box::new(job),
            position: None,
        });
        let mut slots: Vec<GroupSlot> = tasks.chain(debug).collect();
        if slots.is_empty() {
            return;
        }
        match self.try_commit(&mut slots).await {
            Ok(()) => self.publish_and_answer(slots),
            Err(GroupFailure::Within(mut last_error)) if slots.len() > 1 => {
                for slot in slots {
                    let mut alone = vec![slot];
                    if self.has_unwritten_before(&alone[0]) {
                        fail_all(alone, &last_error, &self.unwritten);
                        continue;
                    }
                    match self.try_commit(&mut alone).await {
                        Ok(()) => self.publish_and_answer(alone),
                        Err(GroupFailure::AtBegin(error) | GroupFailure::Within(error)) => {
                            fail_all(alone, &error, &self.unwritten);
                            last_error = error;
                        }
                        Err(GroupFailure::OutcomeUnknown(error)) => {
                            alone.into_iter().for_each(|slot| slot.answer(Some(&error)));
                            last_error = error;
                        }
                    }
                }
            }
            Err(GroupFailure::AtBegin(error) | GroupFailure::Within(error)) => {
                fail_all(slots, &error, &self.unwritten);
            }
            Err(GroupFailure::OutcomeUnknown(error)) => {
                slots.into_iter().for_each(|slot| slot.answer(Some(&error)));
            }
        }
    }

    /// Whether another server has taken over the database.
    pub(super) fn is_superseded(&self) -> bool {
        self.connector.is_lost()
    }

    /// Whether earlier events of the same session are unwritten, which these must not overtake.
    fn has_unwritten_before(&self, slot: &GroupSlot) -> bool {
        matches!(slot, GroupSlot::Events { job, .. } if self.unwritten.is_waiting(&job.session))
    }

    /// Deletes a bounded number of rows that deleted projects left behind.
    pub(super) async fn purge_chunk(&mut self) {
        let outcome = async {
            self.begin(Survives::Crash, Vec::new()).await?;
            let more = purge::delete_chunk(&mut self.tx).await?;
            self.commit_transaction(Vec::new()).await?;
            Ok::<bool, WriteError>(more)
        };
        match outcome.await {
            Ok(more) => self.purging = more,
            Err(error) => {
                self.roll_back(error).await;
                // Retried after the next deletion or restart.
                self.purging = false;
            }
        }
    }

    async fn try_commit(&mut self, slots: &mut [GroupSlot]) -> Result<(), GroupFailure> {
        let survives = slots
            .iter()
            .map(GroupSlot::survives)
            .max()
            .unwrap_or(Survives::Crash);
        let roots = match &self.tx.member {
            Some(_) => self.trees.roots_of(slots),
            None => Vec::new(),
        };
        let begun = match self.plan_transaction(slots) {
            TransactionPlan::Separate => self.begin(survives, roots).await.map(|()| None),
            TransactionPlan::WithStatements(ends) => self.prepare(survives).await.map(|()| Some(ends)),
        };
        let applied = match begun {
            Ok(None) => self.apply_and_commit(slots).await,
            Ok(Some(ends)) => self.apply(slots, ends).await,
            Err(error) => return Err(GroupFailure::AtBegin(self.roll_back(error).await)),
        };
        match applied {
            Ok(()) => {
                if survives >= self.failed_level && self.last_error.lock().take().is_some() {
                    self.failed_level = Survives::Crash;
                    tracing::info!("the database can be written again");
                }
                self.audit.committed(slots, survives);
                Ok(())
            }
            Err(error) => {
                self.failed_level = self.failed_level.max(survives);
                let is_unknown = matches!(error, WriteError::OutcomeUnknown(_));
                let error = self.roll_back(error).await;
                Err(match is_unknown {
                    true => GroupFailure::OutcomeUnknown(error),
                    false => GroupFailure::Within(error),
                })
            }
        }
    }

    async fn apply_and_commit(&mut self, slots: &mut [GroupSlot]) -> Result<(), WriteError> {
        match self.tx.db.is_postgres() {
            true => within_limit(self.apply(slots, TransactionEnds::default())).await?,
            false => self.apply(slots, TransactionEnds::default()).await?,
        }
        let notices = self.notices(slots);
        self.commit_transaction(notices).await
    }
}
