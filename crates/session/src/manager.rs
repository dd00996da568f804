//! [`Sessions`]: every session, found, started and asked.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use futures::{Stream, StreamExt as _, stream};
use oubliette_protocol::{
    CatalogId, Error, ErrorCode, Object, Principal, Result, Scope, SessionId, Slug, TokenId,
    event::{Event, Status},
    tool::{CallResult, ToolList},
};
use oubliette_store::{Page, QueuedMessage, SessionFilter, SessionRow};
use oubliette_tools::{CallContext, Origin, OwnTools, Plane, PlaneParts, Wanted};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    blueprint::Blueprint,
    callers::{self, CallerBook, Hold, Kind, PresenceKey, board::Board},
    debug::SessionDebug,
    late::LateOwnTools,
    live::{Command, Live, Now},
    ports::Deps,
    relay_socket::{self, RelaySocket},
    request::{Cancelled, ListQuery, SessionPage, SessionView, Switched},
    rig::Site,
    task::Task,
};

/// Commands that wait for a session's task.
const COMMANDS: usize = 64;
/// How the plane refuses a call while no agent's tools are installed.
const NOT_READY: &str = "the agent's tools are not ready";
/// How long a stopping server waits for its sessions.
const STOP_WITHIN: Duration = Duration::from_secs(8);

/// Every session.
pub struct Sessions {
    pub(crate) me: Weak<Sessions>,
    pub(crate) deps: Arc<Deps>,
    own: Arc<LateOwnTools>,
    pub(crate) board: Arc<Board>,
    live: Mutex<HashMap<SessionId, Arc<Live>>>,
    /// Held while a session is brought into memory, so that it is brought once.
    loading: tokio::sync::Mutex<()>,
    /// Held while sessions are counted and one is added.
    pub(crate) counting: tokio::sync::Mutex<()>,
    tasks: TaskTracker,
    stopping: CancellationToken,
}

impl Sessions {
    /// No session is in memory yet; see [`Sessions::recover`].
    pub fn new(deps: Deps) -> Arc<Self> {
        let sessions = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            deps: Arc::new(deps),
            own: Arc::default(),
            board: Arc::default(),
            live: Mutex::default(),
            loading: tokio::sync::Mutex::default(),
            counting: tokio::sync::Mutex::default(),
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
        });
        sessions.tasks.spawn(crate::reload::follow(
            sessions.me.clone(),
            sessions.stopping.clone(),
        ));
        sessions
    }

    /// Sets Oubliette's own tools, once, before the first session starts.
    pub fn set_own(&self, own: Arc<dyn OwnTools>) {
        self.own.set(own);
    }

    /// A session's row, if this principal may know of it.
    pub(crate) async fn row(&self, principal: &Principal, id: &SessionId) -> Result<SessionRow> {
        let row = self.deps.store.session_get(id).await?;
        row.filter(|row| principal.sees(&row.project_id))
            .ok_or_else(|| no_session(id))
    }

    /// A session that this principal may know of, in memory. `conflict` when it has ended.
    pub(crate) async fn visible(&self, principal: &Principal, id: &SessionId) -> Result<Arc<Live>> {
        match self.visible_in_memory(principal, id).await? {
            Some(live) => Ok(live),
            None => self.load(id).await,
        }
    }

    /// The same, without bringing it there.
    async fn visible_in_memory(&self, principal: &Principal, id: &SessionId) -> Result<Option<Arc<Live>>> {
        let live = self.in_memory(id);
        match &live {
            // Whose an active session is cannot change, and its project cannot go: no need to look it up.
            Some(live) if live.now.borrow().status.is_active() => {
                match principal.sees(&live.row.project_id) {
                    true => {}
                    false => return Err(no_session(id)),
                }
            }
            Some(_) => match self.deps.store.session_project(id).await? {
                Some(project) if principal.sees(&project) => {}
                Some(_) | None => return Err(no_session(id)),
            },
            None => drop(self.row(principal, id).await?),
        }
        Ok(live)
    }

    /// A session in memory, brought there if need be. `conflict` when it has ended.
    pub(crate) async fn load(&self, id: &SessionId) -> Result<Arc<Live>> {
        if let Some(live) = self.in_memory(id) {
            return Ok(live);
        }
        let _one_at_a_time = self.loading.lock().await;
        if let Some(live) = self.in_memory(id) {
            return Ok(live);
        }
        let row = self
            .deps
            .store
            .session_get(id)
            .await?
            .ok_or_else(|| no_session(id))?;
        if row.status == Status::Ended {
            return Err(Error::conflict(format!(
                "session {id} has ended; start a new one"
            )));
        }
        let waiting = self.deps.store.queue_of(id).await?;
        self.enliven(row, waiting, false)
    }

    pub(crate) fn in_memory(&self, id: &SessionId) -> Option<Arc<Live>> {
        self.live
            .lock()
            .get(id)
            .filter(|live| !live.commands.is_closed())
            .cloned()
    }

    pub(crate) fn all_in_memory(&self) -> Vec<Arc<Live>> {
        self.live.lock().values().cloned().collect()
    }

    /// Gives a row a task.
    pub(crate) fn enliven(
        &self,
        row: SessionRow,
        waiting: Vec<QueuedMessage>,
        announced: bool,
    ) -> Result<Arc<Live>> {
        if self.stopping.is_cancelled() {
            return Err(Error::unavailable("the server is stopping"));
        }
        let deps = &self.deps;
        let id = row.session_id.clone();
        let debug = SessionDebug::new(deps.store.clone(), id.clone());
        let callers = CallerBook::new(
            id.clone(),
            deps.store.clone(),
            self.board.clone(),
            deps.config.relay.clone(),
        );
        let plane = Plane::new(PlaneParts {
            session_id: id.clone(),
            callers: callers.clone(),
            own: self.own.clone(),
            debug: debug.clone(),
            thread: deps.threads.assign(),
        });
        let relay = RelaySocket::bind(&deps.home, &id, deps.door.clone(), deps.sandbox.level())?;
        let (commands, queue) = mpsc::channel(COMMANDS);
        let now = Now {
            status: row.status,
            agent: row.agent.clone(),
            turn: row.turn,
        };
        let live = Arc::new(Live {
            row,
            plane: plane.clone(),
            callers,
            debug: debug.clone(),
            now: watch::Sender::new(now),
            commands,
        });
        let site = Site {
            deps: deps.clone(),
            session: id.clone(),
            plane,
            debug,
            sockets: relay.dir().to_path_buf(),
            admit: relay.admission(),
        };
        let left = (waiting, announced);
        let task = Task::new(self.me.clone(), live.clone(), site, relay, queue, left);
        self.live.lock().insert(id, live.clone());
        self.tasks.spawn(task.run());
        Ok(live)
    }

    /// A session's task is ending; nobody is to find it.
    pub(crate) fn forget(&self, id: &SessionId, live: &Arc<Live>) {
        let mut all = self.live.lock();
        if all.get(id).is_some_and(|known| Arc::ptr_eq(known, live)) {
            all.remove(id);
        }
    }

    /// Cancels the running turn.
    pub async fn cancel(&self, principal: &Principal, id: &SessionId) -> Result<Cancelled> {
        let row = self.row(principal, id).await?;
        let (turn, cancelled) = match self.in_memory(id) {
            Some(live) => live.ask(Command::Cancel).await?,
            None => (row.turn, false),
        };
        Ok(Cancelled {
            session_id: id.clone(),
            turn,
            cancelled,
        })
    }

    /// Ends a session and everything it started. Ending it again changes nothing.
    pub async fn end(&self, principal: &Principal, id: &SessionId) -> Result<SessionView> {
        let row = self.row(principal, id).await?;
        if row.status != Status::Ended {
            match self.load(id).await {
                // Whoever else ended it meanwhile did what was asked.
                Ok(live) => drop(live.ask(Command::End).await),
                Err(error) if error.code == ErrorCode::Conflict => {}
                Err(error) => return Err(error),
            }
        }
        self.end_children(id).await?;
        self.get(principal, id).await
    }

    /// Shows a session.
    pub async fn get(&self, principal: &Principal, id: &SessionId) -> Result<SessionView> {
        Ok(self.view(self.row(principal, id).await?, principal))
    }

    /// Shows the sessions a principal may know of, newest first.
    pub async fn list(&self, principal: &Principal, query: ListQuery) -> Result<SessionPage> {
        if let Some(project) = query
            .project_id
            .as_ref()
            .filter(|project| !principal.sees(project))
        {
            return Err(Error::not_found(format!("there is no project {project}")));
        }
        let project = query.project_id.or_else(|| principal.project.clone());
        let filter = SessionFilter {
            project,
            status: query.status,
            ..SessionFilter::default()
        };
        let page = Page {
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
        let shown = principal.scope == Scope::Admin && row.status != Status::Ended;
        let relay_socket = shown.then(|| relay_socket::path(&self.deps.home, &row.session_id));
        SessionView {
            session_id: row.session_id,
            project_id: row.project_id,
            workspace_id: row.workspace_id,
            agent: row.agent,
            status: row.status,
            reason: row.reason,
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

    /// Replaces a session's agent. A bad one is refused before anything is touched.
    pub async fn switch_agent(
        &self,
        principal: &Principal,
        id: &SessionId,
        agent: &Slug,
    ) -> Result<Switched> {
        let live = self.visible(principal, id).await?;
        let plan = Blueprint::draw(&self.deps, &live.row, agent).await?;
        live.ask(|reply| Command::Switch(Box::new(plan), reply)).await?
    }

    /// Every tool of a session.
    pub async fn tool_list(&self, principal: &Principal, id: &SessionId) -> Result<ToolList> {
        let live = self.visible(principal, id).await?;
        self.with_tools(&live).await?;
        Ok(live.plane.list())
    }

    /// Calls a tool through the session's gate, as the principal, not as the agent.
    pub async fn tool_call(
        &self,
        principal: &Principal,
        id: &SessionId,
        tool: String,
        arguments: Object,
        ctx: CallContext,
    ) -> Result<CallResult> {
        let live = self.visible(principal, id).await?;
        loop {
            self.with_tools(&live).await?;
            let wanted = Wanted::Any(tool.clone());
            let origin = Origin::Outside(principal.clone());
            let result = live
                .plane
                .call(wanted, arguments.clone(), origin, ctx.clone())
                .await;
            match result {
                // The plane was closed between our look and our call: the call has not begun, so it waits
                // for the next agent like any other.
                Err(error) if error.message.starts_with(NOT_READY) => {}
                result => return result,
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
        let live = self.visible(principal, id).await?;
        self.with_tools(&live).await?;
        let context = live
            .plane
            .context()
            .ok_or_else(|| Error::unavailable("the session's tools are not ready"))?;
        context.restart_server(server).await
    }

    /// Waits out a switch and makes sure that the tools are there.
    async fn with_tools(&self, live: &Live) -> Result<()> {
        live.settled().await;
        match live.plane.context() {
            Some(_) => Ok(()),
            None => live.ask(Command::Tools).await?,
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
        let refused = |refusal: callers::book::Refusal| {
            callers::note_refusal(&self.deps.store, id, request_id, refusal.reason());
        };
        match self.visible_in_memory(principal, id).await {
            Ok(Some(live)) => live.callers.answer(principal, request_id, result, error).await,
            Ok(None) => {
                refused(callers::book::Refusal::NotFound);
                Err(callers::book::Refusal::NotFound.error())
            }
            Err(error) => {
                // To whom the session is hidden it stays so; whoever watches it sees the attempt.
                if self.in_memory(id).is_some() {
                    refused(callers::book::Refusal::Foreign);
                }
                Err(error)
            }
        }
    }

    /// A session's gate.
    pub async fn plane(&self, id: &SessionId) -> Result<Arc<Plane>> {
        if let Some(live) = self.in_memory(id) {
            return Ok(live.plane.clone());
        }
        // Boxed: thousands of calls may wait at once, and none needs this room by then.
        Ok(Box::pin(self.load(id)).await?.plane.clone())
    }

    /// A session's callers.
    pub async fn callers(&self, id: &SessionId) -> Result<Arc<CallerBook>> {
        Ok(self.load(id).await?.callers.clone())
    }

    /// The turn a session is in, for calls that come from its inside.
    pub fn current_turn(&self, id: &SessionId) -> Option<u64> {
        self.in_memory(id).map(|live| live.now.borrow().turn)
    }

    /// Takes note of a stream, poll or waiting message of a caller.
    pub fn hold(&self, key: PresenceKey, kind: Kind) -> Hold {
        self.board.hold(key, kind)
    }

    /// A stateful MCP session was closed: whoever declared over it has left.
    pub fn mcp_session_closed(&self, mcp_session: &str) {
        self.board
            .leave(|declarer| declarer.mcp_session.as_deref() == Some(mcp_session));
    }

    /// A token was revoked or has expired: its callers have left.
    pub fn token_gone(&self, token: &TokenId) {
        self.board
            .leave(|declarer| declarer.owner.0.as_ref() == Some(token));
    }

    /// The open requests a stream speaks for, to be delivered again when a caller is back. Which they are
    /// is settled now; they are read as they are asked for.
    pub fn open_requests(&self, key: &PresenceKey) -> impl Stream<Item = Result<Arc<Event>>> + Send + use<> {
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

    /// What callers hold open and what waits for them.
    pub fn caller_load(&self) -> callers::Load {
        self.board.load()
    }

    /// Stops every agent and tool server. Sessions go on when the server is back.
    pub async fn shutdown(&self) {
        self.stopping.cancel();
        let asked = self.all_in_memory().into_iter().map(|live| async move {
            let _ = live.ask(Command::Stop).await;
        });
        let stopped = async {
            futures::future::join_all(asked).await;
            self.tasks.close();
            self.tasks.wait().await;
        };
        if tokio::time::timeout(STOP_WITHIN, stopped).await.is_err() {
            tracing::warn!("some sessions did not stop in time");
        }
    }
}

fn no_session(id: &SessionId) -> Error {
    Error::not_found(format!("there is no session {id}"))
}
