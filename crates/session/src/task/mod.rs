//! [`SessionTask`]: the one task of a session, which alone starts, prompts, switches and stops its agent.
//!
//! Every request to a session arrives as a [`TaskCommand`] and is recorded in [`PendingCommands`] at once, also
//! during a start, a turn or a switch. These look at the pending commands and end early when they have to. So
//! no command is lost, and none is executed on a half-built agent.
//!
//! - `queue`: messages that wait for their turn.
//! - `turn`: runs one message, from the start of the agent to the end of the turn; `start`: starts what is not running yet;
//!   `interruption`: when and why either ends early.
//! - `agent_tools`: whether the agent knows its tools; `earlier_turns`: its conversation so far, from the log.
//! - `turn_usage`: what a turn used, durable before its end is.
//! - `switch`: replaces one agent by another.
//! - `finish`: ends the task: the session has ended, the server stops, or a failed session is unloaded.
//! - `disk`: stops the session when it exceeds its disk limit.
//! - `log`: writes the session's log, and waits while it cannot be written; `event_pace`: how fast an agent may fill it.
//! - `mask`: removes the session's keys from events before they are logged.

mod agent_tools;
mod disk;
mod earlier_turns;
mod event_pace;
mod finish;
mod interruption;
mod log;
mod mask;
mod queue;
mod start;
mod switch;
mod turn;
mod turn_usage;

use std::{
    collections::VecDeque,
    sync::{Arc, Weak},
    time::Instant,
};

use indexmap::IndexMap;
use oubliette_protocol::{Result, Slug, event::SessionStatus};
use oubliette_store::QueuedMessage;
use tokio::sync::{mpsc, oneshot};

use crate::{
    Sessions,
    agent_plan::AgentPlan,
    agent_process::Conversation,
    live::{LiveSession, TaskCommand},
    processes::{SessionEnv, SessionProcesses},
    relay_socket::RelaySocket,
};

use self::{queue::QueuedTurn, switch::PendingSwitch};

/// The state of a session's task.
pub(crate) struct SessionTask {
    sessions: Weak<Sessions>,
    live: Arc<LiveSession>,
    env: SessionEnv,
    relay_socket: Option<RelaySocket>,
    commands: mpsc::Receiver<TaskCommand>,
    queue: VecDeque<QueuedTurn>,
    /// The highest number of a turn whose message was removed from the queue; 0 if none was.
    last_removed_turn: u64,
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
            charge: None,
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
            last_removed_turn: 0,
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
            if let Some(error) = self.env.disk_alarm.take() {
                Box::pin(self.stop_for_disk(error)).await;
                continue;
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
        let disk_alarm = self.env.disk_alarm.clone();
        loop {
            let mut process = self
                .processes
                .as_mut()
                .and_then(|processes| processes.agent.as_mut());
            let tools_due = process.as_ref().and_then(|process| process.tools_due());
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
                () = sleep_until(tools_due) => {
                    if let Some(mut agent) = self.processes.as_mut().and_then(|processes| processes.agent.take()) {
                        self.check_agent_tools(&mut agent).await;
                        if let Some(processes) = &mut self.processes {
                            processes.agent = Some(agent);
                        }
                    }
                }
                () = disk_alarm.raised() => return true,
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
            TaskCommand::RemoveQueued(turn, reply) => {
                let removed = self.remove_queued(turn).await;
                let _ = reply.send(removed);
            }
            TaskCommand::Cancel(reply) => {
                self.live.approvals.cancel_all("the turn was cancelled").await;
                self.pending.cancel = self.running.is_some();
                let turn = self.running.unwrap_or(self.live.state.borrow().turn);
                let _ = reply.send((turn, self.running.is_some()));
            }
            // Approvals first: a call that waits for a person and is cancelled gives a reason of its own.
            TaskCommand::End(reply) => {
                self.live.approvals.cancel_all("the session was ended").await;
                self.pending.end.push(reply);
            }
            TaskCommand::Stop(reply) => {
                let approvals = &self.live.approvals;
                approvals.close("the server stopped while it was pending").await;
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

    fn config(&self) -> Arc<crate::SessionConfig> {
        self.env.deps.config.load()
    }
}

/// Sleeps until `at`, or for ever when it is `None`.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
