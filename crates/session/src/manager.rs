//! [`Sessions`]: the session manager. It brings sessions into memory and passes requests to their tasks.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Weak},
    time::Duration,
};

use futures::{Stream, StreamExt as _, stream};
use oubliette_protocol::{
    Error, ErrorCode, Principal, Result, SessionId, Slug, TokenId,
    event::{SessionEvent, SessionStatus},
};
use oubliette_sandbox::SandboxGroup;
use oubliette_store::{QueuedMessage, SessionRow};
use oubliette_tools::{OwnTools, ToolPlane, ToolPlaneParts};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    agent_plan::AgentPlan,
    approvals::SessionApprovals,
    callers::{self, CallerRelay, HoldKind, PresenceHold, PresenceKey, presence_tracker::PresenceTracker},
    debug::SessionDebugSink,
    deferred_own_tools::DeferredOwnTools,
    disk_guard::DiskAlarm,
    live::{LiveSession, LiveState, TaskCommand},
    ports::SessionDeps,
    processes::SessionEnv,
    relay_socket::RelaySocket,
    request::{CancelReply, SessionView, SwitchReply},
    shown_tools::ShownTools,
    task::SessionTask,
    usage::{self, SessionMeter, UsageLedger},
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
    usage: Arc<UsageLedger>,
    live: Mutex<HashMap<SessionId, Arc<LiveSession>>>,
    /// The trees that this server runs, in a cluster, by the id of their topmost session.
    pub(crate) adopted: Mutex<HashSet<SessionId>>,
    /// Held while a session is brought into memory, so that it gets only one task, and while one is deleted.
    pub(crate) load_lock: tokio::sync::Mutex<()>,
    /// Held from counting a project's sessions until a new one is added, so that the limit holds.
    pub(crate) count_lock: tokio::sync::Mutex<()>,
    tasks: TaskTracker,
    stopping: CancellationToken,
    /// Cancelled when this server of a cluster has to let go of its sessions as they are.
    pub(crate) abandoned: CancellationToken,
}

impl Sessions {
    /// Replaces the configuration: prices and budgets from now on, timeouts and limits for the next turn, session or call that
    /// reads them.
    pub fn set_config(&self, config: crate::SessionConfig) {
        self.deps.config.store(config);
    }

    /// Creates the manager with no session in memory; [`Sessions::recover`] brings back interrupted ones.
    pub fn new(deps: SessionDeps) -> Arc<Self> {
        let usage = UsageLedger::new(deps.store.clone(), deps.config.clone());
        let sessions = Arc::new_cyclic(|weak_self| Self {
            weak_self: weak_self.clone(),
            deps: Arc::new(deps),
            own_tools: Arc::default(),
            presence: Arc::default(),
            usage,
            live: Mutex::default(),
            adopted: Mutex::default(),
            load_lock: tokio::sync::Mutex::default(),
            count_lock: tokio::sync::Mutex::default(),
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
            abandoned: CancellationToken::new(),
        });
        sessions
            .tasks
            .spawn(usage::write_pending(&sessions.usage, sessions.stopping.clone()));
        sessions.tasks.spawn(crate::reload::follow_library(
            sessions.weak_self.clone(),
            sessions.stopping.clone(),
        ));
        sessions
    }

    /// What all sessions use.
    pub fn usage(&self) -> &UsageLedger {
        &self.usage
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
        let mut row = self.row_to_load(id).await?;
        let others_waiting = self.adopt(&row.root_id).await?;
        if self.deps.store.cluster().is_some() {
            // As recovery has left it.
            row = self.row_to_load(id).await?;
        }
        let waiting = self.deps.store.queue_list(id).await?;
        let live = self.spawn_task(row, waiting, false)?;
        if others_waiting.iter().any(|other| other != id) {
            self.start_waiting_soon(others_waiting);
        }
        Ok(live)
    }

    /// The row of a session that is to be brought into memory. `conflict` when it has ended.
    async fn row_to_load(&self, id: &SessionId) -> Result<SessionRow> {
        let row = self.deps.store.session_get(id).await?;
        let row = row.ok_or_else(|| no_session(id))?;
        match row.status {
            SessionStatus::Ended => Err(Error::conflict(format!(
                "session {id} has ended; start a new one"
            ))),
            _ => Ok(row),
        }
    }

    /// Cancelled when the server begins to stop.
    pub(crate) fn stopping(&self) -> &CancellationToken {
        &self.stopping
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
        let config = deps.config.load();
        let id = row.session_id.clone();
        let debug = SessionDebugSink::counting(deps.store.clone(), id.clone());
        let callers = CallerRelay::new(
            id.clone(),
            deps.store.clone(),
            self.presence.clone(),
            config.relay.clone(),
        );
        let meter = SessionMeter::new(self.usage.clone(), deps.store.clone(), &row);
        let approvals = SessionApprovals::new(
            id.clone(),
            row.project_id.clone(),
            deps.store.clone(),
            debug.clone(),
            config.approval_timeout,
        );
        let plane = ToolPlane::new(ToolPlaneParts {
            session_id: id.clone(),
            callers: callers.clone(),
            own: self.own_tools.clone(),
            approver: approvals.clone(),
            debug: debug.clone(),
            meter: meter.clone(),
            thread: deps.threads.assign(),
            buffers: deps
                .buffers
                .part("session_buffer_mb", config.session_buffer_bytes),
        });
        let shown_tools = Arc::new(ShownTools::default());
        let relay = RelaySocket::bind(deps, &id, plane.buffers(), &shown_tools)?;
        let sandbox_group = SandboxGroup::new(id.as_str(), config.limits.clone());
        let (commands, queue) = mpsc::channel(COMMAND_QUEUE_LEN);
        let now = LiveState {
            status: row.status,
            agent: row.agent.clone(),
            turn: row.turn,
            log_error: None,
            switch_beginning: false,
        };
        let live = Arc::new(LiveSession {
            row,
            plane: plane.clone(),
            callers,
            approvals: approvals.clone(),
            debug: debug.clone(),
            shown_tools: shown_tools.clone(),
            state: watch::Sender::new(now),
            commands,
            sandbox_group: sandbox_group.clone(),
        });
        let env = SessionEnv {
            deps: deps.clone(),
            session: id.clone(),
            plane,
            approvals,
            debug,
            meter,
            socket_dir: relay.dir().to_path_buf(),
            sandbox_group,
            descriptors: relay.descriptors().clone(),
            shown_tools,
            disk_alarm: DiskAlarm::new(),
        };
        let left = (waiting, starting_logged);
        let task = SessionTask::new(self.weak_self.clone(), live.clone(), env, relay, queue, left);
        self.live.lock().insert(id, live.clone());
        let abandoned = self.abandoned.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = abandoned.cancelled() => {}
                () = task.run() => {}
            }
        });
        Ok(live)
    }

    /// Removes a session whose task is ending, unless another task has taken its place.
    pub(crate) fn remove_from_memory(&self, id: &SessionId, live: &Arc<LiveSession>) {
        let mut all = self.live.lock();
        if all.get(id).is_some_and(|known| Arc::ptr_eq(known, live)) {
            all.remove(id);
        }
        drop(all);
        if self.deps.store.cluster().is_some()
            && !self.stopping.is_cancelled()
            && let Some(sessions) = self.weak_self.upgrade()
        {
            let root = live.row.root_id.clone();
            tokio::spawn(async move { sessions.release_if_unused(&root).await });
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

    /// Replaces a session's agent. An agent that cannot run is refused before anything is stopped.
    pub async fn switch_agent(
        &self,
        principal: &Principal,
        id: &SessionId,
        agent: &Slug,
    ) -> Result<SwitchReply> {
        let live = self.visible_session(principal, id).await?;
        let plan = AgentPlan::resolve(&self.deps, &live.row, agent).await?;
        crate::processes::check_start(&self.deps, &plan)?;
        // Before anything is stopped: the running agent keeps working until the program is installed, or if it cannot be.
        plan.prepare_program(&self.deps).await?;
        live.send_command(|reply| TaskCommand::Switch(Box::new(plan), reply))
            .await?
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
        let refused = |refusal: callers::answer_refusal::AnswerRefusal| {
            callers::record_refusal(&self.deps.store, id, request_id, refusal.reason());
        };
        match self.visible_in_memory(principal, id).await {
            Ok(Some(live)) => live.callers.answer(principal, request_id, result, error).await,
            Ok(None) => {
                refused(callers::answer_refusal::AnswerRefusal::NotFound);
                Err(callers::answer_refusal::AnswerRefusal::NotFound.error())
            }
            Err(error) => {
                // The error does not reveal the session, but its debugger shows the attempt.
                if self.in_memory(id).is_some() {
                    refused(callers::answer_refusal::AnswerRefusal::OtherPrincipal);
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

    /// The client of a session's agent has shown it these tools.
    pub fn tools_listed(&self, id: &SessionId, names: Vec<String>) {
        if let Some(live) = self.in_memory(id) {
            live.shown_tools.note_listed(names);
        }
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
        if let Err(error) = self.usage.settle().await {
            tracing::error!(error = %error.for_log(), "writing what sessions used failed; the last of it is lost");
        }
    }
}

fn no_session(id: &SessionId) -> Error {
    Error::not_found(format!("there is no session {id}"))
}
