//! How much of the debugger's log each session in memory has, and the limit of that.
//!
//! Recording does not wait, so what is recorded is counted in memory; what a session had before is read from the database
//! when counting begins.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use oubliette_protocol::{Error, Result, SessionId};
use parking_lot::Mutex;

use crate::{
    db::{DbPool, query_scalar},
    db_error::read_error,
};

/// How often a session that is full is measured again: old events may have been deleted.
const MEASURE_INTERVAL: Duration = Duration::from_secs(60);

/// The sessions that are counted.
pub(crate) struct DebugSizes {
    sessions: Mutex<HashMap<SessionId, Arc<DebugSize>>>,
    /// Bytes of JSON that one session may have.
    limit: AtomicU64,
}

impl Default for DebugSizes {
    fn default() -> Self {
        Self {
            sessions: Mutex::default(),
            limit: AtomicU64::new(u64::MAX),
        }
    }
}

/// What one session has, in bytes of JSON.
struct DebugSize {
    bytes: AtomicU64,
    measured: Mutex<Instant>,
}

impl DebugSizes {
    pub(crate) fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// Counts an event of a session.
    pub(crate) fn add(&self, session: &SessionId, bytes: usize) {
        if let Some(size) = self.sessions.lock().get(session) {
            size.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }
}

/// A session that is counted, until this is dropped.
pub struct CountedSession {
    session: SessionId,
    size: Arc<DebugSize>,
    sizes: Arc<DebugSizes>,
    readers: DbPool,
}

impl CountedSession {
    /// Begins to count; must be called in a runtime.
    pub(crate) fn begin(session: SessionId, sizes: Arc<DebugSizes>, readers: DbPool) -> Self {
        let size = Arc::new(DebugSize {
            bytes: AtomicU64::new(0),
            measured: Mutex::new(Instant::now()),
        });
        sizes.sessions.lock().insert(session.clone(), size.clone());
        let counted = Self {
            session,
            size,
            sizes,
            readers,
        };
        // What is recorded meanwhile may count twice, which errs on the safe side.
        counted.measure(|size, stored| {
            size.bytes.fetch_add(stored, Ordering::Relaxed);
        });
        counted
    }

    /// An error if the session has as much as it may have.
    pub fn check(&self) -> Result<()> {
        let limit = self.sizes.limit.load(Ordering::Relaxed);
        if self.size.bytes.load(Ordering::Relaxed) < limit {
            return Ok(());
        }
        let is_due = {
            let mut measured = self.size.measured.lock();
            let is_due = measured.elapsed() >= MEASURE_INTERVAL;
            if is_due {
                *measured = Instant::now();
            }
            is_due
        };
        if is_due {
            self.measure(|size, stored| size.bytes.store(stored, Ordering::Relaxed));
        }
        Err(Error::limit_exceeded(format!(
            "the debugger has {} MiB of this session, the most it may have ([limits] session_log_mb); start a new session",
            limit >> 20
        )))
    }

    /// Reads in the background what the database has.
    fn measure(&self, apply: impl FnOnce(&DebugSize, u64) + Send + 'static) {
        let (session, size, readers) = (self.session.clone(), self.size.clone(), self.readers.clone());
        tokio::spawn(async move {
            match stored_bytes(&readers, &session).await {
                Ok(stored) => apply(&size, stored),
                Err(error) => {
                    tracing::warn!(%session, error = %error.for_log(), "measuring a session's part of the debugger's log failed")
                }
            }
        });
    }
}

impl Drop for CountedSession {
    fn drop(&mut self) {
        let mut sessions = self.sizes.sessions.lock();
        // Counting may have begun anew.
        if sessions
            .get(&self.session)
            .is_some_and(|size| Arc::ptr_eq(size, &self.size))
        {
            sessions.remove(&self.session);
        }
    }
}

async fn stored_bytes(readers: &DbPool, session: &SessionId) -> Result<u64> {
    let bytes: i64 =
        query_scalar("SELECT COALESCE(SUM(octet_length(body)), 0) FROM debug_events WHERE session_id = $1")
            .bind(session.as_str())
            .fetch_one(readers)
            .await
            .map_err(read_error)?;
    u64::try_from(bytes).map_err(Error::internal)
}
