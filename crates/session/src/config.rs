//! Timeouts and limits of sessions.

use std::time::Duration;

use oubliette_sandbox::ResourceLimits;

use crate::callers::RelayLimits;

/// The sections `[session]`, `[relay]`, `[switch]` and `[sandbox]` of the configuration, with defaults filled in.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    /// `[relay]`: timeout, reconnect grace and linger of callers, and the most open calls.
    pub relay: RelayLimits,
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
    /// Bounds on what an agent writes to its stdout.
    pub agent_output: AgentOutputLimits,
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
}

impl Default for SessionConfig {
    fn default() -> Self {
        Self {
            relay: RelayLimits::default(),
            drain_timeout: Duration::from_secs(5),
            turn_timeout: Duration::from_secs(30 * 60),
            idle_sleep: Duration::from_secs(10 * 60),
            initialize_timeout: Duration::from_secs(30),
            open_timeout: Duration::from_secs(60),
            cancel_grace: Duration::from_secs(5),
            max_depth: 3,
            max_sessions: 50,
            max_queue: 100,
            limits: ResourceLimits::default(),
            agent_output: AgentOutputLimits::default(),
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
        }
    }
}
