//! [`Sessions`]: the session manager. It brings sessions into memory and passes requests to their tasks.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use futures::{Stream, StreamExt as _, stream};
use oubliette_protocol::{
    CatalogId, Error, ErrorCode, JsonObject, Principal, Result, Scope, SessionId, Slug, TokenId,
    event::{SessionEvent, SessionStatus},
    tool::{CallResult, ToolList},
};
use oubliette_store::{PageRequest, QueuedMessage, SessionFilter, SessionRow};
use oubliette_tools::{
    CallContext, CallOrigin, OwnTools, RequestedTool, ToolCallError, ToolPlane, ToolPlaneParts,
};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    agent_plan::AgentPlan,
    callers::{self, CallerRelay, HoldKind, PresenceHold, PresenceKey, presence_tracker::PresenceTracker},
    debug::SessionDebugSink,
    deferred_own_tools::DeferredOwnTools,
    live::{LiveSession, LiveState, TaskCommand},
    ports::{SessionDeps, no_project},
    processes::SessionEnv,
    relay_socket::{self, RelaySocket},
    request::{CancelReply, SessionListQuery, SessionPage, SessionView, SwitchReply},
    task::SessionTask,
};

/// How many commands may be queued for one session's task.
const COMMAND_QUEUE_LEN: usize = 64;
/// How long a stopping server waits for all session tasks.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(8);

/// All sessions of a server: those in the database, and those in memory with a task of their own.
pub struct Sessions {
    pub(crate) weak_self: Weak<Sessions>,
    pub(crate) deps: Arc<SessionDeps>,
    own_tools: Arc<DeferredOwnTools>,
    pub(crate) presence: Arc<PresenceTracker>,
    live: Mutex<HashMap<SessionId, Arc<LiveSession>>>,
    /// Held while a session is brought into memory, so that it gets only one task.
    load_lock: tokio::sync::Mutex<()>,
    /// Held from counting a project's sessions until a new one is added, so that the limit holds.
    pub(crate) count_lock: tokio::sync::Mutex<()>,
    tasks: TaskTracker,
    stopping: CancellationToken,
}

impl Sessions {
    /// Creates the manager with no session in memory; [`Sessions::recover`] brings back interrupted ones.
    pub fn new(deps: SessionDeps) -> Arc<Self> {
        let sessions = Arc::new_cyclic(|weak_self| Self {
            weak_self: weak_self.clone(),
            deps: Arc::new(deps),
            own_tools: Arc::default(),
            presence: Arc::default(),
            live: Mutex::default(),
            load_lock: tokio::sync::Mutex::default(),
            count_lock: tokio::sync::Mutex::default(),
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
        });
        sessions.tasks.spawn(crate::reload::follow_library(
            sessions.weak_self.clone(),
            sessions.stopping.clone(),
        ));
        sessions
    }

    /// Sets Oubliette's own tools, once, before the first session starts.
    pub fn set_own_tools(&self, own: Arc<dyn OwnTools>) {
        self.own_tools.set(own);
    }

    /// A session's row; `not_found` when this principal may not see it.
    pub(crate) async fn visible_row(&self, principal: &Principal, id: &SessionId) -> Result<SessionRow> {
        let row = self.deps.store.session_get(id).await?;
        row.filter(|row| principal.sees(&row.project_id))
            .ok_or_else(|| no_session(id))
    }

    /// A session this principal may see, brought into memory if needed. `conflict` when it has ended.
    pub(crate) async fn visible_session(
        &self,
        principal: &Principal,
        id: &SessionId,
    ) -> Result<Arc<LiveSession>> {
        match self.visible_in_memory(principal, id).await? {
            Some(live) => Ok(live),
            None => self.load(id).await,
        }
    }

    /// A session this principal may see; `None` when it is not in memory.
    async fn visible_in_memory(
        &self,
        principal: &Principal,
        id: &SessionId,
    ) -> Result<Option<Arc<LiveSession>>> {
        let live = self.in_memory(id);
        match &live {
            // An active session's project neither changes nor is deleted, so the row in memory is current.
            Some(live) if live.state.borrow().status.is_active() => {
                match principal.sees(&live.row.project_id) {
                    true => {}
                    false => return Err(no_session(id)),
                }
            }
            Some(_) => match self.deps.store.session_project(id).await? {
                Some(project) if principal.sees(&project) => {}
                Some(_) | None => return Err(no_session(id)),
            },
            None => drop(self.visible_row(principal, id).await?),
        }
        Ok(live)
    }

    /// A session, brought into memory if needed. `conflict` when it has ended.
    pub(crate) async fn load(&self, id: &SessionId) -> Result<Arc<LiveSession>> {
        if let Some(live) = self.in_memory(id) {
            return Ok(live);
        }
        let _one_at_a_time = self.load_lock.lock().await;
        if let Some(live) = self.in_memory(id) {
            return Ok(live);
        }
        let row = self
            .deps
            .store
            .session_get(id)
            .await?
            .ok_or_else(|| no_session(id))?;
        if row.status == SessionStatus::Ended {
            return Err(Error::conflict(format!(
                "session {id} has ended; start a new one"
            )));
        }
        let waiting = self.deps.store.queue_list(id).await?;
        self.spawn_task(row, waiting, false)
    }

    pub(crate) fn in_memory(&self, id: &SessionId) -> Option<Arc<LiveSession>> {
        self.live
            .lock()
            .get(id)
            .filter(|live| !live.commands.is_closed())
            .cloned()
    }

    pub(crate) fn all_in_memory(&self) -> Vec<Arc<LiveSession>> {
        self.live.lock().values().cloned().collect()
    }

    /// Brings a session into memory: binds its relay socket and starts its task. `starting_logged` says that
    /// the event `starting` of a new session is in the log already.
    pub(crate) fn spawn_task(
        &self,
        row: SessionRow,
        waiting: Vec<QueuedMessage>,
        starting_logged: bool,
    ) -> Result<Arc<LiveSession>> {
        if self.stopping.is_cancelled() {
            return Err(Error::unavailable("the server is stopping"));
        }
        let deps = &self.deps;
        let id = row.session_id.clone();
        let debug = SessionDebugSink::new(deps.store.clone(), id.clone());
        let callers = CallerRelay::new(
            id.clone(),
            deps.store.clone(),
            self.presence.clone(),
            deps.config.relay.clone(),
        );
        let plane = ToolPlane::new(ToolPlaneParts {
            session_id: id.clone(),
            callers: callers.clone(),
            own: self.own_tools.clone(),
            debug: debug.clone(),
            thread: deps.threads.assign(),
        });
        let relay = RelaySocket::bind(&deps.home, &id, deps.door.clone(), deps.sandbox.level())?;
        let (commands, queue) = mpsc::channel(COMMAND_QUEUE_LEN);
        let now = LiveState {
            status: row.status,
            agent: row.agent.clone(),
            turn: row.turn,
            log_error: None,
        };
        let live = Arc::new(LiveSession {
            row,
            plane: plane.clone(),
            callers,
            debug: debug.clone(),
            state: watch::Sender::new(now),
            commands,
        });
        let env = SessionEnv {
            deps: deps.clone(),
            session: id.clone(),
            plane,
            debug,
            socket_dir: relay.dir().to_path_buf(),
            agent_pid: relay.agent_pid(),
        };
        let left = (waiting, starting_logged);
        let task = SessionTask::new(self.weak_self.clone(), live.clone(), env, relay, queue, left);
        self.live.lock().insert(id, live.clone());
        self.tasks.spawn(task.run());
        Ok(live)
    }

    /// Removes a session whose task is ending, unless another task has taken its place.
    pub(crate) fn remove_from_memory(&self, id: &SessionId, live: &Arc<LiveSession>) {
        let mut all = self.live.lock();
        if all.get(id).is_some_and(|known| Arc::ptr_eq(known, live)) {
            all.remove(id);
        }
    }

    /// Cancels the running turn.
    pub async fn cancel(&self, principal: &Principal, id: &SessionId) -> Result<CancelReply> {
        let row = self.visible_row(principal, id).await?;
        let (turn, cancelled) = match self.in_memory(id) {
            Some(live) => live.send_command(TaskCommand::Cancel).await?,
            None => (row.turn, false),
        };
        Ok(CancelReply {
            session_id: id.clone(),
            turn,
            cancelled,
        })
    }

    /// Ends a session and everything it started. Ending it again changes nothing.
    pub async fn end(&self, principal: &Principal, id: &SessionId) -> Result<SessionView> {
        let row = self.visible_row(principal, id).await?;
        if row.status != SessionStatus::Ended {
            match self.load(id).await {
                Ok(live) => {
                    // A command that cannot be sent: another request has ended the session meanwhile.
                    if let Ok(ended) = live.send_command(TaskCommand::End).await {
                        ended?;
                    }
                }
                Err(error) if error.code == ErrorCode::Conflict => {}
                Err(error) => return Err(error),
            }
        }
        self.end_children(id).await?;
        self.get(principal, id).await
    }

    /// Returns a session.
    pub async fn get(&self, principal: &Principal, id: &SessionId) -> Result<SessionView> {
        Ok(self.view(self.visible_row(principal, id).await?, principal))
    }

    /// Lists the sessions a principal may see, newest first.
    pub async fn list(&self, principal: &Principal, query: SessionListQuery) -> Result<SessionPage> {
        if let Some(project) = query
            .project_id
            .as_ref()
            .filter(|project| !principal.sees(project))
        {
            return Err(no_project(project));
        }
        let project = query.project_id.or_else(|| principal.project.clone());
        let filter = SessionFilter {
            project,
            status: query.status,
            ..SessionFilter::default()
        };
        let page = PageRequest {
            limit: query.limit,
            cursor: query.cursor,
        };
        let rows = self.deps.store.session_list(filter, page).await?;
        let sessions = rows
            .items
            .into_iter()
            .map(|row| self.view(row, principal))
            .collect();
        Ok(SessionPage {
            sessions,
            next_cursor: rows.next_cursor,
        })
    }

    fn view(&self, row: SessionRow, principal: &Principal) -> SessionView {
        let shown = principal.scope == Scope::Admin && row.status != SessionStatus::Ended;
        let live = self.in_memory(&row.session_id);
        let log_error = live.and_then(|live| live.state.borrow().log_error.clone());
        let relay_socket = shown.then(|| relay_socket::path(&self.deps.home, &row.session_id));
        SessionView {
            session_id: row.session_id,
            project_id: row.project_id,
            workspace_id: row.workspace_id,
            agent: row.agent,
            status: row.status,
            reason: log_error.or(row.reason),
            parent_id: row.parent_id,
            root_id: row.root_id,
            depth: row.depth,
            turn: row.turn,
            title: row.title,
            isolation: row.isolation,
            created_at: row.created_at,
            updated_at: row.updated_at,
            relay_socket,
        }
    }

    /// Replaces a session's agent. An agent that cannot run is refused before anything is stopped.
    pub async fn switch_agent(
        &self,
        principal: &Principal,
        id: &SessionId,
        agent: &Slug,
    ) -> Result<SwitchReply> {
        let live = self.visible_session(principal, id).await?;
        let plan = AgentPlan::resolve(&self.deps, &live.row, agent).await?;
        live.send_command(|reply| TaskCommand::Switch(Box::new(plan), reply))
            .await?
    }

    /// Lists the tools of a session, starting its tool servers if needed.
    pub async fn tool_list(&self, principal: &Principal, id: &SessionId) -> Result<ToolList> {
        let live = self.visible_session(principal, id).await?;
        self.ensure_tools(&live).await?;
        Ok(live.plane.list())
    }

    /// Calls a tool through the session's tool plane, as the principal, not as the agent.
    pub async fn tool_call(
        &self,
        principal: &Principal,
        id: &SessionId,
        tool: String,
        arguments: JsonObject,
        ctx: CallContext,
    ) -> Result<CallResult> {
        let live = self.visible_session(principal, id).await?;
        loop {
            self.ensure_tools(&live).await?;
            let tool = RequestedTool::ByName(tool.clone());
            let origin = CallOrigin::Outside(principal.clone());
            let result = live
                .plane
                .call(tool, arguments.clone(), origin, ctx.clone())
                .await;
            match result {
                // The tools were stopped between the check and the call. The call was not dispatched, so it can be
                // repeated; it waits for the next agent.
                Err(ToolCallError::NotReady) => {}
                result => return result.map_err(Error::from),
            }
        }
    }

    /// Restarts one tool server of a session.
    pub async fn tool_server_restart(
        &self,
        principal: &Principal,
        id: &SessionId,
        server: &CatalogId,
    ) -> Result<()> {
        let live = self.visible_session(principal, id).await?;
        self.ensure_tools(&live).await?;
        let context = live
            .plane
            .context()
            .ok_or_else(|| Error::unavailable("the session's tools are not ready"))?;
        context.restart_server(server).await
    }

    /// Waits for a running switch to end and makes sure that the agent's tools are installed.
    async fn ensure_tools(&self, live: &LiveSession) -> Result<()> {
        live.wait_for_switch().await;
        match live.plane.context() {
            Some(_) => Ok(()),
            None => live.send_command(TaskCommand::PrepareTools).await?,
        }
    }

    /// Answers an open caller tool request.
    pub async fn caller_tool_response(
        &self,
        principal: &Principal,
        id: &SessionId,
        request_id: &str,
        result: Option<Value>,
        error: Option<String>,
    ) -> Result<()> {
        let refused = |refusal: callers::book::AnswerRefusal| {
            callers::record_refusal(&self.deps.store, id, request_id, refusal.reason());
        };
        match self.visible_in_memory(principal, id).await {
            Ok(Some(live)) => live.callers.answer(principal, request_id, result, error).await,
            Ok(None) => {
                refused(callers::book::AnswerRefusal::NotFound);
                Err(callers::book::AnswerRefusal::NotFound.error())
            }
            Err(error) => {
                // The error does not reveal the session, but its debugger shows the attempt.
                if self.in_memory(id).is_some() {
                    refused(callers::book::AnswerRefusal::OtherPrincipal);
                }
                Err(error)
            }
        }
    }

    /// A session's tool plane.
    pub async fn plane(&self, id: &SessionId) -> Result<Arc<ToolPlane>> {
        if let Some(live) = self.in_memory(id) {
            return Ok(live.plane.clone());
        }
        // Boxed to keep the futures of thousands of waiting calls small: few of them have to load.
        Ok(Box::pin(self.load(id)).await?.plane.clone())
    }

    /// A session's caller relay.
    pub async fn callers(&self, id: &SessionId) -> Result<Arc<CallerRelay>> {
        Ok(self.load(id).await?.callers.clone())
    }

    /// The last turn a session began, for calls made by its agent; `None` when it is not in memory.
    pub fn current_turn(&self, id: &SessionId) -> Option<u64> {
        self.in_memory(id).map(|live| live.state.borrow().turn)
    }

    /// Counts a stream, poll or waiting message as presence of its caller until the hold is dropped.
    pub fn hold_presence(&self, key: PresenceKey, kind: HoldKind) -> PresenceHold {
        self.presence.register_hold(key, kind)
    }

    /// Marks the callers that declared over a closed stateful MCP session as absent.
    pub fn mcp_session_closed(&self, mcp_session: &str) {
        self.presence
            .mark_left(|declarer| declarer.mcp_session.as_deref() == Some(mcp_session));
    }

    /// Marks the callers of a revoked or expired token as absent.
    pub fn token_revoked(&self, token: &TokenId) {
        self.presence
            .mark_left(|declarer| declarer.principal.0.as_ref() == Some(token));
    }

    /// The open requests of the callers a stream belongs to, for delivery after a reconnect. The set is fixed
    /// by this call; the events are read as the stream is polled.
    pub fn open_requests(
        &self,
        key: &PresenceKey,
    ) -> impl Stream<Item = Result<Arc<SessionEvent>>> + Send + use<> {
        let concerned = match &key.session {
            Some(session) => self.in_memory(session).into_iter().collect(),
            None => self.all_in_memory(),
        };
        let again: Vec<_> = concerned
            .iter()
            .map(|live| live.callers.open_requests(key))
            .collect();
        stream::iter(again).flatten()
    }

    /// How many sessions are in memory.
    pub fn count_in_memory(&self) -> usize {
        self.live.lock().len()
    }

    /// How many streams, polls and messages callers hold open, and how many calls wait for them.
    pub fn caller_load(&self) -> callers::CallerLoad {
        self.presence.load()
    }

    /// Stops every agent and tool server. Sessions can be resumed when the server is started again.
    pub async fn shutdown(&self) {
        self.stopping.cancel();
        let asked = self.all_in_memory().into_iter().map(|live| async move {
            let _ = live.send_command(TaskCommand::Stop).await;
        });
        let stopped = async {
            futures::future::join_all(asked).await;
            self.tasks.close();
            self.tasks.wait().await;
        };
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, stopped).await.is_err() {
            tracing::warn!("sessions did not stop within the shutdown timeout");
        }
    }
}

fn no_session(id: &SessionId) -> Error {
    Error::not_found(format!("there is no session {id}"))
}
