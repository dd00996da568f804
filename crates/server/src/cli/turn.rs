//! Sends a message and follows its turn to the end, handling Ctrl-C and lines typed meanwhile.

use std::{collections::VecDeque, time::Duration};

use oubliette_protocol::{Error, ErrorCode, Result, usage::BudgetName};
use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{
    approval_prompt::{ApprovalPrompt, StdinLines},
    client::ActionClient,
    output::field_text,
    style::fold_to_line,
    turn_display::{SPINNER_INTERVAL, TurnDisplay},
    turn_keys::{TurnKeys, TypedInput},
};

/// How often a turn that runs asks what the session has used.
const USAGE_INTERVAL: Duration = Duration::from_secs(2);

/// Receives SIGINT (Ctrl-C) in place of its default action, which would end the process.
pub(crate) struct InterruptSignal(Signal);

impl InterruptSignal {
    /// Installs the handler.
    pub(crate) fn listen() -> Result<Self> {
        signal(SignalKind::interrupt()).map(Self).map_err(Error::internal)
    }

    /// Forgets a Ctrl-C that came while nobody waited for one.
    pub(crate) async fn clear(&mut self) {
        while tokio::time::timeout(Duration::ZERO, self.next()).await.is_ok() {}
    }

    /// Waits for the next Ctrl-C.
    pub(crate) async fn next(&mut self) {
        if self.0.recv().await.is_none() {
            std::future::pending().await
        }
    }
}

/// How a turn ended.
pub(crate) enum TurnOutcome {
    /// The agent finished it.
    Completed {
        /// What `session_message` with `wait` answers.
        reply: Value,
    },
    /// The turn was cancelled.
    Cancelled {
        /// What `session_message` with `wait` answers, with the text so far.
        reply: Value,
        /// Whether Ctrl-C was pressed during the turn; pressing it again ends the session.
        by_interrupt: bool,
    },
    /// The turn failed.
    Failed(Error),
    /// Ctrl-C was pressed twice, and the session was ended.
    SessionEnded,
    /// Ctrl-C was pressed twice; the session stays, and its turn is being cancelled.
    Left,
}

/// A message the server has accepted, and the turn it got.
pub(crate) struct SentMessage {
    session: String,
    turn: u64,
    text: String,
}

impl SentMessage {
    /// Sends a message. `arguments` are those of `session_message`.
    pub(crate) async fn send(client: &ActionClient, arguments: Value) -> Result<Self> {
        let text = field_text(&arguments, "message");
        let reply = client.call("session_message", arguments).await?;
        Ok(Self {
            session: field_text(&reply, "session_id"),
            turn: reply["turn"].as_u64().unwrap_or(0),
            text,
        })
    }

    /// The session it went to.
    pub(crate) fn session(&self) -> &str {
        &self.session
    }

    /// Shows the turn's events until it ends. `since` is the index of the last event shown, and is advanced.
    /// While a call waits for approval, typed lines answer that. Unless they are read for approvals only: `/cancel` cancels
    /// the turn, `/queue` shows what waits, any other line is queued.
    pub(crate) async fn follow(
        self,
        client: &ActionClient,
        since: &mut i64,
        display: &mut TurnDisplay,
        interrupts: &mut InterruptSignal,
        typed: TypedLines<'_>,
    ) -> Result<TurnOutcome> {
        display.begin_turn();
        let mut typed = typed;
        let ended = self
            .follow_events(client, since, display, interrupts, &mut typed)
            .await;
        display.end_turn();
        ended
    }

    async fn follow_events(
        &self,
        client: &ActionClient,
        since: &mut i64,
        display: &mut TurnDisplay,
        interrupts: &mut InterruptSignal,
        typed: &mut TypedLines<'_>,
    ) -> Result<TurnOutcome> {
        let path = format!("/api/sessions/{}/events?since_index={since}", self.session);
        let mut events = client.follow(&path).await?;
        let mut tick = tokio::time::interval(SPINNER_INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let mut usage = Box::pin(read_status(client, &self.session, Duration::ZERO));
        let mut progress = TurnProgress {
            sent: self,
            begun: false,
            error: None,
            refused: Vec::new(),
        };
        let mut interrupt_count = 0;
        let (mut prompt, mut input_ended) = (ApprovalPrompt::default(), false);
        typed.show(display);
        if *since >= 0 {
            let asked = json!({ "session_id": self.session, "status": "pending" });
            prompt.ask_about_waiting(&client.call("approval_list", asked).await?, display);
        }
        loop {
            let reads = !input_ended && (typed.reads_always() || prompt.is_asking());
            let interrupted = tokio::select! {
                event = events.next() => {
                    let Some(event) = event? else {
                        return Err(server_stopped_error(&self.session));
                    };
                    *since = event["index"].as_i64().unwrap_or(*since);
                    display.show_event(&event);
                    prompt.observe(&event, display);
                    if input_ended {
                        prompt.point_elsewhere(display);
                    }
                    if let Some(ended) = progress.observe(&event) {
                        if let TurnEnd::Completed { refused, .. } = &ended {
                            refused.iter().for_each(|error| display.print_warning(&error.message));
                        }
                        return ended.into_outcome(client, interrupt_count > 0).await;
                    }
                    false
                }
                () = interrupts.next() => true,
                input = typed.next(), if reads => match input {
                    TypedInput::Interrupt => true,
                    TypedInput::Changed => {
                        typed.show(display);
                        display.redraw();
                        false
                    }
                    TypedInput::End => {
                        input_ended = true;
                        prompt.point_elsewhere(display);
                        false
                    }
                    TypedInput::Line(line) => {
                        typed.show(display);
                        match line.trim() {
                            "/cancel" => {
                                display.print_note("cancelling the turn");
                                client.call("session_cancel", json!({ "session_id": self.session })).await?;
                            }
                            _ if prompt.is_asking() => prompt.answer(&line, client, display).await?,
                            "" => {}
                            "/queue" => typed.print_queued(display),
                            "/queue clear" => {
                                typed.queued.clear();
                                typed.print_queued(display);
                            }
                            _ => typed.queue(line, display),
                        }
                        false
                    }
                },
                session = &mut usage, if display.has_spinner() => {
                    if let (Some(session), Some(status)) = (session, display.status_mut()) {
                        status.observe_session(&session);
                    }
                    usage = Box::pin(read_status(client, &self.session, USAGE_INTERVAL));
                    false
                }
                // Not while a question is open that the terminal shows the answer to: it would write over it.
                _ = tick.tick(), if display.has_spinner() && (!prompt.is_asking() || typed.shows_input()) => {
                    display.advance_spinner();
                    false
                }
            };
            if !interrupted {
                continue;
            }
            interrupt_count += 1;
            match (interrupt_count, typed.second_interrupt()) {
                (1, SecondInterrupt::EndsSession) => {
                    display.print_note("cancelling the turn; Ctrl-C again ends the session");
                }
                (1, SecondInterrupt::Leaves) => {
                    display.print_note("cancelling the turn; Ctrl-C again leaves");
                }
                (_, SecondInterrupt::EndsSession) => {
                    display.print_note("ending the session");
                    client
                        .call("session_end", json!({ "session_id": self.session }))
                        .await?;
                    return Ok(TurnOutcome::SessionEnded);
                }
                (_, SecondInterrupt::Leaves) => return Ok(TurnOutcome::Left),
            }
            client
                .call("session_cancel", json!({ "session_id": self.session }))
                .await?;
        }
    }
}

/// What `session_get` says after this long; none if it fails, which the turn itself will show.
async fn read_status(client: &ActionClient, session: &str, after: Duration) -> Option<Value> {
    tokio::time::sleep(after).await;
    client
        .call("session_get", json!({ "session_id": session }))
        .await
        .ok()
}

/// Where lines typed during a turn come from, and where they go.
pub(crate) struct TypedLines<'a> {
    /// What is read.
    pub source: LineSource<'a>,
    /// Lines to handle when the turn has ended.
    pub queued: &'a mut VecDeque<String>,
}

/// What typed lines are read from, and when.
pub(crate) enum LineSource<'a> {
    /// Lines of stdin, while a call waits for approval.
    ForApprovals(&'a mut StdinLines),
    /// Lines of stdin, all the time.
    Always(&'a mut StdinLines),
    /// Keys of a terminal in raw mode, all the time.
    Keys(&'a mut TurnKeys),
}

/// What Ctrl-C does while the turn is being cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SecondInterrupt {
    EndsSession,
    Leaves,
}

impl TypedLines<'_> {
    fn reads_always(&self) -> bool {
        !matches!(self.source, LineSource::ForApprovals(_))
    }

    /// Whether the footer shows what is typed; else the terminal does.
    fn shows_input(&self) -> bool {
        matches!(self.source, LineSource::Keys(_))
    }

    fn second_interrupt(&self) -> SecondInterrupt {
        match self.source {
            LineSource::Keys(_) => SecondInterrupt::Leaves,
            LineSource::Always(_) | LineSource::ForApprovals(_) => SecondInterrupt::EndsSession,
        }
    }

    /// Cancel-safe.
    async fn next(&mut self) -> TypedInput {
        match &mut self.source {
            LineSource::Keys(keys) => keys.next().await,
            LineSource::Always(lines) | LineSource::ForApprovals(lines) => match lines.next().await {
                Some(line) => TypedInput::Line(line),
                None => TypedInput::End,
            },
        }
    }

    fn show(&self, display: &mut TurnDisplay) {
        if let LineSource::Keys(keys) = &self.source {
            display.show_input(Some(keys.typed()));
        }
    }

    fn queue(&mut self, line: String, display: &mut TurnDisplay) {
        if self.shows_input() {
            display.print_note(&format!("queued: {}", fold_to_line(&line, 120)));
        }
        self.queued.push_back(line);
    }

    fn print_queued(&self, display: &mut TurnDisplay) {
        if self.queued.is_empty() {
            display.print_note("nothing is queued");
        }
        for (line, place) in self.queued.iter().zip(1..) {
            display.print_note(&format!("{place}. {}", fold_to_line(line, 120)));
        }
    }
}

/// Finds the end of one message's turn in the events of its session.
struct TurnProgress<'a> {
    sent: &'a SentMessage,
    /// Whether the message's own turn has begun; turns of messages queued earlier come first.
    begun: bool,
    error: Option<Error>,
    /// Tool calls that `tool_calls_per_turn` refused. Unlike past other budgets, the agent goes on without them.
    refused: Vec<Error>,
}

/// How the turn ended, according to its events; [`TurnOutcome`] also has the session's status.
enum TurnEnd {
    Completed {
        reply: Value,
        cancelled: bool,
        /// That tool calls were refused during the turn.
        refused: Vec<Error>,
    },
    Failed(Error),
}

impl TurnProgress<'_> {
    /// Takes the next event; returns how the turn ended if this event ends it.
    fn observe(&mut self, event: &Value) -> Option<TurnEnd> {
        let status = event["status"].as_str();
        match event["type"].as_str().unwrap_or_default() {
            "message" if event["role"] == "user" && event["text"] == self.sent.text.as_str() => {
                self.begun = true;
                None
            }
            "error" if self.begun => {
                let code = serde_json::from_value(event["code"].clone()).unwrap_or(ErrorCode::Internal);
                let error = Error::new(code, field_text(event, "message"));
                match event["budget"] == BudgetName::ToolCallsPerTurn.as_str() {
                    true => self.refused.push(error),
                    false => self.error = Some(error),
                }
                None
            }
            "turn_completed" if self.begun && event["turn"] == self.sent.turn => match self.error.take() {
                Some(error) => Some(TurnEnd::Failed(error)),
                None => {
                    let reply = json!({ "session_id": self.sent.session, "turn": self.sent.turn, "text": event["text"] });
                    Some(TurnEnd::Completed {
                        reply,
                        cancelled: event["stop_reason"] == "cancelled",
                        refused: std::mem::take(&mut self.refused),
                    })
                }
            },
            "status" if status == Some("ended") || (self.begun && self.error.is_some()) => {
                let ended = || Error::conflict("the session was ended");
                Some(TurnEnd::Failed(self.error.take().unwrap_or_else(ended)))
            }
            _ => None,
        }
    }
}

impl TurnEnd {
    async fn into_outcome(self, client: &ActionClient, by_interrupt: bool) -> Result<TurnOutcome> {
        match self {
            TurnEnd::Failed(error) => Ok(TurnOutcome::Failed(error)),
            TurnEnd::Completed {
                mut reply, cancelled, ..
            } => {
                let session = client
                    .call("session_get", json!({ "session_id": reply["session_id"] }))
                    .await?;
                reply["status"] = session["status"].clone();
                Ok(match cancelled {
                    true => TurnOutcome::Cancelled { reply, by_interrupt },
                    false => TurnOutcome::Completed { reply },
                })
            }
        }
    }
}

/// The error for an event stream that ended before the turn did.
fn server_stopped_error(session: &str) -> Error {
    Error::unavailable(format!(
        "the server stopped; the session is kept: start the server again and go on with `oubliette chat --session {session}`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(events: &[Value]) -> Option<Result<bool>> {
        let sent = SentMessage {
            session: "gogol_x".into(),
            turn: 2,
            text: "go".into(),
        };
        let mut progress = TurnProgress {
            sent: &sent,
            begun: false,
            error: None,
            refused: Vec::new(),
        };
        events
            .iter()
            .find_map(|event| progress.observe(event))
            .map(|over| match over {
                TurnEnd::Completed { cancelled, .. } => Ok(cancelled),
                TurnEnd::Failed(error) => Err(error),
            })
    }

    #[test]
    fn events_of_an_earlier_turn_are_ignored() {
        let theirs = [
            json!({"type": "message", "role": "user", "text": "other"}),
            json!({"type": "error", "code": "unavailable", "message": "theirs"}),
            json!({"type": "status", "status": "failed"}),
        ];
        assert!(outcome(&theirs).is_none());
        let ours = [
            json!({"type": "message", "role": "user", "text": "go"}),
            json!({"type": "turn_completed", "turn": 2, "stop_reason": "end_turn", "text": "hi"}),
        ];
        let both: Vec<Value> = theirs.into_iter().chain(ours).collect();
        assert_eq!(outcome(&both), Some(Ok(false)));
    }

    #[test]
    fn a_failed_turn_reports_its_error() {
        let failed = [
            json!({"type": "message", "role": "user", "text": "go"}),
            json!({"type": "error", "code": "timeout", "message": "too slow"}),
            json!({"type": "status", "status": "failed", "reason": "too slow"}),
        ];
        assert_eq!(outcome(&failed), Some(Err(Error::timeout("too slow"))));
    }

    #[test]
    fn a_turn_that_the_agent_finished_without_refused_calls_did_not_fail() {
        let mine = json!({"type": "message", "role": "user", "text": "go"});
        let used_up = |budget: &str| json!({"type": "error", "code": "limit_exceeded", "message": "used up", "budget": budget});
        let refused = used_up("tool_calls_per_turn");
        let no_model = used_up("tokens_per_day");
        let end = json!({"type": "turn_completed", "turn": 2, "stop_reason": "end_turn", "text": ""});
        let finished = outcome(&[mine.clone(), refused.clone(), end.clone()]);
        assert_eq!(finished, Some(Ok(false)));
        // Past a day's budget the agent is answered nothing more: it did not do what it was told.
        let unanswered = outcome(&[mine.clone(), no_model, end]);
        assert_eq!(unanswered.unwrap().unwrap_err().code, ErrorCode::LimitExceeded);
        let failed = [
            mine,
            refused,
            json!({"type": "error", "code": "timeout", "message": "too slow"}),
            json!({"type": "status", "status": "failed"}),
        ];
        assert_eq!(outcome(&failed), Some(Err(Error::timeout("too slow"))));
    }

    #[test]
    fn a_cancelled_turn_and_an_ended_session_are_told_apart() {
        let mine = json!({"type": "message", "role": "user", "text": "go"});
        let cancelled = [
            mine,
            json!({"type": "turn_completed", "turn": 2, "stop_reason": "cancelled", "text": ""}),
        ];
        assert_eq!(outcome(&cancelled), Some(Ok(true)));
        let ended = outcome(&[json!({"type": "status", "status": "ended"})]);
        assert_eq!(ended.unwrap().unwrap_err().code, ErrorCode::Conflict);
    }
}
