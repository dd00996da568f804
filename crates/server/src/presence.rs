//! Marks a caller as present while one of its streams or requests is open. The session crate decides what follows
//! from presence.

use std::sync::Arc;

use oubliette_protocol::{CallerId, Result, SessionId};
use oubliette_session::{HoldKind, PresenceHold, PresenceKey};

use crate::{app::App, auth::Grant, hop::presence::RemoteHold};

/// Held by an open stream, poll or waiting message; marks its caller as present. Dropping it means that the caller
/// disconnected.
pub(crate) struct PresenceGuard {
    hold: PresenceHold,
    /// The same at the server of the cluster that runs the session.
    remote: Option<RemoteHold>,
}

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
        Self::here(app, key, HoldKind::Stream)
    }

    fn here(app: &App, key: PresenceKey, kind: HoldKind) -> Self {
        Self {
            hold: app.sessions.hold_presence(key, kind),
            remote: None,
        }
    }

    /// Marks a principal as present in one session by an open request or stateless stream.
    pub(crate) fn for_request(
        app: &App,
        grant: &Grant,
        session: &SessionId,
        mcp_session: Option<Arc<str>>,
        kind: HoldKind,
    ) -> Self {
        Self::here(app, Self::request_key(grant, session, mcp_session), kind)
    }

    /// Like [`Self::for_request`], of a request that is served here also if another server of the cluster runs the session.
    /// The caller is present there then.
    pub(crate) async fn where_session_runs(
        app: &App,
        grant: &Grant,
        session: &SessionId,
        kind: HoldKind,
    ) -> Result<Self> {
        let key = Self::request_key(grant, session, None);
        let remote = match &app.hop {
            Some(hop) => hop.hold_for_session(app, grant, key.clone(), kind).await?,
            None => None,
        };
        Ok(Self {
            remote,
            ..Self::here(app, key, kind)
        })
    }

    fn request_key(grant: &Grant, session: &SessionId, mcp_session: Option<Arc<str>>) -> PresenceKey {
        PresenceKey {
            principal: grant.token_id().cloned(),
            caller_id: None,
            session: Some(session.clone()),
            mcp_session: mcp_session.map(|id| id.to_string()),
        }
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
        self.hold.answered();
        if let Some(remote) = self.remote {
            remote.release_as_answered();
        }
    }
}
