//! A call on its way to the gate: what is wanted, who wants it, how it can be given up.

use std::sync::Arc;

use oubliette_protocol::{CallerId, Principal};
use tokio_util::sync::CancellationToken;

/// How far a call has got, as MCP's `notifications/progress` says it.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// Grows with every notification.
    pub progress: f64,
    /// Where it ends, if that is known.
    pub total: Option<f64>,
    /// What is being done.
    pub message: Option<String>,
}

/// Where progress goes.
pub type ProgressSink = Arc<dyn Fn(Progress) + Send + Sync>;

/// What goes with a call besides its arguments.
#[derive(Clone, Default)]
pub struct CallContext {
    /// Cancelled when whoever asked gives up.
    pub cancel: CancellationToken,
    /// Where progress goes, if anybody listens.
    pub progress: Option<ProgressSink>,
    /// The session's turn it belongs to.
    pub turn: Option<u64>,
}

impl CallContext {
    /// The same call, cancelled by `cancel` instead.
    #[must_use]
    pub fn with_cancel(&self, cancel: CancellationToken) -> Self {
        Self {
            cancel,
            progress: self.progress.clone(),
            turn: self.turn,
        }
    }
}

impl std::fmt::Debug for CallContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallContext")
            .field("turn", &self.turn)
            .finish_non_exhaustive()
    }
}

/// Who asks.
#[derive(Clone, PartialEq, Eq)]
pub enum Origin {
    /// The session's own agent, over the relay socket.
    Inside {
        /// The key it showed, if it showed one.
        api_key: Option<String>,
    },
    /// A token, through one of the server's doors.
    Outside(Principal),
}

// The key must not reach a log by way of a derived Debug.
impl std::fmt::Debug for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::Inside { api_key } => f
                .debug_struct("Inside")
                .field("api_key", &api_key.as_ref().map(|_| "…"))
                .finish(),
            Origin::Outside(principal) => f.debug_tuple("Outside").field(principal).finish(),
        }
    }
}

/// Which tool is asked for, and what it may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// Any source, by any name the agent could use (`tool_call`).
    Any(String),
    /// A catalog tool by any of its names (`agent_call_tool`).
    Catalog(String),
    /// A lent tool, unprefixed (`caller_tool`).
    Caller {
        /// Its name, without the caller's prefix.
        tool: String,
        /// Whose, when two callers lend the name.
        caller_id: Option<CallerId>,
    },
    /// One of Oubliette's own, unprefixed (`oubliette_call_tool`).
    Own(String),
    /// A base tool (`session_message`, `session_events`, `project_list`).
    Base(String),
}

impl Wanted {
    /// The name as it was called.
    pub fn name(&self) -> &str {
        match self {
            Wanted::Any(name) | Wanted::Catalog(name) | Wanted::Own(name) | Wanted::Base(name) => name,
            Wanted::Caller { tool, .. } => tool,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_never_printed() {
        let origin = Origin::Inside {
            api_key: Some("oub_secret".into()),
        };
        assert!(!format!("{origin:?}").contains("oub_secret"));
    }
}
