//! What the program holds while its tools are lent.

use std::{collections::BTreeMap, sync::Arc};

use serde::Deserialize;
use serde_json::Value;
use tokio::{sync::watch, task::JoinHandle};

use crate::{
    Error, Lend, Message,
    follow::{Joined, follow, join},
};

/// How many finished turns are kept for whoever asks late.
const KEPT_TURNS: usize = 64;

/// A finished turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// Its number, from 1.
    pub turn: u64,
    /// Why it ended.
    pub stop_reason: String,
    /// All the agent said in it.
    pub text: String,
}

/// A session that has this program's tools. Dropping it stops serving them; the session itself goes on.
#[derive(Debug)]
pub struct Session {
    lend: Arc<Lend>,
    session_id: String,
    turn: u64,
    state: watch::Receiver<State>,
    following: JoinHandle<()>,
}

/// What has been heard.
#[derive(Debug, Default)]
pub(crate) struct State {
    turns: BTreeMap<u64, Turn>,
    /// An error the session told of in the turn that runs.
    pub(crate) trouble: Option<Error>,
    /// The turn that had that error is over.
    failed: bool,
    /// The session has ended, or its stream is lost for good.
    pub(crate) over: Option<Error>,
}

impl State {
    pub(crate) fn completed(&mut self, turn: Turn) {
        (self.trouble, self.failed) = (None, false);
        self.turns.insert(turn.turn, turn);
        if self.turns.len() > KEPT_TURNS {
            self.turns.pop_first();
        }
    }

    pub(crate) fn running(&mut self) {
        (self.trouble, self.failed) = (None, false);
    }

    pub(crate) fn idle(&mut self) {
        self.failed = self.trouble.is_some();
    }

    /// How turn `number` ended, if it has.
    fn turn(&self, number: u64) -> Option<Result<Turn, Error>> {
        let failed = self.failed.then(|| self.trouble.clone()).flatten();
        let turn = self.turns.get(&number).cloned();
        turn.map(Ok)
            .or_else(|| failed.or_else(|| self.over.clone()).map(Err))
    }
}

#[derive(Deserialize)]
struct Reply {
    session_id: String,
    #[serde(default)]
    turn: u64,
}

fn reply(value: Value) -> Result<Reply, Error> {
    Reply::deserialize(value).map_err(|why| Error::Unexpected(format!("session_message: {why}")))
}

impl Session {
    pub(crate) async fn start(lend: Lend, message: Message) -> Result<Self, Error> {
        let joined = match message.session_id() {
            Some(session_id) => join(&lend, session_id).await?,
            None => Joined::default(),
        };
        let message = message.with("context", lend.context());
        let Reply { session_id, turn } =
            reply(lend.client.call("session_message", &message.into_value()).await?)?;
        let lend = Arc::new(lend);
        let (tx, state) = watch::channel(State::default());
        let following = tokio::spawn(follow(lend.clone(), session_id.clone(), joined, tx));
        Ok(Self {
            lend,
            session_id,
            turn,
            state,
            following,
        })
    }

    /// The session's id.
    pub fn id(&self) -> &str {
        &self.session_id
    }

    /// The turn the last message began.
    pub fn last_turn(&self) -> u64 {
        self.turn
    }

    /// Sends another message; gives the number of the turn it begins.
    pub async fn message(&mut self, text: impl Into<Message>) -> Result<u64, Error> {
        let message = text.into().session(&self.session_id);
        self.turn = reply(
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

    /// Waits for a turn to end.
    pub async fn turn(&self, number: u64) -> Result<Turn, Error> {
        let mut state = self.state.clone();
        let found = state.wait_for(|state| state.turn(number).is_some()).await;
        let ended = || Error::Ended("its stream is no longer followed".into());
        found.map_err(|_| ended())?.turn(number).ok_or_else(ended)?
    }

    /// Serves until the session ends; says why it did.
    pub async fn ended(&self) -> Error {
        let mut state = self.state.clone();
        match state
            .wait_for(|state| state.over.is_some())
            .await
            .map(|state| state.over.clone())
        {
            Ok(Some(why)) => why,
            Ok(None) | Err(_) => Error::Ended("its stream is no longer followed".into()),
        }
    }

    /// Takes the tools back. The session goes on without them.
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
        self.following.abort();
    }
}
