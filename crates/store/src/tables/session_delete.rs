//! Deleting sessions that are over, with everything stored about them.

use jiff::Timestamp;
use oubliette_protocol::{Error, Result, SessionId, event::SessionStatus};

use super::row::parsed;
use crate::{
    db::{QueryBuilder, query},
    db_error::{WriteError, read_error},
    store::Store,
    writer::{StoreWrite, Survives, WriteTx},
};

/// Maximum number of sessions deleted in one transaction.
const MAX_DELETED: usize = 50;

impl Store {
    /// Deletes sessions with their events, memory, approvals and debugger events; what they used stays in the usage
    /// report. `conflict` if one of them is active; those before it are deleted then. Returns how many there were.
    pub async fn sessions_delete(&self, sessions: &[SessionId]) -> Result<usize> {
        let mut deleted = 0;
        for part in sessions.chunks(MAX_DELETED) {
            deleted += self.write(DeleteSessions(part.to_vec())).await?;
        }
        Ok(deleted)
    }

    /// The sessions that may be deleted because they have not changed since a time, oldest first: no session of their
    /// tree is active or has changed since, so that no session loses the ones above it. In a cluster not those that another
    /// server has in memory.
    pub async fn sessions_expired(&self, before: Timestamp, limit: u32) -> Result<Vec<SessionId>> {
        let mut query = QueryBuilder::new(
            "SELECT session_id FROM sessions AS old
             WHERE status IN ('ended', 'failed') AND updated_at < ",
        );
        query.push_bind(before.as_millisecond());
        query.push(
            " AND NOT EXISTS (SELECT 1 FROM sessions AS other WHERE other.root_id = old.root_id
                  AND (other.status NOT IN ('ended', 'failed') OR other.updated_at >= ",
        );
        query.push_bind(before.as_millisecond()).push("))");
        if let Some(member) = self.cluster() {
            query.push(
                " AND NOT EXISTS (SELECT 1 FROM session_owners o JOIN server_leases l ON l.server_id = o.server_id
                      WHERE o.root_id = old.root_id AND o.server_id <> ",
            );
            query.push_bind(member.server_id().as_str()).push(")");
        }
        query
            .push(" ORDER BY updated_at LIMIT ")
            .push_bind(i64::from(limit));
        let rows = query
            .build()
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        rows.iter().map(|row| parsed(row, "session_id")).collect()
    }
}

struct DeleteSessions(Vec<SessionId>);

impl StoreWrite for DeleteSessions {
    type Out = usize;
    // It deletes tokens.
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut WriteTx) -> Result<usize, WriteError> {
        let mut deleted = 0;
        for session in &self.0 {
            let found = query("SELECT status FROM sessions WHERE session_id = $1")
                .bind(session.as_str())
                .fetch_optional(&mut tx.db)
                .await?;
            let Some(row) = found else { continue };
            let status: SessionStatus = row.text("status")?.parse()?;
            // Checked here, in the transaction: a failed session may have been given a message meanwhile.
            if status.is_active() {
                let why = format!("session {session} is {status}: end it first with session_end");
                return Err(Error::conflict(why).into());
            }
            // The large tables are only marked here; `purge` deletes their rows in chunks afterwards.
            const STEPS: [&str; 9] = [
                "DELETE FROM approvals WHERE session_id = $1",
                "DELETE FROM tokens WHERE session_id = $1",
                "DELETE FROM queue WHERE session_id = $1",
                "DELETE FROM memory WHERE session_id = $1",
                "DELETE FROM session_usage WHERE session_id = $1",
                "INSERT INTO purge_events (log) SELECT log FROM event_logs WHERE session_id = $1",
                "DELETE FROM event_logs WHERE session_id = $1",
                "INSERT INTO purge_session_debug (session_id) VALUES ($1) ON CONFLICT (session_id) DO NOTHING",
                "DELETE FROM sessions WHERE session_id = $1",
            ];
            for step in STEPS {
                query(step).bind(session.as_str()).execute(&mut tx.db).await?;
            }
            if tx.member.is_some() {
                query("DELETE FROM session_owners WHERE root_id = $1")
                    .bind(session.as_str())
                    .execute(&mut tx.db)
                    .await?;
            }
            tx.deleted_sessions.push(session.clone());
            deleted += 1;
        }
        // The cached projects of sessions are dropped with the projects.
        (tx.touched.tokens, tx.touched.projects) = (true, true);
        tx.needs_purge |= deleted > 0;
        Ok(deleted)
    }
}
