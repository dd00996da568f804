//! Appending to the audit log.
//!
//! Every change waits for its audit entry before it is acknowledged, so entries are inserted as cheaply as events: all of
//! a group in one statement, at positions the writer knows. Entries of frequent actions survive a kill of the server
//! when they are answered, and a power cut [`SYNC_DELAY`] later.

use std::{sync::LazyLock, time::Duration};

use oubliette_protocol::{Error, ProjectId, Result, SessionId};
use tokio::{sync::oneshot, time::Instant};

use super::{
    job::{StoreWrite, Survives, WriteTx},
    slot::GroupSlot,
};
use crate::{
    db::{
        batch::{BatchInsert, TransactionEnds},
        query,
        value::ColumnType,
    },
    db_error::WriteError,
    tables::audit::{AuditEntry, AuditPrincipal},
};

/// How long entries may be committed before they are synchronised to the disk.
const SYNC_DELAY: Duration = Duration::from_millis(200);

static AUDIT: LazyLock<BatchInsert> = LazyLock::new(|| {
    use ColumnType::{Number, Text};
    BatchInsert::new(
        "audit (idx, ts, token_id, session_id, project_id, action, target, outcome, detail)",
        &[Number, Number, Text, Text, Text, Text, Text, Text, Text],
    )
});

/// Entries to append to the audit log.
pub(crate) struct AuditJob {
    /// Each with its `detail` as JSON.
    pub(crate) entries: Vec<(AuditEntry, Option<String>)>,
    pub(crate) survives: Survives,
    /// Gets the first entry's index.
    pub(crate) reply: oneshot::Sender<Result<i64>>,
}

/// The end of the audit log, as the writer knows it.
#[derive(Debug, Default)]
pub(super) struct AuditTail {
    /// The next index. None: to be read from the database.
    next: Option<i64>,
    /// When the oldest entry that would not survive a power cut was committed.
    unsynced_since: Option<Instant>,
}

impl AuditTail {
    pub(super) fn is_known(&self) -> bool {
        self.next.is_some()
    }

    /// Forgets the position, after a transaction was rolled back.
    pub(super) fn forget_position(&mut self) {
        self.next = None;
    }

    /// When entries are to be synchronised to the disk; none if all are.
    pub(super) fn sync_at(&self) -> Option<Instant> {
        self.unsynced_since.map(|since| since + SYNC_DELAY)
    }

    /// The write that synchronises all entries, once it is due. If it fails, the next is due after the same time.
    pub(super) fn sync_due(&mut self) -> Option<SyncAudit> {
        let now = Instant::now();
        if self.sync_at()? > now {
            return None;
        }
        self.unsynced_since = Some(now);
        Some(SyncAudit { next: self.next })
    }

    /// Records what a committed group means for entries.
    pub(super) fn committed(&mut self, slots: &[GroupSlot], survives: Survives) {
        match survives {
            Survives::PowerCut => self.unsynced_since = None,
            Survives::Crash if slots.iter().any(|slot| matches!(slot, GroupSlot::Audit { .. })) => {
                self.unsynced_since.get_or_insert_with(Instant::now);
            }
            Survives::Crash => {}
        }
    }

    /// Inserts the entries of all slots, with `ends` around them.
    pub(super) async fn insert(
        &mut self,
        tx: &mut WriteTx,
        slots: &mut [GroupSlot],
        ends: TransactionEnds,
    ) -> Result<(), WriteError> {
        let count: usize = slots
            .iter()
            .map(|slot| match slot {
                GroupSlot::Audit { job, .. } => job.entries.len(),
                GroupSlot::Events { .. } | GroupSlot::Work { .. } | GroupSlot::Debug { .. } => 0,
            })
            .sum();
        if count == 0 {
            return Ok(());
        }
        let mut next = match (self.next, &tx.member) {
            (_, Some(_)) => reserve(tx, count).await?,
            (Some(next), None) => next,
            (None, None) => read_next(tx).await?,
        };
        let now = tx.now_millis();
        let mut rows = Vec::new();
        for slot in slots {
            let GroupSlot::Audit { job, first } = slot else {
                continue;
            };
            *first = next;
            next += job.entries.len() as i64;
            rows.extend(job.entries.iter().zip(*first..));
        }
        AUDIT
            .insert_rows(&mut tx.db, &rows, ends, |query, ((entry, detail), index)| {
                query
                    .bind(*index)
                    .bind(now)
                    .bind(match &entry.principal {
                        AuditPrincipal::Owner => None,
                        principal => Some(principal.as_str()),
                    })
                    .bind(entry.session_id.as_ref().map(SessionId::as_str))
                    .bind(entry.project_id.as_ref().map(ProjectId::as_str))
                    .bind(entry.action.as_str())
                    .bind(entry.target.as_deref())
                    .bind(entry.outcome.as_str())
                    .bind(detail.as_deref())
            })
            .await?;
        // Other servers of a cluster append too.
        self.next = tx.member.is_none().then_some(next);
        Ok(())
    }
}

/// Reserves so many indexes, for a server of a cluster: the counter's row stays locked until the
/// transaction ends, so indexes are in the order of commits.
async fn reserve(tx: &mut WriteTx, count: usize) -> Result<i64, WriteError> {
    let count = i64::try_from(count).map_err(Error::internal)?;
    // A server that used the database alone may have left the counter behind its log.
    let row = query(
        "INSERT INTO counters (name, value) VALUES ('audit', COALESCE((SELECT MAX(idx) + 1 FROM audit), 0) + $1)
         ON CONFLICT (name) DO UPDATE
             SET value = GREATEST(counters.value, COALESCE((SELECT MAX(idx) + 1 FROM audit), 0)) + $1
         RETURNING value",
    )
    .bind(count)
    .fetch_one(&mut tx.db)
    .await?;
    Ok(row.try_get::<i64>(0)? - count)
}

/// The next index: after the last entry, and after every index that was ever used.
async fn read_next(tx: &mut WriteTx) -> Result<i64, WriteError> {
    let row = query("SELECT (SELECT MAX(idx) FROM audit), (SELECT value FROM counters WHERE name = 'audit')")
        .fetch_one(&mut tx.db)
        .await?;
    let (last, used): (Option<i64>, Option<i64>) = (row.try_get(0)?, row.try_get(1)?);
    Ok(last.map_or(0, |last| last + 1).max(used.unwrap_or(0)))
}

/// Stores how many indexes were used. The commit, as it survives a power cut, makes everything before it do so too.
pub(crate) struct SyncAudit {
    next: Option<i64>,
}

impl StoreWrite for SyncAudit {
    type Out = ();
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        query(
            "INSERT INTO counters (name, value) VALUES ('audit', $1)
             ON CONFLICT (name) DO UPDATE SET value = $1 WHERE counters.value < $1",
        )
        .bind(self.next.unwrap_or(0))
        .execute(&mut tx.db)
        .await?;
        Ok(())
    }
}
