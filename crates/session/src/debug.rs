//! Where a session's debugger events go.

use std::{sync::Arc, time::Duration};

use oubliette_egress::ModelSink;
use oubliette_protocol::{SessionId, Slug, debug::DebugBody};
use oubliette_store::Store;
use oubliette_tools::DebugSink;

/// The debugger, bound to one session.
pub(crate) struct SessionDebug {
    store: Store,
    session: SessionId,
}

impl SessionDebug {
    pub(crate) fn new(store: Store, session: SessionId) -> Arc<Self> {
        Arc::new(Self { store, session })
    }
}

impl DebugSink for SessionDebug {
    fn record(&self, agent: Option<&Slug>, body: DebugBody) {
        self.store
            .debugger()
            .record(Some(self.session.clone()), agent.cloned(), body);
    }

    fn record_text(&self, agent: Option<&Slug>, kind: &'static str, text: String) {
        let session = Some(self.session.clone());
        self.store
            .debugger()
            .record_text(session, agent.cloned(), kind, text);
    }
}

/// The debugger of one context. The tool plane knows nothing of memory, which is a part of the context
/// all the same: it is opened before the build is finished.
pub(crate) struct ContextDebug {
    pub(crate) inner: Arc<dyn DebugSink>,
    /// How much the agent remembers.
    pub(crate) entries: u64,
}

impl DebugSink for ContextDebug {
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

/// Tells the debugger of model requests.
pub(crate) struct ModelDebug {
    pub(crate) inner: Arc<dyn DebugSink>,
    pub(crate) agent: Slug,
}

impl ModelSink for ModelDebug {
    fn model_request(&self, provider: &str, path: &str, status: u16, duration: Duration) {
        self.inner.record(
            Some(&self.agent),
            DebugBody::ModelRequest {
                provider: provider.to_owned(),
                path: path.to_owned(),
                status,
                duration_ms: duration.as_secs_f64() * 1e3,
            },
        );
    }
}
