//! The three ends of a session's task: the session is ended, the server stops, or a failed session is unloaded.

use std::time::Duration;

use oubliette_protocol::{
    Error,
    event::{EventBody, SessionStatus},
};
use oubliette_store::SessionPatch;

use super::SessionTask;

/// How long a stopping server waits for a running turn before it interrupts it.
pub(super) const STOP_TURN_WAIT: Duration = Duration::from_secs(5);

/// Which queued messages are dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum QueueDrop {
    All,
    /// Those whose sender waits for the turn's result.
    Awaited,
}

impl SessionTask {
    /// Ends the session. The agent is killed first, and the reply is sent as soon as the end is in the log;
    /// tool servers are stopped after that, because they may be slow.
    pub(super) async fn end(mut self) {
        let over = Error::conflict(format!("session {} was ended", self.env.session));
        let mut events = self.drop_queue(&over, QueueDrop::All).await;
        self.refuse_pending(&over);
        self.live.plane.cancel_all("the session was ended");
        // Before the end is logged: who follows the log reads no further.
        self.live.approvals.cancel_all("the session was ended").await;
        let processes = self
            .processes
            .take()
            .map(|mut processes| (processes.agent.take(), processes));
        let processes = match processes {
            Some((Some(process), processes)) => {
                process.stop().await;
                Some(processes)
            }
            Some((None, processes)) => Some(processes),
            None => None,
        };
        self.live.callers.close().await;
        self.env.deps.door.disconnect(&self.env.session);
        self.revoke_keys().await;
        if let Some(relay) = self.relay_socket.take() {
            relay.remove();
        }
        events.push(EventBody::Status {
            status: SessionStatus::Ended,
            reason: None,
        });
        let logged = self.log(events, SessionPatch::default()).await;
        for reply in self.pending.end.drain(..) {
            let _ = reply.send(logged.clone());
        }
        if logged.is_err() {
            return match self.pending.stop.is_empty() {
                true => self.unload().await,
                false => self.stop().await,
            };
        }
        self.close_commands();
        self.env.tear_down_tools().await;
        drop(processes);
        let home = &self.env.deps.home;
        home.discard(&home.session_dir(&self.env.session)).await;
    }

    /// Stops everything because the server stops. The session is resumed after its next start.
    pub(super) async fn stop(mut self) {
        let stopping = Error::unavailable("the server is stopping; send the message again when it is back");
        let dropped = self.drop_queue(&stopping, QueueDrop::Awaited).await;
        self.refuse_pending(&stopping);
        self.live.callers.close().await;
        self.leave_memory().await;
        let mut logged = Ok(());
        if !dropped.is_empty() {
            logged = self.log(dropped, SessionPatch::default()).await;
        }
        // What cannot be logged now is logged as an interruption after the next start.
        if logged.is_ok() && self.live.status() != SessionStatus::Idle && self.live.status().is_active() {
            let reason = "the server was stopped; send a message to go on";
            let _ = self.log_status(SessionStatus::Idle, Some(reason.into())).await;
        }
        self.revoke_keys().await;
        for reply in self.pending.stop.drain(..) {
            let _ = reply.send(());
        }
    }

    /// Removes a failed session from memory; its row and log stay in the database.
    pub(super) async fn unload(mut self) {
        self.live.callers.close().await;
        self.leave_memory().await;
    }

    async fn leave_memory(&mut self) {
        self.close_commands();
        match self.processes.take() {
            Some(processes) => processes.stop(&self.env).await,
            None => self.env.tear_down_tools().await,
        }
        if let Some(relay) = self.relay_socket.take() {
            relay.remove();
        }
    }

    /// Closes the command channel and removes the session from the manager. Commands sent meanwhile fail
    /// because the channel is closed.
    fn close_commands(&mut self) {
        self.commands.close();
        if let Some(sessions) = self.sessions.upgrade() {
            sessions.remove_from_memory(&self.env.session, &self.live);
        }
    }

    /// Drops queued messages and returns an error event for each. A sender that waits gets the error and can
    /// send the message again. Messages nobody waits for are kept in the database when the server stops, because
    /// their senders were told that they would run.
    async fn drop_queue(&mut self, why: &Error, which: QueueDrop) -> Vec<EventBody> {
        let mut events = Vec::new();
        for queued in std::mem::take(&mut self.queue) {
            if which == QueueDrop::Awaited && queued.result.is_none() {
                continue;
            }
            let dropped = self
                .env
                .deps
                .store
                .queue_drop(&self.env.session, Some(queued.turn));
            if let Err(error) = dropped.await {
                tracing::error!(session = %self.env.session, error = %error.for_log(), "dropping a queued message failed");
                continue;
            }
            events.push(EventBody::turn_skipped(queued.turn, why));
            if let Some(result) = queued.result {
                let _ = result.send(Err(why.clone()));
            }
        }
        events
    }

    fn refuse_pending(&mut self, error: &Error) {
        for reply in self.pending.tools.drain(..) {
            let _ = reply.send(Err(error.clone()));
        }
        if let Some(switch) = self.pending.switch.take() {
            switch.refuse(error.clone());
        }
    }

    async fn revoke_keys(&self) {
        if let Err(error) = self.env.deps.keys.revoke(&self.env.session).await {
            tracing::error!(session = %self.env.session, error = %error.for_log(), "revoking a session's keys failed");
        }
    }
}
