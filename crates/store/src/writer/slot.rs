//! A task in its group: applied, taken back if it is refused, answered in the end.

use std::sync::Arc;

use jiff::Timestamp;
use oubliette_protocol::{Error, ProjectId, event::Event};

use super::job::{EventJob, Job, Survives, Tx};
use crate::{fault::Fault, log::debugger::DebugJob};

/// A task in a group, and how it went.
pub(super) enum Slot {
    Events {
        job: EventJob,
        events: Vec<Arc<Event>>,
        refused: Option<Error>,
    },
    Work {
        job: Box<dyn Job>,
        refused: Option<Error>,
    },
    Debug {
        job: Box<DebugJob>,
        /// Where it was put.
        place: Option<DebugPlace>,
    },
}

/// A place in the debugger's log.
pub(super) struct DebugPlace {
    pub(super) index: i64,
    pub(super) ts: Timestamp,
    pub(super) project: Option<ProjectId>,
}

/// Applies one job so that refusing it leaves no trace of it.
pub(super) async fn guarded(
    tx: &mut Tx,
    alone: bool,
    job: &mut Box<dyn Job>,
) -> Result<Option<Error>, Fault> {
    let gone = tx.gone.len();
    if !alone {
        sqlx::query("SAVEPOINT job").execute(&mut tx.db).await?;
    }
    let outcome = job.apply(tx).await;
    if matches!(outcome, Err(Fault::Refused(_))) {
        tx.gone.truncate(gone);
    }
    match (outcome, alone) {
        (Ok(()), true) => Ok(None),
        (Ok(()), false) => {
            sqlx::query("RELEASE SAVEPOINT job").execute(&mut tx.db).await?;
            Ok(None)
        }
        (Err(Fault::Refused(error)), true) => {
            sqlx::query("ROLLBACK").execute(&mut tx.db).await?;
            sqlx::query("BEGIN IMMEDIATE").execute(&mut tx.db).await?;
            Ok(Some(error))
        }
        (Err(Fault::Refused(error)), false) => {
            sqlx::query("ROLLBACK TO SAVEPOINT job")
                .execute(&mut tx.db)
                .await?;
            sqlx::query("RELEASE SAVEPOINT job").execute(&mut tx.db).await?;
            Ok(Some(error))
        }
        (Err(fault), _) => Err(fault),
    }
}

pub(super) fn fail(slots: Vec<Slot>, error: &Error) {
    for slot in slots {
        slot.answer(Some(error));
    }
}

impl Slot {
    pub(super) fn survives(&self) -> Survives {
        match self {
            Slot::Work { job, .. } => job.survives(),
            Slot::Events { .. } | Slot::Debug { .. } => Survives::Crash,
        }
    }

    /// Tells whoever asked. They may have gone; what is written stands all the same.
    pub(super) fn answer(self, failed: Option<&Error>) {
        match self {
            Slot::Work { job, refused } => {
                job.answer(failed.cloned().or(refused).map_or(Ok(()), Err));
            }
            Slot::Events { job, events, refused } => {
                let failed = failed.cloned().or(refused);
                match (job.reply, failed) {
                    (Some(reply), failed) => drop(reply.send(failed.map_or(Ok(events), Err))),
                    (None, Some(error)) => {
                        let (session, error) = (&job.session, error.for_log());
                        tracing::warn!(%session, %error, "an event was not written");
                    }
                    (None, None) => {}
                }
            }
            Slot::Debug { job, .. } => {
                let failed = failed.cloned();
                match job.reply {
                    Some(reply) => drop(reply.send(failed.map_or(Ok(()), Err))),
                    None => {
                        if let Some(error) = failed {
                            tracing::warn!(error = %error.for_log(), "a debugger event was not written");
                        }
                    }
                }
            }
        }
    }
}
