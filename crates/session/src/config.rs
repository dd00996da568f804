//! How long things may take and how much there may be.

use std::time::Duration;

use oubliette_sandbox::Limits;

use crate::callers::Rules;

/// `[session]`, `[relay]`, `[switch]` and `[sandbox]` of the configuration, resolved.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    /// `[relay]`: caller timeout, reconnect grace, linger.
    pub relay: Rules,
    /// `[switch] drain_timeout`.
    pub drain_timeout: Duration,
    /// How long one turn may take.
    pub turn_timeout: Duration,
    /// How long an idle session keeps its agent process.
    pub idle_sleep: Duration,
    /// How long an agent may take to answer `initialize`.
    pub initialize_timeout: Duration,
    /// How long an agent may take to open or load its conversation.
    pub open_timeout: Duration,
    /// How long an agent may take to end a cancelled turn before it is killed.
    pub cancel_grace: Duration,
    /// How deep sessions may start sessions.
    pub max_depth: u32,
    /// Active sessions of a project.
    pub max_sessions: u32,
    /// Messages waiting in one session.
    pub max_queue: usize,
    /// What a sandbox may use unless its project says otherwise.
    pub limits: Limits,
    /// Bounds on what an agent says.
    pub voice: Voice,
}

/// Bounds on what an agent may say.
#[derive(Debug, Clone)]
pub struct Voice {
    /// Longest line of ACP.
    pub line: usize,
    /// Lines that are not ACP, in a row of one process's life, before it is given up.
    pub rubbish: usize,
    /// Message and thought text of one turn, in bytes.
    pub turn_text: usize,
    /// Events of one turn.
    pub turn_events: usize,
    /// A delta is written when this much has gathered, …
    pub delta_bytes: usize,
    /// … or when this long has passed.
    pub delta_time: Duration,
}

impl Default for SessionConfig {
    fn default() -> Self {
        Self {
            relay: Rules::default(),
            drain_timeout: Duration::from_secs(5),
            turn_timeout: Duration::from_secs(30 * 60),
            idle_sleep: Duration::from_secs(10 * 60),
            initialize_timeout: Duration::from_secs(30),
            open_timeout: Duration::from_secs(60),
            cancel_grace: Duration::from_secs(5),
            max_depth: 3,
            max_sessions: 50,
            max_queue: 100,
            limits: Limits::default(),
            voice: Voice::default(),
        }
    }
}

impl Default for Voice {
    fn default() -> Self {
        Self {
            line: 16 * 1024 * 1024,
            rubbish: 1_000,
            turn_text: 16 * 1024 * 1024,
            turn_events: 200_000,
            delta_bytes: 4 * 1024,
            delta_time: Duration::from_millis(50),
        }
    }
}
