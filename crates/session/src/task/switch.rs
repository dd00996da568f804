//! Replaces one agent by another: drain, tear down, build.
//!
//! The new agent was read and checked before the command was sent. From the command on the session is
//! `switching`: messages are queued and calls from outside wait, so both go to the new agent.

use std::time::{Duration, Instant};

use oubliette_protocol::{
    Error, Result, Slug,
    debug::DebugBody,
    event::{EventBody, SessionStatus},
};
use oubliette_store::SessionPatch;
use tokio::sync::oneshot;

use crate::{agent_plan::AgentPlan, processes::SessionProcesses, request::SwitchReply};

use super::{SessionTask, interruption::Interruption};

/// A switch that was requested and is not finished.
pub(super) struct PendingSwitch {
    plan: AgentPlan,
    reply: oneshot::Sender<Result<SwitchReply>>,
    requested_at: Instant,
    /// When the running turn and calls in flight are cancelled.
    pub(super) deadline: Instant,
    /// How many turns were cancelled for it.
    pub(super) cancelled_turns: usize,
}

impl PendingSwitch {
    pub(super) fn refuse(self, error: Error) {
        let _ = self.reply.send(Err(error));
    }
}

impl SessionTask {
    pub(super) async fn begin_switch(
        &mut self,
        plan: AgentPlan,
        reply: oneshot::Sender<Result<SwitchReply>>,
    ) {
        if self.pending.switch.is_some() {
            let error = Error::conflict("the session is switching to another agent already; wait for that");
            let _ = reply.send(Err(error));
            return;
        }
        let from = self.live.state.borrow().agent.clone();
        let switching = EventBody::Status {
            status: SessionStatus::Switching,
            reason: Some(format!("switching from {from} to {}", plan.agent())),
        };
        let timeout = self.config().drain_timeout;
        let asked = Instant::now();
        let in_flight = self.live.plane.in_flight() + usize::from(self.running.is_some());
        self.record(
            &from,
            DebugBody::SwitchRequested {
                from: from.clone(),
                to: plan.agent().clone(),
            },
        );
        self.record(
            &from,
            DebugBody::DrainStarted {
                in_flight,
                timeout_ms: millis(timeout),
            },
        );
        self.live.state.send_modify(|now| now.switch_beginning = true);
        let logged = self.try_log(vec![switching], SessionPatch::default()).await;
        self.live.state.send_modify(|now| now.switch_beginning = false);
        if let Err(error) = logged {
            let took_ms = millis(asked.elapsed());
            self.record(
                &from,
                DebugBody::DrainFinished {
                    drained: false,
                    took_ms,
                },
            );
            let _ = reply.send(Err(error));
            return;
        }
        self.pending.switch = Some(PendingSwitch {
            plan,
            reply,
            requested_at: asked,
            deadline: asked + timeout,
            cancelled_turns: 0,
        });
    }

    /// Executes the pending switch. No turn is running when this is called.
    pub(super) async fn switch(&mut self) {
        let drained = self.drain().await;
        let Some(switch) = self.pending.switch.take() else {
            return;
        };
        let PendingSwitch {
            plan,
            reply,
            requested_at: asked,
            ..
        } = switch;
        let from = self.live.state.borrow().agent.clone();
        let outcome = match drained {
            Ok(drained) => {
                self.record(
                    &from,
                    DebugBody::DrainFinished {
                        drained,
                        took_ms: millis(asked.elapsed()),
                    },
                );
                let old = self.processes.as_ref().map(|processes| processes.plan.clone());
                // From here on no call fails because a context is missing: it waits for the new agent's, or for
                // the old agent's when that is brought back.
                let _building = self.env.plane.begin_build();
                self.tear_down(&from).await;
                Box::pin(self.build(&from, old, plan))
                    .await
                    .map(|agent| (agent, drained))
            }
            Err(_) => Err(Error::conflict("the session is over")),
        };
        let session_id = self.env.session.clone();
        let answer = outcome.map(|(agent, drained)| SwitchReply {
            session_id,
            agent,
            drained,
            took_ms: millis(asked.elapsed()),
        });
        // The requester may be gone; the debugger has every step.
        let _ = reply.send(answer);
    }

    /// Waits for calls in flight and cancels them at the deadline. Returns true when neither a call nor a turn
    /// had to be cancelled.
    async fn drain(&mut self) -> Result<bool, Interruption> {
        let plane = self.live.plane.clone();
        let over = match self.unless_interrupted(plane.wait_drained()).await {
            Ok(()) => false,
            Err(Interruption::DrainTimeout) => true,
            // No turn runs, so there is nothing to cancel.
            Err(Interruption::Cancelled) => false,
            Err(interruption) => return Err(interruption),
        };
        let Some(switch) = &self.pending.switch else {
            return Ok(true);
        };
        let turns = switch.cancelled_turns;
        if !over && turns == 0 {
            return Ok(true);
        }
        let waited_ms = millis(switch.requested_at.elapsed());
        let calls = plane.cancel_all("the call was cancelled: the session switches to another agent");
        let from = self.live.state.borrow().agent.clone();
        self.record(
            &from,
            DebugBody::DrainTimeout {
                cancelled: turns + calls,
                waited_ms,
            },
        );
        tracing::warn!(session = %self.env.session, turns, calls, "drain timeout: a switch cancelled turns and calls");
        // At most one second, because the agent may keep making calls; it is stopped next.
        let _ = tokio::time::timeout(Duration::from_secs(1), plane.wait_drained()).await;
        Ok(false)
    }

    async fn tear_down(&mut self, from: &Slug) {
        self.env.deps.door.disconnect(&self.env.session);
        match self.processes.take() {
            Some(processes) => processes.stop(&self.env).await,
            // Nothing is running; the debugger still shows all steps.
            None => {
                self.record(from, DebugBody::TeardownStarted {});
                self.record(from, DebugBody::RegistryCleared { tools: 0 });
                self.record(from, DebugBody::TeardownFinished { took_ms: 0 });
            }
        }
    }

    async fn build(&mut self, from: &Slug, old: Option<AgentPlan>, plan: AgentPlan) -> Result<Slug> {
        let to = plan.agent().clone();
        let env = self.env.clone();
        let before = self.conversations.get(&to).cloned();
        let work = async move { SessionProcesses::start(&env, plan, before.as_ref()).await };
        let built = self.unless_interrupted(Box::pin(work)).await;
        match built {
            Ok(Ok(processes)) => {
                let patch = SessionPatch {
                    agent: Some(to.clone()),
                    ..SessionPatch::default()
                };
                if let Err(error) = self.log(idle_event(None), patch).await {
                    processes.stop(&self.env).await;
                    return Err(error);
                }
                self.install(processes).await;
                Ok(to)
            }
            Ok(Err(error)) => Err(self.roll_back(from, old, &to, error).await),
            Err(_) => {
                self.env.tear_down_tools().await;
                Err(Error::conflict("the session is over"))
            }
        }
    }

    /// Starts the old agent again after the new one failed to start, and logs the error.
    async fn roll_back(&mut self, from: &Slug, old: Option<AgentPlan>, to: &Slug, why: Error) -> Error {
        let env = self.env.clone();
        let before = self.conversations.get(from).cloned();
        let (row, agent) = (self.live.row.clone(), from.clone());
        let work = async move {
            let plan = match old {
                Some(plan) => plan,
                None => AgentPlan::resolve(&env.deps, &row, &agent).await?,
            };
            SessionProcesses::start(&env, plan, before.as_ref()).await
        };
        let message = format!("agent {to} could not be started: {}", why.message);
        let error = match self.unless_interrupted(Box::pin(work)).await {
            Ok(Ok(processes)) => {
                self.install(processes).await;
                Error::unavailable(format!("{message}; {from} is back"))
            }
            Ok(Err(again)) => Error::unavailable(format!(
                "{message}; and {from} could not be started again: {}",
                again.message
            )),
            Err(_) => Error::unavailable(message),
        };
        let mut events = vec![EventBody::error(error.code, error.message.as_str())];
        match self.processes {
            Some(_) => events.extend(idle_event(Some(error.message.clone()))),
            None => {
                let reason = Some(error.message.clone());
                events.push(EventBody::Status {
                    status: SessionStatus::Failed,
                    reason,
                });
            }
        }
        match self.log(events, SessionPatch::default()).await {
            Ok(()) => error,
            Err(unwritten) => unwritten,
        }
    }

    async fn install(&mut self, mut processes: SessionProcesses) {
        if let Some(mut process) = processes.agent.take() {
            self.remember_conversation(&process).await;
            self.log_notices(&mut process).await;
            processes.agent = Some(process);
        }
        self.processes = Some(processes);
        self.apply_library_edits().await;
    }

    fn record(&self, agent: &Slug, body: DebugBody) {
        self.live.debug.record(Some(agent), body);
    }
}

/// The status after a switch. It is `idle` even when messages are queued: the next turn logs `running`.
fn idle_event(reason: Option<String>) -> Vec<EventBody> {
    vec![EventBody::Status {
        status: SessionStatus::Idle,
        reason,
    }]
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
