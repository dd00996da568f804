//! One message: the agent is started if need be, prompted, and heard until the turn ends.

use std::time::Instant;

use agent_client_protocol::v1::schema::StopReason;
use oubliette_protocol::{
    Error, Result,
    event::{EventBody, Role, Status},
    relay::RpcError,
};
use oubliette_sandbox::DiskWatch;
use oubliette_store::SessionPatch;
use serde_json::Value;
use tokio::sync::oneshot;

use crate::agent_host::{Happening, Host, agent_error, scribe::Scribe, wire::Gone};

use super::{Interruption, Queued, Task, until, veil::veil};

/// How a turn ended.
enum Ending {
    /// The agent says so.
    Answered(Result<Value, RpcError>),
    /// The agent is gone, or was given up.
    Broken(Error),
    /// It was told to stop and did not.
    Ignored,
    /// It was broken off from our side.
    Interrupted(Interruption),
}

/// A turn under way.
struct Turn {
    number: u64,
    ended: Option<oneshot::Sender<Result<String>>>,
    scribe: Scribe,
    /// Why it is being cancelled, when it is not because somebody asked.
    fault: Option<Error>,
}

impl Task {
    pub(super) async fn turn(&mut self, queued: Queued) {
        let Queued {
            turn: number,
            text,
            ended,
        } = queued;
        self.running = Some(number);
        self.notes.cancel = false;
        let scribe = Scribe::new(self.config().voice.clone());
        let turn = Turn {
            number,
            ended,
            scribe,
            fault: None,
        };
        let held = self.rig.as_mut().and_then(|rig| rig.host.take());
        let began = SessionPatch {
            turn: Some(number),
            ..SessionPatch::default()
        };
        let message = EventBody::Message {
            role: Role::User,
            text: text.clone(),
        };
        // In the log and out of the queue in one: it is neither lost nor run twice.
        let heard = SessionPatch {
            begun: Some(number),
            ..began.clone()
        };
        let host = match held {
            Some(host) => Ok(Ok(host)),
            None => {
                if !std::mem::take(&mut self.announced) {
                    let starting = EventBody::Status {
                        status: Status::Starting,
                        reason: None,
                    };
                    self.log(vec![starting], began).await;
                }
                self.start().await
            }
        };
        self.announced = false;
        match host {
            Ok(Ok(host)) => {
                self.answer_tools(&Ok(()));
                let running = EventBody::Status {
                    status: Status::Running,
                    reason: None,
                };
                self.log(vec![running, message], heard).await;
                self.converse(turn, host, &text).await;
            }
            not_started => {
                // The message was heard all the same.
                self.log(vec![message], heard).await;
                match not_started {
                    Ok(Err(error)) => self.fail(turn, error).await,
                    Err(interruption) => self.break_off(turn, interruption).await,
                    Ok(Ok(_)) => {}
                }
            }
        }
        self.running = None;
        self.notes.cancel = false;
    }

    /// Prompts and listens. The agent is kept for the next turn if it is still good.
    async fn converse(&mut self, mut turn: Turn, mut host: Host, text: &str) {
        let ending = match host.prompt(text) {
            Ok(prompt) => {
                let kept = self.conversations.get(&self.live.now.borrow().agent);
                if kept != host.conversation()
                    && let Err(error) = self.remember_conversation(&host).await
                {
                    tracing::error!(session = %self.site.session, error = %error.for_log(), "a conversation was not kept");
                }
                self.listen(&mut turn, &mut host, prompt).await
            }
            Err(gone) => Ending::Broken(host.gone(gone).await),
        };
        match ending {
            Ending::Answered(Ok(answer)) => {
                if let Some(rig) = &mut self.rig {
                    rig.host = Some(host);
                }
                self.complete(turn, &answer).await;
            }
            Ending::Ignored => {
                host.stop().await;
                self.complete(turn, &serde_json::json!({ "stopReason": StopReason::Cancelled }))
                    .await;
            }
            Ending::Answered(Err(error)) => {
                host.stop().await;
                self.fail(
                    turn,
                    Error::unavailable(format!("the agent's turn failed: {}", agent_error(&error))),
                )
                .await;
            }
            Ending::Broken(error) => {
                host.stop().await;
                self.fail(turn, error).await;
            }
            Ending::Interrupted(interruption) => {
                host.stop().await;
                self.break_off(turn, interruption).await;
            }
        }
    }

    async fn listen(&mut self, turn: &mut Turn, host: &mut Host, prompt: u64) -> Ending {
        let deadline = Instant::now() + self.config().turn_timeout;
        let mut disk = std::pin::pin!(watch_disk(self));
        // From when an agent that was told to stop is not waited for any more.
        let mut give_up: Option<Instant> = None;
        loop {
            match self.interruption() {
                Some(Interruption::Cancelled) if give_up.is_none() => {
                    if let Err(gone) = host.cancel() {
                        return Ending::Broken(host.gone(gone).await);
                    }
                    give_up = Some(Instant::now() + self.config().cancel_grace);
                }
                Some(Interruption::Cancelled) | None => {}
                Some(interruption) => return Ending::Interrupted(interruption),
            }
            let (due, interruption_at) = (turn.scribe.due(), self.interruption_at());
            // Not biased: an agent that never stops talking must not keep the clocks from being looked at.
            tokio::select! {
                heard = host.hear() => {
                    let happening = match heard {
                        Ok(heard) => host.attend(heard).await,
                        Err(gone) => Err(gone),
                    };
                    match self.take_down(turn, happening, prompt).await {
                        Ok(None) => {}
                        Ok(Some(answer)) => return Ending::Answered(answer),
                        Err(Fault::Gone(gone)) => return Ending::Broken(host.gone(gone).await),
                        Err(Fault::Error(error)) => return Ending::Broken(error),
                    }
                }
                command = self.commands.recv() => match command {
                    Some(command) => self.note(command).await,
                    None => return Ending::Interrupted(Interruption::Stopped),
                },
                () = until(due) => {
                    let event = turn.scribe.flush(Instant::now());
                    if let Err(error) = self.log_soon(event).await {
                        return Ending::Broken(error);
                    }
                }
                () = until(Some(deadline)) => {
                    let limit = self.config().turn_timeout.as_secs();
                    return Ending::Broken(Error::timeout(format!("the turn took longer than {limit} s")));
                }
                () = until(give_up) => return Ending::Ignored,
                () = until(interruption_at) => {}
                error = &mut disk, if turn.fault.is_none() => {
                    let event = EventBody::Error { code: error.code, message: error.message.clone() };
                    turn.fault = Some(error);
                    self.notes.cancel = true;
                    if let Err(error) = self.log_soon([event]).await {
                        return Ending::Broken(error);
                    }
                }
            }
        }
    }

    /// Writes down what came of what the agent said; gives the answer to the prompt when it is that.
    async fn take_down(
        &mut self,
        turn: &mut Turn,
        happening: Result<Happening, Gone>,
        prompt: u64,
    ) -> Result<Option<Result<Value, RpcError>>, Fault> {
        match happening.map_err(Fault::Gone)? {
            Happening::Attended => Ok(None),
            Happening::Answer { id, outcome } => Ok((id == prompt).then_some(outcome)),
            Happening::Update(update) => {
                let events = turn.scribe.take(*update, Instant::now());
                let events = events.map_err(|why| Fault::Error(Error::limit_exceeded(why.to_string())))?;
                self.log_soon(events).await.map_err(Fault::Error)?;
                Ok(None)
            }
        }
    }

    async fn log_soon(&self, events: impl IntoIterator<Item = EventBody>) -> Result<()> {
        for mut event in events {
            veil(&self.site.plane, &mut event);
            self.site
                .deps
                .store
                .events()
                .append_soon(&self.site.session, event)
                .await?;
        }
        Ok(())
    }

    /// The agent finished its turn.
    async fn complete(&mut self, turn: Turn, answer: &Value) {
        let (mut events, mut text) = turn.scribe.finish();
        self.site.plane.veil_text(&mut text);
        if let Some(Value::Object(usage)) = answer.get("usage") {
            events.push(EventBody::Usage { usage: usage.clone() });
        }
        let stop_reason = answer
            .get("stopReason")
            .and_then(Value::as_str)
            .unwrap_or("end_turn")
            .to_owned();
        events.push(EventBody::TurnCompleted {
            turn: turn.number,
            stop_reason,
            text: text.clone(),
        });
        // What follows says what the session does next: another turn or a switch.
        if self.queue.is_empty() && self.notes.switch.is_none() {
            events.push(EventBody::Status {
                status: Status::Idle,
                reason: None,
            });
        }
        self.log(events, SessionPatch::default()).await;
        tell(turn.ended, turn.fault.map_or(Ok(text), Err));
    }

    /// The turn failed: nothing of the agent is kept, and the next message starts it again.
    async fn fail(&mut self, turn: Turn, mut error: Error) {
        let (mut events, _) = turn.scribe.finish();
        self.site.plane.veil_text(&mut error.message);
        tracing::info!(session = %self.site.session, error = %error.for_log(), "a turn failed");
        events.push(EventBody::Error {
            code: error.code,
            message: error.message.clone(),
        });
        if self.notes.switch.is_none() {
            events.push(EventBody::Status {
                status: Status::Failed,
                reason: Some(error.message.clone()),
            });
        }
        if let Some(rig) = self.rig.take() {
            rig.down(&self.site).await;
        }
        self.log(events, SessionPatch::default()).await;
        tell(turn.ended, Err(error));
    }

    /// The turn was broken off from our side.
    async fn break_off(&mut self, turn: Turn, interruption: Interruption) {
        let number = turn.number;
        let error = match interruption {
            Interruption::Cancelled => {
                return self
                    .complete(turn, &serde_json::json!({ "stopReason": StopReason::Cancelled }))
                    .await;
            }
            Interruption::Ended => Error::conflict(format!("the session was ended during turn {number}")),
            Interruption::Stopped => Error::unavailable(format!("the server stopped during turn {number}")),
            Interruption::DrainedOut => {
                if let Some(switch) = &mut self.notes.switch {
                    switch.cancelled += 1;
                }
                Error::unavailable(format!(
                    "turn {number} was cancelled: the session switches to another agent"
                ))
            }
        };
        let (mut events, _) = turn.scribe.finish();
        events.push(EventBody::Error {
            code: error.code,
            message: error.message.clone(),
        });
        if interruption == Interruption::Stopped {
            events.push(EventBody::Status {
                status: Status::Idle,
                reason: Some(error.message.clone()),
            });
        }
        self.log(events, SessionPatch::default()).await;
        tell(turn.ended, Err(error));
    }
}

enum Fault {
    Gone(Gone),
    Error(Error),
}

fn tell(ended: Option<oneshot::Sender<Result<String>>>, outcome: Result<String>) {
    if let Some(ended) = ended {
        // Whoever waited may have gone; the turn is in the log.
        let _ = ended.send(outcome);
    }
}

/// Resolves when the workspace holds more than it may.
fn watch_disk(task: &Task) -> impl Future<Output = Error> + use<> {
    let plan = task.rig.as_ref().map(|rig| &rig.plan);
    let limit = plan.and_then(|plan| plan.limits.workspace_mb);
    let home = &task.site.deps.home;
    let dir = plan.map(|plan| home.workspace_dir(&plan.project.project_id, &plan.workspace.workspace_id));
    async move {
        match (limit, dir) {
            (Some(limit), Some(dir)) => {
                DiskWatch::new([dir], limit).exceeded().await;
                Error::limit_exceeded(format!(
                    "the workspace holds more than {limit} MiB; the turn was cancelled"
                ))
            }
            _ => std::future::pending().await,
        }
    }
}
