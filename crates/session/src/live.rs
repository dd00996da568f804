//! A session in memory, as everyone but its own task sees it.

use std::sync::Arc;

use oubliette_protocol::{Error, Result, Slug, event::Status};
use oubliette_store::SessionRow;
use oubliette_tools::{DebugSink, Plane};
use tokio::sync::{mpsc, oneshot, watch};

use crate::{blueprint::Blueprint, callers::CallerBook, request::Switched};

/// What a session is doing now.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Now {
    pub(crate) status: Status,
    pub(crate) agent: Slug,
    /// The last turn that was begun.
    pub(crate) turn: u64,
}

/// See the module.
pub(crate) struct Live {
    /// The row as it was loaded; what changes is in `now`.
    pub(crate) row: SessionRow,
    pub(crate) plane: Arc<Plane>,
    pub(crate) callers: Arc<CallerBook>,
    pub(crate) debug: Arc<dyn DebugSink>,
    pub(crate) now: watch::Sender<Now>,
    pub(crate) commands: mpsc::Sender<Command>,
}

impl Live {
    pub(crate) fn status(&self) -> Status {
        self.now.borrow().status
    }

    /// Asks the task something and waits for its answer.
    pub(crate) async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        let over = || Error::conflict(format!("session {} is over", self.row.session_id));
        self.commands.send(command(reply)).await.map_err(|_| over())?;
        answer.await.map_err(|_| over())
    }

    /// Waits while one agent is being replaced by another.
    pub(crate) async fn settled(&self) {
        let mut now = self.now.subscribe();
        // The sender lives as long as `self`, so waiting cannot fail.
        let _ = now.wait_for(|now| now.status != Status::Switching).await;
    }
}

/// What a session's task is asked.
pub(crate) enum Command {
    /// Run a turn, after those that wait.
    Message(Incoming),
    /// Cancel the running turn: which, and whether there was one.
    Cancel(oneshot::Sender<(u64, bool)>),
    /// Stop everything; the session is over.
    End(oneshot::Sender<()>),
    /// Replace the agent.
    Switch(Box<Blueprint>, oneshot::Sender<Result<Switched>>),
    /// Have the tools ready, whether the agent runs or not.
    Tools(oneshot::Sender<Result<()>>),
    /// Look at the library: an agent or a catalog entry was edited.
    Refresh,
    /// The server stops; the session goes on after its next start.
    Stop(oneshot::Sender<()>),
}

/// A message on its way in.
pub(crate) struct Incoming {
    pub(crate) text: String,
    /// Told the turn it will be, and what the session is doing.
    pub(crate) accepted: oneshot::Sender<Result<(u64, Status)>>,
    /// Told the turn's text when it has ended.
    pub(crate) ended: Option<oneshot::Sender<Result<String>>>,
}
