//! `session_message`: sends a message to an agent, in a new session or an existing one.

use std::{borrow::Cow, sync::Arc};

use futures::StreamExt as _;
use oubliette_os::WorkerThreads;
use oubliette_protocol::{
    Error, ProjectId, Result, Scope, SessionId, Slug, WorkspaceId, argument_schema::CHECK_STACK_BYTES, caller,
};
use oubliette_session::{MessageReply, MessageRequest, RequestOrigin, WaitMode, WorkspaceChoice};
use schemars::JsonSchema;
use serde::Deserialize;
use tokio::sync::oneshot;

use super::{ActionCall, ActionHandler, Effect, EventSink};
use crate::auth::CredentialKind;

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
    /// Whether a new session gets a new, empty workspace. Not together with workspace_id. Default: false.
    #[serde(default)]
    pub create_workspace: Option<bool>,
    /// Tools you lend to the agent. Replaces what you lent under the same caller_id before. Absent: unchanged.
    #[serde(default)]
    pub context: Option<caller::CallerContext>,
    /// Whether to wait until the turn ends and return its text. Default: false, which returns at once.
    #[serde(default)]
    pub wait: Option<bool>,
}

impl ActionCall<'_> {
    fn request_origin(&self) -> RequestOrigin {
        match (self.grant.inside(), self.grant.credential()) {
            (None, _) => RequestOrigin::Outside,
            (Some(session), CredentialKind::BaseTool) => RequestOrigin::BaseTool(session.clone()),
            (Some(session), CredentialKind::Token | CredentialKind::Cookie | CredentialKind::Owner) => {
                RequestOrigin::OwnTool(session.clone())
            }
        }
    }

    /// Subscribes the MCP session the call belongs to, if any, to a session's events after an index.
    fn subscribe_mcp_session(&self, session: &SessionId, since: i64) {
        if let Some(messaged) = &self.client.messaged_session {
            // The MCP session is at the server that passed the call on.
            let _ = messaged.send((session.clone(), since));
        }
        if let Some(listener) = self.mcp_session().and_then(|id| self.app.mcp_sessions.get(&id)) {
            listener.record_message(session, since);
        }
    }
}

impl ActionHandler for SessionMessage {
    type Output = MessageReply;

    const NAME: &'static str = "session_message";
    const DESCRIPTION: &'static str = "Send a message to an agent. Without session_id a new session starts. Returns at \
        once unless wait is true. With context you lend the agent tools of your own: each call of one comes to you as a \
        caller_tool_request event, which you answer with caller_tool_response.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Write;

    fn target(&self) -> Option<Cow<'_, str>> {
        self.session_id.as_ref().map(|id| id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
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
            context: check_context(self.context).await?,
            mcp_session: call.mcp_session().map(|id| id.to_string()),
            wait,
        };
        let (announce, mut session) = oneshot::channel();
        let stop_waiting = &call.client.stop_waiting;
        let mut work = Box::pin(app.sessions.message_announcing_session(
            request,
            Some(announce),
            stop_waiting,
        ));
        let forwarder = EventForwarder { call, wait, since };
        let mut forwarding = Box::pin(forwarder.run(&mut session));
        let reply = tokio::select! {
            biased;
            reply = &mut work => reply,
            // The turn goes on; dropping `work` marks the caller as disconnected.
            error = &mut forwarding => return Err(error),
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
        Ok(reply)
    }
}

/// Threads that check declarations.
static THREADS: WorkerThreads = WorkerThreads::new(2, CHECK_STACK_BYTES);

/// Checks a declaration away from the threads that serve requests: compiling schemas takes time and stack.
async fn check_context(context: Option<caller::CallerContext>) -> Result<Option<caller::CallerDeclaration>> {
    let Some(context) = context else { return Ok(None) };
    let checked = THREADS.run(|| context.check()).await.map_err(Error::internal)?;
    checked.map(Some)
}

/// Forwards a session's events to the client while its message is being handled.
struct EventForwarder<'a> {
    call: &'a ActionCall<'a>,
    wait: WaitMode,
    since: i64,
}

impl EventForwarder<'_> {
    /// Subscribes the MCP session to the session's events, sends them to the event sink if the client waits, and
    /// returns only when a waiting client leaves or may no longer hear them.
    async fn run(self, session: &mut oneshot::Receiver<SessionId>) -> Error {
        let call = self.call;
        let Ok(session) = session.await else {
            return std::future::pending().await;
        };
        call.note_target(session.as_str());
        call.subscribe_mcp_session(&session, self.since);
        if self.wait == WaitMode::No {
            return std::future::pending().await;
        }
        if let Some(awaited) = &call.client.awaited_session {
            // Nobody listens any more: the door has what it waits for.
            let _ = awaited.send((session.clone(), self.since));
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
            std::future::pending().await
        };
        tokio::select! {
            error = call.abandoned() => error,
            error = stream => error,
        }
    }
}

/// Sends the events the forwarder has not sent yet, so that the turn's last events precede the answer.
async fn send_remaining_events(
    call: &ActionCall<'_>,
    sink: &Arc<dyn EventSink>,
    session: &SessionId,
    since: i64,
) -> Result<()> {
    let streamed = call.last_streamed().unwrap_or(since);
    for event in call.app.store.events().read(session, streamed, 1000).await? {
        sink.event(&event).await;
    }
    Ok(())
}
