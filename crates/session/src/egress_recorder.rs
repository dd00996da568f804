//! Records the connections of one session's sandboxes as debugger events, at a bounded rate.
//!
//! A sandbox can make thousands of connections a second, and each event is a row in the database. Past
//! [`RECORDS_A_MINUTE`] connections are only counted, and at the end of the minute one event tells how many they were.

use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use oubliette_egress::{EgressRecord, EgressSink};
use oubliette_protocol::{CatalogId, Slug, debug::DebugBody};
use oubliette_tools::DebugSink;
use tokio::time::Instant;

/// Connections of one session that are recorded one by one in a minute.
const RECORDS_A_MINUTE: u32 = 600;
const MINUTE: Duration = Duration::from_secs(60);
/// Maximum length of a recorded reason, in characters.
const MAX_ERROR_CHARS: usize = 500;

/// Records the connections of one agent's sandbox and of its tool servers' sandboxes.
pub(crate) struct EgressRecorder {
    debug: Arc<dyn DebugSink>,
    agent: Slug,
    minute: Mutex<RecordedMinute>,
}

/// What was recorded and what was only counted since `began`.
struct RecordedMinute {
    began: Instant,
    recorded: u32,
    omitted: OmittedConnections,
}

#[derive(Debug, Default)]
struct OmittedConnections {
    connections: u64,
    bytes_in: u64,
    bytes_out: u64,
}

impl EgressRecorder {
    pub(crate) fn new(debug: Arc<dyn DebugSink>, agent: Slug) -> Arc<Self> {
        Arc::new(Self {
            debug,
            agent,
            minute: Mutex::new(RecordedMinute {
                began: Instant::now(),
                recorded: 0,
                omitted: OmittedConnections::default(),
            }),
        })
    }

    /// The sink for connections of a tool server, or of the agent itself.
    pub(crate) fn sink(self: &Arc<Self>, server: Option<CatalogId>) -> Arc<dyn EgressSink> {
        Arc::new(SandboxEgressSink {
            recorder: self.clone(),
            server,
        })
    }

    fn record(self: &Arc<Self>, server: Option<&CatalogId>, record: EgressRecord) {
        let mut minute = self.minute.lock().unwrap_or_else(PoisonError::into_inner);
        if minute.began.elapsed() >= MINUTE {
            self.record_omitted(&mut minute);
            (minute.began, minute.recorded) = (Instant::now(), 0);
        }
        if minute.recorded >= RECORDS_A_MINUTE {
            let omitted = &mut minute.omitted;
            omitted.connections += 1;
            omitted.bytes_in = omitted.bytes_in.saturating_add(record.bytes_in);
            omitted.bytes_out = omitted.bytes_out.saturating_add(record.bytes_out);
            // Without a next connection nobody else would tell.
            if omitted.connections == 1
                && let Ok(runtime) = tokio::runtime::Handle::try_current()
            {
                runtime.spawn(flush_at(Arc::downgrade(self), minute.began + MINUTE));
            }
            return;
        }
        minute.recorded += 1;
        self.debug.record(
            Some(&self.agent),
            DebugBody::Egress {
                host: record.host,
                port: record.port,
                allowed: record.allowed,
                rule: record.rule,
                bytes_in: record.bytes_in,
                bytes_out: record.bytes_out,
                duration_ms: record.duration.as_secs_f64() * 1e3,
                started: record.started,
                server: server.map(|id| id.as_str().to_owned()),
                error: record
                    .error
                    .map(|text| text.chars().take(MAX_ERROR_CHARS).collect()),
                request: record.request,
            },
        );
    }

    fn record_omitted(&self, minute: &mut RecordedMinute) {
        let omitted = std::mem::take(&mut minute.omitted);
        if omitted.connections > 0 {
            self.debug.record(
                Some(&self.agent),
                DebugBody::EgressOmitted {
                    connections: omitted.connections,
                    bytes_in: omitted.bytes_in,
                    bytes_out: omitted.bytes_out,
                },
            );
        }
    }
}

/// Tells what was omitted in the minute that ends at `end`.
async fn flush_at(recorder: Weak<EgressRecorder>, end: Instant) {
    tokio::time::sleep_until(end).await;
    if let Some(recorder) = recorder.upgrade() {
        let mut minute = recorder.minute.lock().unwrap_or_else(PoisonError::into_inner);
        recorder.record_omitted(&mut minute);
    }
}

impl Drop for EgressRecorder {
    fn drop(&mut self) {
        let mut minute = std::mem::replace(
            self.minute.get_mut().unwrap_or_else(PoisonError::into_inner),
            RecordedMinute {
                began: Instant::now(),
                recorded: 0,
                omitted: OmittedConnections::default(),
            },
        );
        self.record_omitted(&mut minute);
    }
}

/// Records the connections of one sandbox.
struct SandboxEgressSink {
    recorder: Arc<EgressRecorder>,
    server: Option<CatalogId>,
}

impl EgressSink for SandboxEgressSink {
    fn record(&self, record: EgressRecord) {
        self.recorder.record(self.server.as_ref(), record);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct KeptEvents(Mutex<Vec<DebugBody>>);

    impl DebugSink for KeptEvents {
        fn record(&self, _: Option<&Slug>, body: DebugBody) {
            self.0.lock().unwrap().push(body);
        }
    }

    fn connection(port: u16) -> EgressRecord {
        EgressRecord {
            host: "a.org".into(),
            port,
            allowed: true,
            rule: None,
            bytes_in: 3,
            bytes_out: 2,
            started: oubliette_protocol::now(),
            duration: Duration::from_millis(1),
            error: None,
            request: None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_connections_is_counted_not_recorded() {
        let kept = Arc::new(KeptEvents::default());
        let recorder = EgressRecorder::new(kept.clone(), "writer".parse().unwrap());
        let sink = recorder.sink(Some("net".parse().unwrap()));
        for _ in 0..10_000 {
            sink.record(connection(443));
        }
        let count = || kept.0.lock().unwrap().len();
        assert_eq!(count(), RECORDS_A_MINUTE as usize);
        // The clock is paused: this passes at once.
        tokio::time::sleep(MINUTE * 2).await;
        let omitted = 10_000 - u64::from(RECORDS_A_MINUTE);
        let last = kept.0.lock().unwrap().pop();
        assert_eq!(
            last,
            Some(DebugBody::EgressOmitted {
                connections: omitted,
                bytes_in: 3 * omitted,
                bytes_out: 2 * omitted
            })
        );
        sink.record(connection(80));
        let last = kept.0.lock().unwrap().pop();
        assert!(
            matches!(&last, Some(DebugBody::Egress { port: 80, server: Some(server), .. }) if server == "net"),
            "{last:?}"
        );
    }

    #[tokio::test]
    async fn what_was_omitted_is_told_when_the_session_stops() {
        let kept = Arc::new(KeptEvents::default());
        let recorder = EgressRecorder::new(kept.clone(), "writer".parse().unwrap());
        let sink = recorder.sink(None);
        for _ in 0..=RECORDS_A_MINUTE {
            sink.record(connection(443));
        }
        drop((sink, recorder));
        let last = kept.0.lock().unwrap().pop();
        assert!(
            matches!(last, Some(DebugBody::EgressOmitted { connections: 1, .. })),
            "{last:?}"
        );
    }
}
