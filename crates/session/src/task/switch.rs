//! One agent replaced by another, as CONTRACT 8 tells it: drain, tear down, build.
//!
//! The new agent was read and checked before the task heard of it. From then on the session is
//! `switching`: messages queue and calls from outside wait, so both meet the new agent.

use std::time::{Duration, Instant};

use oubliette_protocol::{
    Error, Result, Slug,
    debug::DebugBody,
    event::{EventBody, Status},
};
use oubliette_store::SessionPatch;
use tokio::sync::oneshot;

use crate::{blueprint::Blueprint, request::Switched, rig::Rig};

use super::{Interruption, Task};

/// A switch that was asked for.
pub(super) struct Switching {
    plan: Blueprint,
    reply: oneshot::Sender<Result<Switched>>,
    asked: Instant,
    /// When what is in flight is cancelled.
    pub(super) deadline: Instant,
    /// Turns that were cancelled for it.
    pub(super) cancelled: usize,
}

impl Switching {
    pub(super) fn refuse(self, error: Error) {
        let _ = self.reply.send(Err(error));
    }
}

impl Task {
    pub(super) async fn note_switch(&mut self, plan: Blueprint, reply: oneshot::Sender<Result<Switched>>) {
        if self.notes.switch.is_some() {
            let error = Error::conflict("the session is switching to another agent already; wait for that");
            let _ = reply.send(Err(error));
            return;
        }
        let from = self.live.now.borrow().agent.clone();
        let timeout = self.config().drain_timeout;
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
        let asked = Instant::now();
        let deadline = asked + timeout;
        let reason = Some(format!("switching from {from} to {}", plan.agent()));
        self.notes.switch = Some(Switching {
            plan,
            reply,
            asked,
            deadline,
            cancelled: 0,
        });
        self.log_status(Status::Switching, reason).await;
    }

    /// Switches now: no turn is running.
    pub(super) async fn switch(&mut self) {
        let drained = self.drain().await;
        let Some(switch) = self.notes.switch.take() else {
            return;
        };
        let Switching {
            plan, reply, asked, ..
        } = switch;
        let from = self.live.now.borrow().agent.clone();
        let outcome = match drained {
            Ok(drained) => {
                self.record(
                    &from,
                    DebugBody::DrainFinished {
                        drained,
                        took_ms: millis(asked.elapsed()),
                    },
                );
                let old = self.rig.as_ref().map(|rig| rig.plan.clone());
                self.tear_down(&from).await;
                self.build(&from, old, plan).await.map(|agent| (agent, drained))
            }
            Err(_) => Err(Error::conflict("the session is over")),
        };
        let session_id = self.site.session.clone();
        let answer = outcome.map(|(agent, drained)| Switched {
            session_id,
            agent,
            drained,
            took_ms: millis(asked.elapsed()),
        });
        // Whoever asked may have gone; the debugger has it all.
        let _ = reply.send(answer);
    }

    /// Waits for what is in flight; past the deadline it is cancelled. True: it all ended by itself.
    async fn drain(&mut self) -> Result<bool, Interruption> {
        let plane = self.live.plane.clone();
        let over = match self.unless_interrupted(plane.drained()).await {
            Ok(()) => false,
            Err(Interruption::DrainedOut) => true,
            // No turn runs, so there is nothing to cancel.
            Err(Interruption::Cancelled) => false,
            Err(interruption) => return Err(interruption),
        };
        let Some(switch) = &self.notes.switch else {
            return Ok(true);
        };
        let turns = switch.cancelled;
        if !over && turns == 0 {
            return Ok(true);
        }
        let waited_ms = millis(switch.asked.elapsed());
        let calls = plane.cancel_all("the call was cancelled: the session switches to another agent");
        let from = self.live.now.borrow().agent.clone();
        self.record(
            &from,
            DebugBody::DrainTimeout {
                cancelled: turns + calls,
                waited_ms,
            },
        );
        tracing::warn!(session = %self.site.session, turns, calls, "a switch cancelled what did not end in time");
        // An idle agent may call again and again; it is stopped next.
        let _ = tokio::time::timeout(Duration::from_secs(1), plane.drained()).await;
        Ok(false)
    }

    async fn tear_down(&mut self, from: &Slug) {
        self.site.deps.door.close(&self.site.session);
        match self.rig.take() {
            Some(rig) => rig.down(&self.site).await,
            // Asleep: there is nothing to take down, and the debugger says so.
            None => {
                self.record(from, DebugBody::TeardownStarted {});
                self.record(from, DebugBody::RegistryCleared { tools: 0 });
                self.record(from, DebugBody::TeardownFinished { took_ms: 0 });
            }
        }
    }

    async fn build(&mut self, from: &Slug, old: Option<Blueprint>, plan: Blueprint) -> Result<Slug> {
        let to = plan.agent().clone();
        let site = self.site.clone();
        let before = self.conversations.get(&to).cloned();
        let work = async move { Rig::whole(&site, plan, before.as_ref()).await };
        let built = self.unless_interrupted(Box::pin(work)).await;
        match built {
            Ok(Ok(rig)) => {
                let patch = SessionPatch {
                    agent: Some(to.clone()),
                    ..SessionPatch::default()
                };
                self.log(self.after_switch(None), patch).await;
                self.adopt(rig).await;
                Ok(to)
            }
            Ok(Err(error)) => Err(self.go_back(from, old, &to, error).await),
            Err(_) => {
                self.site.clear().await;
                Err(Error::conflict("the session is over"))
            }
        }
    }

    /// The new agent could not be started: the old one is rebuilt, and the session says so.
    async fn go_back(&mut self, from: &Slug, old: Option<Blueprint>, to: &Slug, why: Error) -> Error {
        let site = self.site.clone();
        let before = self.conversations.get(from).cloned();
        let (row, agent) = (self.live.row.clone(), from.clone());
        let work = async move {
            let plan = match old {
                Some(plan) => plan,
                None => Blueprint::draw(&site.deps, &row, &agent).await?,
            };
            Rig::whole(&site, plan, before.as_ref()).await
        };
        let message = format!("agent {to} could not be started: {}", why.message);
        let error = match self.unless_interrupted(Box::pin(work)).await {
            Ok(Ok(rig)) => {
                self.adopt(rig).await;
                Error::unavailable(format!("{message}; {from} is back"))
            }
            Ok(Err(again)) => Error::unavailable(format!(
                "{message}; and {from} could not be started again: {}",
                again.message
            )),
            Err(_) => Error::unavailable(message),
        };
        let mut events = vec![EventBody::Error {
            code: error.code,
            message: error.message.clone(),
        }];
        match self.rig {
            Some(_) => events.extend(self.after_switch(Some(error.message.clone()))),
            None => {
                let reason = Some(error.message.clone());
                events.push(EventBody::Status {
                    status: Status::Failed,
                    reason,
                });
            }
        }
        self.log(events, SessionPatch::default()).await;
        error
    }

    /// A turn that waits says itself that the session runs.
    fn after_switch(&self, reason: Option<String>) -> Vec<EventBody> {
        vec![EventBody::Status {
            status: Status::Idle,
            reason,
        }]
    }

    async fn adopt(&mut self, mut rig: Rig) {
        if let Some(host) = rig.host.take() {
            if let Err(error) = self.remember_conversation(&host).await {
                tracing::error!(session = %self.site.session, error = %error.for_log(), "a conversation's id was not kept");
            }
            rig.host = Some(host);
        }
        self.rig = Some(rig);
        self.refresh().await;
    }

    fn record(&self, agent: &Slug, body: DebugBody) {
        self.live.debug.record(Some(agent), body);
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
