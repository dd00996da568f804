//! Agent memory: a list of JSON entries for each pair of session and agent. Another agent in the same session
//! has its own.

use oubliette_protocol::{Error, Result, SessionId, Slug};
use serde_json::Value;

use super::row::to_json;
use crate::{
    db::{query, query_scalar},
    db_error::{WriteError, read_error},
    store::Store,
    writer::{StoreWrite, WriteTx},
};

/// What an entry of memory takes in the database besides its text, in bytes.
pub const MEMORY_ENTRY_OVERHEAD: u64 = 128;

impl Store {
    /// All entries of an agent's memory in a session, in the order they were added.
    pub async fn memory_load(&self, session: &SessionId, agent: &Slug) -> Result<Vec<Value>> {
        let rows = query("SELECT entry FROM memory WHERE session_id = $1 AND agent = $2 ORDER BY seq")
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
        let count: i64 = query_scalar("SELECT COUNT(*) FROM memory WHERE session_id = $1 AND agent = $2")
            .bind(session.as_str())
            .bind(agent.as_str())
            .fetch_one(self.readers())
            .await
            .map_err(read_error)?;
        u64::try_from(count).map_err(Error::internal)
    }

    /// Size of an agent's memory: the JSON of its entries, and [`MEMORY_ENTRY_OVERHEAD`] for each.
    pub async fn memory_bytes(&self, session: &SessionId, agent: &Slug) -> Result<u64> {
        let row = query(
            "SELECT COUNT(*), COALESCE(SUM(octet_length(entry)), 0) FROM memory
             WHERE session_id = $1 AND agent = $2",
        )
        .bind(session.as_str())
        .bind(agent.as_str())
        .fetch_one(self.readers())
        .await
        .map_err(read_error)?;
        let number = |column: usize| {
            let number: i64 = row.try_get(column).map_err(read_error)?;
            u64::try_from(number).map_err(Error::internal)
        };
        Ok(number(0)? * MEMORY_ENTRY_OVERHEAD + number(1)?)
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
            query("DELETE FROM memory WHERE session_id = $1 AND agent = $2")
                .bind(session)
                .bind(agent)
                .execute(&mut tx.db)
                .await?;
        }
        let last = query("SELECT MAX(seq) FROM memory WHERE session_id = $1 AND agent = $2")
            .bind(session)
            .bind(agent)
            .fetch_one(&mut tx.db)
            .await?;
        let first = last.try_get::<Option<i64>>(0)?.map_or(0, |last| last + 1);
        for (seq, entry) in (first..).zip(&self.entries) {
            query("INSERT INTO memory (session_id, agent, seq, entry) VALUES ($1, $2, $3, $4)")
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
