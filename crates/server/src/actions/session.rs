//! `session_*`: starting and messaging sessions, reading their events, switching agents, ending them.

use std::{borrow::Cow, sync::Arc, time::Duration};

use futures::StreamExt as _;
use oubliette_protocol::{
    Error, ProjectId, Result, Scope, SessionId, Slug, WorkspaceId, caller, event::SessionStatus,
};
use oubliette_session::{
    RequestOrigin, IncludeChildren, EventsQuery, HoldKind, SessionListQuery, MessageRequest, WaitMode, WorkspaceChoice,
};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::oneshot;

use super::{ActionCall, ActionHandler, ActionOrigin, Effect, EventSink, call::AgentAuthority, output};
use crate::presence::PresenceGuard;

/// `session_message`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionMessage {
    /// Text of the message to the agent, not blank, at most 4 MiB.
    pub message: String,
    /// Id of the project to start the session in (`proj_…`). Default: the only project your token can see; an error
    /// if there are several. With session_id it must be that session's project.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// Id of the session to send the message to (`gogol_…`). Absent: starts a new session.
    #[serde(default)]
    pub session_id: Option<SessionId>,
    /// Slug of the agent a new session runs, for example "assistant". Default: the project's agent. It cannot change
    /// the agent of an existing session; session_switch_agent does.
    #[serde(default)]
    pub agent: Option<Slug>,
    /// Id of the workspace a new session works in (a UUID). Default: the project's default workspace, or the parent's
    /// when a session starts another in its own project. Not together with create_workspace.
    #[serde(default)]
    pub workspace_id: Option<WorkspaceId>,
    /// Whether a new session gets a new, empty workspace. Default: false.
    #[serde(default)]
    pub create_workspace: Option<bool>,
    /// Tools you lend to the agent. Replaces what you lent under the same caller_id before. Absent: unchanged.
    #[serde(default)]
    pub context: Option<caller::CallerContext>,
    /// Whether to wait until the turn ends and return its text. Default: false, which returns at once.
    #[serde(default)]
    pub wait: Option<bool>,
}

/// `session_cancel`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionCancel {
    /// Id of the session whose running turn to cancel (`gogol_…`).
    pub session_id: SessionId,
}

/// `session_end`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionEnd {
    /// Id of the session to end (`gogol_…`).
    pub session_id: SessionId,
}

/// `session_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionGet {
    /// Id of the session (`gogol_…`).
    pub session_id: SessionId,
}

/// `session_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionList {
    /// Only sessions of this project (`proj_…`). Absent: of all your token can see.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// Only sessions in this status. Absent: in any.
    #[serde(default)]
    pub status: Option<SessionStatus>,
    /// Maximum number of entries to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the previous answer, to read the entries after it. Absent: from the start.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `session_events`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionEvents {
    /// Id of the session (`gogol_…`).
    pub session_id: SessionId,
    /// Return events after this index, not the one at it: pass last_index of the previous answer. Default: -1, from
    /// the first.
    #[serde(default)]
    pub since_index: Option<i64>,
    /// Maximum number of events to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub max_events: Option<u32>,
    /// How long to wait for a first event if there is none yet, in milliseconds, 0 to 50000. Default: 0.
    #[serde(default)]
    pub wait_ms: Option<u32>,
    /// Whether to return, as `children`, also the first events of every session started below this one, at most
    /// 1000 together. Default: false.
    #[serde(default)]
    pub include_children: Option<bool>,
}

/// `session_switch_agent`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionSwitchAgent {
    /// Id of the session (`gogol_…`).
    pub session_id: SessionId,
    /// Slug of the agent to switch to, for example "assistant".
    pub agent: Slug,
}

impl ActionCall<'_> {
    fn request_origin(&self) -> RequestOrigin {
        match self.origin {
            ActionOrigin::Outside(_) => RequestOrigin::Outside,
            ActionOrigin::Inside(inside) => match inside.authority {
                AgentAuthority::Base => RequestOrigin::BaseTool(inside.session.clone()),
                AgentAuthority::Key => RequestOrigin::OwnTool(inside.session.clone()),
            },
        }
    }

    /// The stateful MCP session the call belongs to.
    fn mcp_session(&self) -> Option<Arc<str>> {
        match self.origin {
            ActionOrigin::Outside(outside) => outside.mcp_session.clone(),
            ActionOrigin::Inside(_) => None,
        }
    }

    fn event_sink(&self) -> Option<&Arc<dyn EventSink>> {
        match self.origin {
            ActionOrigin::Outside(outside) => outside.stream.as_ref(),
            ActionOrigin::Inside(_) => None,
        }
    }

    /// Subscribes the MCP session the call belongs to, if any, to a session's events after an index.
    fn subscribe_mcp_session(&self, session: &SessionId, since: i64) {
        if let Some(listener) = self.mcp_session().and_then(|id| self.app.mcp_sessions.get(&id)) {
            listener.record_message(session, since);
        }
    }

    /// Sets a session's project for the audit entry, if the grant can see the session.
    pub(super) async fn note_session(&self, id: &SessionId) -> Result<()> {
        if let Some(project) = self.app.store.session_project(id).await?
            && self.grant.principal().sees(&project)
        {
            self.note_project(&project);
        }
        Ok(())
    }
}

impl ActionHandler for SessionMessage {
    const NAME: &'static str = "session_message";
    const DESCRIPTION: &'static str = "Send a message to an agent. Without session_id a new session starts. Returns at \
        once unless wait is true. With context you lend the agent tools of your own: each call of one comes to you as a \
        caller_tool_request event, which you answer with caller_tool_response.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Write;

    fn target(&self) -> Option<Cow<'_, str>> {
        self.session_id.as_ref().map(|id| id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let app = call.app;
        let wait = if self.wait == Some(true) {
            WaitMode::ForTurn
        } else {
            WaitMode::No
        };
        let workspace = match (self.workspace_id, self.create_workspace == Some(true)) {
            (Some(_), true) => {
                return Err(Error::invalid("give workspace_id or create_workspace, not both"));
            }
            (Some(id), false) => WorkspaceChoice::Existing(id),
            (None, true) => WorkspaceChoice::New,
            (None, false) => WorkspaceChoice::Default,
        };
        // The end of the log before the message, so that subscribers get everything from the message on.
        let since = match &self.session_id {
            Some(id) => {
                call.note_session(id).await?;
                app.store.events().last_index(id).await?
            }
            None => -1,
        };
        let request = MessageRequest {
            principal: call.grant.principal().clone(),
            origin: call.request_origin(),
            message: self.message,
            project_id: self.project_id,
            session_id: self.session_id,
            agent: self.agent,
            workspace,
            context: self.context.map(caller::CallerContext::check).transpose()?,
            mcp_session: call.mcp_session().map(|id| id.to_string()),
            wait,
        };
        let (announce, mut session) = oneshot::channel();
        let mut work = Box::pin(app.sessions.message_announcing_session(request, Some(announce)));
        let forwarder = EventForwarder { call, wait, since };
        let mut forwarding = Box::pin(forwarder.run(&mut session));
        let reply = tokio::select! {
            biased;
            reply = &mut work => reply,
            // The client left. The turn goes on; dropping `work` marks the caller as disconnected.
            () = &mut forwarding => return Err(Error::unavailable("the client left before the turn ended")),
        };
        drop(forwarding);
        // If the message was handled quickly, the forwarder has not run yet.
        if let Ok(id) = session.try_recv() {
            call.note_target(id.as_str());
        }
        let reply = reply?;
        call.note_session(&reply.session_id).await?;
        // If the turn ended quickly, the forwarder may not have run yet.
        call.subscribe_mcp_session(&reply.session_id, since);
        if let Some(sink) = call.event_sink().filter(|_| wait == WaitMode::ForTurn) {
            send_remaining_events(call, sink, &reply.session_id, since).await?;
        }
        output::to_json(reply)
    }
}

/// Forwards a session's events to the client while its message is being handled.
struct EventForwarder<'a> {
    call: &'a ActionCall<'a>,
    wait: WaitMode,
    since: i64,
}

impl EventForwarder<'_> {
    /// Subscribes the MCP session to the session's events, sends them to the event sink if the client waits, and
    /// returns only when a waiting client leaves.
    async fn run(self, session: &mut oneshot::Receiver<SessionId>) {
        let call = self.call;
        let Ok(session) = session.await else {
            return std::future::pending().await;
        };
        call.note_target(session.as_str());
        call.subscribe_mcp_session(&session, self.since);
        if self.wait == WaitMode::No {
            return std::future::pending().await;
        }
        let stream = async {
            let Some(sink) = call.event_sink() else {
                return std::future::pending().await;
            };
            let mut events = call.app.store.events().follow(&session, self.since);
            while let Some(Ok(event)) = events.next().await {
                sink.event(&event).await;
                call.note_streamed(event.index);
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = call.origin.cancellation().cancelled() => {}
            () = stream => {}
        }
    }
}

/// Sends the events the forwarder has not sent yet, so that the turn's last events precede the answer.
async fn send_remaining_events(call: &ActionCall<'_>, sink: &Arc<dyn EventSink>, session: &SessionId, since: i64) -> Result<()> {
    let streamed = call.last_streamed().unwrap_or(since);
    for event in call.app.store.events().read(session, streamed, 1000).await? {
        sink.event(&event).await;
    }
    Ok(())
}

impl ActionHandler for SessionCancel {
    const NAME: &'static str = "session_cancel";
    const DESCRIPTION: &'static str = "Cancel the running turn of a session.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Set;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.session_id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        call.note_session(&self.session_id).await?;
        output::to_json(
            call.app
                .sessions
                .cancel(call.grant.principal(), &self.session_id)
                .await?,
        )
    }
}

impl ActionHandler for SessionEnd {
    const NAME: &'static str = "session_end";
    const DESCRIPTION: &'static str = "End a session and every session it started.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Delete;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.session_id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        call.note_session(&self.session_id).await?;
        output::to_json(
            call.app
                .sessions
                .end(call.grant.principal(), &self.session_id)
                .await?,
        )
    }
}

impl ActionHandler for SessionGet {
    const NAME: &'static str = "session_get";
    const DESCRIPTION: &'static str = "Show one session.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        output::to_json(
            call.app
                .sessions
                .get(call.grant.principal(), &self.session_id)
                .await?,
        )
    }
}

impl ActionHandler for SessionList {
    const NAME: &'static str = "session_list";
    const DESCRIPTION: &'static str = "List sessions, newest first.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let query = SessionListQuery {
            project_id: self.project_id,
            status: self.status,
            limit: self.limit,
            cursor: self.cursor,
        };
        output::to_json(call.app.sessions.list(call.grant.principal(), query).await?)
    }
}

impl ActionHandler for SessionEvents {
    const NAME: &'static str = "session_events";
    const DESCRIPTION: &'static str =
        "Read a session's events after an index. With wait_ms it waits for the first new one (long poll).";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let query = EventsQuery {
            session_id: self.session_id,
            since_index: self.since_index.unwrap_or(-1),
            max_events: self.max_events.unwrap_or(100) as usize,
            wait: Duration::from_millis(self.wait_ms.unwrap_or(0).into()),
            children: if self.include_children == Some(true) {
                IncludeChildren::Yes
            } else {
                IncludeChildren::No
            },
        };
        let held = match call.origin {
            ActionOrigin::Outside(_) => Some(PresenceGuard::for_request(
                call.app,
                call.grant,
                &query.session_id,
                call.mcp_session(),
                HoldKind::Poll,
            )),
            ActionOrigin::Inside(_) => None,
        };
        let without_wait = EventsQuery {
            wait: Duration::ZERO,
            ..query.clone()
        };
        let reply = tokio::select! {
            reply = call.app.sessions.events(call.grant.principal(), query) => reply,
            // A stopping server answers polls with the events there are.
            () = call.app.stopping.cancelled() => call.app.sessions.events(call.grant.principal(), without_wait).await,
            // Dropping `held` marks the caller as disconnected.
            () = call.origin.cancellation().cancelled() => return Err(Error::unavailable("the client left")),
            () = call.app.auth.wait_until_ended(call.grant) => return Err(Error::unauthenticated("this token has expired or was revoked")),
        };
        if let Some(held) = held {
            held.release_as_answered();
        }
        let reply = reply?;
        if let Some(sink) = call.event_sink() {
            for event in &reply.events {
                sink.event(event).await;
            }
        }
        output::to_json(reply)
    }
}

impl ActionHandler for SessionSwitchAgent {
    const NAME: &'static str = "session_switch_agent";
    const DESCRIPTION: &'static str = "Give a session another agent. The running turn gets a few seconds to end; the new \
        agent starts with tools and memory of its own.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Set;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(format!("{} → {}", self.session_id, self.agent).into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        call.note_session(&self.session_id).await?;
        let switched = call
            .app
            .sessions
            .switch_agent(call.grant.principal(), &self.session_id, &self.agent)
            .await?;
        output::to_json(switched)
    }
}
