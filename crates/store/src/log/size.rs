//! The size of each session's event log, and the limit it has.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering},
};

use oubliette_protocol::{Error, Result, SessionId};
use parking_lot::Mutex;

use crate::db::{DbPool, query_scalar};
use crate::db_error::read_error;

/// How many sessions' sizes are kept; beyond it all are forgotten and read again when they are needed.
const MAX_KEPT: usize = 4096;

/// The sizes of the logs that were appended to, in bytes of JSON.
pub(crate) struct LogSizes {
    limit: AtomicU64,
    sizes: Mutex<HashMap<SessionId, u64>>,
}

/// What becomes of events that exceed the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BeyondLimit {
    /// They are refused.
    Refused,
    /// They are appended: they say how something ended that began within the limit.
    Appended,
}

impl Default for LogSizes {
    fn default() -> Self {
        Self {
            limit: AtomicU64::new(u64::MAX),
            sizes: Mutex::default(),
        }
    }
}

impl LogSizes {
    pub(crate) fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// Begins to count the log of a session that was just created.
    pub(crate) fn begin(&self, session: &SessionId) {
        self.keep(session, 0);
    }

    pub(crate) fn forget(&self, session: &SessionId) {
        self.sizes.lock().remove(session);
    }

    /// Counts bytes that are about to be appended.
    pub(crate) async fn add(
        &self,
        readers: &DbPool,
        session: &SessionId,
        bytes: usize,
        beyond: BeyondLimit,
    ) -> Result<()> {
        let limit = self.limit.load(Ordering::Relaxed);
        if limit == u64::MAX {
            return Ok(());
        }
        let size = self.get(readers, session).await?;
        let after = size.saturating_add(bytes as u64);
        if after > limit && beyond == BeyondLimit::Refused {
            return Err(limit_error(limit));
        }
        *self.sizes.lock().entry(session.clone()).or_insert(size) += bytes as u64;
        Ok(())
    }

    /// An error if a session's log has less room left than another turn should have: a sixteenth.
    pub(crate) async fn check(&self, readers: &DbPool, session: &SessionId) -> Result<()> {
        let limit = self.limit.load(Ordering::Relaxed);
        match limit != u64::MAX && self.get(readers, session).await? >= limit - limit / 16 {
            true => Err(limit_error(limit)),
            false => Ok(()),
        }
    }

    async fn get(&self, readers: &DbPool, session: &SessionId) -> Result<u64> {
        if let Some(size) = self.sizes.lock().get(session) {
            return Ok(*size);
        }
        let size: i64 = query_scalar(
            "SELECT COALESCE(SUM(octet_length(body)), 0) FROM events
             WHERE log = (SELECT log FROM event_logs WHERE session_id = $1)",
        )
        .bind(session.as_str())
        .fetch_one(readers)
        .await
        .map_err(read_error)?;
        let size = u64::try_from(size).map_err(Error::internal)?;
        Ok(self.keep(session, size))
    }

    fn keep(&self, session: &SessionId, size: u64) -> u64 {
        let mut sizes = self.sizes.lock();
        if sizes.len() >= MAX_KEPT {
            sizes.clear();
        }
        *sizes.entry(session.clone()).or_insert(size)
    }
}

fn limit_error(limit: u64) -> Error {
    Error::limit_exceeded(format!(
        "the session's log has its {} MiB ([limits] session_log_mb); start a new session",
        limit >> 20
    ))
}
