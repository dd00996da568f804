//! The program's handle on a session while its tools are lent.

use std::{collections::BTreeMap, sync::Arc};

use serde::Deserialize;
use serde_json::Value;
use tokio::{sync::watch, task::JoinHandle};

use crate::{
    Error, Lend, Message,
    follow::{JoinPoint, follow_session, read_existing_log},
};

/// How many completed turns are kept for [`Session::turn`] called after their end.
const MAX_KEPT_TURNS: usize = 64;

/// A completed turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// Its number in the session, from 1.
    pub turn: u64,
    /// Why it ended: `end_turn`, `cancelled`, `max_tokens`, …
    pub stop_reason: String,
    /// All text of the agent in this turn.
    pub text: String,
}

/// A session that may call this program's tools. Dropping it stops answering requests; the session itself
/// continues.
#[derive(Debug)]
pub struct Session {
    lend: Arc<Lend>,
    session_id: String,
    turn: u64,
    /// How many turns had failed when the last message was sent.
    earlier_failures: u64,
    state: watch::Receiver<SessionProgress>,
    follow_task: JoinHandle<()>,
}

/// What the event stream has reported so far.
#[derive(Debug, Default)]
pub(crate) struct SessionProgress {
    turns: BTreeMap<u64, Turn>,
    /// The error event of the running or last turn.
    pub(crate) turn_error: Option<Error>,
    /// Whether the turn with that error has ended.
    turn_failed: bool,
    /// How many turns have failed.
    failed_turns: u64,
    /// Why the session ended, or why its stream cannot be read any more.
    pub(crate) end_reason: Option<Error>,
}

impl SessionProgress {
    pub(crate) fn turn_completed(&mut self, turn: Turn) {
        (self.turn_error, self.turn_failed) = (None, false);
        self.turns.insert(turn.turn, turn);
        if self.turns.len() > MAX_KEPT_TURNS {
            self.turns.pop_first();
        }
    }

    pub(crate) fn turn_started(&mut self) {
        (self.turn_error, self.turn_failed) = (None, false);
    }

    pub(crate) fn turn_stopped(&mut self) {
        self.turn_failed = self.turn_error.is_some();
        self.failed_turns += u64::from(self.turn_failed);
    }

    /// The result of turn `number`, if it has ended. The first `earlier_failures` are of turns before it.
    fn turn_outcome(&self, number: u64, earlier_failures: u64) -> Option<Result<Turn, Error>> {
        let has_failed = self.turn_failed && self.failed_turns > earlier_failures;
        let failed = has_failed.then(|| self.turn_error.clone()).flatten();
        let turn = self.turns.get(&number).cloned();
        turn.map(Ok)
            .or_else(|| failed.or_else(|| self.end_reason.clone()).map(Err))
    }
}

#[derive(Deserialize)]
struct SessionMessageReply {
    session_id: String,
    #[serde(default)]
    turn: u64,
}

fn parse_reply(value: Value) -> Result<SessionMessageReply, Error> {
    SessionMessageReply::deserialize(value)
        .map_err(|why| Error::Unexpected(format!("session_message: {why}")))
}

impl Session {
    pub(crate) async fn start(lend: Lend, message: Message) -> Result<Self, Error> {
        let joined = match message.session_id() {
            Some(session_id) => read_existing_log(&lend, session_id).await?,
            None => JoinPoint::default(),
        };
        let message = message.with("context", lend.context());
        let SessionMessageReply { session_id, turn } =
            parse_reply(lend.client.call("session_message", &message.into_value()).await?)?;
        let lend = Arc::new(lend);
        let (tx, state) = watch::channel(SessionProgress::default());
        let following = tokio::spawn(follow_session(lend.clone(), session_id.clone(), joined, tx));
        Ok(Self {
            lend,
            session_id,
            turn,
            earlier_failures: 0,
            state,
            follow_task: following,
        })
    }

    /// The session's id.
    pub fn id(&self) -> &str {
        &self.session_id
    }

    /// The number of the turn that the last message began.
    pub fn last_turn(&self) -> u64 {
        self.turn
    }

    /// Sends another message and returns the number of the turn it begins. It declares the tools again: a server
    /// that was restarted has forgotten them.
    pub async fn message(&mut self, text: impl Into<Message>) -> Result<u64, Error> {
        let message = text.into().session(&self.session_id);
        let message = message.with_default("context", self.lend.context());
        self.earlier_failures = self.state.borrow().failed_turns;
        self.turn = parse_reply(
            self.lend
                .client
                .call("session_message", &message.into_value())
                .await?,
        )?
        .turn;
        Ok(self.turn)
    }

    /// Sends another message and waits for its turn to end.
    pub async fn ask(&mut self, text: impl Into<Message>) -> Result<Turn, Error> {
        let turn = self.message(text).await?;
        self.turn(turn).await
    }

    /// Waits for the turn with this number to end.
    pub async fn turn(&self, number: u64) -> Result<Turn, Error> {
        let mut state = self.state.clone();
        let earlier = if number < self.turn {
            0
        } else {
            self.earlier_failures
        };
        let found = state
            .wait_for(|state| state.turn_outcome(number, earlier).is_some())
            .await;
        let ended = || Error::Ended("its stream is no longer followed".into());
        found
            .map_err(|_| ended())?
            .turn_outcome(number, earlier)
            .ok_or_else(ended)?
    }

    /// Waits until the session ends and returns the reason. Requests are answered meanwhile.
    pub async fn ended(&self) -> Error {
        let mut state = self.state.clone();
        match state
            .wait_for(|state| state.end_reason.is_some())
            .await
            .map(|state| state.end_reason.clone())
        {
            Ok(Some(why)) => why,
            Ok(None) | Err(_) => Error::Ended("its stream is no longer followed".into()),
        }
    }

    /// Sends a message that withdraws this caller's tools. The session continues without them.
    pub async fn withdraw(self, text: impl Into<Message>) -> Result<(), Error> {
        let context = serde_json::json!({ "caller_id": self.lend.caller_id, "caller_tools": [] });
        let message = text.into().session(&self.session_id).with("context", context);
        self.lend
            .client
            .call("session_message", &message.into_value())
            .await
            .map(drop)
    }

    /// Ends the session.
    pub async fn end(self) -> Result<(), Error> {
        let which = serde_json::json!({ "session_id": self.session_id });
        self.lend.client.call("session_end", &which).await.map(drop)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.follow_task.abort();
    }
}
