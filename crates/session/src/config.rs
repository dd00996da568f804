//! Timeouts and limits of sessions.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use oubliette_sandbox::ResourceLimits;

use crate::{
    callers::RelayLimits,
    usage::{PriceTable, ServerBudget},
};

/// The sections `[session]`, `[limits]`, `[relay]`, `[approval]`, `[switch]` and `[sandbox]` of the configuration, with defaults filled in.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    /// `[relay]`: timeout, reconnect grace and linger of callers, and the most open calls.
    pub relay: RelayLimits,
    /// `[approval] timeout`: how long a call waits for a person to allow it.
    pub approval_timeout: Duration,
    /// `[switch] drain_timeout`: how long a switch waits for the running turn and calls before it cancels them.
    pub drain_timeout: Duration,
    /// How long one turn may take before it fails.
    pub turn_timeout: Duration,
    /// How long an idle session keeps its agent and tool servers running.
    pub idle_sleep: Duration,
    /// How long an agent may take to answer `initialize`.
    pub initialize_timeout: Duration,
    /// How long an agent may take to open or load its conversation.
    pub open_timeout: Duration,
    /// How long an agent may take to connect to its tools, after it has opened its conversation, before that is
    /// reported.
    pub tools_connect_timeout: Duration,
    /// How long an agent may take to list tools that changed before it is started again for them.
    pub relist_timeout: Duration,
    /// How long an agent may take to end a cancelled turn before it is killed.
    pub cancel_grace: Duration,
    /// The greatest depth below a root session at which sessions may be started.
    pub max_depth: u32,
    /// The most active sessions of one project.
    pub max_sessions: u32,
    /// The most messages queued in one session.
    pub max_queue: usize,
    /// Resource limits of a sandbox unless its project sets others.
    pub limits: ResourceLimits,
    /// `[limits] session_buffer_mb`: what may be kept in memory on behalf of one session, in bytes.
    pub session_buffer_bytes: usize,
    /// Bounds on what an agent writes to its stdout.
    pub agent_output: AgentOutputLimits,
    /// `[prices]`: what models cost.
    pub prices: PriceTable,
    /// `[budget]`: what the whole server may use.
    pub budget: ServerBudget,
}

/// The configuration of sessions, which may change while they run.
#[derive(Debug, Clone)]
pub struct LiveConfig(Arc<ArcSwap<SessionConfig>>);

impl LiveConfig {
    /// The configuration as it is now.
    pub fn load(&self) -> Arc<SessionConfig> {
        self.0.load_full()
    }

    /// Replaces it. What has been read stays as it is: the deadline of a running turn, the limits of a session in memory.
    pub(crate) fn store(&self, config: SessionConfig) {
        self.0.store(Arc::new(config));
    }
}

impl From<SessionConfig> for LiveConfig {
    fn from(config: SessionConfig) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(config)))
    }
}

/// Bounds on what an agent writes to its stdout, and how its text is grouped into `delta` events.
#[derive(Debug, Clone)]
pub struct AgentOutputLimits {
    /// The longest line, in bytes.
    pub line_bytes: usize,
    /// How many lines of one process may be something other than ACP messages before it is stopped.
    pub invalid_lines: usize,
    /// Message and thought text of one turn, in bytes.
    pub turn_text_bytes: usize,
    /// The most events of one turn.
    pub turn_events: usize,
    /// A `delta` event is written when this many bytes of text are pending.
    pub delta_bytes: usize,
    /// A `delta` event is written at the latest this long after the previous one.
    pub delta_interval: Duration,
    /// The shortest time between two `plan` events, and between two `usage` events; of those between only the last is
    /// written.
    pub update_interval: Duration,
}

impl Default for SessionConfig {
    fn default() -> Self {
        Self {
            relay: RelayLimits::default(),
            approval_timeout: Duration::from_secs(10 * 60),
            drain_timeout: Duration::from_secs(5),
            turn_timeout: Duration::from_secs(30 * 60),
            idle_sleep: Duration::from_secs(10 * 60),
            initialize_timeout: Duration::from_secs(30),
            open_timeout: Duration::from_secs(60),
            tools_connect_timeout: Duration::from_secs(5),
            relist_timeout: Duration::from_secs(3),
            cancel_grace: Duration::from_secs(5),
            max_depth: 3,
            max_sessions: 50,
            max_queue: 100,
            limits: ResourceLimits::default(),
            session_buffer_bytes: 64 * 1024 * 1024,
            agent_output: AgentOutputLimits::default(),
            prices: PriceTable::default(),
            budget: ServerBudget::default(),
        }
    }
}

impl Default for AgentOutputLimits {
    fn default() -> Self {
        Self {
            line_bytes: 16 * 1024 * 1024,
            invalid_lines: 1_000,
            turn_text_bytes: 16 * 1024 * 1024,
            turn_events: 200_000,
            delta_bytes: 4 * 1024,
            delta_interval: Duration::from_millis(50),
            update_interval: Duration::from_millis(250),
        }
    }
}
