//! What says that a caller is there. Sessions decide what follows from it.

use std::sync::Arc;

use oubliette_protocol::{CallerId, SessionId};

use crate::{app::App, auth::Grant, doors::mcp::listeners::Listener};

/// A stream, poll or waiting message that speaks for a caller while it is held.
#[derive(Debug)]
pub struct Held(());

impl Held {
    /// A GET stream of a stateful MCP session.
    pub fn stream(_app: &Arc<App>, _listener: &Listener, _session: &SessionId) -> Self {
        Held(())
    }

    /// A `subscriptions/listen` of a stateless client.
    pub fn listen(_app: &Arc<App>, _grant: &Grant, _session: &SessionId) -> Self {
        Held(())
    }

    /// An event stream under `/api` that speaks for a caller.
    pub fn sse(_app: &Arc<App>, _grant: &Grant, _session: &SessionId, _caller: CallerId) -> Self {
        Held(())
    }

    /// It ended because Oubliette answered, not because the caller let go.
    pub fn answered(self) {}
}

/// A stateful MCP session is over: its callers have left.
pub fn mcp_session_closed(_app: &Arc<App>, _id: &str) {}
