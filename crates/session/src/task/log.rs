//! Writing the session's log. The state in memory changes only after the events that say so are durable.
//!
//! While the database cannot be written the task repeats the append and does nothing else: it does not read
//! from the agent, it refuses whatever would have to be logged, and `session_get` shows the reason. Once the
//! append succeeds it goes on where it was, so the log has every event once.

use std::time::{Duration, Instant};

use oubliette_protocol::{
    Error, ErrorCode, Result,
    event::{EventBody, SessionStatus},
};
use oubliette_store::SessionPatch;
use tokio::sync::oneshot;

use crate::{
    agent_process::{event_bounds::bound_event, terminal_escapes::strip_event},
    live::TaskCommand,
};

use super::{SessionTask, mask::mask_secrets, sleep_until};

/// How long to wait before a failed append is repeated.
const APPEND_RETRY: Duration = Duration::from_millis(500);

impl SessionTask {
    /// Appends events and updates the session's row in one transaction, then updates the live state. Repeats
    /// that until it succeeds. An error means that the events are not in the log and will not be: the server
    /// stops, or the database refuses them. The task ends then.
    pub(super) async fn log(&mut self, bodies: Vec<EventBody>, patch: SessionPatch) -> Result<()> {
        loop {
            let error = match self.try_log(bodies.clone(), patch.clone()).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if error.code != ErrorCode::Unavailable || !self.pending.stop.is_empty() {
                tracing::error!(session = %self.env.session, error = %error.for_log(), "appending events failed");
                self.log_abandoned = true;
                return Err(error);
            }
            self.wait_to_retry(error).await;
        }
    }

    /// Like [`log`](Self::log), but tries it once; an error means that nothing has changed.
    pub(super) async fn try_log(
        &mut self,
        mut bodies: Vec<EventBody>,
        mut patch: SessionPatch,
    ) -> Result<()> {
        for body in &mut bodies {
            // Before secrets are masked: one with an escape sequence in it would not be recognised.
            strip_event(body);
            mask_secrets(&self.env.plane, body);
            // Secrets go before a value is cut: half a secret would not be recognised.
            bound_event(body);
        }
        let status = bodies.iter().rev().find_map(|body| match body {
            EventBody::Status { status, reason } => Some((*status, reason.clone())),
            _ => None,
        });
        if let Some((status, reason)) = &status {
            patch.status = Some(*status);
            patch.reason = Some(reason.clone());
        }
        let now = (status.map(|(status, _)| status), patch.turn, patch.agent.clone());
        let log = self.env.deps.store.events();
        log.append_with_patch(&self.env.session, bodies, patch).await?;
        self.live.state.send_modify(|live| {
            live.status = now.0.unwrap_or(live.status);
            live.turn = now.1.unwrap_or(live.turn);
            live.agent = now.2.unwrap_or_else(|| live.agent.clone());
            if live.log_error.take().is_some() {
                tracing::info!(session = %self.env.session, "the session's log can be written again");
            }
        });
        Ok(())
    }

    pub(super) async fn log_status(&mut self, status: SessionStatus, reason: Option<String>) -> Result<()> {
        let event = EventBody::Status { status, reason };
        self.log(vec![event], SessionPatch::default()).await
    }

    /// Appends events of the running turn without waiting until they are durable, unless earlier ones could not
    /// be written: then it waits until all are, or until the turn is to be interrupted. Returns how many bytes of
    /// JSON were appended without waiting.
    pub(super) async fn log_soon(&mut self, events: impl IntoIterator<Item = EventBody>) -> Result<usize> {
        let events: Vec<EventBody> = events.into_iter().collect();
        let store = self.env.deps.store.clone();
        while !events.is_empty() && store.events().has_unwritten(&self.env.session) {
            match self.try_log(events.clone(), SessionPatch::default()).await {
                Ok(()) => return Ok(0),
                Err(error) if error.code != ErrorCode::Unavailable => return Err(error),
                Err(_) if self.interruption().is_some() || !self.pending.stop.is_empty() => break,
                Err(error) => self.wait_to_retry(error).await,
            }
        }
        let mut bytes = 0;
        for mut event in events {
            strip_event(&mut event);
            mask_secrets(&self.env.plane, &mut event);
            bound_event(&mut event);
            bytes += store.events().append_soon(&self.env.session, event).await?;
        }
        Ok(bytes)
    }

    /// Reports that the log cannot be written, and waits before the next attempt. Commands are taken meanwhile;
    /// those that would have to be logged are refused.
    pub(super) async fn wait_to_retry(&mut self, cause: Error) {
        let error = Error::unavailable(format!("the session's log cannot be written: {}", cause.message));
        self.live.state.send_modify(|live| {
            if live.log_error.replace(error.message.clone()).is_none() {
                tracing::error!(session = %self.env.session, error = %cause.for_log(), "appending events failed; repeated until it succeeds");
            }
        });
        // The session ends as soon as that can be logged, but that is not acknowledged.
        for reply in std::mem::take(&mut self.pending.end) {
            self.refuse_unlogged(TaskCommand::End(reply), &error);
        }
        let retry_at = Some(Instant::now() + APPEND_RETRY);
        loop {
            tokio::select! {
                () = sleep_until(retry_at) => return,
                command = self.commands.recv() => match command {
                    Some(command) => {
                        if let Some(command) = self.refuse_unlogged(command, &error) {
                            // Boxed: a command may begin a switch, which logs.
                            Box::pin(self.take_command(command)).await;
                        }
                        if self.interruption().is_some() || !self.pending.stop.is_empty() {
                            return;
                        }
                    }
                    None => {
                        self.pending.stop.push(oneshot::channel().0);
                        return;
                    }
                },
            }
        }
    }

    /// Refuses a command that would have to be logged; returns any other.
    fn refuse_unlogged(&mut self, command: TaskCommand, error: &Error) -> Option<TaskCommand> {
        match command {
            TaskCommand::Message(incoming) => drop(incoming.accepted.send(Err(error.clone()))),
            TaskCommand::Switch(_, reply) => drop(reply.send(Err(error.clone()))),
            TaskCommand::End(reply) => {
                drop(reply.send(Err(error.clone())));
                self.pending.end.push(oneshot::channel().0);
            }
            TaskCommand::PrepareTools(reply) | TaskCommand::RemoveQueued(_, reply) => {
                drop(reply.send(Err(error.clone())));
            }
            other @ (TaskCommand::Cancel(_) | TaskCommand::ApplyEdits | TaskCommand::Stop(_)) => {
                return Some(other);
            }
        }
        None
    }
}
