//! Applying the writes of a group within its transaction.

use std::sync::{Arc, LazyLock};

use oubliette_protocol::{Error, ProjectId, SessionId, event::SessionEvent};

use super::{
    group::{DatabaseWriter, MAX_CACHED_SESSIONS},
    job::{EventJob, SequenceCounter, SessionRowChange},
    slot::{DebugLogPosition, GroupSlot, apply_in_savepoint},
};
use crate::{
    db::{
        batch::{BatchInsert, TransactionEnds},
        query,
        value::ColumnType,
    },
    db_error::WriteError,
};

static EVENTS: LazyLock<BatchInsert> = LazyLock::new(|| {
    use ColumnType::{Number, Text};
    BatchInsert::new("events (log, idx, ts, body)", &[Number, Number, Number, Text])
});
static DEBUG_EVENTS: LazyLock<BatchInsert> = LazyLock::new(|| {
    use ColumnType::{Number, Text};
    BatchInsert::new(
        "debug_events (idx, ts, session_id, agent, project_id, kind, body)",
        &[Number, Number, Text, Text, Text, Text, Text],
    )
});

/// Where a session's next event goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct LogPosition {
    /// The log's number in the table `event_logs`.
    log: i64,
    /// The next index.
    next: i64,
}

impl DatabaseWriter {
    /// Executes every write of a group within its transaction. Its first and last statement have `ends` with them; only
    /// for groups that [`DatabaseWriter::plan_transaction`] says so of.
    pub(super) async fn apply(
        &mut self,
        slots: &mut [GroupSlot],
        ends: TransactionEnds,
    ) -> Result<(), WriteError> {
        let alone = slots.len() == 1;
        let (mut rows, mut audit_entries) = (Vec::new(), 0);
        for slot in slots.iter_mut() {
            match slot {
                GroupSlot::Work { job, refused } => {
                    *refused = apply_in_savepoint(&mut self.tx, alone, job).await?;
                    self.forget_moved_trees();
                }
                GroupSlot::Events { job, events, refused } => {
                    *refused = self.check_owner(job).await?;
                    if let (None, Some(change)) = (&refused, &job.row_change) {
                        *refused = self.apply_row_change(change, &job.session).await?;
                    }
                    if refused.is_none() {
                        *events = self.assign_indexes(job).await?;
                        rows.push((self.positions[&job.session].log, &*events, &job.bodies));
                    }
                }
                GroupSlot::Audit { job, .. } => audit_entries += job.entries.len(),
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
        let (has_events, has_entries) = (!rows.is_empty(), audit_entries > 0);
        let event_ends = TransactionEnds {
            begin: ends.begin,
            commit: ends.commit && !has_entries,
        };
        EVENTS
            .insert_rows(&mut self.tx.db, &rows, event_ends, |query, (log, event, text)| {
                query
                    .bind(*log)
                    .bind(event.index)
                    .bind(event.ts.as_millisecond())
                    .bind(text.as_str())
            })
            .await?;
        drop(rows);
        // Only in transactions with statements of their own: see `plan_transaction`.
        self.outbox_filled |= self.webhooks.fill(&mut self.tx, slots).await?;
        let audit_ends = TransactionEnds {
            begin: ends.begin && !has_events,
            commit: ends.commit,
        };
        self.audit.insert(&mut self.tx, slots, audit_ends).await?;
        self.apply_debug(slots).await
    }

    /// Applies the change of a row that comes with events. Returns why it is refused.
    async fn apply_row_change(
        &mut self,
        change: &SessionRowChange,
        session: &SessionId,
    ) -> Result<Option<Error>, WriteError> {
        // On PostgreSQL a refused statement fails the transaction, unless it is rolled back to a savepoint.
        let in_savepoint = self.tx.db.is_postgres();
        if in_savepoint {
            self.tx.db.run("SAVEPOINT row_change").await?;
        }
        match change.apply(session, &mut self.tx).await {
            Ok(()) => {
                if in_savepoint {
                    self.tx.db.run("RELEASE SAVEPOINT row_change").await?;
                }
                Ok(None)
            }
            Err(WriteError::Refused(error)) => {
                if in_savepoint {
                    self.tx
                        .db
                        .run("ROLLBACK TO SAVEPOINT row_change;RELEASE SAVEPOINT row_change")
                        .await?;
                }
                Ok(Some(error))
            }
            Err(error) => Err(error),
        }
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
        let known = query(
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
        query("INSERT INTO event_logs (session_id, log) VALUES ($1, $2)")
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
        DEBUG_EVENTS
            .insert_rows(
                &mut self.tx.db,
                &rows,
                TransactionEnds::default(),
                |query, (position, job)| {
                    query
                        .bind(position.index)
                        .bind(job.ts.as_millisecond())
                        .bind(job.session.as_ref().map(SessionId::as_str))
                        .bind(job.agent.as_ref().map(AsRef::<str>::as_ref))
                        .bind(position.project.as_ref().map(ProjectId::as_str))
                        .bind(job.kind)
                        .bind(job.text.as_str())
                },
            )
            .await
    }

    async fn project_of(&mut self, session: &SessionId) -> Result<Option<ProjectId>, WriteError> {
        if let Some(project) = self.session_projects.get(session) {
            return Ok(Some(project.clone()));
        }
        let row = query("SELECT project_id FROM sessions WHERE session_id = $1")
            .bind(session.as_str())
            .fetch_optional(&mut self.tx.db)
            .await?;
        let Some(row) = row else { return Ok(None) };
        let project: ProjectId = row.text(0)?.parse()?;
        if self.session_projects.len() > MAX_CACHED_SESSIONS {
            self.session_projects.clear();
        }
        self.session_projects.insert(session.clone(), project.clone());
        Ok(Some(project))
    }
}
