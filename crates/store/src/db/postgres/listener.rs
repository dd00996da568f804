//! Hearing what another server commits. A notification only says how far a log is; readers pull the entries by index. What
//! was not heard is caught up: whenever the connection is new, and every second while somebody follows a log, the
//! database is asked how far the followed logs are.

use std::{sync::Arc, time::Duration};

use oubliette_protocol::{SessionId, TokenId};
use sqlx::{PgPool, postgres::PgListener};
use tokio::sync::{Notify, broadcast, watch};

use super::notice::{CommitNotice, from_payload};
use crate::{
    db::{DbPool, QueryBuilder},
    log::{
        debugger::{self, DebugQueue},
        tail::SessionTails,
    },
    store::StoreCaches,
    writer::WebhookOutbox,
};

/// How often followed logs are looked at although nothing was heard.
const CATCH_UP_INTERVAL: Duration = Duration::from_secs(1);
/// How long to wait before connecting again.
const RECONNECT_WAIT: Duration = Duration::from_millis(500);
/// Maximum sessions that one query asks for.
const SESSIONS_PER_QUERY: usize = 500;

/// What is told of what was heard.
pub(crate) struct CommitListener {
    pub(crate) pool: PgPool,
    pub(crate) channel: String,
    pub(crate) tails: Arc<SessionTails>,
    pub(crate) debug_queue: Arc<DebugQueue>,
    pub(crate) caches: Arc<StoreCaches>,
    /// Told that a server of the cluster is gone.
    pub(crate) servers_changed: Arc<Notify>,
    /// Told of tokens that were revoked.
    pub(crate) revoked_tokens: broadcast::Sender<TokenId>,
    /// Told that something is to be delivered.
    pub(crate) webhooks: Arc<WebhookOutbox>,
}

impl CommitListener {
    /// Listens until the store is closed.
    pub(crate) async fn run(self, mut closed: watch::Receiver<bool>) {
        let listening = async {
            loop {
                if let Err(error) = self.listen().await {
                    tracing::warn!(%error, "listening to the database failed; listening again");
                }
                tokio::time::sleep(RECONNECT_WAIT).await;
            }
        };
        tokio::select! {
            () = listening => {}
            _ = closed.wait_for(|closed| *closed) => {}
        }
        self.tails.close();
        self.debug_queue.tail.close();
    }

    async fn listen(&self) -> Result<(), sqlx::Error> {
        let mut listener = PgListener::connect_with(&self.pool).await?;
        // A lost connection is an error here: what was missed has to be caught up.
        listener.eager_reconnect(false);
        listener.listen(&self.channel).await?;
        // After the listening began, so that nothing is missed between.
        self.caches.invalidate_all();
        self.caches.library_changed();
        self.catch_up().await?;
        loop {
            match tokio::time::timeout(CATCH_UP_INTERVAL, listener.try_recv()).await {
                Ok(Ok(Some(heard))) => {
                    for notice in from_payload(heard.payload()) {
                        self.tell(notice);
                    }
                }
                Ok(Ok(None)) => return Ok(()),
                Ok(Err(error)) => return Err(error),
                Err(_) => self.catch_up().await?,
            }
        }
    }

    fn tell(&self, notice: CommitNotice) {
        match notice {
            CommitNotice::Events(session, last) => self.tails.advance(&session, last),
            CommitNotice::Debug(last) => self.debug_queue.tail.advance_to(last),
            CommitNotice::SessionDeleted(session) => self.tails.close_session(&session),
            CommitNotice::Servers => self.servers_changed.notify_one(),
            CommitNotice::Outbox => self.webhooks.filled.notify_one(),
            // Nobody may be listening.
            CommitNotice::TokenRevoked(token) => drop(self.revoked_tokens.send(token)),
            CommitNotice::Tokens => self.caches.tokens.invalidate(),
            CommitNotice::Projects => {
                self.caches.projects.invalidate();
                self.caches.sessions.invalidate();
            }
            CommitNotice::Definitions => self.caches.library_changed(),
        }
    }

    /// Asks the database how far the followed logs are.
    async fn catch_up(&self) -> Result<(), sqlx::Error> {
        let pool = DbPool::Postgres(self.pool.clone());
        for sessions in self.tails.followed().chunks(SESSIONS_PER_QUERY) {
            let mut query = QueryBuilder::new(
                "SELECT session_id, (SELECT MAX(idx) FROM events WHERE events.log = event_logs.log)
                 FROM event_logs WHERE session_id IN (''",
            );
            for session in sessions {
                query.push(", ").push_bind(session.as_str());
            }
            query.push(")");
            for row in query.build().fetch_all(&pool).await? {
                let (session, last): (String, Option<i64>) = (row.try_get(0)?, row.try_get(1)?);
                if let (Ok(session), Some(last)) = (session.parse::<SessionId>(), last) {
                    self.tails.advance(&session, last);
                }
            }
        }
        if self.debug_queue.tail.is_followed() {
            let last = debugger::last_index(&pool)
                .await
                .map_err(|error| sqlx::Error::Io(std::io::Error::other(error.for_log().to_string())))?;
            self.debug_queue.tail.advance_to(last);
        }
        Ok(())
    }
}
