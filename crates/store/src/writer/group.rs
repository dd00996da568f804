//! One group of writes, from `BEGIN` to `COMMIT`.
//!
//! A refused write is rolled back alone, to a savepoint; the rest of its group is committed. When the
//! transaction itself fails (a full disk, for example), all of it is rolled back and each write is retried in a
//! transaction of its own, so that one that cannot be written does not fail the others.

use std::{collections::HashMap, sync::Arc};

use oubliette_protocol::{Error, ProjectId, SessionId, event::SessionEvent};
use parking_lot::Mutex;
use sqlx::{ConnectOptions, Row, SqliteConnection, sqlite::SqliteConnectOptions};

use super::{
    batch,
    job::{EventJob, SequenceCounter, Survives, TouchedCaches, WriteTx, WriterTask},
    slot::{DebugLogPosition, GroupSlot, apply_in_savepoint, fail_all},
    unwritten::UnwrittenEvents,
};
use crate::{
    db_error::WriteError,
    log::{
        debugger::{DebugJob, DebugQueue},
        tail::SessionTails,
    },
    store::StoreCaches,
    tables::purge,
};

/// Maximum sessions whose log position or project the writer caches; beyond it, the cache is cleared.
const MAX_CACHED_SESSIONS: usize = 4096;

/// The writer's connection and caches.
pub(super) struct DatabaseWriter {
    pub(super) tx: WriteTx,
    /// Options for a new connection when this one breaks.
    connect_options: SqliteConnectOptions,
    pub(super) tails: Arc<SessionTails>,
    pub(super) debug_queue: Arc<DebugQueue>,
    pub(super) unwritten: Arc<UnwrittenEvents>,
    caches: Arc<StoreCaches>,
    /// The error of the last commit, if it failed.
    last_error: Arc<Mutex<Option<Error>>>,
    /// What the connection's `synchronous` setting guarantees now.
    sync_level: Survives,
    /// Each session's next log position. Valid only while every commit succeeds.
    positions: HashMap<SessionId, LogPosition>,
    /// Each session's project.
    session_projects: HashMap<SessionId, ProjectId>,
    /// Whether rows of deleted projects may be left to purge.
    pub(super) purging: bool,
    /// While true, every write fails as on a full disk.
    #[cfg(feature = "test-support")]
    pub(super) write_fault: Arc<std::sync::atomic::AtomicBool>,
}

/// Where a session's next event goes.
#[derive(Debug, Clone, Copy)]
struct LogPosition {
    /// The log's number in the table `event_logs`.
    log: i64,
    /// The next index.
    next: i64,
}

/// Where a group's transaction failed.
enum GroupFailure {
    /// At `BEGIN`. Retrying the writes one by one would only wait for the same lock again.
    AtBegin(Error),
    /// While a write was applied, or at `COMMIT`.
    Within(Error),
}

impl DatabaseWriter {
    pub(super) fn new(
        db: SqliteConnection,
        connect_options: SqliteConnectOptions,
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
        };
        let (positions, session_projects) = Default::default();
        Self {
            tx,
            connect_options,
            tails,
            debug_queue,
            unwritten,
            caches,
            last_error,
            sync_level: Survives::Crash,
            positions,
            session_projects,
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
                    }
                }
            }
            Err(GroupFailure::AtBegin(error) | GroupFailure::Within(error)) => {
                fail_all(slots, &error, &self.unwritten);
            }
        }
    }

    /// Whether earlier events of the same session are unwritten, which these must not overtake.
    fn has_unwritten_before(&self, slot: &GroupSlot) -> bool {
        matches!(slot, GroupSlot::Events { job, .. } if self.unwritten.is_waiting(&job.session))
    }

    /// Deletes a bounded number of rows that deleted projects left behind.
    pub(super) async fn purge_chunk(&mut self) {
        let outcome = async {
            self.begin(Survives::Crash).await?;
            let more = purge::delete_chunk(&mut self.tx).await?;
            sqlx::query("COMMIT").execute(&mut self.tx.db).await?;
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
        let applied = match self.is_one_statement(slots) {
            // A single statement is a transaction by itself; `BEGIN` and `COMMIT` would be two more.
            true => match self.prepare(survives).await {
                Ok(()) => self.apply(slots).await,
                Err(error) => return Err(GroupFailure::AtBegin(self.roll_back(error).await)),
            },
            false => match self.begin(survives).await {
                Ok(()) => self.apply_and_commit(slots).await,
                Err(error) => return Err(GroupFailure::AtBegin(self.roll_back(error).await)),
            },
        };
        match applied {
            Ok(()) => {
                let mut last_error = self.last_error.lock();
                if last_error.take().is_some() {
                    tracing::info!("the database can be written again");
                }
                Ok(())
            }
            Err(error) => Err(GroupFailure::Within(self.roll_back(error).await)),
        }
    }

    /// Whether applying these is a single `INSERT`: events of logs whose position is cached.
    fn is_one_statement(&self, slots: &[GroupSlot]) -> bool {
        let mut rows = 0;
        let only_events = slots.iter().all(|slot| match slot {
            GroupSlot::Events { job, .. } => {
                rows += job.bodies.len();
                job.row_change.is_none() && self.positions.contains_key(&job.session)
            }
            GroupSlot::Work { .. } | GroupSlot::Debug { .. } => false,
        });
        // Above the maximum, `prepare` clears the positions.
        only_events && self.positions.len() <= MAX_CACHED_SESSIONS && batch::is_single_statement(rows)
    }

    async fn begin(&mut self, survives: Survives) -> Result<(), WriteError> {
        self.prepare(survives).await?;
        sqlx::query("BEGIN IMMEDIATE").execute(&mut self.tx.db).await?;
        Ok(())
    }

    async fn apply_and_commit(&mut self, slots: &mut [GroupSlot]) -> Result<(), WriteError> {
        self.apply(slots).await?;
        sqlx::query("COMMIT").execute(&mut self.tx.db).await?;
        Ok(())
    }

    /// Sets the durability level and resets what the transaction collects.
    async fn prepare(&mut self, survives: Survives) -> Result<(), WriteError> {
        #[cfg(feature = "test-support")]
        if self.write_fault.load(std::sync::atomic::Ordering::SeqCst) {
            return Err(WriteError::Broken(Error::unavailable("the disk is full")));
        }
        if self.sync_level != survives {
            // SQLite does not change it within a transaction.
            let level = match survives {
                Survives::Crash => "PRAGMA synchronous = NORMAL",
                Survives::PowerCut => "PRAGMA synchronous = FULL",
            };
            sqlx::query(level).execute(&mut self.tx.db).await?;
            self.sync_level = survives;
        }
        if self.positions.len() > MAX_CACHED_SESSIONS {
            // Only between groups: within one, positions run ahead of the database.
            self.positions.clear();
        }
        self.tx.now = crate::now();
        self.tx.deleted_sessions.clear();
        self.tx.touched = TouchedCaches::default();
        Ok(())
    }

    async fn apply(&mut self, slots: &mut [GroupSlot]) -> Result<(), WriteError> {
        let alone = slots.len() == 1;
        let mut rows = Vec::new();
        for slot in slots.iter_mut() {
            match slot {
                GroupSlot::Work { job, refused } => {
                    *refused = apply_in_savepoint(&mut self.tx, alone, job).await?;
                }
                GroupSlot::Events { job, events, refused } => {
                    *refused = match &job.row_change {
                        Some(change) => match change.apply(&job.session, &mut self.tx).await {
                            Ok(()) => None,
                            Err(WriteError::Refused(error)) => Some(error),
                            Err(error) => return Err(error),
                        },
                        None => None,
                    };
                    if refused.is_none() {
                        *events = self.assign_indexes(job).await?;
                        rows.push((self.positions[&job.session].log, &*events, &job.bodies));
                    }
                }
                GroupSlot::Debug { .. } => {}
            }
        }
        let rows: Vec<_> = rows
            .into_iter()
            .flat_map(|(log, events, bodies)| {
                events
                    .iter()
                    .zip(bodies)
                    .map(move |(e, (_, text))| (log, e, text))
            })
            .collect();
        batch::EVENTS
            .insert_rows(&mut self.tx.db, &rows, |query, (log, event, text)| {
                query
                    .bind(*log)
                    .bind(event.index)
                    .bind(event.ts.as_millisecond())
                    .bind(text.as_str())
            })
            .await?;
        drop(rows);
        self.apply_debug(slots).await
    }

    /// Assigns events their indexes in their session's log.
    async fn assign_indexes(&mut self, job: &EventJob) -> Result<Vec<Arc<SessionEvent>>, WriteError> {
        let mut position = match self.positions.get(&job.session) {
            Some(position) => *position,
            None => self.load_position(&job.session).await?,
        };
        let ts = self.tx.now;
        let events = job.bodies.iter().zip(position.next..).map(|((body, _), index)| {
            Arc::new(SessionEvent {
                index,
                ts,
                session_id: job.session.clone(),
                body: body.clone(),
            })
        });
        let events: Vec<_> = events.collect();
        position.next += events.len() as i64;
        self.positions.insert(job.session.clone(), position);
        Ok(events)
    }

    /// Reads a session's log position from the database; creates the log if there is none.
    async fn load_position(&mut self, session: &SessionId) -> Result<LogPosition, WriteError> {
        let known = sqlx::query(
            "SELECT log, (SELECT MAX(idx) FROM events WHERE events.log = event_logs.log)
             FROM event_logs WHERE session_id = $1",
        )
        .bind(session.as_str())
        .fetch_optional(&mut self.tx.db)
        .await?;
        if let Some(row) = known {
            let last: Option<i64> = row.try_get(1)?;
            return Ok(LogPosition {
                log: row.try_get(0)?,
                next: last.map_or(0, |last| last + 1),
            });
        }
        let log = self.tx.reserve_numbers(SequenceCounter::EventLog, 1).await?;
        sqlx::query("INSERT INTO event_logs (session_id, log) VALUES ($1, $2)")
            .bind(session.as_str())
            .bind(log)
            .execute(&mut self.tx.db)
            .await?;
        Ok(LogPosition { log, next: 0 })
    }

    async fn apply_debug(&mut self, slots: &mut [GroupSlot]) -> Result<(), WriteError> {
        let count = slots
            .iter()
            .filter(|slot| matches!(slot, GroupSlot::Debug { .. }))
            .count();
        if count == 0 {
            return Ok(());
        }
        let mut index = self.tx.reserve_numbers(SequenceCounter::Debug, count).await?;
        let mut rows = Vec::with_capacity(count);
        for slot in slots {
            let GroupSlot::Debug { job, position } = slot else {
                continue;
            };
            let project = match &job.session {
                Some(session) => self.project_of(session).await?,
                None => None,
            };
            rows.push((&*position.insert(DebugLogPosition { index, project }), &**job));
            index += 1;
        }
        batch::DEBUG_EVENTS
            .insert_rows(&mut self.tx.db, &rows, |query, (position, job)| {
                query
                    .bind(position.index)
                    .bind(job.ts.as_millisecond())
                    .bind(job.session.as_ref().map(SessionId::as_str))
                    .bind(job.agent.as_ref().map(AsRef::<str>::as_ref))
                    .bind(position.project.as_ref().map(ProjectId::as_str))
                    .bind(job.kind)
                    .bind(job.text.as_str())
            })
            .await
    }

    async fn project_of(&mut self, session: &SessionId) -> Result<Option<ProjectId>, WriteError> {
        if let Some(project) = self.session_projects.get(session) {
            return Ok(Some(project.clone()));
        }
        let row = sqlx::query("SELECT project_id FROM sessions WHERE session_id = $1")
            .bind(session.as_str())
            .fetch_optional(&mut self.tx.db)
            .await?;
        let Some(row) = row else { return Ok(None) };
        let project: ProjectId = row.try_get::<&str, _>(0)?.parse()?;
        if self.session_projects.len() > MAX_CACHED_SESSIONS {
            self.session_projects.clear();
        }
        self.session_projects.insert(session.clone(), project.clone());
        Ok(Some(project))
    }

    /// Rolls back a failed transaction, clears every cache it may have made stale and reconnects if the
    /// connection is broken. Returns the error for the callers.
    async fn roll_back(&mut self, error: WriteError) -> Error {
        // Indexes assigned in it were not used; positions have to be read from the database again.
        self.positions.clear();
        self.session_projects.clear();
        self.tx.deleted_sessions.clear();
        // A `COMMIT` that reported an error may still have reached the disk.
        self.invalidate_caches();
        // Fails when SQLite has already rolled back by itself.
        let _ = sqlx::query("ROLLBACK").execute(&mut self.tx.db).await;
        if sqlx::query("SELECT 1").execute(&mut self.tx.db).await.is_err() {
            match self.connect_options.connect().await {
                Ok(db) => (self.tx.db, self.sync_level) = (db, Survives::Crash),
                Err(error) => tracing::error!(%error, "reconnecting to the database failed"),
            }
        }
        let error = error.into_error();
        if self.last_error.lock().replace(error.clone()).is_none() {
            tracing::error!(error = %error.for_log(), "committing to the database failed");
        }
        error
    }

    /// Invalidates the row caches that this transaction made stale.
    fn invalidate_caches(&mut self) {
        let touched = std::mem::take(&mut self.tx.touched);
        if touched.tokens {
            self.caches.tokens.invalidate();
        }
        if touched.projects {
            self.caches.projects.invalidate();
            self.caches.sessions.invalidate();
        }
    }

    /// Publishes a committed group to followers, then answers its callers.
    fn publish_and_answer(&mut self, slots: Vec<GroupSlot>) {
        self.invalidate_caches();
        for session in std::mem::take(&mut self.tx.deleted_sessions) {
            self.positions.remove(&session);
            self.session_projects.remove(&session);
            self.tails.close_session(&session);
            self.unwritten.drop_session(&session);
        }
        self.purging |= std::mem::take(&mut self.tx.needs_purge);
        // A follower that subscribes after this check finds the events in the database.
        let followed = self.debug_queue.tail.is_followed();
        let (mut recorded, mut last) = (Vec::new(), None);
        for slot in &slots {
            match slot {
                GroupSlot::Events {
                    job,
                    events,
                    refused: None,
                } => {
                    let sizes = job.bodies.iter().map(|(_, text)| text.len());
                    self.tails
                        .publish(&job.session, events.iter().cloned().zip(sizes));
                }
                GroupSlot::Debug {
                    job,
                    position: Some(position),
                } => {
                    last = Some(position.index);
                    if followed {
                        recorded.push(job.recorded(position.index, position.project.clone()));
                    }
                }
                GroupSlot::Events { .. } | GroupSlot::Work { .. } | GroupSlot::Debug { .. } => {}
            }
        }
        match recorded.into_iter().collect::<Option<Vec<_>>>() {
            Some(recorded) => self.debug_queue.tail.publish(recorded.into_iter()),
            None => self.debug_queue.tail.clear_ring(),
        }
        if let Some(last) = last {
            self.debug_queue.tail.advance_to(last);
        }
        for slot in slots {
            slot.answer(None);
        }
    }
}
