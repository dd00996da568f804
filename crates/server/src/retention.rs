//! Deletes what is older than `[retention]` says, at start and every minute, in small batches between other writes.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use oubliette_protocol::Result;

use crate::{app::App, config::RetentionPeriods};

/// How often old records are looked for.
const INTERVAL: Duration = Duration::from_secs(60);
/// Milliseconds of a day.
const DAY_MILLIS: i64 = 24 * 3_600 * 1_000;

/// Deletes old records until the server stops.
pub(crate) async fn run(app: Arc<App>) {
    loop {
        // In a cluster one server deletes.
        tokio::select! {
            () = app.store.wait_for_duty() => {}
            () = app.stopping.cancelled() => return,
        }
        let deletion = async {
            match app.store.shared_now().await {
                Ok(now) => delete_expired(&app, app.live.config().retention, now).await,
                Err(error) => {
                    tracing::warn!(error = %error.for_log(), "nothing is deleted while the database does not answer");
                }
            }
        };
        tokio::select! {
            () = deletion => {}
            () = app.stopping.cancelled() => return,
        }
        tokio::select! {
            () = tokio::time::sleep(INTERVAL) => {}
            () = app.stopping.cancelled() => return,
        }
    }
}

/// Deletes what has expired by `now`. A failure is logged, and does not keep the others from being deleted.
pub(crate) async fn delete_expired(app: &App, keep: RetentionPeriods, now: Timestamp) {
    if let Some(before) = expiry(now, keep.sessions) {
        let deleted = app.sessions.delete_expired(before).await;
        log_outcome("sessions", deleted.map(|n| n as u64));
    }
    if let Some(before) = expiry(now, keep.debugger) {
        log_outcome("debugger events", app.store.debugger_delete_before(before).await);
    }
    if let Some(before) = expiry(now, keep.audit) {
        log_outcome("audit entries", app.store.audit_delete_before(before).await);
    }
    if let Some(before) = expiry(now, keep.usage) {
        // Budgets count what was used since the day (UTC) began, also after a restart.
        let before = before.min(day_start(now));
        log_outcome("usage records", app.store.usage_delete_before(before).await);
    }
}

/// The time before which records have expired; none if they are kept for ever, or longer than the calendar reaches.
fn expiry(now: Timestamp, keep: Option<Duration>) -> Option<Timestamp> {
    now.checked_sub(keep?).ok()
}

/// The beginning of the day, in UTC.
fn day_start(now: Timestamp) -> Timestamp {
    let millis = now.as_millisecond();
    Timestamp::from_millisecond(millis - millis.rem_euclid(DAY_MILLIS)).unwrap_or(now)
}

fn log_outcome(records: &str, deleted: Result<u64>) {
    match deleted {
        Ok(0) => {}
        Ok(deleted) => tracing::info!(deleted, records, "expired records deleted"),
        Err(error) => {
            tracing::warn!(records, error = %error.for_log(), "deleting expired records failed; tried again in a minute");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_today_has_not_expired() {
        let now: Timestamp = "2026-11-17T16:00:00Z".parse().unwrap();
        assert_eq!(day_start(now), "2026-11-17T00:00:00Z".parse().unwrap());
        assert_eq!(expiry(now, None), None);
        assert_eq!(
            expiry(now, Some(Duration::from_secs(3_600))),
            Some("2026-11-17T15:00:00Z".parse().unwrap())
        );
        assert_eq!(expiry(now, Some(Duration::MAX)), None);
    }
}
