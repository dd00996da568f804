//! One session's task: it alone starts, prompts, switches and stops the agent.
//!
//! Everything that is asked of a session arrives as a [`Command`] and is noted at once, whatever is being
//! done; what is being done looks at the notes and ends early when it has to. So no command can be lost
//! or meet a half-built agent.
//!
//! - `turn`: one message, from the start of the agent to the end of the turn.
//! - `switch`: one agent replaced by another.
//! - `finish`: the end of a session, of its sleep, of the server.
//! - `veil`: keys taken out of what is logged.

mod finish;
mod switch;
mod turn;
mod veil;

use std::{
    collections::VecDeque,
    future::Future,
    sync::{Arc, Weak},
    time::Instant,
};

use indexmap::IndexMap;
use oubliette_protocol::{
    Error, Result, Slug,
    event::{EventBody, Status},
};
use oubliette_store::{QueuedMessage, SessionPatch};
use tokio::sync::{mpsc, oneshot};

use crate::{
    Sessions,
    agent_host::{Conversation, Host},
    blueprint::Blueprint,
    live::{Command, Incoming, Live},
    relay_socket::RelaySocket,
    rig::{Rig, Site},
};

use self::switch::Switching;

/// A message that waits for its turn.
struct Queued {
    turn: u64,
    text: String,
    ended: Option<oneshot::Sender<Result<String>>>,
}

/// See the module.
pub(crate) struct Task {
    sessions: Weak<Sessions>,
    live: Arc<Live>,
    site: Site,
    relay: Option<RelaySocket>,
    commands: mpsc::Receiver<Command>,
    queue: VecDeque<Queued>,
    rig: Option<Rig>,
    /// Each agent's conversation in this session.
    conversations: IndexMap<Slug, Conversation>,
    /// The turn under way, while one is.
    running: Option<u64>,
    /// `starting` is in the log already: whoever made the session wrote it.
    announced: bool,
    notes: Notes,
}

/// What was asked and not yet done.
#[derive(Default)]
struct Notes {
    cancel: bool,
    end: Vec<oneshot::Sender<()>>,
    stop: Vec<oneshot::Sender<()>>,
    /// When a stopping server gives up on the running turn.
    stop_at: Option<Instant>,
    switch: Option<Switching>,
    tools: Vec<oneshot::Sender<Result<()>>>,
}

/// Why something was broken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interruption {
    Cancelled,
    Ended,
    Stopped,
    /// A switch has waited long enough.
    DrainedOut,
}

impl Task {
    pub(crate) fn new(
        sessions: Weak<Sessions>,
        live: Arc<Live>,
        site: Site,
        relay: RelaySocket,
        commands: mpsc::Receiver<Command>,
        (waiting, announced): (Vec<QueuedMessage>, bool),
    ) -> Self {
        // Whoever sent them is gone; the log will tell what became of them.
        let again = |kept: QueuedMessage| Queued {
            turn: kept.turn,
            text: kept.text,
            ended: None,
        };
        let text = live.row.agent_session.as_deref().unwrap_or("{}");
        let conversations = serde_json::from_str(text).unwrap_or_default();
        Self {
            sessions,
            live,
            site,
            relay: Some(relay),
            commands,
            queue: waiting.into_iter().map(again).collect(),
            rig: None,
            conversations,
            running: None,
            announced,
            notes: Notes::default(),
        }
    }

    pub(crate) async fn run(mut self) {
        loop {
            if !self.notes.end.is_empty() {
                return Box::pin(self.end()).await;
            }
            if !self.notes.stop.is_empty() {
                return Box::pin(self.stop()).await;
            }
            if self.notes.switch.is_some() {
                Box::pin(self.switch()).await;
            } else if !self.notes.tools.is_empty() {
                Box::pin(self.ready_tools()).await;
            } else if let Some(next) = self.queue.pop_front() {
                // Boxed, as the others are: an idle session does not hold the room a turn needs.
                Box::pin(self.turn(next)).await;
            } else if !self.rest().await {
                return Box::pin(self.unload()).await;
            }
        }
    }

    /// Waits for something to do. False: the session is to leave memory.
    async fn rest(&mut self) -> bool {
        let mut sleep_at = tokio::time::Instant::now() + self.config().idle_sleep;
        loop {
            let mut host = self.rig.as_mut().and_then(|rig| rig.host.as_mut());
            let heard = async {
                match host.as_mut() {
                    Some(host) => host.hear().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                command = self.commands.recv() => {
                    match command {
                        Some(command) => self.note(command).await,
                        // Nobody can reach the session any more: the server is being dropped.
                        None => self.notes.stop.push(oneshot::channel().0),
                    }
                    return true;
                }
                heard = heard => {
                    let attended = match (heard, host) {
                        // A report between turns belongs to none.
                        (Ok(heard), Some(host)) => host.attend(heard).await.map(drop),
                        (Ok(_), None) => Ok(()),
                        (Err(gone), _) => Err(gone),
                    };
                    if let Err(gone) = attended {
                        self.lose_idle_agent(gone.to_string()).await;
                    }
                }
                () = tokio::time::sleep_until(sleep_at) => match self.rig.take() {
                    // Somebody waits for a call, from outside or from a process that outlived its turn.
                    Some(rig) if self.live.plane.in_flight() > 0 => {
                        self.rig = Some(rig);
                        sleep_at = tokio::time::Instant::now() + self.config().idle_sleep;
                    }
                    Some(rig) => rig.down(&self.site).await,
                    None if self.live.status() == Status::Failed => return false,
                    None => return self.idle_without_rig().await,
                },
            }
        }
    }

    /// Asleep: nothing runs, nothing is polled, until somebody asks for something.
    async fn idle_without_rig(&mut self) -> bool {
        match self.commands.recv().await {
            Some(command) => self.note(command).await,
            None => self.notes.stop.push(oneshot::channel().0),
        }
        true
    }

    /// An agent that goes while nothing is asked of it is simply started again at the next message.
    async fn lose_idle_agent(&mut self, why: String) {
        tracing::info!(session = %self.site.session, why, "an idle agent stopped; the next message starts it again");
        if let Some(host) = self.rig.as_mut().and_then(|rig| rig.host.take()) {
            host.stop().await;
        }
    }

    /// Takes note of a command.
    async fn note(&mut self, command: Command) {
        match command {
            Command::Message(incoming) => self.enqueue(incoming).await,
            Command::Cancel(reply) => {
                self.notes.cancel = self.running.is_some();
                let turn = self.running.unwrap_or(self.live.now.borrow().turn);
                let _ = reply.send((turn, self.running.is_some()));
            }
            Command::End(reply) => self.notes.end.push(reply),
            Command::Stop(reply) => {
                self.notes.stop.push(reply);
                self.notes.stop_at = Some(Instant::now() + finish::STOP_PATIENCE);
            }
            Command::Switch(plan, reply) => self.note_switch(*plan, reply).await,
            Command::Tools(reply) => match self.live.plane.context() {
                Some(_) => {
                    let _ = reply.send(Ok(()));
                }
                None => self.notes.tools.push(reply),
            },
            Command::Refresh => self.refresh().await,
        }
    }

    /// Takes edits of the agent and of the catalog into what runs.
    async fn refresh(&mut self) {
        let Some(rig) = &self.rig else { return };
        if rig.plan.version == self.site.deps.library.version() {
            return;
        }
        let agent = rig.plan.agent().clone();
        let renewed = match Blueprint::draw(&self.site.deps, &self.live.row, &agent).await {
            Ok(plan) => self
                .rig
                .as_mut()
                .map_or(Ok(()), |rig| rig.renew(&self.site, plan)),
            Err(error) => Err(error),
        };
        if let Err(error) = renewed {
            tracing::warn!(session = %self.site.session, %agent, %error, "an edit was not taken into a running session");
        }
    }

    /// Keeps a message and says that it is kept: whatever happens to the server, it is not lost.
    async fn enqueue(&mut self, incoming: Incoming) {
        let Incoming {
            text,
            accepted,
            ended,
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
        let turn = last.or(self.running).unwrap_or(self.live.now.borrow().turn) + 1;
        let idle = self.queue.is_empty() && self.running.is_none() && self.notes.switch.is_none();
        let status = match (idle, self.rig.as_ref().is_some_and(|rig| rig.host.is_some())) {
            (true, true) => Status::Running,
            (true, false) => Status::Starting,
            (false, _) => self.live.status(),
        };
        let kept = QueuedMessage {
            turn,
            text: text.clone(),
        };
        if let Err(error) = self.site.deps.store.queue_push(&self.site.session, kept).await {
            let _ = accepted.send(Err(error));
            return;
        }
        self.queue.push_back(Queued { turn, text, ended });
        let _ = accepted.send(Ok((turn, status)));
    }

    /// What breaks off a start or a turn, as far as it is known now.
    fn interruption(&self) -> Option<Interruption> {
        let past = |at: Option<Instant>| at.is_some_and(|at| at <= Instant::now());
        if !self.notes.end.is_empty() {
            Some(Interruption::Ended)
        } else if past(self.notes.stop_at) {
            Some(Interruption::Stopped)
        } else if self.notes.cancel {
            Some(Interruption::Cancelled)
        } else if past(self.notes.switch.as_ref().map(|switch| switch.deadline)) {
            Some(Interruption::DrainedOut)
        } else {
            None
        }
    }

    /// When [`interruption`](Self::interruption) may change by time alone.
    fn interruption_at(&self) -> Option<Instant> {
        let drain = self.notes.switch.as_ref().map(|switch| switch.deadline);
        [self.notes.stop_at, drain]
            .into_iter()
            .flatten()
            .filter(|at| *at > Instant::now())
            .min()
    }

    /// Runs something that does not need the task, noting commands meanwhile, until one breaks it off.
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
                    Some(command) => self.note(command).await,
                    None => return Err(Interruption::Stopped),
                },
                () = until(at) => {}
            }
        }
    }

    /// Makes the agent ready: tools, process and conversation, as far as they are not there.
    async fn start(&mut self) -> Result<Result<Host>, Interruption> {
        self.refresh().await;
        let site = self.site.clone();
        let agent = self.live.now.borrow().agent.clone();
        let before = self.conversations.get(&agent).cloned();
        let plan = self.rig.as_ref().map(|rig| rig.plan.clone());
        let row = self.live.row.clone();
        let work = async move {
            match plan {
                Some(plan) => Rig::agent(&site, &plan, before.as_ref())
                    .await
                    .map(|host| (None, host)),
                None => {
                    let plan = Blueprint::draw(&site.deps, &row, &agent).await?;
                    let mut rig = Rig::whole(&site, plan, before.as_ref()).await?;
                    let host = rig
                        .host
                        .take()
                        .ok_or_else(|| Error::internal("a whole rig has an agent"))?;
                    Ok((Some(rig), host))
                }
            }
        };
        let started = match self.unless_interrupted(Box::pin(work)).await {
            Ok(started) => started,
            Err(interruption) => {
                if self.rig.is_none() {
                    self.site.clear().await;
                }
                return Err(interruption);
            }
        };
        Ok(match started {
            Ok((rig, host)) => {
                self.rig = rig.or_else(|| self.rig.take());
                self.refresh().await;
                self.remember_conversation(&host).await.map(|()| host)
            }
            Err(error) => Err(error),
        })
    }

    async fn remember_conversation(&mut self, host: &Host) -> Result<()> {
        let agent = self.live.now.borrow().agent.clone();
        let isolation = Some(host.level().to_string());
        if let Some(open) = host.conversation() {
            self.conversations.insert(agent, open.clone());
        }
        let text = serde_json::to_string(&self.conversations).map_err(Error::internal)?;
        let patch = SessionPatch {
            agent_session: Some(Some(text)),
            isolation: Some(isolation),
            ..SessionPatch::default()
        };
        self.site
            .deps
            .store
            .session_update(&self.site.session, patch)
            .await
            .map(drop)
    }

    /// Builds the tools alone, for calls from outside.
    async fn ready_tools(&mut self) {
        let site = self.site.clone();
        let agent = self.live.now.borrow().agent.clone();
        let row = self.live.row.clone();
        let work = async move {
            let plan = Blueprint::draw(&site.deps, &row, &agent).await?;
            Rig::tools(&site, plan).await
        };
        let built = match self.live.plane.context() {
            Some(_) => Ok(()),
            None => match self.unless_interrupted(Box::pin(work)).await {
                Ok(built) => built.map(|rig| self.rig = Some(rig)),
                Err(_) => {
                    self.site.clear().await;
                    Err(Error::conflict("the session is over"))
                }
            },
        };
        self.refresh().await;
        self.answer_tools(&built);
    }

    fn answer_tools(&mut self, built: &Result<()>) {
        for reply in self.notes.tools.drain(..) {
            let _ = reply.send(built.clone());
        }
    }

    /// Writes events and what they mean for the session, both or neither.
    async fn log(&mut self, mut bodies: Vec<EventBody>, mut patch: SessionPatch) {
        bodies
            .iter_mut()
            .for_each(|body| veil::veil(&self.site.plane, body));
        let status = bodies.iter().rev().find_map(|body| match body {
            EventBody::Status { status, reason } => Some((*status, reason.clone())),
            _ => None,
        });
        if let Some((status, reason)) = &status {
            patch.status = Some(*status);
            patch.reason = Some(reason.clone());
        }
        let now = (status.map(|(status, _)| status), patch.turn, patch.agent.clone());
        let log = self.site.deps.store.events();
        if let Err(error) = log.append_with(&self.site.session, bodies, patch).await {
            tracing::error!(session = %self.site.session, error = %error.for_log(), "events were not written");
        }
        self.live.now.send_modify(|live| {
            live.status = now.0.unwrap_or(live.status);
            live.turn = now.1.unwrap_or(live.turn);
            live.agent = now.2.unwrap_or_else(|| live.agent.clone());
        });
    }

    async fn log_status(&mut self, status: Status, reason: Option<String>) {
        self.log(
            vec![EventBody::Status { status, reason }],
            SessionPatch::default(),
        )
        .await;
    }

    fn config(&self) -> &crate::SessionConfig {
        &self.site.deps.config
    }
}

/// Sleeps until then; for ever without a then.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
