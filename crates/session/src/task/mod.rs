//! [`SessionTask`]: the one task of a session, which alone starts, prompts, switches and stops its agent.
//!
//! Every request to a session arrives as a [`TaskCommand`] and is recorded in [`PendingCommands`] at once, also
//! during a start, a turn or a switch. These look at the pending commands and end early when they have to. So
//! no command is lost, and none is executed on a half-built agent.
//!
//! - `turn`: runs one message, from the start of the agent to the end of the turn.
//! - `switch`: replaces one agent by another.
//! - `finish`: ends the task: the session has ended, the server stops, or a failed session is unloaded.
//! - `log`: writes the session's log, and waits while it cannot be written.
//! - `mask`: removes the session's keys from events before they are logged.

mod finish;
mod log;
mod mask;
mod switch;
mod turn;

use std::{
    collections::VecDeque,
    future::Future,
    sync::{Arc, Weak},
    time::Instant,
};

use indexmap::IndexMap;
use oubliette_protocol::{Error, Result, Slug, event::SessionStatus};
use oubliette_store::{QueuedMessage, SessionPatch};
use tokio::sync::{mpsc, oneshot};

use crate::{
    Sessions,
    agent_plan::AgentPlan,
    agent_process::{AgentProcess, Conversation},
    live::{LiveSession, SubmittedMessage, TaskCommand},
    processes::{SessionEnv, SessionProcesses},
    relay_socket::RelaySocket,
};

use self::switch::PendingSwitch;

/// A queued message and the turn it will be.
struct QueuedTurn {
    turn: u64,
    text: String,
    result: Option<oneshot::Sender<Result<String>>>,
}

/// The state of a session's task.
pub(crate) struct SessionTask {
    sessions: Weak<Sessions>,
    live: Arc<LiveSession>,
    env: SessionEnv,
    relay_socket: Option<RelaySocket>,
    commands: mpsc::Receiver<TaskCommand>,
    queue: VecDeque<QueuedTurn>,
    processes: Option<SessionProcesses>,
    /// The conversation of each agent that has run in this session.
    conversations: IndexMap<Slug, Conversation>,
    /// The number of the running turn.
    running: Option<u64>,
    /// Whether the status `starting` is in the log already: `session_message` writes it for a new session.
    starting_logged: bool,
    /// Whether events were given up, so that the task has to end.
    log_abandoned: bool,
    pending: PendingCommands,
}

/// Commands that were received and not yet executed.
#[derive(Default)]
struct PendingCommands {
    cancel: bool,
    end: Vec<oneshot::Sender<Result<()>>>,
    stop: Vec<oneshot::Sender<()>>,
    /// When a stopping server interrupts the running turn.
    stop_at: Option<Instant>,
    switch: Option<PendingSwitch>,
    tools: Vec<oneshot::Sender<Result<()>>>,
}

/// Why a start, a turn or a switch is interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interruption {
    Cancelled,
    Ended,
    Stopped,
    /// A pending switch has waited for the drain timeout.
    DrainTimeout,
}

impl SessionTask {
    pub(crate) fn new(
        sessions: Weak<Sessions>,
        live: Arc<LiveSession>,
        env: SessionEnv,
        relay: RelaySocket,
        commands: mpsc::Receiver<TaskCommand>,
        (waiting, starting_logged): (Vec<QueuedMessage>, bool),
    ) -> Self {
        // Messages stored before a restart: nobody waits for their results any more.
        let restore = |stored: QueuedMessage| QueuedTurn {
            turn: stored.turn,
            text: stored.text,
            result: None,
        };
        let text = live.row.agent_session.as_deref().unwrap_or("{}");
        let conversations = serde_json::from_str(text).unwrap_or_default();
        Self {
            sessions,
            live,
            env,
            relay_socket: Some(relay),
            commands,
            queue: waiting.into_iter().map(restore).collect(),
            processes: None,
            conversations,
            running: None,
            starting_logged,
            log_abandoned: false,
            pending: PendingCommands::default(),
        }
    }

    pub(crate) async fn run(mut self) {
        loop {
            if !self.pending.end.is_empty() && !self.log_abandoned {
                return Box::pin(self.end()).await;
            }
            if !self.pending.stop.is_empty() {
                return Box::pin(self.stop()).await;
            }
            if self.log_abandoned {
                return Box::pin(self.unload()).await;
            }
            if self.pending.switch.is_some() {
                Box::pin(self.switch()).await;
            } else if !self.pending.tools.is_empty() {
                Box::pin(self.build_tools()).await;
            } else if let Some(next) = self.queue.pop_front() {
                // Boxed, like the others, so that the task of an idle session is small.
                Box::pin(self.run_turn(next)).await;
            } else if !self.wait_idle().await {
                return Box::pin(self.unload()).await;
            }
        }
    }

    /// Waits for a command, and stops the agent and tools after the idle time. Returns false when the session
    /// is to be unloaded.
    async fn wait_idle(&mut self) -> bool {
        let mut sleep_at = tokio::time::Instant::now() + self.config().idle_sleep;
        loop {
            let mut process = self
                .processes
                .as_mut()
                .and_then(|processes| processes.agent.as_mut());
            let received = async {
                match process.as_mut() {
                    Some(process) => process.receive().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                command = self.commands.recv() => {
                    match command {
                        Some(command) => self.take_command(command).await,
                        // All handles were dropped, so the manager is being dropped: stop.
                        None => self.pending.stop.push(oneshot::channel().0),
                    }
                    return true;
                }
                received = received => {
                    let handled = match (received, process) {
                        // An update between turns belongs to no turn and is not logged.
                        (Ok(message), Some(process)) => process.handle(message).await.map(drop),
                        (Ok(_), None) => Ok(()),
                        (Err(error), _) => Err(error),
                    };
                    if let Err(error) = handled {
                        self.stop_idle_agent(error.to_string()).await;
                    }
                }
                () = tokio::time::sleep_until(sleep_at) => match self.processes.take() {
                    // A call is in flight, from outside or from a process that outlived its turn.
                    Some(processes) if self.live.plane.in_flight() > 0 => {
                        self.processes = Some(processes);
                        sleep_at = tokio::time::Instant::now() + self.config().idle_sleep;
                    }
                    Some(processes) => processes.stop(&self.env).await,
                    None if self.live.status() == SessionStatus::Failed => return false,
                    None => return self.wait_asleep().await,
                },
            }
        }
    }

    /// Waits for a command while no agent and no tools run.
    async fn wait_asleep(&mut self) -> bool {
        match self.commands.recv().await {
            Some(command) => self.take_command(command).await,
            None => self.pending.stop.push(oneshot::channel().0),
        }
        true
    }

    /// Stops an agent whose connection failed while the session is idle; the next message starts it again.
    async fn stop_idle_agent(&mut self, why: String) {
        tracing::info!(session = %self.env.session, why, "an idle agent stopped; the next message starts it again");
        if let Some(process) = self
            .processes
            .as_mut()
            .and_then(|processes| processes.agent.take())
        {
            process.stop().await;
        }
    }

    /// Records a command, or answers it at once if it needs nothing else.
    async fn take_command(&mut self, command: TaskCommand) {
        match command {
            TaskCommand::Message(incoming) => self.enqueue(incoming).await,
            TaskCommand::Cancel(reply) => {
                self.pending.cancel = self.running.is_some();
                let turn = self.running.unwrap_or(self.live.state.borrow().turn);
                let _ = reply.send((turn, self.running.is_some()));
            }
            TaskCommand::End(reply) => self.pending.end.push(reply),
            TaskCommand::Stop(reply) => {
                self.pending.stop.push(reply);
                self.pending.stop_at = Some(Instant::now() + finish::STOP_TURN_WAIT);
            }
            TaskCommand::Switch(plan, reply) => self.begin_switch(*plan, reply).await,
            TaskCommand::PrepareTools(reply) => match self.live.plane.context() {
                Some(_) => {
                    let _ = reply.send(Ok(()));
                }
                None => self.pending.tools.push(reply),
            },
            TaskCommand::ApplyEdits => self.apply_library_edits().await,
        }
    }

    /// Applies edits of the agent and of the catalog to the running processes.
    async fn apply_library_edits(&mut self) {
        let Some(processes) = &self.processes else { return };
        if processes.plan.library_version == self.env.deps.library.version() {
            return;
        }
        let agent = processes.plan.agent().clone();
        let renewed = match AgentPlan::resolve(&self.env.deps, &self.live.row, &agent).await {
            Ok(plan) => self
                .processes
                .as_mut()
                .map_or(Ok(()), |processes| processes.apply_edit(&self.env, plan)),
            Err(error) => Err(error),
        };
        if let Err(error) = renewed {
            tracing::warn!(session = %self.env.session, %agent, %error, "applying an edit to a running session failed");
        }
    }

    /// Stores a message in the database, queues it and replies. From the reply on it survives a kill of the
    /// server.
    async fn enqueue(&mut self, incoming: SubmittedMessage) {
        let SubmittedMessage {
            text,
            accepted,
            turn_result: ended,
        } = incoming;
        if self.queue.len() >= self.config().max_queue {
            let waiting = self.queue.len();
            let error = Error::limit_exceeded(format!(
                "{waiting} messages wait in this session; let some be done"
            ));
            let _ = accepted.send(Err(error));
            return;
        }
        let last = self.queue.back().map(|queued| queued.turn);
        let turn = last.or(self.running).unwrap_or(self.live.state.borrow().turn) + 1;
        let idle = self.queue.is_empty() && self.running.is_none() && self.pending.switch.is_none();
        let status = match (
            idle,
            self.processes
                .as_ref()
                .is_some_and(|processes| processes.agent.is_some()),
        ) {
            (true, true) => SessionStatus::Running,
            (true, false) => SessionStatus::Starting,
            (false, _) => self.live.status(),
        };
        let kept = QueuedMessage {
            turn,
            text: text.clone(),
        };
        if let Err(error) = self.env.deps.store.queue_push(&self.env.session, kept).await {
            let _ = accepted.send(Err(error));
            return;
        }
        self.queue.push_back(QueuedTurn {
            turn,
            text,
            result: ended,
        });
        let _ = accepted.send(Ok((turn, status)));
    }

    /// Why what is running should be interrupted now, if it should.
    fn interruption(&self) -> Option<Interruption> {
        let past = |at: Option<Instant>| at.is_some_and(|at| at <= Instant::now());
        if !self.pending.end.is_empty() {
            Some(Interruption::Ended)
        } else if past(self.pending.stop_at) {
            Some(Interruption::Stopped)
        } else if self.pending.cancel {
            Some(Interruption::Cancelled)
        } else if past(self.pending.switch.as_ref().map(|switch| switch.deadline)) {
            Some(Interruption::DrainTimeout)
        } else {
            None
        }
    }

    /// When [`interruption`](Self::interruption) may change by time alone.
    fn interruption_at(&self) -> Option<Instant> {
        let drain = self.pending.switch.as_ref().map(|switch| switch.deadline);
        [self.pending.stop_at, drain]
            .into_iter()
            .flatten()
            .filter(|at| *at > Instant::now())
            .min()
    }

    /// Runs `work`, recording commands meanwhile, until it is done or interrupted.
    async fn unless_interrupted<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Interruption> {
        let mut work = std::pin::pin!(work);
        loop {
            if let Some(interruption) = self.interruption() {
                return Err(interruption);
            }
            let at = self.interruption_at();
            tokio::select! {
                done = &mut work => return Ok(done),
                command = self.commands.recv() => match command {
                    Some(command) => self.take_command(command).await,
                    None => return Err(Interruption::Stopped),
                },
                () = sleep_until(at) => {}
            }
        }
    }

    /// Starts what is not running yet of tools, agent process and conversation.
    async fn start_agent(&mut self) -> Result<Result<AgentProcess>, Interruption> {
        self.apply_library_edits().await;
        let env = self.env.clone();
        let agent = self.live.state.borrow().agent.clone();
        let before = self.conversations.get(&agent).cloned();
        let plan = self.processes.as_ref().map(|processes| processes.plan.clone());
        let row = self.live.row.clone();
        let building = plan.is_none().then(|| self.env.plane.begin_build());
        let work = async move {
            let _building = building;
            match plan {
                Some(plan) => SessionProcesses::start_agent(&env, &plan, before.as_ref())
                    .await
                    .map(|process| (None, process)),
                None => {
                    let plan = AgentPlan::resolve(&env.deps, &row, &agent).await?;
                    let mut processes = SessionProcesses::start(&env, plan, before.as_ref()).await?;
                    let process = processes
                        .agent
                        .take()
                        .ok_or_else(|| Error::internal("processes were started without an agent"))?;
                    Ok((Some(processes), process))
                }
            }
        };
        let started = match self.unless_interrupted(Box::pin(work)).await {
            Ok(started) => started,
            Err(interruption) => {
                if self.processes.is_none() {
                    self.env.tear_down_tools().await;
                }
                return Err(interruption);
            }
        };
        Ok(match started {
            Ok((processes, process)) => {
                self.processes = processes.or_else(|| self.processes.take());
                self.apply_library_edits().await;
                self.remember_conversation(&process).await;
                Ok(process)
            }
            Err(error) => Err(error),
        })
    }

    /// Stores the agent's conversation. If that fails, it is tried again before the next prompt.
    async fn remember_conversation(&mut self, process: &AgentProcess) {
        if let Err(error) = self.store_conversation(process).await {
            tracing::error!(session = %self.env.session, error = %error.for_log(), "storing a conversation failed");
        }
    }

    async fn store_conversation(&mut self, process: &AgentProcess) -> Result<()> {
        let agent = self.live.state.borrow().agent.clone();
        let isolation = Some(process.level().to_string());
        let mut conversations = self.conversations.clone();
        if let Some(open) = process.conversation() {
            conversations.insert(agent, open.clone());
        }
        let text = serde_json::to_string(&conversations).map_err(Error::internal)?;
        let patch = SessionPatch {
            agent_session: Some(Some(text)),
            isolation: Some(isolation),
            ..SessionPatch::default()
        };
        self.env
            .deps
            .store
            .session_update(&self.env.session, patch)
            .await?;
        self.conversations = conversations;
        Ok(())
    }

    /// Starts the tools without the agent, for calls from outside.
    async fn build_tools(&mut self) {
        let env = self.env.clone();
        let agent = self.live.state.borrow().agent.clone();
        let row = self.live.row.clone();
        let building = self.env.plane.begin_build();
        let work = async move {
            let _building = building;
            let plan = AgentPlan::resolve(&env.deps, &row, &agent).await?;
            SessionProcesses::start_tools(&env, plan).await
        };
        let built = match self.live.plane.context() {
            Some(_) => Ok(()),
            None => match self.unless_interrupted(Box::pin(work)).await {
                Ok(built) => built.map(|processes| self.processes = Some(processes)),
                Err(_) => {
                    self.env.tear_down_tools().await;
                    Err(Error::conflict("the session is over"))
                }
            },
        };
        self.apply_library_edits().await;
        self.answer_tools(&built);
    }

    fn answer_tools(&mut self, built: &Result<()>) {
        for reply in self.pending.tools.drain(..) {
            let _ = reply.send(built.clone());
        }
    }

    fn config(&self) -> &crate::SessionConfig {
        &self.env.deps.config
    }
}

/// Sleeps until `at`, or for ever when it is `None`.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
