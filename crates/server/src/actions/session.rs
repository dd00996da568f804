//! Sessions: started, messaged, watched, ended.

use std::{borrow::Cow, sync::Arc, time::Duration};

use futures::StreamExt as _;
use oubliette_protocol::{
    Error, ProjectId, Result, Scope, SessionId, Slug, WorkspaceId, caller, event::Status,
};
use oubliette_session::{
    Asker, Children, EventsQuery, Kind, ListQuery, MessageRequest, Wait, WorkspaceChoice,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::oneshot;

use super::{Call, Effect, EventSink, Origin, Tool, call::Reason};
use crate::presence::Held;

/// `session_message`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionMessage {
    /// What to tell the agent.
    pub message: String,
    /// In which project; the only visible one when absent.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// To which session; absent starts a new one.
    #[serde(default)]
    pub session_id: Option<SessionId>,
    /// Which agent a new session runs; the project's when absent.
    #[serde(default)]
    pub agent: Option<Slug>,
    /// Which workspace a new session works in; the project's default when absent.
    #[serde(default)]
    pub workspace_id: Option<WorkspaceId>,
    /// Make a new workspace for a new session.
    #[serde(default)]
    pub create_workspace: Option<bool>,
    /// Tools of yours that the agent may call.
    #[serde(default)]
    pub context: Option<caller::Context>,
    /// Return when the turn ends, with its text.
    #[serde(default)]
    pub wait: Option<bool>,
}

/// `session_cancel`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionCancel {
    /// Which.
    pub session_id: SessionId,
}

/// `session_end`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionEnd {
    /// Which.
    pub session_id: SessionId,
}

/// `session_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionGet {
    /// Which.
    pub session_id: SessionId,
}

/// `session_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionList {
    /// Only of this project.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// Only in this status.
    #[serde(default)]
    pub status: Option<Status>,
    /// At most so many (1 to 1000, default 100).
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the list before.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `session_events`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionEvents {
    /// Of which session.
    pub session_id: SessionId,
    /// After this index; -1 is from the first.
    #[serde(default)]
    pub since_index: Option<i64>,
    /// At most so many (1 to 1000, default 100).
    #[serde(default)]
    pub max_events: Option<u32>,
    /// Wait so long for the first one (0 to 50000 ms, default 0).
    #[serde(default)]
    pub wait_ms: Option<u32>,
    /// Also the events of sessions it started.
    #[serde(default)]
    pub include_children: Option<bool>,
}

/// `session_switch_agent`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionSwitchAgent {
    /// Which session.
    pub session_id: SessionId,
    /// To which agent.
    pub agent: Slug,
}

fn shaped(value: impl Serialize) -> Result<Value> {
    serde_json::to_value(value).map_err(Error::internal)
}

impl Call<'_> {
    fn asker(&self) -> Asker {
        match self.origin {
            Origin::Outside(_) => Asker::Outside,
            Origin::Inside(inside) => match inside.reason {
                Reason::Base => Asker::Base(inside.session.clone()),
                Reason::Key => Asker::Key(inside.session.clone()),
            },
        }
    }

    /// The stateful MCP session this came on.
    fn mcp_session(&self) -> Option<Arc<str>> {
        match self.origin {
            Origin::Outside(outside) => outside.mcp_session.clone(),
            Origin::Inside(_) => None,
        }
    }

    fn sink(&self) -> Option<&Arc<dyn EventSink>> {
        match self.origin {
            Origin::Outside(outside) => outside.stream.as_ref(),
            Origin::Inside(_) => None,
        }
    }

    /// Lets the MCP session this came on hear a session's events, from after an index.
    fn hear(&self, session: &SessionId, since: i64) {
        if let Some(listener) = self.mcp_session().and_then(|id| self.app.listeners.get(&id)) {
            listener.messaged(session, since);
        }
    }

    /// Notes a session's project for the audit log, if the session is within reach.
    pub(super) async fn note_session(&self, id: &SessionId) -> Result<()> {
        if let Some(project) = self.app.store.session_project(id).await?
            && self.grant.principal().sees(&project)
        {
            self.note_project(&project);
        }
        Ok(())
    }
}

impl Tool for SessionMessage {
    const NAME: &'static str = "session_message";
    const DESCRIPTION: &'static str = "Send a message to an agent. Without session_id a new session starts. Returns at \
        once unless wait is true. With context you lend the agent tools of your own: each call of one comes to you as a \
        caller_tool_request event, which you answer with caller_tool_response.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Write;

    fn target(&self) -> Option<Cow<'_, str>> {
        self.session_id.as_ref().map(|id| id.as_str().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let app = call.app;
        let wait = if self.wait == Some(true) {
            Wait::ForTurn
        } else {
            Wait::No
        };
        let workspace = match (self.workspace_id, self.create_workspace == Some(true)) {
            (Some(_), true) => {
                return Err(Error::invalid("give workspace_id or create_workspace, not both"));
            }
            (Some(id), false) => WorkspaceChoice::Existing(id),
            (None, true) => WorkspaceChoice::New,
            (None, false) => WorkspaceChoice::Default,
        };
        // Where the log stands before the message: whoever listens hears from here on.
        let since = match &self.session_id {
            Some(id) => {
                call.note_session(id).await?;
                app.store.events().last_index(id).await?
            }
            None => -1,
        };
        let request = MessageRequest {
            principal: call.grant.principal().clone(),
            asker: call.asker(),
            message: self.message,
            project_id: self.project_id,
            session_id: self.session_id,
            agent: self.agent,
            workspace,
            context: self.context.map(caller::Context::check).transpose()?,
            mcp_session: call.mcp_session().map(|id| id.to_string()),
            wait,
        };
        let (told, session) = oneshot::channel();
        let mut work = Box::pin(app.sessions.message_told(request, Some(told)));
        let heard = Streamed { call, wait, since };
        let mut heard = Box::pin(heard.run(session));
        let reply = tokio::select! {
            biased;
            reply = &mut work => reply,
            // The client left. The turn goes on; letting go of the wait is what says so.
            () = &mut heard => return Err(Error::unavailable("the client left before the turn ended")),
        };
        drop(heard);
        let reply = reply?;
        call.note_session(&reply.session_id).await?;
        // A quick answer may come before what happens beside it was so much as begun.
        call.hear(&reply.session_id, since);
        if let Some(sink) = call.sink().filter(|_| wait == Wait::ForTurn) {
            rest(call, sink, &reply.session_id, since).await?;
        }
        shaped(reply)
    }
}

/// What happens beside a message on its way.
struct Streamed<'a> {
    call: &'a Call<'a>,
    wait: Wait,
    since: i64,
}

impl Streamed<'_> {
    /// Lets the MCP session hear the session, streams its events where that is asked for, and ends when the
    /// client lets go of a wait.
    async fn run(self, session: oneshot::Receiver<SessionId>) {
        let call = self.call;
        let Ok(session) = session.await else {
            return std::future::pending().await;
        };
        call.hear(&session, self.since);
        if self.wait == Wait::No {
            return std::future::pending().await;
        }
        let stream = async {
            let Some(sink) = call.sink() else {
                return std::future::pending().await;
            };
            let mut events = call.app.store.events().follow(&session, self.since);
            while let Some(Ok(event)) = events.next().await {
                sink.event(&event).await;
                call.streamed(event.index);
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = call.origin.gone().cancelled() => {}
            () = stream => {}
        }
    }
}

/// The turn's end may be in the log before it is on the stream: what is left goes out before the answer.
async fn rest(call: &Call<'_>, sink: &Arc<dyn EventSink>, session: &SessionId, since: i64) -> Result<()> {
    let streamed = call.streamed_until().unwrap_or(since);
    for event in call.app.store.events().read(session, streamed, 1000).await? {
        sink.event(&event).await;
    }
    Ok(())
}

impl Tool for SessionCancel {
    const NAME: &'static str = "session_cancel";
    const DESCRIPTION: &'static str = "Cancel the running turn of a session.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Set;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.session_id.as_str().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        call.note_session(&self.session_id).await?;
        shaped(
            call.app
                .sessions
                .cancel(call.grant.principal(), &self.session_id)
                .await?,
        )
    }
}

impl Tool for SessionEnd {
    const NAME: &'static str = "session_end";
    const DESCRIPTION: &'static str = "End a session and every session it started.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Delete;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.session_id.as_str().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        call.note_session(&self.session_id).await?;
        shaped(
            call.app
                .sessions
                .end(call.grant.principal(), &self.session_id)
                .await?,
        )
    }
}

impl Tool for SessionGet {
    const NAME: &'static str = "session_get";
    const DESCRIPTION: &'static str = "Show one session.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        shaped(
            call.app
                .sessions
                .get(call.grant.principal(), &self.session_id)
                .await?,
        )
    }
}

impl Tool for SessionList {
    const NAME: &'static str = "session_list";
    const DESCRIPTION: &'static str = "List sessions, newest first.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let query = ListQuery {
            project_id: self.project_id,
            status: self.status,
            limit: self.limit,
            cursor: self.cursor,
        };
        shaped(call.app.sessions.list(call.grant.principal(), query).await?)
    }
}

impl Tool for SessionEvents {
    const NAME: &'static str = "session_events";
    const DESCRIPTION: &'static str =
        "Read a session's events after an index. With wait_ms it waits for the first new one (long poll).";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let query = EventsQuery {
            session_id: self.session_id,
            since_index: self.since_index.unwrap_or(-1),
            max_events: self.max_events.unwrap_or(100) as usize,
            wait: Duration::from_millis(self.wait_ms.unwrap_or(0).into()),
            children: if self.include_children == Some(true) {
                Children::Included
            } else {
                Children::Hidden
            },
        };
        let held = match call.origin {
            Origin::Outside(_) => Some(Held::request(
                call.app,
                call.grant,
                &query.session_id,
                call.mcp_session(),
                Kind::Poll,
            )),
            Origin::Inside(_) => None,
        };
        let at_once = EventsQuery {
            wait: Duration::ZERO,
            ..query.clone()
        };
        let reply = tokio::select! {
            reply = call.app.sessions.events(call.grant.principal(), query) => reply,
            // A server that stops answers its polls with what there is.
            () = call.app.stopping.cancelled() => call.app.sessions.events(call.grant.principal(), at_once).await,
            // Dropping what is held says that the caller left.
            () = call.origin.gone().cancelled() => return Err(Error::unavailable("the client left")),
            () = call.app.auth.ended(call.grant) => return Err(Error::unauthenticated("this token is no longer good")),
        };
        if let Some(held) = held {
            held.answered();
        }
        let reply = reply?;
        if let Some(sink) = call.sink() {
            for event in &reply.events {
                sink.event(event).await;
            }
        }
        shaped(reply)
    }
}

impl Tool for SessionSwitchAgent {
    const NAME: &'static str = "session_switch_agent";
    const DESCRIPTION: &'static str = "Give a session another agent. The running turn gets a few seconds to end; the new \
        agent starts with tools and memory of its own.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Set;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(format!("{} → {}", self.session_id, self.agent).into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        call.note_session(&self.session_id).await?;
        let switched = call
            .app
            .sessions
            .switch_agent(call.grant.principal(), &self.session_id, &self.agent)
            .await?;
        shaped(switched)
    }
}
