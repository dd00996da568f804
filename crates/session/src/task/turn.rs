//! Runs one message: starts the agent if needed, prompts it, and records what it reports until the turn ends.

use std::time::Instant;

use agent_client_protocol::v1::schema::StopReason;
use oubliette_protocol::{
    ByteCharge, Error, Result,
    event::{EventBody, MessageRole, SessionStatus},
    relay::RpcError,
};
use oubliette_store::SessionPatch;
use serde_json::Value;
use tokio::sync::oneshot;

use crate::agent_process::{
    AgentProcess, HandledMessage, agent_error_text, connection::AcpConnectionError, prompt::TurnPrompt,
    turn_recorder::TurnRecorder,
};

use super::{SessionTask, event_pace::EventPace, interruption::Interruption, queue::QueuedTurn, sleep_until};

/// How a turn ended.
enum TurnEnding {
    /// The agent answered the prompt.
    Answered(Result<Value, RpcError>),
    /// The connection to the agent failed, or a limit was exceeded.
    Failed(Error),
    /// The agent was told to cancel and did not end the turn in time.
    CancelIgnored,
    /// The session exceeded its disk limit, and its sandboxes were killed.
    DiskExceeded(Error),
    /// A command or a deadline interrupted it.
    Interrupted(Interruption),
}

/// The running turn.
struct RunningTurn {
    number: u64,
    result: Option<oneshot::Sender<Result<String>>>,
    recorder: TurnRecorder,
    /// The error for which the server itself cancels the turn; its sender gets this error instead of the text.
    cancel_cause: Option<Error>,
    /// What the message is charged.
    charge: Option<ByteCharge>,
}

impl SessionTask {
    pub(super) async fn run_turn(&mut self, queued: QueuedTurn) {
        let QueuedTurn {
            turn: number,
            text,
            result,
            charge,
        } = queued;
        self.running = Some(number);
        self.pending.cancel = false;
        let recorder = TurnRecorder::new(self.config().agent_output.clone(), self.env.plane.buffers());
        let turn = RunningTurn {
            number,
            result,
            recorder,
            cancel_cause: None,
            charge,
        };
        self.begin_usage().await;
        let held = self
            .processes
            .as_mut()
            .and_then(|processes| processes.agent.take());
        let held = match held {
            Some(process) => self.with_current_tools(process).await,
            None => None,
        };
        let began = SessionPatch {
            turn: Some(number),
            ..SessionPatch::default()
        };
        let message = EventBody::Message {
            role: MessageRole::User,
            text: text.clone(),
        };
        // Taken out of the queue in the transaction that logs it, so that it is neither lost nor run twice.
        let message_logged = SessionPatch {
            dequeue_turn: Some(number),
            ..began.clone()
        };
        let process = match held {
            Some(process) => Ok(Ok(process)),
            None => {
                if !std::mem::take(&mut self.starting_logged) {
                    let starting = EventBody::Status {
                        status: SessionStatus::Starting,
                        reason: None,
                    };
                    if self.log(vec![starting], began).await.is_err() {
                        return self.put_back(turn, text);
                    }
                }
                Box::pin(self.start_agent()).await
            }
        };
        self.starting_logged = false;
        match process {
            Ok(Ok(process)) => {
                self.answer_tools(&Ok(()));
                let running = EventBody::Status {
                    status: SessionStatus::Running,
                    reason: None,
                };
                if self.log(vec![running, message], message_logged).await.is_err() {
                    process.stop().await;
                    return self.put_back(turn, text);
                }
                self.prompt_and_follow(turn, process, &text).await;
            }
            not_started => {
                // The message is logged even when the agent did not start.
                if self.log(vec![message], message_logged).await.is_err() {
                    return self.put_back(turn, text);
                }
                match not_started {
                    Ok(Err(error)) => self.fail_turn(turn, error).await,
                    Err(interruption) => self.interrupt_turn(turn, interruption).await,
                    Ok(Ok(_)) => {}
                }
            }
        }
        self.running = None;
        self.pending.cancel = false;
    }

    /// Puts the message of a turn that could not be begun back into the queue, where it still is in the database.
    fn put_back(&mut self, turn: RunningTurn, text: String) {
        self.running = None;
        self.queue.push_front(QueuedTurn {
            turn: turn.number,
            text,
            result: turn.result,
            charge: turn.charge,
        });
    }

    /// Prompts the agent and follows the turn to its end. The agent process is kept for the next turn if it
    /// answered.
    async fn prompt_and_follow(&mut self, mut turn: RunningTurn, mut process: AgentProcess, text: &str) {
        let agent = self.live.state.borrow().agent.clone();
        let earlier = match process.needs_earlier_turns() {
            false => Vec::new(),
            true => match self.earlier_turns(&agent, turn.number).await {
                Ok(earlier) => earlier,
                Err(error) => {
                    tracing::error!(session = %self.env.session, error = %error.for_log(), "reading earlier turns failed");
                    Vec::new()
                }
            },
        };
        let prompt = TurnPrompt {
            turn: turn.number,
            text,
            earlier: &earlier,
            others_since: self.others_since(&agent),
        };
        let ending = match process.prompt(prompt) {
            Ok(prompt) => {
                let kept = self.conversations.get(&agent);
                if kept != process.conversation() {
                    self.remember_conversation(&process).await;
                }
                self.follow_turn(&mut turn, &mut process, prompt).await
            }
            Err(error) => TurnEnding::Failed(process.explain_connection_error(error).await),
        };
        // An agent that was killed for the disk may be noticed before the alarm.
        let ending = match ending {
            TurnEnding::Failed(error) => match self.env.disk_alarm.take() {
                Some(disk) => TurnEnding::DiskExceeded(disk),
                None => TurnEnding::Failed(error),
            },
            ending => ending,
        };
        match ending {
            TurnEnding::Answered(Ok(answer)) => {
                if let Some(processes) = &mut self.processes {
                    processes.agent = Some(process);
                }
                self.complete_turn(turn, &answer).await;
            }
            TurnEnding::CancelIgnored => {
                process.stop().await;
                self.complete_turn(turn, &serde_json::json!({ "stopReason": StopReason::Cancelled }))
                    .await;
            }
            TurnEnding::DiskExceeded(error) => {
                process.stop().await;
                turn.cancel_cause = Some(error.clone());
                self.stop_for_disk(error).await;
                self.complete_turn(turn, &serde_json::json!({ "stopReason": StopReason::Cancelled }))
                    .await;
            }
            TurnEnding::Answered(Err(error)) => {
                process.stop().await;
                let message = format!("the agent's turn failed: {}", agent_error_text(&error));
                let error = match self.env.meter.refusal() {
                    Some(_) => Error::limit_exceeded(message),
                    None => Error::unavailable(message),
                };
                self.fail_turn(turn, error).await;
            }
            TurnEnding::Failed(error) => {
                process.stop().await;
                self.fail_turn(turn, error).await;
            }
            TurnEnding::Interrupted(interruption) => {
                process.stop().await;
                self.interrupt_turn(turn, interruption).await;
            }
        }
    }

    async fn follow_turn(
        &mut self,
        turn: &mut RunningTurn,
        process: &mut AgentProcess,
        prompt: u64,
    ) -> TurnEnding {
        let turn_timeout = self.config().turn_timeout;
        let deadline = Instant::now() + turn_timeout;
        let (disk_alarm, meter) = (self.env.disk_alarm.clone(), self.env.meter.clone());
        // When to stop waiting for an agent that was told to cancel.
        let mut give_up: Option<Instant> = None;
        let mut pace = EventPace::new(Instant::now());
        // When to read from an agent again that reported too much.
        let mut read_at: Option<Instant> = None;
        loop {
            match self.interruption() {
                Some(Interruption::Cancelled) if give_up.is_none() => {
                    if let Err(error) = process.cancel() {
                        return TurnEnding::Failed(process.explain_connection_error(error).await);
                    }
                    give_up = Some(Instant::now() + self.config().cancel_grace);
                }
                Some(Interruption::Cancelled) | None => {}
                Some(interruption) => return TurnEnding::Interrupted(interruption),
            }
            let (due, interruption_at) = (turn.recorder.flush_due(), self.interruption_at());
            let tools_due = process.tools_due();
            // Not biased: an agent that writes without pause must not keep the deadlines from being polled.
            tokio::select! {
                () = sleep_until(read_at), if read_at.is_some() => read_at = None,
                received = process.receive(), if read_at.is_none() => {
                    let handled = match received {
                        Ok(message) => process.handle(message).await,
                        Err(error) => Err(error),
                    };
                    match self.record_handled(turn, handled, prompt).await {
                        Ok(TurnStep::Logged(bytes)) => read_at = pace.count(bytes, Instant::now()),
                        Ok(TurnStep::Answered(answer)) => return TurnEnding::Answered(answer),
                        Err(TurnFault::Connection(error)) => return TurnEnding::Failed(process.explain_connection_error(error).await),
                        Err(TurnFault::Error(error)) => return TurnEnding::Failed(error),
                    }
                }
                command = self.commands.recv() => match command {
                    Some(command) => self.take_command(command).await,
                    None => return TurnEnding::Interrupted(Interruption::Stopped),
                },
                () = sleep_until(due) => {
                    let events = turn.recorder.flush(Instant::now());
                    if let Err(error) = self.log_soon(events).await {
                        return TurnEnding::Failed(error);
                    }
                }
                () = sleep_until(Some(deadline)) => {
                    let limit = turn_timeout.as_secs();
                    return TurnEnding::Failed(Error::timeout(format!("the turn took longer than {limit} s")));
                }
                () = sleep_until(give_up) => return TurnEnding::CancelIgnored,
                () = sleep_until(tools_due) => self.check_agent_tools(process).await,
                () = sleep_until(interruption_at) => {}
                // An agent that asks for a model again and again, although its budget is used up.
                error = meter.exhausted(), if turn.cancel_cause.is_none() => {
                    turn.cancel_cause = Some(error);
                    self.pending.cancel = true;
                }
                () = disk_alarm.raised() => {
                    if let Some(error) = disk_alarm.take() {
                        return TurnEnding::DiskExceeded(error);
                    }
                }
            }
        }
    }

    /// Logs an update of the agent, or returns the answer to the prompt.
    async fn record_handled(
        &mut self,
        turn: &mut RunningTurn,
        handled: Result<HandledMessage, AcpConnectionError>,
        prompt: u64,
    ) -> Result<TurnStep, TurnFault> {
        match handled.map_err(TurnFault::Connection)? {
            HandledMessage::Response { id, outcome } if id == prompt => Ok(TurnStep::Answered(outcome)),
            HandledMessage::Handled | HandledMessage::Response { .. } => Ok(TurnStep::Logged(0)),
            HandledMessage::Update(update) => {
                let events = turn.recorder.record(*update, Instant::now());
                let events =
                    events.map_err(|why| TurnFault::Error(Error::limit_exceeded(why.to_string())))?;
                let bytes = self.log_soon(events).await.map_err(TurnFault::Error)?;
                Ok(TurnStep::Logged(bytes))
            }
        }
    }

    /// Logs the end of a turn that the agent finished or that was cancelled.
    async fn complete_turn(&mut self, turn: RunningTurn, answer: &Value) {
        let usage = self.settle_usage().await;
        let (mut events, mut text) = turn.recorder.finish();
        self.env.plane.mask_text(&mut text);
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
            usage: Some(usage),
        });
        // When a message or a switch is pending, its own status event follows instead.
        if self.queue.is_empty() && self.pending.switch.is_none() {
            events.push(EventBody::Status {
                status: SessionStatus::Idle,
                reason: None,
            });
        }
        let logged = self.log(events, SessionPatch::default()).await;
        let result = turn.cancel_cause.map_or(Ok(text), Err);
        send_result(turn.result, logged.and(result));
    }

    /// Logs a failed turn and stops the agent and its tools; the next message starts them again.
    async fn fail_turn(&mut self, turn: RunningTurn, mut error: Error) {
        let (mut events, _) = turn.recorder.finish();
        self.env.plane.mask_text(&mut error.message);
        tracing::info!(session = %self.env.session, error = %error.for_log(), "a turn failed");
        events.push(EventBody::error(error.code, error.message.as_str()));
        if self.pending.switch.is_none() {
            events.push(EventBody::Status {
                status: SessionStatus::Failed,
                reason: Some(error.message.clone()),
            });
        }
        if let Some(processes) = self.processes.take() {
            processes.stop(&self.env).await;
        }
        self.settle_usage().await;
        let logged = self.log(events, SessionPatch::default()).await;
        send_result(turn.result, logged.and(Err(error)));
    }

    /// Logs a turn that the server interrupted.
    async fn interrupt_turn(&mut self, turn: RunningTurn, interruption: Interruption) {
        let number = turn.number;
        let error = match interruption {
            Interruption::Cancelled => {
                return self
                    .complete_turn(turn, &serde_json::json!({ "stopReason": StopReason::Cancelled }))
                    .await;
            }
            Interruption::Ended => Error::conflict(format!("the session was ended during turn {number}")),
            Interruption::Stopped => Error::unavailable(format!("the server stopped during turn {number}")),
            Interruption::DrainTimeout => {
                if let Some(switch) = &mut self.pending.switch {
                    switch.cancelled_turns += 1;
                }
                Error::unavailable(format!(
                    "turn {number} was cancelled: the session switches to another agent"
                ))
            }
        };
        let (mut events, _) = turn.recorder.finish();
        events.push(EventBody::error(error.code, error.message.as_str()));
        if interruption == Interruption::Stopped {
            events.push(EventBody::Status {
                status: SessionStatus::Idle,
                reason: Some(error.message.clone()),
            });
        }
        self.settle_usage().await;
        let logged = self.log(events, SessionPatch::default()).await;
        send_result(turn.result, logged.and(Err(error)));
    }
}

/// What a message of the agent came to.
enum TurnStep {
    /// It was handled, and so many bytes of JSON were logged for it.
    Logged(usize),
    /// It was the answer to the prompt.
    Answered(Result<Value, RpcError>),
}

enum TurnFault {
    Connection(AcpConnectionError),
    Error(Error),
}

fn send_result(ended: Option<oneshot::Sender<Result<String>>>, outcome: Result<String>) {
    if let Some(ended) = ended {
        // The sender may be gone; the turn is in the log.
        let _ = ended.send(outcome);
    }
}
