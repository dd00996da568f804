//! Sinks that record a session's debugger events in the store.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use oubliette_egress::ModelSink;
use oubliette_protocol::{SessionId, Slug, debug::DebugBody};
use oubliette_store::Store;
use oubliette_tools::DebugSink;

/// Records debugger events of one session.
pub(crate) struct SessionDebugSink {
    store: Store,
    session: SessionId,
}

impl SessionDebugSink {
    pub(crate) fn new(store: Store, session: SessionId) -> Arc<Self> {
        Arc::new(Self { store, session })
    }
}

impl DebugSink for SessionDebugSink {
    fn record(&self, agent: Option<&Slug>, body: DebugBody) {
        self.store
            .debugger()
            .record(Some(self.session.clone()), agent.cloned(), body);
    }

    fn record_text(&self, agent: Option<&Slug>, kind: &'static str, text: String) {
        let session = Some(self.session.clone());
        self.store
            .debugger()
            .record_json(session, agent.cloned(), kind, text);
    }
}

/// Records debugger events of one agent's tool context, and adds `memory_opened` before `build_finished`: the
/// tool plane, which builds the context, does not know of the agent's memory.
pub(crate) struct ContextDebugSink {
    pub(crate) inner: Arc<dyn DebugSink>,
    /// The number of entries in the agent's memory.
    pub(crate) entries: u64,
}

impl DebugSink for ContextDebugSink {
    fn record(&self, agent: Option<&Slug>, body: DebugBody) {
        if matches!(body, DebugBody::BuildFinished { .. }) {
            self.inner.record(
                agent,
                DebugBody::MemoryOpened {
                    entries: self.entries,
                },
            );
        }
        self.inner.record(agent, body);
    }
}

/// Records the model requests of one agent as debugger events.
pub(crate) struct ModelDebugSink {
    pub(crate) inner: Arc<dyn DebugSink>,
    pub(crate) agent: Slug,
}

impl ModelSink for ModelDebugSink {
    fn model_request(&self, provider: &str, path: &str, status: u16, started: Timestamp, duration: Duration) {
        self.inner.record(
            Some(&self.agent),
            DebugBody::ModelRequest {
                provider: provider.to_owned(),
                path: path.to_owned(),
                status,
                duration_ms: duration.as_secs_f64() * 1e3,
                started: Some(started),
            },
        );
    }
}
