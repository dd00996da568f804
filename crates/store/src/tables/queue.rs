//! Messages that wait for their turn. They are stored because their sender was told that they were accepted,
//! so they must survive a restart. A message is removed in the transaction that appends it to the session's log
//! ([`SessionPatch::dequeue_turn`]).
//!
//! [`SessionPatch::dequeue_turn`]: super::sessions::SessionPatch::dequeue_turn

use oubliette_protocol::{Error, Result, SessionId};

use super::row::{number, text};
use crate::{
    db::{query, query_scalar},
    db_error::{WriteError, read_error},
    store::Store,
    writer::{StoreWrite, WriteTx},
};

/// A message waiting for its turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuedMessage {
    /// The number of the turn it will start.
    pub turn: u64,
    /// Its text.
    pub text: String,
}

impl Store {
    /// Queues a message for a turn; `conflict` if another message is queued for that turn.
    pub async fn queue_push(&self, session: &SessionId, message: QueuedMessage) -> Result<()> {
        self.write(EnqueueMessage(session.clone(), message)).await
    }

    /// The queued messages of a session, in order of turns.
    pub async fn queue_list(&self, session: &SessionId) -> Result<Vec<QueuedMessage>> {
        let rows = query("SELECT turn, text FROM queue WHERE session_id = $1 ORDER BY turn")
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

    /// The sessions that have queued messages.
    pub async fn queue_sessions(&self) -> Result<Vec<SessionId>> {
        let ids: Vec<String> = query_scalar("SELECT DISTINCT session_id FROM queue ORDER BY session_id")
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        ids.iter().map(|id| id.parse().map_err(Error::internal)).collect()
    }

    /// Removes the queued message of a turn; all of the session's if `turn` is none.
    pub async fn queue_drop(&self, session: &SessionId, turn: Option<u64>) -> Result<()> {
        self.write(DropQueuedMessages(session.clone(), turn)).await
    }
}

struct EnqueueMessage(SessionId, QueuedMessage);

impl StoreWrite for EnqueueMessage {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        let Self(session, message) = self;
        query("INSERT INTO queue (session_id, turn, text) VALUES ($1, $2, $3)")
            .bind(session.as_str())
            .bind(i64::try_from(message.turn).map_err(Error::internal)?)
            .bind(&message.text)
            .execute(&mut tx.db)
            .await?;
        Ok(())
    }
}

struct DropQueuedMessages(SessionId, Option<u64>);

impl StoreWrite for DropQueuedMessages {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        match self.1 {
            Some(turn) => remove_queued(&self.0, turn, tx).await,
            None => {
                query("DELETE FROM queue WHERE session_id = $1")
                    .bind(self.0.as_str())
                    .execute(&mut tx.db)
                    .await?;
                Ok(())
            }
        }
    }
}

/// Removes the queued message of a turn.
pub(crate) async fn remove_queued(
    session: &SessionId,
    turn: u64,
    tx: &mut WriteTx,
) -> Result<(), WriteError> {
    query("DELETE FROM queue WHERE session_id = $1 AND turn = $2")
        .bind(session.as_str())
        .bind(i64::try_from(turn).map_err(Error::internal)?)
        .execute(&mut tx.db)
        .await?;
    Ok(())
}
