//! Puts events that webhooks want into their outbox, in the transaction that appends them.

use std::{collections::HashSet, sync::Arc};

use oubliette_protocol::{Error, event::EventBody};
use parking_lot::RwLock;
use tokio::sync::Notify;

use super::{job::WriteTx, slot::GroupSlot};
use crate::db::query;
use crate::db_error::WriteError;

/// A webhook and the types of events it wants.
#[derive(Debug, Clone)]
pub struct WebhookSubscription {
    /// Identifies it in the database.
    pub webhook: String,
    /// The types of events.
    pub events: HashSet<String>,
}

/// All webhooks, and the signal that one of them has something to deliver.
#[derive(Default)]
pub(crate) struct WebhookOutbox {
    subscriptions: RwLock<Arc<Vec<WebhookSubscription>>>,
    pub(crate) filled: Notify,
}

impl WebhookOutbox {
    pub(crate) fn set(&self, subscriptions: Vec<WebhookSubscription>) {
        *self.subscriptions.write() = subscriptions.into();
    }

    /// Whether a webhook wants one of these.
    pub(super) fn wants(&self, bodies: &[(EventBody, String)]) -> bool {
        self.subscriptions.read().iter().any(|webhook| {
            bodies
                .iter()
                .any(|(body, _)| webhook.events.contains(body.kind()))
        })
    }

    /// Adds the events of these slots for each webhook that wants them. Returns whether there were any.
    pub(super) async fn fill(&self, tx: &mut WriteTx, slots: &mut [GroupSlot]) -> Result<bool, WriteError> {
        let subscriptions = self.subscriptions.read().clone();
        if subscriptions.is_empty() {
            return Ok(false);
        }
        let (mut filled, now) = (false, tx.now_millis());
        for slot in slots {
            let GroupSlot::Events {
                events,
                refused: None,
                ..
            } = slot
            else {
                continue;
            };
            for event in events.iter() {
                let wanted = subscriptions
                    .iter()
                    .filter(|webhook| webhook.events.contains(event.body.kind()));
                for webhook in wanted {
                    let body = serde_json::to_string(&**event).map_err(Error::internal)?;
                    query(
                        "INSERT INTO webhook_outbox (webhook, session_id, idx, body, created_at, attempts, next_at)
                         VALUES ($1, $2, $3, $4, $5, 0, $5) ON CONFLICT DO NOTHING",
                    )
                    .bind(&webhook.webhook)
                    .bind(event.session_id.as_str())
                    .bind(event.index)
                    .bind(body)
                    .bind(now)
                    .execute(&mut tx.db)
                    .await?;
                    filled = true;
                }
            }
        }
        Ok(filled)
    }
}
