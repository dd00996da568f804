//! Messages that wait for their turn. Whoever sent one was told that it was accepted, so it outlives the
//! server; it goes in the same moment as it enters the session's log ([`SessionPatch::begun`]).
//!
//! [`SessionPatch::begun`]: super::sessions::SessionPatch::begun

use oubliette_protocol::{Error, Result, SessionId};

use super::row::{number, text};
use crate::{
    fault::{Fault, read_error},
    store::Store,
    writer::{Tx, Write},
};

/// A message that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuedMessage {
    /// The turn it will be.
    pub turn: u64,
    /// What was said.
    pub text: String,
}

impl Store {
    /// Keeps a message until its turn; `conflict` when the turn is taken.
    pub async fn queue_push(&self, session: &SessionId, message: QueuedMessage) -> Result<()> {
        self.write(Push(session.clone(), message)).await
    }

    /// What waits in a session, in order.
    pub async fn queue_of(&self, session: &SessionId) -> Result<Vec<QueuedMessage>> {
        let rows = sqlx::query("SELECT turn, text FROM queue WHERE session_id = $1 ORDER BY turn")
            .bind(session.as_str())
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        let message = |row| {
            Ok(QueuedMessage {
                turn: number(row, "turn")?,
                text: text(row, "text")?,
            })
        };
        rows.iter().map(message).collect()
    }

    /// The sessions in which something waits.
    pub async fn queue_sessions(&self) -> Result<Vec<SessionId>> {
        let ids: Vec<String> =
            sqlx::query_scalar("SELECT DISTINCT session_id FROM queue ORDER BY session_id")
                .fetch_all(self.readers())
                .await
                .map_err(read_error)?;
        ids.iter().map(|id| id.parse().map_err(Error::internal)).collect()
    }

    /// Drops one message of a session that waits; all of them when no turn is named.
    pub async fn queue_drop(&self, session: &SessionId, turn: Option<u64>) -> Result<()> {
        self.write(Drop(session.clone(), turn)).await
    }
}

struct Push(SessionId, QueuedMessage);

impl Write for Push {
    type Out = ();

    async fn apply(&self, tx: &mut Tx) -> Result<(), Fault> {
        let Self(session, message) = self;
        sqlx::query("INSERT INTO queue (session_id, turn, text) VALUES ($1, $2, $3)")
            .bind(session.as_str())
            .bind(i64::try_from(message.turn).map_err(Error::internal)?)
            .bind(&message.text)
            .execute(&mut tx.db)
            .await?;
        Ok(())
    }
}

struct Drop(SessionId, Option<u64>);

impl Write for Drop {
    type Out = ();

    async fn apply(&self, tx: &mut Tx) -> Result<(), Fault> {
        match self.1 {
            Some(turn) => begun(&self.0, turn, tx).await,
            None => {
                sqlx::query("DELETE FROM queue WHERE session_id = $1")
                    .bind(self.0.as_str())
                    .execute(&mut tx.db)
                    .await?;
                Ok(())
            }
        }
    }
}

/// A message waits no more.
pub(crate) async fn begun(session: &SessionId, turn: u64, tx: &mut Tx) -> Result<(), Fault> {
    sqlx::query("DELETE FROM queue WHERE session_id = $1 AND turn = $2")
        .bind(session.as_str())
        .bind(i64::try_from(turn).map_err(Error::internal)?)
        .execute(&mut tx.db)
        .await?;
    Ok(())
}
