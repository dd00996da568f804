//! What everyone else sees of a server: its light, its tools, whom to call.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use jiff::Timestamp;
use oubliette_protocol::{
    CatalogId, Slug,
    debug::DebugBody,
    tool::{Light, ServerRow},
};
use parking_lot::RwLock;
use tokio::sync::watch;

use super::{UpstreamTool, connection::Connection, fault::Fault};
use crate::DebugSink;

/// Where a server is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Being started, for the first time or again: worth waiting for.
    Coming,
    /// Can be called.
    Up,
    /// Cannot, for now or until somebody does something.
    Down,
    /// Was stopped.
    Stopped,
}

/// One moment of a server.
#[derive(Debug, Clone)]
pub(super) struct View {
    pub(super) phase: Phase,
    pub(super) light: Light,
    pub(super) since: Timestamp,
    /// The end of the last health check, or of the start if there was none since.
    last_check: Option<Timestamp>,
    pub(super) error: Option<Arc<str>>,
    pub(super) next_retry: Option<Timestamp>,
    /// The first start is over.
    pub(super) settled: bool,
}

/// The notice board of one server.
pub(super) struct Board {
    pub(super) id: CatalogId,
    transport: &'static str,
    agent: Slug,
    debug: Arc<dyn DebugSink>,
    view: watch::Sender<View>,
    changes: watch::Sender<u64>,
    tools: RwLock<Arc<[UpstreamTool]>>,
    connection: ArcSwapOption<Connection>,
}

impl Board {
    /// A server that is about to be started for the first time. `tools` are those of the one whose place it
    /// takes.
    pub(super) fn new(
        id: CatalogId,
        transport: &'static str,
        agent: Slug,
        debug: Arc<dyn DebugSink>,
        tools: Arc<[UpstreamTool]>,
    ) -> Self {
        let view = View {
            phase: Phase::Coming,
            light: Light::Yellow,
            since: Timestamp::now(),
            last_check: None,
            error: None,
            next_retry: None,
            settled: false,
        };
        Self {
            id,
            transport,
            agent,
            debug,
            view: watch::Sender::new(view),
            changes: watch::Sender::new(0),
            tools: RwLock::new(tools),
            connection: ArcSwapOption::empty(),
        }
    }

    /// Follows the view.
    pub(super) fn views(&self) -> watch::Receiver<View> {
        self.view.subscribe()
    }

    /// Follows a counter of changes of tools or light.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The tools it was last known to have.
    pub(super) fn tools(&self) -> Arc<[UpstreamTool]> {
        self.tools.read().clone()
    }

    /// The connection to call through.
    pub(super) fn connection(&self) -> Option<Arc<Connection>> {
        self.connection
            .load_full()
            .filter(|connection| connection.is_alive())
    }

    /// The row of `tool_list`.
    pub(super) fn row(&self) -> ServerRow {
        let view = self.view.borrow().clone();
        ServerRow {
            id: self.id.clone(),
            transport: self.transport.into(),
            status: view.light,
            since: view.since,
            last_check: view.last_check,
            error: view.error.as_deref().map(str::to_owned),
            next_retry: view.next_retry,
            tools: self.tools.read().len(),
        }
    }

    /// A start begins.
    pub(super) fn starting(&self, attempt: u32) {
        self.record(DebugBody::ToolServerStarting {
            server: self.id.to_string(),
            transport: self.transport.into(),
            attempt,
        });
        self.show(Phase::Coming, Light::Yellow, None, None);
    }

    /// It can be called.
    pub(super) fn ready(&self, connection: Arc<Connection>, tools: Vec<UpstreamTool>, took_ms: u64) {
        self.record(DebugBody::ToolServerReady {
            server: self.id.to_string(),
            tools: tools.len(),
            took_ms,
        });
        *self.tools.write() = tools.into();
        self.connection.store(Some(connection));
        self.heard();
        self.show(Phase::Up, Light::Green, None, None);
        self.changes.send_modify(|version| *version += 1);
    }

    /// Its tools are others now.
    pub(super) fn relisted(&self, tools: Vec<UpstreamTool>) {
        if self.tools.read()[..] != tools[..] {
            *self.tools.write() = tools.into();
            self.changes.send_modify(|version| *version += 1);
        }
    }

    /// A health check ended just now, whatever it found.
    pub(super) fn heard(&self) {
        self.view
            .send_modify(|view| view.last_check = Some(Timestamp::now()));
    }

    /// A health check was good, or missed for this reason.
    pub(super) fn checked(&self, missed: Option<&str>) {
        match missed {
            None => self.show(Phase::Up, Light::Green, None, None),
            Some(reason) => self.show(Phase::Up, Light::Yellow, Some(reason.into()), None),
        }
    }

    /// It went down, and is tried again at `next_retry`; `phase` says whether that is worth waiting for.
    pub(super) fn failed(&self, fault: &Fault, phase: Phase, next_retry: Option<Timestamp>) {
        self.connection.store(None);
        self.record(DebugBody::ToolServerFailed {
            server: self.id.to_string(),
            error: fault.reason.to_string(),
            stderr: fault.stderr.clone(),
        });
        self.show(phase, Light::Red, Some(fault.with_tail().into()), next_retry);
    }

    /// It is being stopped in order to be started again.
    pub(super) fn leaving(&self) {
        self.connection.store(None);
        self.show(Phase::Coming, Light::Yellow, None, None);
    }

    /// It was stopped. Nothing of it runs any more.
    pub(super) fn stopped(&self, reason: &str, phase: Phase) {
        self.connection.store(None);
        self.record(DebugBody::ToolServerStopped {
            server: self.id.to_string(),
            reason: reason.into(),
        });
        if phase == Phase::Stopped {
            self.show(phase, Light::Red, Some(reason.into()), None);
        }
    }

    fn record(&self, body: DebugBody) {
        self.debug.record(Some(&self.agent), body);
    }

    fn show(&self, phase: Phase, light: Light, error: Option<Arc<str>>, next_retry: Option<Timestamp>) {
        let before = self.view.borrow().light;
        if before != light {
            self.record(DebugBody::HealthChanged {
                server: self.id.to_string(),
                from: before,
                to: light,
                reason: error.as_deref().map(str::to_owned),
            });
        }
        self.view.send_modify(|view| {
            let since = if before == light {
                view.since
            } else {
                Timestamp::now()
            };
            let settled = view.settled || phase != Phase::Coming;
            *view = View {
                phase,
                light,
                since,
                last_check: view.last_check,
                error,
                next_retry,
                settled,
            };
        });
        if before != light {
            self.changes.send_modify(|version| *version += 1);
        }
    }
}
