//! Sinks that record a session's debugger events in the store.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use oubliette_protocol::{Result, SessionId, Slug, debug::DebugBody};
use oubliette_store::{CountedSession, Store};
use oubliette_tools::DebugSink;

/// Records debugger events of one session.
pub(crate) struct SessionDebugSink {
    store: Store,
    session: SessionId,
    /// What the session has of the log; none if that is not counted.
    counted: Option<CountedSession>,
    /// Whether it was recorded that the session has as much as it may have.
    told_full: AtomicBool,
}

impl SessionDebugSink {
    /// For a few events of a session.
    pub(crate) fn new(store: Store, session: SessionId) -> Arc<Self> {
        Arc::new(Self {
            store,
            session,
            counted: None,
            told_full: AtomicBool::new(false),
        })
    }

    /// For a session in memory, of which all that is recorded counts.
    pub(crate) fn counting(store: Store, session: SessionId) -> Arc<Self> {
        let counted = store.debugger().count_session(session.clone());
        Arc::new(Self {
            store,
            session,
            counted: Some(counted),
            told_full: AtomicBool::new(false),
        })
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

    fn check_room(&self) -> Result<()> {
        let checked = self.counted.as_ref().map_or(Ok(()), CountedSession::check);
        checked.inspect_err(|error| {
            if !self.told_full.swap(true, Ordering::Relaxed) {
                tracing::warn!(session = %self.session, "a session has as much of the debugger's log as it may have; its tool calls are refused");
                let body = DebugBody::LimitExceeded {
                    limit: "debugger".to_owned(),
                    reason: error.message.clone(),
                };
                self.record(None, body);
            }
        })
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
