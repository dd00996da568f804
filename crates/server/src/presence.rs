//! What says that a caller is there. Sessions decide what follows from it.

use std::sync::Arc;

use oubliette_protocol::{CallerId, SessionId};
use oubliette_session::{Hold, Kind, PresenceKey};

use crate::{app::App, auth::Grant};

/// A stream, poll or waiting message that speaks for a caller while it is held. Dropped, it says that the
/// caller let go of it.
pub struct Held(Hold);

impl Held {
    /// The key of a stateful MCP session's GET stream: it speaks for all that was declared over it.
    pub fn mcp_key(grant: Option<&Grant>, mcp_session: &str) -> PresenceKey {
        PresenceKey {
            principal: grant.and_then(|g| g.token_id().cloned()),
            caller_id: None,
            session: None,
            mcp_session: Some(mcp_session.to_owned()),
        }
    }

    /// By a key.
    pub fn stream(app: &App, key: PresenceKey) -> Self {
        Held(app.sessions.hold(key, Kind::Stream))
    }

    /// A request or stateless stream about one session.
    pub fn request(
        app: &App,
        grant: &Grant,
        session: &SessionId,
        mcp_session: Option<Arc<str>>,
        kind: Kind,
    ) -> Self {
        let key = PresenceKey {
            principal: grant.token_id().cloned(),
            caller_id: None,
            session: Some(session.clone()),
            mcp_session: mcp_session.map(|id| id.to_string()),
        };
        Held(app.sessions.hold(key, kind))
    }

    /// The key of an event stream under `/api` that says which caller it is of.
    pub fn sse_key(grant: &Grant, session: &SessionId, caller: CallerId) -> PresenceKey {
        PresenceKey {
            principal: grant.token_id().cloned(),
            caller_id: Some(caller),
            session: Some(session.clone()),
            mcp_session: None,
        }
    }

    /// It ended because Oubliette answered, not because the caller let go.
    pub fn answered(self) {
        self.0.answered();
    }
}
