//! One write of a group: applied, rolled back alone if it is refused, answered after the commit.

use std::sync::Arc;

use oubliette_protocol::{Error, ErrorCode, ProjectId, event::SessionEvent};

use super::{
    audit::AuditJob,
    job::{EventJob, Survives, WriteJob, WriteTx},
    unwritten::UnwrittenEvents,
};
use crate::{db_error::WriteError, log::debugger::DebugJob};

/// One write of a group, and its result.
pub(super) enum GroupSlot {
    Events {
        job: EventJob,
        events: Vec<Arc<SessionEvent>>,
        refused: Option<Error>,
    },
    Work {
        job: Box<dyn WriteJob>,
        refused: Option<Error>,
    },
    Audit {
        job: AuditJob,
        /// The index of its first entry, once assigned.
        first: i64,
    },
    Debug {
        job: Box<DebugJob>,
        /// Its index, once assigned.
        position: Option<DebugLogPosition>,
    },
}

/// A debugger event's position in the log, and its session's project.
pub(super) struct DebugLogPosition {
    pub(super) index: i64,
    pub(super) project: Option<ProjectId>,
}

/// Applies one job in a savepoint, so that a refused job leaves no change behind. A job that is alone in its
/// group needs none on SQLite: its whole transaction is rolled back and begun anew.
pub(super) async fn apply_in_savepoint(
    tx: &mut WriteTx,
    alone: bool,
    job: &mut Box<dyn WriteJob>,
) -> Result<Option<Error>, WriteError> {
    let gone = tx.deleted_sessions.len();
    // On PostgreSQL beginning anew would mean to check the lease again.
    let alone = alone && !tx.db.is_postgres();
    if !alone {
        tx.db.run("SAVEPOINT job").await?;
    }
    let outcome = job.apply(tx).await;
    if matches!(outcome, Err(WriteError::Refused(_))) {
        tx.deleted_sessions.truncate(gone);
    }
    match (outcome, alone) {
        (Ok(()), true) => Ok(None),
        (Ok(()), false) => {
            tx.db.run("RELEASE SAVEPOINT job").await?;
            Ok(None)
        }
        (Err(WriteError::Refused(error)), true) => {
            tx.db.run("ROLLBACK").await?;
            tx.db.run("BEGIN IMMEDIATE").await?;
            Ok(Some(error))
        }
        (Err(WriteError::Refused(error)), false) => {
            tx.db.run("ROLLBACK TO SAVEPOINT job").await?;
            tx.db.run("RELEASE SAVEPOINT job").await?;
            Ok(Some(error))
        }
        (Err(error), _) => Err(error),
    }
}

/// Answers every slot with an error. Events that nobody waits for are kept, to be written later.
pub(super) fn fail_all(slots: Vec<GroupSlot>, error: &Error, unwritten: &UnwrittenEvents) {
    for slot in slots {
        match slot {
            GroupSlot::Events { job, .. } if job.reply.is_none() && error.code == ErrorCode::Unavailable => {
                unwritten.keep(job);
            }
            slot => slot.answer(Some(error)),
        }
    }
}

impl GroupSlot {
    /// What the write must survive once answered.
    pub(super) fn survives(&self) -> Survives {
        match self {
            GroupSlot::Work { job, .. } => job.survives(),
            GroupSlot::Audit { job, .. } => job.survives,
            GroupSlot::Events { .. } | GroupSlot::Debug { .. } => Survives::Crash,
        }
    }

    /// Sends the result to the caller, who may have stopped waiting; the write is committed all the same.
    pub(super) fn answer(self, failed: Option<&Error>) {
        match self {
            GroupSlot::Work { job, refused } => {
                job.answer(failed.cloned().or(refused).map_or(Ok(()), Err));
            }
            GroupSlot::Events { job, events, refused } => {
                let failed = failed.cloned().or(refused);
                match (job.reply, failed) {
                    (Some(reply), failed) => drop(reply.send(failed.map_or(Ok(events), Err))),
                    (None, Some(error)) => {
                        let (session, error) = (&job.session, error.for_log());
                        tracing::warn!(%session, %error, "writing an event failed; it is lost");
                    }
                    (None, None) => {}
                }
            }
            GroupSlot::Audit { job, first } => {
                let _ = job.reply.send(failed.cloned().map_or(Ok(first), Err));
            }
            GroupSlot::Debug { job, .. } => {
                let failed = failed.cloned();
                match job.reply {
                    Some(reply) => drop(reply.send(failed.map_or(Ok(()), Err))),
                    None => {
                        if let Some(error) = failed {
                            tracing::warn!(error = %error.for_log(), "writing a debugger event failed; it is lost");
                        }
                    }
                }
            }
        }
    }
}
