//! `session_message`: a session is found or started, what the caller lends is taken, the message queued.

use oubliette_protocol::{
    Error, Principal, ProjectId, Result, SessionId, Slug,
    caller::full_name,
    event::{EventBody, Status},
    relay::method,
};
use oubliette_store::{Page, ProjectFilter, ProjectRow, SessionRow};
use std::sync::Arc;
use tokio::sync::oneshot;

use crate::{
    Sessions,
    blueprint::Blueprint,
    callers::{Hold, Kind, PresenceKey},
    children::Parent,
    live::{Command, Incoming, Live},
    request::{Asker, MessageReply, MessageRequest, Wait, WorkspaceChoice},
};

/// The longest message, in bytes.
const LONGEST: usize = 4 * 1024 * 1024;
/// How much of the first message names the session.
const TITLE: usize = 80;

impl Sessions {
    /// Sends a message to a session, starting one if none is named.
    pub async fn message(&self, request: MessageRequest) -> Result<MessageReply> {
        self.message_told(request, None).await
    }

    /// The same, telling which session it is before the message is delivered: whoever waits for the turn
    /// can follow its events meanwhile.
    pub async fn message_told(
        &self,
        request: MessageRequest,
        told: Option<oneshot::Sender<SessionId>>,
    ) -> Result<MessageReply> {
        if request.message.trim().is_empty() {
            return Err(Error::invalid("message is empty"));
        }
        if request.message.len() > LONGEST {
            return Err(Error::invalid(format!("message is longer than {LONGEST} bytes")));
        }
        if request.context.is_some() && matches!(request.asker, Asker::Base(_)) {
            return Err(Error::invalid(
                "context: an agent cannot lend tools to the sessions it starts",
            ));
        }
        let live = match &request.session_id {
            Some(id) => self.known(&request, id).await?,
            None => self.begin(&request).await?,
        };
        if let Some(told) = told {
            let _ = told.send(live.row.session_id.clone());
        }
        // From here on the caller is there: it has a request open. Being dropped means it broke that off.
        let hold = self.present(&request, &live);
        let reply = self.deliver(request, &live).await;
        if let Some(hold) = hold {
            hold.answered();
        }
        reply
    }

    fn present(&self, request: &MessageRequest, live: &Live) -> Option<Hold> {
        let counts = request.context.is_some() || request.wait == Wait::ForTurn;
        (counts && request.asker == Asker::Outside).then(|| {
            let key = PresenceKey {
                principal: request.principal.token_id.clone(),
                caller_id: None,
                session: Some(live.row.session_id.clone()),
                mcp_session: request.mcp_session.clone(),
            };
            self.hold(key, Kind::Wait)
        })
    }

    async fn deliver(&self, request: MessageRequest, live: &Arc<Live>) -> Result<MessageReply> {
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
                    live.plane.taken(name)
                })
                .await?;
            live.plane.touch();
        }
        let (ended, outcome) = match wait {
            Wait::No => (None, None),
            Wait::ForTurn => {
                let (ended, outcome) = oneshot::channel();
                (Some(ended), Some(outcome))
            }
        };
        let command = |accepted| {
            Command::Message(Incoming {
                text: message,
                accepted,
                ended,
            })
        };
        let (turn, status) = live.ask(command).await??;
        let session_id = live.row.session_id.clone();
        let Some(outcome) = outcome else {
            return Ok(MessageReply {
                session_id,
                turn,
                status,
                text: None,
            });
        };
        let gone = || Error::unavailable("the session ended before the turn did");
        let text = outcome.await.map_err(|_| gone())??;
        Ok(MessageReply {
            session_id,
            turn,
            status: live.status(),
            text: Some(text),
        })
    }

    /// A session that is there already.
    async fn known(&self, request: &MessageRequest, id: &SessionId) -> Result<Arc<Live>> {
        let row = self.row(&request.principal, id).await?;
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
        if request.wait == Wait::ForTurn
            && let Some(asking) = request.asker.session()
        {
            self.refuse_waiting_for_oneself(asking, id).await?;
        }
        if row.status == Status::Failed {
            // It becomes active again, and counts again.
            let project = self.project(&row.project_id).await?;
            self.check_count(&project).await?;
        }
        let live = self.load(id).await?;
        if let Some(declaration) = &request.context {
            live.callers.check(declaration, |name| live.plane.taken(name))?;
        }
        Ok(live)
    }

    /// A new session. Everything is checked before anything is made.
    async fn begin(&self, request: &MessageRequest) -> Result<Arc<Live>> {
        let project = self.project_for(request).await?;
        let parent = match request.asker.session() {
            Some(session) => Some(Parent::find(self, session, &project).await?),
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
            status: Status::Starting,
            reason: None,
            turn: 0,
            created_at: now,
            updated_at: now,
            created_by: request.principal.token_id.clone(),
            title: Some(title(&request.message)),
            agent_session: None,
            isolation: None,
        };
        let plan = Blueprint::draw(&self.deps, &row, &agent).await?;
        if let Some(declaration) = &request.context {
            let aliases = &plan.entry.definition.tools.aliases;
            for tool in &declaration.tools {
                let full = full_name(&declaration.caller_id, &tool.name);
                if aliases.contains_key(&full) || method::BASE.contains(&full.as_str()) {
                    return Err(Error::conflict(format!(
                        "context.caller_tools: {full} is a tool of the agent already; lend it under another name"
                    )));
                }
            }
        }
        let _counted = self.counting.lock().await;
        self.check_count(&project).await?;
        if request.workspace == WorkspaceChoice::New {
            row.workspace_id = self.deps.workspaces.create(&project.project_id).await?;
        }
        self.deps.store.session_insert(row.clone()).await?;
        let starting = EventBody::Status {
            status: Status::Starting,
            reason: None,
        };
        self.deps
            .store
            .events()
            .append(&row.session_id, vec![starting])
            .await?;
        self.enliven(row, Vec::new(), true)
    }

    pub(crate) async fn project(&self, id: &ProjectId) -> Result<ProjectRow> {
        let row = self.deps.store.project_get(id).await?;
        row.ok_or_else(|| Error::not_found(format!("there is no project {id}")))
    }

    /// The project that was named, or the only one there is to see.
    async fn project_for(&self, request: &MessageRequest) -> Result<ProjectRow> {
        let principal: &Principal = &request.principal;
        if let Some(id) = &request.project_id {
            let row = self
                .deps
                .store
                .project_get(id)
                .await?
                .filter(|row| principal.sees(&row.project_id));
            return row.ok_or_else(|| Error::not_found(format!("there is no project {id}")));
        }
        let filter = ProjectFilter {
            only: principal.project.clone(),
            name_contains: None,
        };
        let mut visible = self.deps.store.project_list(filter, Page::first(2)).await?.items;
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
        parent: Option<&Parent>,
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
        parent: Option<&Parent>,
    ) -> Result<oubliette_protocol::WorkspaceId> {
        match &request.workspace {
            // A child works where its parent does.
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
            // Made when everything else is known to be good; until then the default stands for it.
            WorkspaceChoice::New => Ok(project.default_workspace.clone()),
        }
    }

    /// Refuses one more active session than a project may have.
    async fn check_count(&self, project: &ProjectRow) -> Result<()> {
        let named = project
            .limits
            .get("max_sessions")
            .and_then(serde_json::Value::as_u64);
        let most = named.unwrap_or(u64::from(self.deps.config.max_sessions));
        match self.deps.store.session_count_active(&project.project_id).await? < most {
            true => Ok(()),
            false => Err(Error::limit_exceeded(format!(
                "the project has {most} active sessions, its most; end one first"
            ))),
        }
    }
}

fn title(message: &str) -> String {
    let line = message.trim().lines().next().unwrap_or_default();
    let mut title: String = line.chars().take(TITLE).collect();
    if title.len() < line.len() {
        title.push('…');
    }
    title
}
