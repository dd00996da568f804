//! Deleting sessions that are over: by `session_delete`, and when their time of retention has passed.

use jiff::Timestamp;
use oubliette_protocol::{Error, Principal, Result, SessionId};
use oubliette_store::SessionRow;

use crate::{Sessions, live::TaskCommand};

/// How many expired sessions are deleted at a time.
const EXPIRED_BATCH: u32 = 50;

impl Sessions {
    /// A session that may be deleted, with the sessions it started, parents first. `conflict` while one of them is
    /// active: it would lose what the sessions above it forbid.
    pub async fn deletable(&self, principal: &Principal, id: &SessionId) -> Result<Vec<SessionRow>> {
        let mut rows = vec![self.visible_row(principal, id).await?];
        rows.extend(self.descendants(id).await?);
        match rows.iter().find(|row| row.status.is_active()) {
            None => Ok(rows),
            Some(row) if row.session_id == *id => Err(Error::conflict(format!(
                "session {id} is {}: end it first with session_end",
                row.status
            ))),
            Some(row) => Err(Error::conflict(format!(
                "session {} was started by {id} and is {}: end it first with session_end",
                row.session_id, row.status
            ))),
        }
    }

    /// Deletes sessions that [`Sessions::deletable`] returned, with their logs and homes.
    pub async fn delete(&self, rows: &[SessionRow]) -> Result<()> {
        for row in rows {
            // Only a failed session is still in memory: ending it stops what is left of it.
            if let Some(live) = self.in_memory(&row.session_id)
                && let Ok(ended) = live.send_command(TaskCommand::End).await
            {
                ended?;
            }
        }
        // Children first: a crash in between leaves no session without the ones above it.
        let ids: Vec<_> = rows.iter().rev().map(|row| row.session_id.clone()).collect();
        self.delete_rows(&ids).await
    }

    /// Deletes the sessions that have not changed since a time, in batches. Returns how many there were.
    pub async fn delete_expired(&self, before: Timestamp) -> Result<usize> {
        let mut deleted = 0;
        loop {
            let mut ids = self.deps.store.sessions_expired(before, EXPIRED_BATCH).await?;
            if ids.is_empty() {
                return Ok(deleted);
            }
            // Ids are in the order of creation: children first, as above.
            ids.sort_unstable_by(|a, b| b.cmp(a));
            for id in &ids {
                if let Some(live) = self.in_memory(id)
                    && let Ok(ended) = live.send_command(TaskCommand::End).await
                {
                    ended?;
                }
            }
            self.delete_rows(&ids).await?;
            deleted += ids.len();
        }
    }

    async fn delete_rows(&self, ids: &[SessionId]) -> Result<()> {
        // So that none is brought into memory between the check of its status and its end.
        let _not_loaded = self.load_lock.lock().await;
        // What they used last is written before, or it would be added to a session that is gone.
        self.usage().settle().await?;
        self.deps.store.sessions_delete(ids).await?;
        for id in ids {
            self.deps.home.discard(&self.deps.home.session_dir(id)).await;
        }
        Ok(())
    }
}
