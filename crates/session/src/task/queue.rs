//! Messages that wait for their turn: put into the queue, or removed from it before their turn begins.

use oubliette_protocol::{
    ByteCharge, Error, Result,
    event::{EventBody, SessionStatus},
};
use oubliette_store::{QueuedMessage, SessionPatch};
use tokio::sync::oneshot;

use super::SessionTask;
use crate::live::SubmittedMessage;

/// A queued message and the turn it will be.
pub(super) struct QueuedTurn {
    pub(super) turn: u64,
    pub(super) text: String,
    pub(super) result: Option<oneshot::Sender<Result<String>>>,
    /// What the text is charged; none for one that was stored before a restart.
    pub(super) charge: Option<ByteCharge>,
}

impl SessionTask {
    /// Stores a message in the database, queues it and replies. From the reply on it survives a kill of the
    /// server.
    pub(super) async fn enqueue(&mut self, incoming: SubmittedMessage) {
        let SubmittedMessage {
            text,
            accepted,
            turn_result: ended,
        } = incoming;
        if self.queue.len() >= self.config().max_queue {
            let waiting = self.queue.len();
            let error = Error::limit_exceeded(format!(
                "{waiting} messages wait in this session; let some be done"
            ));
            let _ = accepted.send(Err(error));
            return;
        }
        let admitted = match self.env.plane.buffers().charge(text.len()) {
            Ok(charge) => {
                let log = self.env.deps.store.events();
                log.check_session_limit(&self.env.session).await.map(|()| charge)
            }
            Err(over) => Err(over.into()),
        };
        let charge = match admitted {
            Ok(charge) => charge,
            Err(error) => {
                let _ = accepted.send(Err(error));
                return;
            }
        };
        let last = self.queue.back().map(|queued| queued.turn);
        let last = last.or(self.running).unwrap_or(self.live.state.borrow().turn);
        // The sender of a removed message was told its number: nobody else gets it.
        let turn = last.max(self.last_removed_turn) + 1;
        let idle = self.queue.is_empty() && self.running.is_none() && self.pending.switch.is_none();
        let status = match (
            idle,
            self.processes
                .as_ref()
                .is_some_and(|processes| processes.agent.is_some()),
        ) {
            (true, true) => SessionStatus::Running,
            (true, false) => SessionStatus::Starting,
            (false, _) => self.live.status(),
        };
        let kept = QueuedMessage {
            turn,
            text: text.clone(),
        };
        if let Err(error) = self.env.deps.store.queue_push(&self.env.session, kept).await {
            let _ = accepted.send(Err(error));
            return;
        }
        self.queue.push_back(QueuedTurn {
            turn,
            text,
            result: ended,
            charge: Some(charge),
        });
        let _ = accepted.send(Ok((turn, status)));
    }

    /// Removes the message that waits for a turn. The log says so in the transaction that takes it out of the queue, so
    /// that nobody waits for a turn that never begins; a sender that waits gets the error.
    pub(super) async fn remove_queued(&mut self, turn: u64) -> Result<()> {
        let Some(place) = self.queue.iter().position(|queued| queued.turn == turn) else {
            return Err(Error::not_found(format!(
                "no message waits for turn {turn}: it has begun, or was removed"
            )));
        };
        let error = Error::conflict("its message was removed from the queue");
        let event = EventBody::turn_skipped(turn, &error);
        let patch = SessionPatch {
            dequeue_turn: Some(turn),
            ..SessionPatch::default()
        };
        self.try_log(vec![event], patch).await?;
        self.last_removed_turn = self.last_removed_turn.max(turn);
        if let Some(result) = self.queue.remove(place).and_then(|queued| queued.result) {
            let _ = result.send(Err(error));
        }
        Ok(())
    }
}
