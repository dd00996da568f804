//! Sends what is in a webhook's outbox.
//!
//! Each webhook has a task. It sends the first event of several sessions at once, but of one session one after the other. What
//! fails is tried again with growing waits for a day; the events after it wait, those of other sessions do not.

use std::{sync::Arc, time::Duration};

use futures::{StreamExt as _, stream};
use jiff::{SignedDuration, Timestamp};
use oubliette_protocol::{Error, Result};
use oubliette_store::{DeliveryOutcome, OutboxEvent, Store};
use reqwest::{Client, redirect};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::Webhook;

/// How long one delivery may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// The wait after a first failure; it doubles with each further one.
const FIRST_RETRY: Duration = Duration::from_secs(5);
/// The longest wait between two attempts.
const MAX_RETRY: Duration = Duration::from_secs(3600);
/// How long an event is tried.
const GIVE_UP_AFTER: Duration = Duration::from_secs(24 * 3600);
/// Deliveries of one webhook at once.
const MAX_PARALLEL: usize = 8;
/// Events that may wait for one webhook, and their bytes. Beyond it the oldest are given up.
const MAX_EVENTS: u64 = 10_000;
const MAX_BYTES: u64 = 256 << 20;
/// How long to wait when the database cannot be read or written.
const STORE_RETRY: Duration = Duration::from_secs(1);
/// How often an outbox is looked at even if nothing says that it has been filled.
const IDLE_CHECK: Duration = Duration::from_secs(60);
/// The longest part of an error that is kept, in characters.
const MAX_ERROR_CHARS: usize = 300;

/// The tasks that deliver.
#[derive(Debug, Default)]
pub(crate) struct WebhookTasks {
    stopping: CancellationToken,
    tasks: TaskTracker,
}

impl WebhookTasks {
    /// Stops delivering, and waits until nothing is under way any more: what was not delivered stays in the outbox.
    pub(crate) async fn stop(self) {
        self.stopping.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Begins to keep and deliver what these webhooks want, until the server or the tasks are stopped.
pub(crate) async fn start(
    webhooks: &[Webhook],
    store: &Store,
    stopping: &CancellationToken,
) -> Result<WebhookTasks> {
    let running = WebhookTasks {
        stopping: stopping.child_token(),
        tasks: TaskTracker::new(),
    };
    // Made first: a client that cannot be made must leave the subscriptions as they are.
    let clients: Vec<Client> = webhooks.iter().map(build_client).collect::<Result<_>>()?;
    store
        .webhooks_set(webhooks.iter().map(Webhook::subscription).collect())
        .await?;
    let mut wakes = Vec::new();
    for (webhook, client) in webhooks.iter().zip(clients) {
        if webhook.secret.is_none() {
            tracing::warn!(
                webhook = webhook.shown(),
                variable = webhook.secret_env,
                "a webhook's secret is not set; its events are kept and not sent"
            );
        }
        let wake = Arc::new(tokio::sync::Notify::new());
        let sender = WebhookSender {
            id: webhook.id(),
            webhook: webhook.clone(),
            secret: webhook.secret.clone(),
            client,
            store: store.clone(),
            wake: wake.clone(),
            stopping: running.stopping.clone(),
        };
        running.tasks.spawn(sender.run());
        wakes.push(wake);
    }
    if !wakes.is_empty() {
        let (store, stopping) = (store.clone(), running.stopping.clone());
        running.tasks.spawn(async move {
            loop {
                tokio::select! {
                    () = stopping.cancelled() => return,
                    () = store.webhooks_filled() => wakes.iter().for_each(|wake| wake.notify_one()),
                }
            }
        });
    }
    Ok(running)
}

fn build_client(webhook: &Webhook) -> Result<Client> {
    // The process has one default crypto provider. If it is set already, it is this one too.
    let _already = rustls::crypto::ring::default_provider().install_default();
    let is_loopback = match webhook.url.host_str() {
        Some("localhost" | "[::1]") => true,
        Some(host) => host
            .parse::<std::net::Ipv4Addr>()
            .is_ok_and(|ip| ip.is_loopback()),
        None => false,
    };
    let mut builder = Client::builder()
        .redirect(redirect::Policy::none())
        .referer(false)
        .timeout(REQUEST_TIMEOUT)
        .pool_max_idle_per_host(1);
    if is_loopback {
        builder = builder.no_proxy();
    }
    if webhook.url.scheme() == "http" {
        // Plain HTTP needs no root certificates, so none are loaded.
        builder = builder.tls_certs_only([]);
    }
    let failed =
        |e: reqwest::Error| Error::unavailable("connections to webhooks cannot be prepared").with_cause(e);
    builder.build().map_err(failed)
}

/// Delivers the events of one webhook.
struct WebhookSender {
    id: String,
    webhook: Webhook,
    /// None: events are kept, within the bounds of an outbox, and not sent.
    secret: Option<super::WebhookSecret>,
    client: Client,
    store: Store,
    wake: Arc<tokio::sync::Notify>,
    stopping: CancellationToken,
}

impl WebhookSender {
    async fn run(self) {
        loop {
            // In a cluster one server delivers.
            tokio::select! {
                () = self.stopping.cancelled() => return,
                () = self.store.wait_for_duty() => {}
            }
            let wait = match self.deliver_due().await {
                Ok(wait) => wait,
                Err(error) => {
                    tracing::warn!(webhook = self.webhook.shown(), error = %error.for_log(), "the outbox of a webhook cannot be used; tried again");
                    STORE_RETRY
                }
            };
            tokio::select! {
                () = self.stopping.cancelled() => return,
                () = self.wake.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Delivers everything that is due; returns how long to wait for the next.
    async fn deliver_due(&self) -> Result<Duration> {
        let dropped = self.store.webhook_trim(&self.id, MAX_EVENTS, MAX_BYTES).await?;
        if dropped > 0 {
            tracing::warn!(
                webhook = self.webhook.shown(),
                dropped,
                "more events wait for a webhook than are kept; the oldest were given up"
            );
        }
        if self.secret.is_none() {
            return Ok(IDLE_CHECK);
        }
        loop {
            let now = self.store.shared_now().await?;
            let latest = later(now, MAX_RETRY);
            let due = self.store.webhook_due(&self.id, now, latest, 64).await?;
            if due.is_empty() || self.stopping.is_cancelled() || !self.store.has_duty() {
                break;
            }
            let mut deliveries = stream::iter(due)
                .map(|event| self.deliver_session(event))
                .buffer_unordered(MAX_PARALLEL);
            while let Some(done) = deliveries.next().await {
                done?;
            }
        }
        let next = self.store.webhook_next_due(&self.id).await?;
        let now = self.store.shared_now().await?;
        let wait = next.map(|at| at.duration_since(now));
        let wait = wait.map(|wait| Duration::try_from(wait).unwrap_or(Duration::from_millis(10)));
        Ok(wait
            .unwrap_or(IDLE_CHECK)
            .clamp(Duration::from_millis(10), IDLE_CHECK))
    }

    async fn deliver_session(&self, event: OutboxEvent) -> Result<()> {
        let outcome = tokio::select! {
            outcome = self.attempt(&event) => outcome?,
            // Sent again after the next start.
            () = self.stopping.cancelled() => return Ok(()),
        };
        if let DeliveryOutcome::GivenUp(why) = &outcome {
            tracing::warn!(webhook = self.webhook.shown(), session = %event.session_id, index = event.index, why, "an event was not delivered for a day; it is given up");
        }
        self.store.webhook_record(&self.id, &event, outcome).await
    }

    async fn attempt(&self, event: &OutboxEvent) -> Result<DeliveryOutcome> {
        let sent_at = self.store.shared_now().await?;
        let Err(why) = self.send(event, sent_at).await else {
            return Ok(DeliveryOutcome::Delivered);
        };
        let now = self.store.shared_now().await?;
        let is_old =
            now.duration_since(event.created_at) > SignedDuration::from_secs(GIVE_UP_AFTER.as_secs() as i64);
        Ok(match is_old {
            true => DeliveryOutcome::GivenUp(why),
            false => DeliveryOutcome::Retry(later(now, retry_wait(event.attempts)), why),
        })
    }

    /// Posts an event; an error says why the webhook did not take it, without its path or secret.
    async fn send(&self, event: &OutboxEvent, sent_at: Timestamp) -> Result<(), String> {
        let id = format!("{}-{}", event.session_id, event.index);
        let timestamp = sent_at.as_second();
        let signature = self
            .secret
            .as_ref()
            .and_then(|secret| secret.sign(&id, timestamp, &event.body))
            .ok_or("the secret cannot be used as a key")?;
        let response = self
            .client
            .post(self.webhook.url.clone())
            .header("content-type", "application/json")
            .header("user-agent", concat!("oubliette/", env!("CARGO_PKG_VERSION")))
            .header("webhook-id", id)
            .header("webhook-timestamp", timestamp)
            .header("webhook-signature", signature)
            .body(event.body.clone())
            .send()
            .await
            .map_err(describe)?;
        let status = response.status();
        match status {
            status if status.is_success() => Ok(()),
            status if status.is_redirection() => Err(format!(
                "answered {} with a redirect, which is not followed: set url to where it leads",
                status.as_u16()
            )),
            status => Err(format!("answered {}", status.as_u16())),
        }
    }
}

/// The wait after this many failures before.
fn retry_wait(attempts: u32) -> Duration {
    FIRST_RETRY
        .saturating_mul(2_u32.saturating_pow(attempts.min(16)))
        .min(MAX_RETRY)
}

fn later(now: Timestamp, by: Duration) -> Timestamp {
    now.checked_add(by).unwrap_or(Timestamp::MAX)
}

/// Why a request failed: the innermost cause, without the URL.
fn describe(error: reqwest::Error) -> String {
    if error.is_timeout() {
        return format!("did not answer within {} s", REQUEST_TIMEOUT.as_secs());
    }
    let error = error.without_url();
    let mut cause: &dyn std::error::Error = &error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    let text: String = cause.to_string().chars().take(MAX_ERROR_CHARS).collect();
    format!("cannot be reached: {text}")
}

#[cfg(test)]
mod tests {
    use oubliette_protocol::{ErrorCode, SessionId, event::EventBody};

    use super::*;

    #[test]
    fn the_first_retry_is_soon_and_a_day_has_many() {
        assert!(retry_wait(0) <= Duration::from_secs(10));
        let (mut waited, mut attempts) = (Duration::ZERO, 0);
        while waited < GIVE_UP_AFTER {
            assert!(retry_wait(attempts) <= MAX_RETRY);
            waited += retry_wait(attempts);
            attempts += 1;
        }
        assert!((20..100).contains(&attempts), "{attempts}");
        assert_eq!(retry_wait(u32::MAX), MAX_RETRY);
    }

    #[tokio::test]
    async fn what_waits_for_a_secret_is_bounded_too() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("db")).await.unwrap();
        let url = "http://127.0.0.1:9/";
        let webhook = Webhook::new(url, vec!["error".into()], "UNSET".into(), |_| None).unwrap();
        let stopping = CancellationToken::new();
        let tasks = start(std::slice::from_ref(&webhook), &store, &stopping)
            .await
            .unwrap();
        let event = EventBody::error(ErrorCode::Internal, "");
        let events = vec![event; MAX_EVENTS as usize + 1];
        store
            .events()
            .append(&SessionId::generate(), events)
            .await
            .unwrap();
        let status = loop {
            let status = store.webhook_status(&webhook.id()).await.unwrap();
            if status.dropped > 0 {
                break status;
            }
            tokio::task::yield_now().await;
        };
        assert!(status.waiting > 0 && status.waiting <= MAX_EVENTS, "{status:?}");
        tasks.stop().await;
    }
}
