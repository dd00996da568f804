//! The ends of a session's task: the session is over, the server stops, or nobody needs it in memory.

use std::time::Duration;

use oubliette_protocol::{
    Error,
    event::{EventBody, Status},
};
use oubliette_store::SessionPatch;

use super::Task;

/// How long a stopping server waits for a running turn.
pub(super) const STOP_PATIENCE: Duration = Duration::from_secs(5);

/// Which of the messages that wait are dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dropped {
    All,
    /// Those whose sender waits for the turn.
    Awaited,
}

impl Task {
    /// The session is over. The agent dies first and whoever asked is told as soon as the log says so;
    /// tool servers may take their time to end.
    pub(super) async fn end(mut self) {
        let over = Error::conflict(format!("session {} was ended", self.site.session));
        let mut events = self.drop_queue(&over, Dropped::All).await;
        self.refuse_what_waits(&over);
        self.live.plane.cancel_all("the session was ended");
        let rig = self.rig.take().map(|mut rig| (rig.host.take(), rig));
        let rig = match rig {
            Some((Some(host), rig)) => {
                host.stop().await;
                Some(rig)
            }
            Some((None, rig)) => Some(rig),
            None => None,
        };
        self.live.callers.close().await;
        self.site.deps.door.close(&self.site.session);
        self.revoke_keys().await;
        if let Some(relay) = self.relay.take() {
            relay.remove();
        }
        events.push(EventBody::Status {
            status: Status::Ended,
            reason: None,
        });
        self.log(events, SessionPatch::default()).await;
        self.forget();
        for reply in self.notes.end.drain(..) {
            let _ = reply.send(());
        }
        self.site.clear().await;
        drop(rig);
        let dir = self.site.deps.home.session_dir(&self.site.session);
        let removed = tokio::task::spawn_blocking(move || std::fs::remove_dir_all(dir)).await;
        if let Ok(Err(error)) = removed
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(session = %self.site.session, %error, "an ended session's directory was not removed");
        }
    }

    /// The server stops; the session is found again at its next start.
    pub(super) async fn stop(mut self) {
        let stopping = Error::unavailable("the server is stopping; send the message again when it is back");
        let dropped = self.drop_queue(&stopping, Dropped::Awaited).await;
        self.refuse_what_waits(&stopping);
        self.live.callers.close().await;
        self.leave_memory().await;
        if !dropped.is_empty() {
            self.log(dropped, SessionPatch::default()).await;
        }
        if self.live.status() != Status::Idle && self.live.status().is_active() {
            self.log_status(
                Status::Idle,
                Some("the server was stopped; send a message to go on".into()),
            )
            .await;
        }
        self.revoke_keys().await;
        for reply in self.notes.stop.drain(..) {
            let _ = reply.send(());
        }
    }

    /// A failed session that nobody asks for is kept in the database alone.
    pub(super) async fn unload(mut self) {
        self.live.callers.close().await;
        self.leave_memory().await;
    }

    async fn leave_memory(&mut self) {
        self.forget();
        match self.rig.take() {
            Some(rig) => rig.down(&self.site).await,
            None => self.site.clear().await,
        }
        if let Some(relay) = self.relay.take() {
            relay.remove();
        }
    }

    /// Nobody finds the session in memory any more, and what was sent meanwhile is refused by the closed
    /// channel.
    fn forget(&mut self) {
        self.commands.close();
        if let Some(sessions) = self.sessions.upgrade() {
            sessions.forget(&self.site.session, &self.live);
        }
    }

    /// Drops messages that were not begun, with a word in the log for each. Whoever waits for one is told
    /// and can send it again; the others were accepted for good, and stay.
    async fn drop_queue(&mut self, why: &Error, which: Dropped) -> Vec<EventBody> {
        let mut told = Vec::new();
        for queued in std::mem::take(&mut self.queue) {
            if which == Dropped::Awaited && queued.ended.is_none() {
                continue;
            }
            let dropped = self
                .site
                .deps
                .store
                .queue_drop(&self.site.session, Some(queued.turn));
            if let Err(error) = dropped.await {
                tracing::error!(session = %self.site.session, error = %error.for_log(), "a message was not dropped");
                continue;
            }
            told.push(EventBody::Error {
                code: why.code,
                message: format!("turn {} was not begun: {}", queued.turn, why.message),
            });
            if let Some(ended) = queued.ended {
                let _ = ended.send(Err(why.clone()));
            }
        }
        told
    }

    fn refuse_what_waits(&mut self, error: &Error) {
        for reply in self.notes.tools.drain(..) {
            let _ = reply.send(Err(error.clone()));
        }
        if let Some(switch) = self.notes.switch.take() {
            switch.refuse(error.clone());
        }
    }

    async fn revoke_keys(&self) {
        if let Err(error) = self.site.deps.keys.revoke(&self.site.session).await {
            tracing::error!(session = %self.site.session, error = %error.for_log(), "a session's keys were not revoked");
        }
    }
}
