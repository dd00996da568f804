//! Agent memory: a list of JSON entries for each pair of session and agent. Another agent in the same session
//! has its own.

use oubliette_protocol::{Error, Result, SessionId, Slug};
use serde_json::Value;
use sqlx::Row;

use super::row::to_json;
use crate::{
    db_error::{WriteError, read_error},
    store::Store,
    writer::{StoreWrite, WriteTx},
};

impl Store {
    /// All entries of an agent's memory in a session, in the order they were added.
    pub async fn memory_load(&self, session: &SessionId, agent: &Slug) -> Result<Vec<Value>> {
        let rows = sqlx::query("SELECT entry FROM memory WHERE session_id = $1 AND agent = $2 ORDER BY seq")
            .bind(session.as_str())
            .bind(agent.as_str())
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        rows.iter().map(|row| super::row::json(row, "entry")).collect()
    }

    /// Appends entries to an agent's memory.
    pub async fn memory_append(&self, session: &SessionId, agent: &Slug, entries: Vec<Value>) -> Result<()> {
        self.write_memory(session, agent, &entries, MemoryWriteMode::Append)
            .await
    }

    /// Replaces all of an agent's memory.
    pub async fn memory_replace(&self, session: &SessionId, agent: &Slug, entries: Vec<Value>) -> Result<()> {
        self.write_memory(session, agent, &entries, MemoryWriteMode::Replace)
            .await
    }

    /// Number of entries of an agent's memory.
    pub async fn memory_len(&self, session: &SessionId, agent: &Slug) -> Result<u64> {
        let count: i64 =
            sqlx::query_scalar("SELECT COUNT(*) FROM memory WHERE session_id = $1 AND agent = $2")
                .bind(session.as_str())
                .bind(agent.as_str())
                .fetch_one(self.readers())
                .await
                .map_err(read_error)?;
        u64::try_from(count).map_err(Error::internal)
    }

    async fn write_memory(
        &self,
        session: &SessionId,
        agent: &Slug,
        entries: &[Value],
        mode: MemoryWriteMode,
    ) -> Result<()> {
        let entries = entries.iter().map(to_json).collect::<Result<_>>()?;
        self.write(WriteMemory {
            session: session.clone(),
            agent: agent.clone(),
            entries,
            mode,
        })
        .await
    }
}

/// Whether existing entries are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MemoryWriteMode {
    Append,
    Replace,
}

struct WriteMemory {
    session: SessionId,
    agent: Slug,
    entries: Vec<String>,
    mode: MemoryWriteMode,
}

impl StoreWrite for WriteMemory {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        let (session, agent) = (self.session.as_str(), self.agent.as_str());
        if self.mode == MemoryWriteMode::Replace {
            sqlx::query("DELETE FROM memory WHERE session_id = $1 AND agent = $2")
                .bind(session)
                .bind(agent)
                .execute(&mut tx.db)
                .await?;
        }
        let last = sqlx::query("SELECT MAX(seq) FROM memory WHERE session_id = $1 AND agent = $2")
            .bind(session)
            .bind(agent)
            .fetch_one(&mut tx.db)
            .await?;
        let first = last.try_get::<Option<i64>, _>(0)?.map_or(0, |last| last + 1);
        for (seq, entry) in (first..).zip(&self.entries) {
            sqlx::query("INSERT INTO memory (session_id, agent, seq, entry) VALUES ($1, $2, $3, $4)")
                .bind(session)
                .bind(agent)
                .bind(seq)
                .bind(entry)
                .execute(&mut tx.db)
                .await?;
        }
        Ok(())
    }
}
