//! Marks a caller as present while one of its streams or requests is open. The session crate decides what follows
//! from presence.

use std::sync::Arc;

use oubliette_protocol::{CallerId, SessionId};
use oubliette_session::{HoldKind, PresenceHold, PresenceKey};

use crate::{app::App, auth::Grant};

/// Held by an open stream, poll or waiting message; marks its caller as present. Dropping it means that the caller
/// disconnected.
pub(crate) struct PresenceGuard(PresenceHold);

impl PresenceGuard {
    /// The key of a stateful MCP session's GET stream: it stands for every caller declared over that MCP session.
    pub(crate) fn mcp_key(grant: Option<&Grant>, mcp_session: &str) -> PresenceKey {
        PresenceKey {
            principal: grant.and_then(|g| g.token_id().cloned()),
            caller_id: None,
            session: None,
            mcp_session: Some(mcp_session.to_owned()),
        }
    }

    /// Marks the callers of `key` as present by an open stream.
    pub(crate) fn for_stream(app: &App, key: PresenceKey) -> Self {
        PresenceGuard(app.sessions.hold_presence(key, HoldKind::Stream))
    }

    /// Marks a principal as present in one session by an open request or stateless stream.
    pub(crate) fn for_request(
        app: &App,
        grant: &Grant,
        session: &SessionId,
        mcp_session: Option<Arc<str>>,
        kind: HoldKind,
    ) -> Self {
        let key = PresenceKey {
            principal: grant.token_id().cloned(),
            caller_id: None,
            session: Some(session.clone()),
            mcp_session: mcp_session.map(|id| id.to_string()),
        };
        PresenceGuard(app.sessions.hold_presence(key, kind))
    }

    /// The key of an event stream under `/api` whose query names its caller.
    pub(crate) fn sse_key(grant: &Grant, session: &SessionId, caller: CallerId) -> PresenceKey {
        PresenceKey {
            principal: grant.token_id().cloned(),
            caller_id: Some(caller),
            session: Some(session.clone()),
            mcp_session: None,
        }
    }

    /// Releases the guard because Oubliette answered the request: the caller did not disconnect.
    pub(crate) fn release_as_answered(self) {
        self.0.answered();
    }
}
