//! One turn, from the message to its end, with what the person at the keyboard does meanwhile.

use oubliette_protocol::{Error, ErrorCode, Result};
use serde_json::{Value, json};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};

use super::{
    client::Client,
    live::{Live, TICK},
    output::field,
};

/// Ctrl-C.
pub struct Interrupts(Signal);

impl Interrupts {
    /// From now on Ctrl-C is ours.
    pub fn listen() -> Result<Self> {
        signal(SignalKind::interrupt()).map(Self).map_err(Error::internal)
    }

    /// The next one.
    pub async fn next(&mut self) {
        if self.0.recv().await.is_none() {
            std::future::pending().await
        }
    }
}

/// How a turn ended.
pub enum Ended {
    /// The agent finished it.
    Completed {
        /// What `session_message` with `wait` answers.
        reply: Value,
    },
    /// It was cancelled.
    Cancelled {
        /// The same, with the text so far.
        reply: Value,
        /// By Ctrl-C: another one ends the session.
        by_key: bool,
    },
    /// It failed.
    Failed(Error),
    /// Ctrl-C came twice: the session is over.
    SessionEnded,
}

/// A message on its way.
pub struct Sent {
    session: String,
    turn: u64,
    text: String,
}

impl Sent {
    /// Sends a message. `arguments` are those of `session_message`.
    pub async fn send(client: &Client, arguments: Value) -> Result<Self> {
        let text = field(&arguments, "message");
        let reply = client.call("session_message", arguments).await?;
        Ok(Self {
            session: field(&reply, "session_id"),
            turn: reply["turn"].as_u64().unwrap_or(0),
            text,
        })
    }

    /// The session it went to.
    pub fn session(&self) -> &str {
        &self.session
    }

    /// Shows the turn until it ends; `since` is the last index seen of the session and moves on.
    /// Lines typed meanwhile are looked at when `typed` is given: `/cancel` acts, anything else waits.
    pub async fn follow(
        self,
        client: &Client,
        since: &mut i64,
        live: &mut Live,
        interrupts: &mut Interrupts,
        mut typed: Option<&mut Typed<'_>>,
    ) -> Result<Ended> {
        let path = format!("/api/sessions/{}/events?since_index={since}", self.session);
        let mut events = client.follow(&path).await?;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let mut progress = Progress {
            sent: &self,
            begun: false,
            error: None,
        };
        let mut presses = 0;
        live.begin();
        loop {
            let line = async {
                match typed.as_mut() {
                    Some(typed) => typed.lines.recv().await,
                    None => None,
                }
            };
            tokio::select! {
                event = events.next() => {
                    let Some(event) = event? else {
                        live.end_line();
                        return Err(gone(&self.session));
                    };
                    *since = event["index"].as_i64().unwrap_or(*since);
                    live.event(&event);
                    if let Some(ended) = progress.take(&event) {
                        live.end_line();
                        return ended.settle(client, presses > 0).await;
                    }
                }
                () = interrupts.next() => {
                    presses += 1;
                    if presses > 1 {
                        live.note("ending the session");
                        client.call("session_end", json!({ "session_id": self.session })).await?;
                        return Ok(Ended::SessionEnded);
                    }
                    live.note("cancelling the turn; Ctrl-C again ends the session");
                    client.call("session_cancel", json!({ "session_id": self.session })).await?;
                }
                Some(line) = line => match (line.trim(), typed.as_mut()) {
                    ("/cancel", _) => {
                        live.note("cancelling the turn");
                        client.call("session_cancel", json!({ "session_id": self.session })).await?;
                    }
                    (_, Some(typed)) => typed.waiting.push_back(line),
                    (_, None) => {}
                },
                _ = tick.tick(), if live.spins() => live.tick(),
            }
        }
    }
}

/// Lines that are typed while a turn runs.
pub struct Typed<'a> {
    /// Where they come from.
    pub lines: &'a mut mpsc::Receiver<String>,
    /// Those that wait for the turn to end.
    pub waiting: &'a mut std::collections::VecDeque<String>,
}

/// What is known of the turn so far.
struct Progress<'a> {
    sent: &'a Sent,
    /// Whether it is our message's turn: others may have been queued before it.
    begun: bool,
    error: Option<Error>,
}

/// How it ended, before the session was asked how it is.
enum Over {
    Completed { reply: Value, cancelled: bool },
    Failed(Error),
}

impl Progress<'_> {
    fn take(&mut self, event: &Value) -> Option<Over> {
        let status = event["status"].as_str();
        match event["type"].as_str().unwrap_or_default() {
            "message" if event["role"] == "user" && event["text"] == self.sent.text.as_str() => {
                self.begun = true;
                None
            }
            "error" if self.begun => {
                let code = serde_json::from_value(event["code"].clone()).unwrap_or(ErrorCode::Internal);
                self.error = Some(Error::new(code, field(event, "message")));
                None
            }
            "turn_completed" if self.begun && event["turn"] == self.sent.turn => match self.error.take() {
                Some(error) => Some(Over::Failed(error)),
                None => {
                    let reply = json!({ "session_id": self.sent.session, "turn": self.sent.turn, "text": event["text"] });
                    Some(Over::Completed {
                        reply,
                        cancelled: event["stop_reason"] == "cancelled",
                    })
                }
            },
            "status" if status == Some("ended") || (self.begun && self.error.is_some()) => {
                let ended = || Error::conflict("the session was ended");
                Some(Over::Failed(self.error.take().unwrap_or_else(ended)))
            }
            _ => None,
        }
    }
}

impl Over {
    async fn settle(self, client: &Client, by_key: bool) -> Result<Ended> {
        match self {
            Over::Failed(error) => Ok(Ended::Failed(error)),
            Over::Completed { mut reply, cancelled } => {
                let session = client
                    .call("session_get", json!({ "session_id": reply["session_id"] }))
                    .await?;
                reply["status"] = session["status"].clone();
                Ok(match cancelled {
                    true => Ended::Cancelled { reply, by_key },
                    false => Ended::Completed { reply },
                })
            }
        }
    }
}

/// The stream broke off.
fn gone(session: &str) -> Error {
    Error::unavailable(format!(
        "the server stopped; the session is kept: start the server again and go on with `oubliette chat --session {session}`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(events: &[Value]) -> Option<Result<bool>> {
        let sent = Sent {
            session: "gogol_x".into(),
            turn: 2,
            text: "go".into(),
        };
        let mut progress = Progress {
            sent: &sent,
            begun: false,
            error: None,
        };
        events
            .iter()
            .find_map(|event| progress.take(event))
            .map(|over| match over {
                Over::Completed { cancelled, .. } => Ok(cancelled),
                Over::Failed(error) => Err(error),
            })
    }

    #[test]
    fn a_turn_queued_before_ours_is_not_ours() {
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
    fn a_failed_turn_tells_its_error() {
        let failed = [
            json!({"type": "message", "role": "user", "text": "go"}),
            json!({"type": "error", "code": "timeout", "message": "too slow"}),
            json!({"type": "status", "status": "failed", "reason": "too slow"}),
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
