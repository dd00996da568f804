//! The outbox of webhooks: what is to be delivered, and how each webhook fares.

use jiff::Timestamp;
use oubliette_protocol::{Result, SessionId};

use super::row::{number, optional_text, optional_time, parsed, text, time};
use crate::{
    db::{QueryBuilder, query, query_scalar},
    db_error::{WriteError, read_error},
    store::Store,
    writer::{StoreWrite, WebhookSubscription, WriteTx},
};

/// An event that a webhook has not taken yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutboxEvent {
    /// The event's session.
    pub session_id: SessionId,
    /// Its index in the session's log.
    pub index: i64,
    /// The event as JSON.
    pub body: String,
    /// When it happened.
    pub created_at: Timestamp,
    /// How often its delivery failed.
    pub attempts: u32,
}

/// How a webhook fares.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WebhookStatus {
    /// Events that wait.
    pub waiting: u64,
    /// Since when deliveries fail; none if the last one succeeded.
    pub failing_since: Option<Timestamp>,
    /// Why the last delivery failed.
    pub last_error: Option<String>,
    /// Events that were given up.
    pub dropped: u64,
}

/// What became of an attempt to deliver an event.
#[derive(Debug, Clone)]
pub enum DeliveryOutcome {
    /// The webhook took it.
    Delivered,
    /// It is to be tried again at this time.
    Retry(Timestamp, String),
    /// It is not tried again.
    GivenUp(String),
}

impl Store {
    /// Sets the webhooks: from now on what they want is kept for them. What is kept for others is deleted.
    pub async fn webhooks_set(&self, webhooks: Vec<WebhookSubscription>) -> Result<()> {
        let known = webhooks.iter().map(|webhook| webhook.webhook.clone()).collect();
        self.webhook_outbox().set(webhooks);
        if self.cluster().is_some() {
            // Another server may know more of them, while a change of the configuration goes from one to the next.
            return Ok(());
        }
        self.write(ForgetOtherWebhooks(known)).await
    }

    /// Waits until something was put into an outbox.
    pub async fn webhooks_filled(&self) {
        self.webhook_outbox().filled.notified().await;
    }

    /// Events that are due: of each session only the first, since a session's events are delivered in order. One that is due
    /// after `latest` is due now: no retry is that late, so the clock was set back.
    pub async fn webhook_due(
        &self,
        webhook: &str,
        now: Timestamp,
        latest: Timestamp,
        max: u32,
    ) -> Result<Vec<OutboxEvent>> {
        let rows = query(
            "SELECT session_id, idx, body, created_at, attempts FROM webhook_outbox AS o
             WHERE webhook = $1 AND (next_at <= $2 OR next_at > $4) AND NOT EXISTS
                 (SELECT 1 FROM webhook_outbox AS p
                  WHERE p.webhook = $1 AND p.session_id = o.session_id AND p.idx < o.idx)
             ORDER BY next_at, created_at LIMIT $3",
        )
        .bind(webhook)
        .bind(now.as_millisecond())
        .bind(i64::from(max))
        .bind(latest.as_millisecond())
        .fetch_all(self.readers())
        .await
        .map_err(read_error)?;
        let event = |row| {
            Ok(OutboxEvent {
                session_id: parsed(row, "session_id")?,
                index: number(row, "idx")?,
                body: text(row, "body")?,
                created_at: time(row, "created_at")?,
                attempts: number(row, "attempts")?,
            })
        };
        rows.iter().map(event).collect()
    }

    /// When the next event is due; none if none waits.
    pub async fn webhook_next_due(&self, webhook: &str) -> Result<Option<Timestamp>> {
        let row = query(
            "SELECT MIN(next_at) AS next_at FROM webhook_outbox AS o WHERE webhook = $1 AND NOT EXISTS
                 (SELECT 1 FROM webhook_outbox AS p
                  WHERE p.webhook = $1 AND p.session_id = o.session_id AND p.idx < o.idx)",
        )
        .bind(webhook)
        .fetch_one(self.readers())
        .await
        .map_err(read_error)?;
        optional_time(&row, "next_at")
    }

    /// Records what became of an attempt.
    pub async fn webhook_record(
        &self,
        webhook: &str,
        event: &OutboxEvent,
        outcome: DeliveryOutcome,
    ) -> Result<()> {
        self.write(RecordDelivery {
            webhook: webhook.to_owned(),
            session_id: event.session_id.clone(),
            index: event.index,
            outcome,
        })
        .await
    }

    /// Deletes the oldest events until at most so many, of so many bytes, wait. Returns how many were deleted.
    pub async fn webhook_trim(&self, webhook: &str, max_events: u64, max_bytes: u64) -> Result<u64> {
        self.write(TrimOutbox {
            webhook: webhook.to_owned(),
            max_events,
            max_bytes,
        })
        .await
    }

    /// How a webhook fares.
    pub async fn webhook_status(&self, webhook: &str) -> Result<WebhookStatus> {
        let waiting: i64 = query_scalar("SELECT COUNT(*) FROM webhook_outbox WHERE webhook = $1")
            .bind(webhook)
            .fetch_one(self.readers())
            .await
            .map_err(read_error)?;
        let row = query("SELECT failing_since, last_error, dropped FROM webhook_state WHERE webhook = $1")
            .bind(webhook)
            .fetch_optional(self.readers())
            .await
            .map_err(read_error)?;
        let waiting = waiting.unsigned_abs();
        let Some(row) = row else {
            return Ok(WebhookStatus {
                waiting,
                ..WebhookStatus::default()
            });
        };
        Ok(WebhookStatus {
            waiting,
            failing_since: optional_time(&row, "failing_since")?,
            last_error: optional_text(&row, "last_error")?,
            dropped: number(&row, "dropped")?,
        })
    }
}

struct ForgetOtherWebhooks(Vec<String>);

impl StoreWrite for ForgetOtherWebhooks {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        for table in ["webhook_outbox", "webhook_state"] {
            // No webhook is '', so the list is never empty; `NOT IN ()` would be invalid SQL.
            let mut query = QueryBuilder::new(format!("DELETE FROM {table} WHERE webhook NOT IN (''"));
            for webhook in &self.0 {
                query.push(", ").push_bind(webhook);
            }
            query.push(")");
            query.build().execute(&mut tx.db).await?;
        }
        Ok(())
    }
}

struct RecordDelivery {
    webhook: String,
    session_id: SessionId,
    index: i64,
    outcome: DeliveryOutcome,
}

impl RecordDelivery {
    async fn delete(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        query("DELETE FROM webhook_outbox WHERE webhook = $1 AND session_id = $2 AND idx = $3")
            .bind(&self.webhook)
            .bind(self.session_id.as_str())
            .bind(self.index)
            .execute(&mut tx.db)
            .await?;
        Ok(())
    }

    async fn set_failing(&self, tx: &mut WriteTx, error: &str, dropped: i64) -> Result<(), WriteError> {
        query(
            "INSERT INTO webhook_state (webhook, failing_since, last_error, dropped) VALUES ($1, $2, $3, $4)
             ON CONFLICT (webhook) DO UPDATE SET failing_since = COALESCE(webhook_state.failing_since, $2),
                 last_error = $3, dropped = webhook_state.dropped + $4",
        )
        .bind(&self.webhook)
        .bind(tx.now_millis())
        .bind(error)
        .bind(dropped)
        .execute(&mut tx.db)
        .await?;
        Ok(())
    }
}

impl StoreWrite for RecordDelivery {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        match &self.outcome {
            DeliveryOutcome::Delivered => {
                self.delete(tx).await?;
                query(
                    "UPDATE webhook_state SET failing_since = NULL, last_error = NULL
                     WHERE webhook = $1 AND failing_since IS NOT NULL",
                )
                .bind(&self.webhook)
                .execute(&mut tx.db)
                .await?;
                Ok(())
            }
            DeliveryOutcome::Retry(at, error) => {
                query(
                    "UPDATE webhook_outbox SET attempts = attempts + 1, next_at = $4
                     WHERE webhook = $1 AND session_id = $2 AND idx = $3",
                )
                .bind(&self.webhook)
                .bind(self.session_id.as_str())
                .bind(self.index)
                .bind(at.as_millisecond())
                .execute(&mut tx.db)
                .await?;
                self.set_failing(tx, error, 0).await
            }
            DeliveryOutcome::GivenUp(error) => {
                self.delete(tx).await?;
                self.set_failing(tx, error, 1).await
            }
        }
    }
}

/// Deletes events of the sessions that have most of them, the oldest of each first, so that no session can push those of
/// others out: an event goes the earlier, the more its session has from it on.
const TRIM_BY_COUNT: &str = "DELETE FROM webhook_outbox WHERE webhook = $1 AND (session_id, idx) IN
    (SELECT session_id, idx FROM
        (SELECT session_id, idx, created_at, COUNT(*) OVER (PARTITION BY session_id ORDER BY idx DESC) AS share
         FROM webhook_outbox WHERE webhook = $1) AS shares
     ORDER BY share DESC, created_at, session_id, idx LIMIT $2)";
/// The same by bytes.
const TRIM_BY_BYTES: &str = "DELETE FROM webhook_outbox WHERE webhook = $1 AND (session_id, idx) IN
    (SELECT session_id, idx FROM
        (SELECT session_id, idx, created_at,
             SUM(octet_length(body)) OVER (PARTITION BY session_id ORDER BY idx DESC) AS share
         FROM webhook_outbox WHERE webhook = $1) AS shares
     ORDER BY share DESC, created_at, session_id, idx LIMIT $2)";

struct TrimOutbox {
    webhook: String,
    max_events: u64,
    max_bytes: u64,
}

impl StoreWrite for TrimOutbox {
    type Out = u64;

    async fn apply(&self, tx: &mut WriteTx) -> Result<u64, WriteError> {
        let mut dropped = 0;
        loop {
            let row = query(
                "SELECT COUNT(*), COALESCE(SUM(octet_length(body)), 0) FROM webhook_outbox WHERE webhook = $1",
            )
            .bind(&self.webhook)
            .fetch_one(&mut tx.db)
            .await?;
            let (events, bytes): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
            let (events, bytes) = (events.unsigned_abs(), bytes.unsigned_abs());
            if events <= self.max_events && bytes <= self.max_bytes {
                break;
            }
            // A tenth at a time where bytes are too many: how large each is is not known.
            let excess = events.saturating_sub(self.max_events).max(events / 10).max(1);
            let gone = query(match bytes > self.max_bytes {
                true => TRIM_BY_BYTES,
                false => TRIM_BY_COUNT,
            })
            .bind(&self.webhook)
            .bind(i64::try_from(excess).unwrap_or(i64::MAX))
            .execute(&mut tx.db)
            .await?;
            dropped += gone.rows_affected();
            if gone.rows_affected() == 0 {
                break;
            }
        }
        if dropped > 0 {
            query(
                "INSERT INTO webhook_state (webhook, dropped) VALUES ($1, $2)
                 ON CONFLICT (webhook) DO UPDATE SET dropped = webhook_state.dropped + $2",
            )
            .bind(&self.webhook)
            .bind(i64::try_from(dropped).unwrap_or(i64::MAX))
            .execute(&mut tx.db)
            .await?;
        }
        Ok(dropped)
    }
}
