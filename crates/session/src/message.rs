//! `session_message`: finds or starts a session, records the tools the caller lends, queues the message.

use oubliette_protocol::{
    Error, Principal, Result, SessionId, Slug, WorkspacePolicy,
    caller::full_name,
    event::{EventBody, SessionStatus},
    relay::method,
};
use oubliette_store::{PageRequest, ProjectFilter, ProjectRow, SessionRow, session_limit_error};
use std::sync::Arc;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::{
    Sessions,
    agent_plan::AgentPlan,
    callers::{HoldKind, PresenceHold, PresenceKey},
    children::ParentSession,
    live::{LiveSession, SubmittedMessage, TaskCommand},
    ports::no_project,
    request::{MessageReply, MessageRequest, RequestOrigin, WaitMode, WorkspaceChoice},
};

/// Maximum length of a message, in bytes.
const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;
/// Maximum length of a session's title, in characters of its first message.
const MAX_TITLE_CHARS: usize = 80;

/// A message that waits for its turn, or is in it.
struct AcceptedMessage {
    turn: u64,
    status: SessionStatus,
    /// Gets the turn's text, if it is waited for.
    outcome: Option<oneshot::Receiver<Result<String>>>,
}

impl AcceptedMessage {
    /// The reply: at once, or when the turn has ended or is to be waited for no longer.
    async fn reply(self, live: &LiveSession, stop_waiting: &CancellationToken) -> Result<MessageReply> {
        let (session_id, turn) = (live.row.session_id.clone(), self.turn);
        let Some(outcome) = self.outcome else {
            return Ok(MessageReply {
                session_id,
                turn,
                status: self.status,
                text: None,
            });
        };
        let ended = || Error::unavailable("the session ended before the turn did");
        let text = tokio::select! {
            biased;
            outcome = outcome => Some(outcome.map_err(|_| ended())??),
            () = stop_waiting.cancelled() => None,
        };
        Ok(MessageReply {
            session_id,
            turn,
            status: live.status(),
            text,
        })
    }
}

impl Sessions {
    /// Sends a message to a session, starting one if none is named.
    pub async fn message(&self, request: MessageRequest) -> Result<MessageReply> {
        self.message_announcing_session(request, None, &CancellationToken::new())
            .await
    }

    /// Like [`Sessions::message`], and sends the session's id before the message is delivered, so that a
    /// client that waits for the turn can follow its events meanwhile. When `stop_waiting` is cancelled, the reply comes
    /// before the turn has ended, without its text.
    pub async fn message_announcing_session(
        &self,
        request: MessageRequest,
        announce: Option<oneshot::Sender<SessionId>>,
        stop_waiting: &CancellationToken,
    ) -> Result<MessageReply> {
        if request.message.trim().is_empty() {
            return Err(Error::invalid("message is empty"));
        }
        if request.message.len() > MAX_MESSAGE_BYTES {
            return Err(Error::invalid(format!(
                "message is longer than {MAX_MESSAGE_BYTES} bytes"
            )));
        }
        if request.context.is_some() && matches!(request.origin, RequestOrigin::BaseTool(_)) {
            return Err(Error::invalid(
                "context: an agent cannot lend tools to the sessions it starts",
            ));
        }
        let live = match &request.session_id {
            Some(id) => self.existing_session(&request, id).await?,
            None => self.start_session(&request).await?,
        };
        if let Some(announce) = announce {
            let _ = announce.send(live.row.session_id.clone());
        }
        // The open request counts as presence of the caller. If this future is dropped, the caller has
        // aborted the request, and dropping the hold marks it absent.
        let hold = self.hold_while_waiting(&request, &live);
        let is_new = request.session_id.is_none();
        let reply = match self.submit(request, &live).await {
            Ok(submitted) => submitted.reply(&live, stop_waiting).await,
            Err(error) => {
                if is_new {
                    end_unused(live);
                }
                Err(error)
            }
        };
        if let Some(hold) = hold {
            hold.answered();
        }
        reply
    }

    fn hold_while_waiting(&self, request: &MessageRequest, live: &LiveSession) -> Option<PresenceHold> {
        let counts = request.context.is_some() || request.wait == WaitMode::ForTurn;
        (counts && request.origin == RequestOrigin::Outside).then(|| {
            let key = PresenceKey {
                principal: request.principal.token_id.clone(),
                caller_id: None,
                session: Some(live.row.session_id.clone()),
                mcp_session: request.mcp_session.clone(),
            };
            self.hold_presence(key, HoldKind::Wait)
        })
    }

    /// Declares the request's tools and hands its message to the session. An error means that the message was not accepted.
    async fn submit(&self, request: MessageRequest, live: &LiveSession) -> Result<AcceptedMessage> {
        let MessageRequest {
            principal,
            message,
            context,
            mcp_session,
            wait,
            ..
        } = request;
        if let Some(declaration) = context {
            live.callers
                .declare(&principal, mcp_session, declaration, |name| {
                    live.plane.name_conflict(name)
                })
                .await?;
            live.plane.notify_changed();
        }
        let (ended, outcome) = match wait {
            WaitMode::No => (None, None),
            WaitMode::ForTurn => {
                let (ended, outcome) = oneshot::channel();
                (Some(ended), Some(outcome))
            }
        };
        let command = |accepted| {
            TaskCommand::Message(SubmittedMessage {
                text: message,
                accepted,
                turn_result: ended,
            })
        };
        let (turn, status) = live.send_command(command).await??;
        Ok(AcceptedMessage {
            turn,
            status,
            outcome,
        })
    }

    /// Finds the session a request names, and checks that the request fits it.
    async fn existing_session(&self, request: &MessageRequest, id: &SessionId) -> Result<Arc<LiveSession>> {
        let row = self.visible_row(&request.principal, id).await?;
        if request
            .project_id
            .as_ref()
            .is_some_and(|project| *project != row.project_id)
        {
            return Err(Error::not_found(format!(
                "there is no session {id} in that project"
            )));
        }
        if request.agent.as_ref().is_some_and(|agent| *agent != row.agent) {
            return Err(Error::invalid(format!(
                "session {id} runs agent {}; use session_switch_agent to change it",
                row.agent
            )));
        }
        match &request.workspace {
            WorkspaceChoice::Default => {}
            WorkspaceChoice::Existing(workspace) if *workspace == row.workspace_id => {}
            WorkspaceChoice::Existing(_) | WorkspaceChoice::New => {
                return Err(Error::invalid(format!(
                    "session {id} has its workspace already; start a new session"
                )));
            }
        }
        if request.wait == WaitMode::ForTurn
            && let Some(asking) = request.origin.session()
        {
            self.refuse_circular_wait(asking, id).await?;
        }
        if row.status == SessionStatus::Failed {
            // A failed session does not count as active; this message makes it active again.
            let project = self.deps.project(&row.project_id).await?;
            self.check_session_limit(&project).await?;
        }
        let live = self.load(id).await?;
        if let Some(declaration) = &request.context {
            live.callers
                .check_names(declaration, |name| live.plane.name_conflict(name))?;
        }
        Ok(live)
    }

    /// Starts a new session. Everything is checked before anything is created.
    async fn start_session(&self, request: &MessageRequest) -> Result<Arc<LiveSession>> {
        let project = self.project_for(request).await?;
        let parent = match request.origin.session() {
            Some(session) => Some(ParentSession::find(self, session, &project).await?),
            None => None,
        };
        let agent = self.agent_for(request, &project, parent.as_ref())?;
        let now = oubliette_store::now();
        let session_id = SessionId::generate();
        let mut row = SessionRow {
            root_id: parent
                .as_ref()
                .map_or_else(|| session_id.clone(), |parent| parent.row.root_id.clone()),
            depth: parent.as_ref().map_or(0, |parent| parent.row.depth + 1),
            parent_id: parent.as_ref().map(|parent| parent.row.session_id.clone()),
            session_id,
            project_id: project.project_id.clone(),
            workspace_id: self.workspace_for(request, &project, parent.as_ref()).await?,
            agent: agent.clone(),
            status: SessionStatus::Starting,
            reason: None,
            turn: 0,
            created_at: now,
            updated_at: now,
            created_by: request.principal.token_id.clone(),
            title: Some(title(&request.message)),
            agent_session: None,
            isolation: None,
            images: None,
        };
        let plan = AgentPlan::resolve(&self.deps, &row, &agent).await?;
        if let Some(declaration) = &request.context {
            let aliases = &plan.entry.definition.tools.aliases;
            for tool in &declaration.tools {
                let full = full_name(&declaration.caller_id, &tool.name);
                if aliases.contains_key(&full) || method::BASE_TOOLS.contains(&full.as_str()) {
                    return Err(Error::conflict(format!(
                        "context.caller_tools: {full} is a tool of the agent already; lend it under another name"
                    )));
                }
            }
        }
        // A child shares its parent's workspace; what names none else gets one of its own if the project says so.
        let own = request.workspace == WorkspaceChoice::Default
            && project.workspaces == WorkspacePolicy::Own
            && parent
                .as_ref()
                .is_none_or(|parent| parent.row.project_id != project.project_id);
        let _counted = self.count_lock.lock().await;
        let max_active = self.check_session_limit(&project).await?;
        if own || request.workspace == WorkspaceChoice::New {
            row.workspace_id = self.deps.workspaces.create(&project.project_id).await?;
        }
        let starting = EventBody::Status {
            status: SessionStatus::Starting,
            reason: None,
        };
        self.deps
            .store
            .events()
            .append_first(row.clone(), vec![starting], Some(max_active))
            .await?;
        self.note_adopted(&row.root_id);
        self.spawn_task(row, Vec::new(), true)
    }

    /// The project the request names, or the only one the principal sees.
    async fn project_for(&self, request: &MessageRequest) -> Result<ProjectRow> {
        let principal: &Principal = &request.principal;
        if let Some(id) = &request.project_id {
            return match principal.sees(id) {
                true => self.deps.project(id).await,
                false => Err(no_project(id)),
            };
        }
        let filter = ProjectFilter {
            project: principal.project.clone(),
            name_contains: None,
        };
        let mut visible = self
            .deps
            .store
            .project_list(filter, PageRequest::first(2))
            .await?
            .items;
        match (visible.pop(), visible.is_empty()) {
            (Some(only), true) => Ok(only),
            (Some(_), false) => Err(Error::invalid(
                "project_id is missing, and there is more than one project",
            )),
            (None, _) => Err(Error::invalid(
                "there is no project yet; make one with project_create",
            )),
        }
    }

    fn agent_for(
        &self,
        request: &MessageRequest,
        project: &ProjectRow,
        parent: Option<&ParentSession>,
    ) -> Result<Slug> {
        if let Some(parent) = parent {
            return parent.agent_for_child(self, request.agent.as_ref());
        }
        let named = request.agent.clone().or_else(|| project.agent.clone());
        named.ok_or_else(|| {
            let agents = self.deps.library.agents();
            let known: Vec<&str> = agents.keys().map(Slug::as_str).collect();
            Error::invalid(format!(
                "agent is missing and the project names none; there are: {}",
                if known.is_empty() {
                    "none yet".to_owned()
                } else {
                    known.join(", ")
                }
            ))
        })
    }

    async fn workspace_for(
        &self,
        request: &MessageRequest,
        project: &ProjectRow,
        parent: Option<&ParentSession>,
    ) -> Result<oubliette_protocol::WorkspaceId> {
        match &request.workspace {
            // A child shares its parent's workspace.
            WorkspaceChoice::Default => Ok(match parent.filter(|p| p.row.project_id == project.project_id) {
                Some(parent) => parent.row.workspace_id.clone(),
                None => project.default_workspace.clone(),
            }),
            WorkspaceChoice::Existing(id) => {
                let row = self.deps.store.workspace_get(id).await?;
                let row = row.filter(|row| row.project_id == project.project_id);
                row.map(|row| row.workspace_id)
                    .ok_or_else(|| Error::not_found(format!("there is no workspace {id} in this project")))
            }
            // Created after all checks have passed; until then the default is a placeholder.
            WorkspaceChoice::New => Ok(project.default_workspace.clone()),
        }
    }

    /// Fails when a project has as many active sessions as it may have. Returns how many that are.
    async fn check_session_limit(&self, project: &ProjectRow) -> Result<u64> {
        let named = project
            .limits
            .get("max_sessions")
            .and_then(serde_json::Value::as_u64);
        let most = named.unwrap_or(u64::from(self.deps.config.load().max_sessions));
        match self
            .deps
            .store
            .session_count_active(Some(&project.project_id))
            .await?
            < most
        {
            true => Ok(most),
            false => Err(session_limit_error(most)),
        }
    }
}

/// Ends a new session whose first message was not accepted: whoever sent it knows of none, and it would count as active for
/// ever. While the database cannot be written, the end is logged as soon as it can be.
fn end_unused(live: Arc<LiveSession>) {
    tokio::spawn(async move {
        // It is refused, or cannot be sent, if the session ends by other means.
        let _ = live.send_command(TaskCommand::End).await;
    });
}

fn title(message: &str) -> String {
    let line = message.trim().lines().next().unwrap_or_default();
    let mut title: String = line.chars().take(MAX_TITLE_CHARS).collect();
    if title.len() < line.len() {
        title.push('…');
    }
    title
}
