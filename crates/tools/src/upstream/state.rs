//! The state of a server that its supervisor publishes: phase, health status, tools, and the connection to call
//! through.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use jiff::Timestamp;
use oubliette_protocol::{
    CatalogId, Slug,
    debug::DebugBody,
    tool::{HealthStatus, ListedServer},
};
use parking_lot::RwLock;
use tokio::sync::watch;

use super::{connection::UpstreamConnection, fault::UpstreamFault};
use crate::{DebugSink, registry::ToolInfo};

/// Phase of a server, which decides what a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UpstreamPhase {
    /// Being started or restarted: calls wait.
    Starting,
    /// Connected: calls are sent.
    Up,
    /// Failed, until a delayed retry or a manual restart: calls fail at once.
    Down,
    /// Stopped for good: calls fail at once.
    Stopped,
}

/// A server's state at one moment.
#[derive(Debug, Clone)]
pub(super) struct UpstreamSnapshot {
    pub(super) phase: UpstreamPhase,
    pub(super) health: HealthStatus,
    pub(super) since: Timestamp,
    /// When the last health check ended, or the start if there was none since.
    last_check: Option<Timestamp>,
    pub(super) error: Option<Arc<str>>,
    pub(super) next_retry: Option<Timestamp>,
    /// The first start has succeeded or failed.
    pub(super) first_start_over: bool,
}

/// The published state of one server: written by its supervisor, read by callers and `tool_list`.
pub(super) struct UpstreamState {
    pub(super) id: CatalogId,
    transport: &'static str,
    agent: Slug,
    debug: Arc<dyn DebugSink>,
    snapshot: watch::Sender<UpstreamSnapshot>,
    changes: watch::Sender<u64>,
    tools: RwLock<Arc<[Arc<ToolInfo>]>>,
    connection: ArcSwapOption<UpstreamConnection>,
}

impl UpstreamState {
    /// The state of a server that is about to be started for the first time. `tools` are those of its
    /// predecessor, shown until it has listed its own.
    pub(super) fn new(
        id: CatalogId,
        transport: &'static str,
        agent: Slug,
        debug: Arc<dyn DebugSink>,
        tools: Arc<[Arc<ToolInfo>]>,
    ) -> Self {
        let snapshot = UpstreamSnapshot {
            phase: UpstreamPhase::Starting,
            health: HealthStatus::Yellow,
            since: Timestamp::now(),
            last_check: None,
            error: None,
            next_retry: None,
            first_start_over: false,
        };
        Self {
            id,
            transport,
            agent,
            debug,
            snapshot: watch::Sender::new(snapshot),
            changes: watch::Sender::new(0),
            tools: RwLock::new(tools),
            connection: ArcSwapOption::empty(),
        }
    }

    /// Subscribes to the snapshots.
    pub(super) fn subscribe_snapshots(&self) -> watch::Receiver<UpstreamSnapshot> {
        self.snapshot.subscribe()
    }

    /// Subscribes to a counter that grows when the tools or the health status change.
    pub(super) fn subscribe_changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The tools it listed last.
    pub(super) fn tools(&self) -> Arc<[Arc<ToolInfo>]> {
        self.tools.read().clone()
    }

    /// The connection to call through, if it is up and not lost.
    pub(super) fn connection(&self) -> Option<Arc<UpstreamConnection>> {
        self.connection
            .load_full()
            .filter(|connection| connection.is_alive())
    }

    /// The row of `tool_list`.
    pub(super) fn to_row(&self) -> ListedServer {
        let snapshot = self.snapshot.borrow().clone();
        ListedServer {
            id: self.id.clone(),
            transport: self.transport.into(),
            status: snapshot.health,
            since: snapshot.since,
            last_check: snapshot.last_check,
            error: snapshot.error.as_deref().map(str::to_owned),
            next_retry: snapshot.next_retry,
            tools: self.tools.read().len(),
        }
    }

    /// Records that a start begins.
    pub(super) fn set_starting(&self, attempt: u32) {
        self.record(DebugBody::ToolServerStarting {
            server: self.id.to_string(),
            transport: self.transport.into(),
            attempt,
        });
        self.publish(UpstreamPhase::Starting, HealthStatus::Yellow, None, None);
    }

    /// Publishes a new connection and its tools.
    pub(super) fn set_ready(
        &self,
        connection: Arc<UpstreamConnection>,
        tools: Vec<Arc<ToolInfo>>,
        took_ms: u64,
    ) {
        self.record(DebugBody::ToolServerReady {
            server: self.id.to_string(),
            tools: tools.len(),
            took_ms,
        });
        *self.tools.write() = tools.into();
        self.connection.store(Some(connection));
        self.record_check_time();
        self.publish(UpstreamPhase::Up, HealthStatus::Green, None, None);
        self.changes.send_modify(|version| *version += 1);
    }

    /// Publishes the tools of a new `tools/list`, if they differ.
    pub(super) fn set_tools(&self, tools: Vec<Arc<ToolInfo>>) {
        if self.tools.read()[..] != tools[..] {
            *self.tools.write() = tools.into();
            self.changes.send_modify(|version| *version += 1);
        }
    }

    /// Sets the time of the last health check to now, whatever its result.
    pub(super) fn record_check_time(&self) {
        self.snapshot
            .send_modify(|snapshot| snapshot.last_check = Some(Timestamp::now()));
    }

    /// Publishes the result of a health check: green, or yellow with the reason it was missed.
    pub(super) fn set_check_result(&self, missed: Option<&str>) {
        match missed {
            None => self.publish(UpstreamPhase::Up, HealthStatus::Green, None, None),
            Some(reason) => self.publish(UpstreamPhase::Up, HealthStatus::Yellow, Some(reason.into()), None),
        }
    }

    /// Records that the server went down. It is started again at `next_retry`; `phase` is `Starting` if calls
    /// should wait for that.
    pub(super) fn set_failed(
        &self,
        fault: &UpstreamFault,
        phase: UpstreamPhase,
        next_retry: Option<Timestamp>,
    ) {
        self.connection.store(None);
        self.record(DebugBody::ToolServerFailed {
            server: self.id.to_string(),
            error: fault.reason.to_string(),
            stderr: fault.stderr.clone(),
        });
        self.publish(
            phase,
            HealthStatus::Red,
            Some(fault.with_stderr().into()),
            next_retry,
        );
    }

    /// Takes the connection away before it is closed, so that new calls wait instead of being sent on it.
    pub(super) fn withdraw_connection(&self) {
        self.connection.store(None);
        self.publish(UpstreamPhase::Starting, HealthStatus::Yellow, None, None);
    }

    /// Records that the server was stopped and nothing of it runs any more.
    pub(super) fn set_stopped(&self, reason: &str, phase: UpstreamPhase) {
        self.connection.store(None);
        self.record(DebugBody::ToolServerStopped {
            server: self.id.to_string(),
            reason: reason.into(),
        });
        if phase == UpstreamPhase::Stopped {
            self.publish(phase, HealthStatus::Red, Some(reason.into()), None);
        }
    }

    fn record(&self, body: DebugBody) {
        self.debug.record(Some(&self.agent), body);
    }

    fn publish(
        &self,
        phase: UpstreamPhase,
        health: HealthStatus,
        error: Option<Arc<str>>,
        next_retry: Option<Timestamp>,
    ) {
        let before = self.snapshot.borrow().health;
        if before != health {
            self.record(DebugBody::HealthChanged {
                server: self.id.to_string(),
                from: before,
                to: health,
                reason: error.as_deref().map(str::to_owned),
            });
        }
        self.snapshot.send_modify(|snapshot| {
            let since = if before == health {
                snapshot.since
            } else {
                Timestamp::now()
            };
            let first_start_over = snapshot.first_start_over || phase != UpstreamPhase::Starting;
            *snapshot = UpstreamSnapshot {
                phase,
                health,
                since,
                last_check: snapshot.last_check,
                error,
                next_retry,
                first_start_over,
            };
        });
        if before != health {
            self.changes.send_modify(|version| *version += 1);
        }
    }
}
