//! What an agent remembers of a session. It belongs to the two of them: another agent in the same
//! session has its own.

use oubliette_protocol::{Error, Result, SessionId, Slug};
use serde_json::Value;
use sqlx::Row;

use super::row::to_json;
use crate::{
    fault::{Fault, read_error},
    store::Store,
    writer::{Tx, Write},
};

impl Store {
    /// All of an agent's memory of a session, in the order it was added.
    pub async fn memory_load(&self, session: &SessionId, agent: &Slug) -> Result<Vec<Value>> {
        let rows = sqlx::query("SELECT entry FROM memory WHERE session_id = $1 AND agent = $2 ORDER BY seq")
            .bind(session.as_str())
            .bind(agent.as_str())
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        rows.iter().map(|row| super::row::json(row, "entry")).collect()
    }

    /// Adds to an agent's memory.
    pub async fn memory_append(&self, session: &SessionId, agent: &Slug, entries: Vec<Value>) -> Result<()> {
        self.remember(session, agent, &entries, Old::Stays).await
    }

    /// Puts something else in place of all of an agent's memory.
    pub async fn memory_replace(&self, session: &SessionId, agent: &Slug, entries: Vec<Value>) -> Result<()> {
        self.remember(session, agent, &entries, Old::Goes).await
    }

    /// How many entries an agent's memory has.
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

    async fn remember(&self, session: &SessionId, agent: &Slug, entries: &[Value], old: Old) -> Result<()> {
        let entries = entries.iter().map(to_json).collect::<Result<_>>()?;
        self.write(Remember {
            session: session.clone(),
            agent: agent.clone(),
            entries,
            old,
        })
        .await
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Old {
    Stays,
    Goes,
}

struct Remember {
    session: SessionId,
    agent: Slug,
    entries: Vec<String>,
    old: Old,
}

impl Write for Remember {
    type Out = ();

    async fn apply(&self, tx: &mut Tx) -> Result<(), Fault> {
        let (session, agent) = (self.session.as_str(), self.agent.as_str());
        if self.old == Old::Goes {
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
