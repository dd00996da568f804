//! Callers that are connected to this server while their session runs on another: they are present there as long as a
//! request of this server to that one is open.

use std::{sync::Arc, time::Duration};

use futures::{Stream, StreamExt as _, stream};
use oubliette_protocol::{Result, event::SessionEvent};
use oubliette_session::{HoldKind, PresenceKey};
use oubliette_store::PeerServer;
use tokio::{sync::watch, task::AbortHandle};
use tokio_util::sync::CancellationToken;

use super::{
    ClusterHop, IfUnowned, OwnedTarget, SessionPlace,
    client::PeerRequest,
    new_call_id,
    wire::{AnswerLine, AnswerLineReader, ClosedMcpSession, HoldRequest, OpenRequestsQuery},
};
use crate::{app::App, auth::Grant};

/// How long a request waits until its caller is present at the other server.
const HOLD_TIMEOUT: Duration = Duration::from_secs(2);
/// How long to wait before a hold that broke is made again.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Marks callers as present at another server. Dropping it means that they left.
pub(crate) struct RemoteHold {
    task: AbortHandle,
    answered: CancellationToken,
    is_held: watch::Receiver<bool>,
}

impl RemoteHold {
    /// Completes when the other server has it, or after a moment.
    pub(crate) fn held(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut is_held = self.is_held.clone();
        async move {
            let _ = tokio::time::timeout(HOLD_TIMEOUT, is_held.wait_for(|held| *held)).await;
        }
    }

    /// Ends it as answered: the callers did not leave.
    pub(crate) fn release_as_answered(self) {
        self.answered.cancel();
    }
}

impl Drop for RemoteHold {
    fn drop(&mut self) {
        if !self.answered.is_cancelled() {
            self.task.abort();
        }
    }
}

impl ClusterHop {
    /// Marks callers as present at another server, until the hold is dropped or that server is gone. A connection that
    /// breaks is made again.
    pub(crate) fn hold_at(
        self: &Arc<Self>,
        peer: PeerServer,
        key: PresenceKey,
        kind: HoldKind,
    ) -> RemoteHold {
        let (held, is_held) = watch::channel(false);
        let answered = CancellationToken::new();
        let (me, ended) = (self.clone(), answered.clone());
        let task = tokio::spawn(async move {
            tokio::select! {
                () = me.keep_hold(&peer, &key, kind, &held, &ended) => {}
                () = me.peers.gone(&peer.server_id) => {}
            }
        });
        RemoteHold {
            task: task.abort_handle(),
            answered,
            is_held,
        }
    }

    /// Marks a caller of a session as present at the server that runs it; `None` if that is this one.
    pub(crate) async fn hold_for_session(
        self: &Arc<Self>,
        app: &App,
        grant: &Grant,
        key: PresenceKey,
        kind: HoldKind,
    ) -> Result<Option<RemoteHold>> {
        let Some(session) = key.session.clone() else {
            return Ok(None);
        };
        let place = self
            .place(app, grant, OwnedTarget::Session(&session), IfUnowned::Claim)
            .await?;
        let SessionPlace::Peer(peer) = place else {
            return Ok(None);
        };
        let hold = self.hold_at(peer, key, kind);
        hold.held().await;
        Ok(Some(hold))
    }

    async fn keep_hold(
        &self,
        peer: &PeerServer,
        key: &PresenceKey,
        kind: HoldKind,
        held: &watch::Sender<bool>,
        answered: &CancellationToken,
    ) {
        while !answered.is_cancelled() {
            let call_id = new_call_id();
            let hold = HoldRequest {
                call_id: call_id.clone(),
                key: key.clone(),
                kind,
            };
            let Ok(request) = PeerRequest::post("/internal/presence", &hold) else {
                return;
            };
            match self.peers.send(peer, &request).await {
                Ok(answer) if answer.status().is_success() => {
                    let mut lines = AnswerLineReader::new(answer.bytes_stream());
                    let reading = async {
                        while let Ok(Some(line)) = lines.next::<AnswerLine>().await {
                            if matches!(line, AnswerLine::Held) {
                                held.send_replace(true);
                            }
                        }
                    };
                    tokio::select! {
                        () = reading => {}
                        () = answered.cancelled() => self.signal(peer, &call_id).await,
                    }
                }
                Ok(answer) => {
                    tracing::debug!(server = %peer.server_id, status = answer.status().as_u16(), "a presence hold was refused")
                }
                Err(failure) => {
                    tracing::debug!(server = %peer.server_id, ?failure, "a presence hold failed")
                }
            }
            held.send_replace(false);
            tokio::select! {
                () = tokio::time::sleep(RETRY_DELAY) => {}
                () = answered.cancelled() => {}
            }
        }
    }

    /// The requests that wait at another server for the callers of a stream here, for delivery after a reconnect. They are
    /// asked for when `held` completes.
    pub(crate) fn open_requests_at(
        self: &Arc<Self>,
        peer: PeerServer,
        key: PresenceKey,
        held: impl Future<Output = ()> + Send + 'static,
    ) -> impl Stream<Item = Arc<SessionEvent>> + Send + 'static {
        let me = self.clone();
        let asked = async move {
            held.await;
            let request = PeerRequest::post("/internal/open-requests", &OpenRequestsQuery { key }).ok()?;
            let answer = tokio::time::timeout(HOLD_TIMEOUT, me.peers.send(&peer, &request))
                .await
                .ok()?
                .ok()?;
            answer
                .status()
                .is_success()
                .then(|| AnswerLineReader::new(answer.bytes_stream().boxed()))
        };
        stream::once(asked).flat_map(|lines| {
            stream::unfold(lines, |lines| async move {
                let mut lines = lines?;
                loop {
                    match lines.next().await {
                        Ok(Some(AnswerLine::Event { event })) => {
                            return Some((Arc::new(*event), Some(lines)));
                        }
                        Ok(Some(_)) => {}
                        Ok(None) | Err(_) => return None,
                    }
                }
            })
        })
    }

    /// Tells another server that a stateful MCP session was closed, whose callers are absent then.
    pub(crate) fn tell_mcp_session_closed(self: &Arc<Self>, peer: PeerServer, mcp_session: String) {
        let me = self.clone();
        tokio::spawn(async move {
            let closed = ClosedMcpSession { mcp_session };
            let Ok(request) = PeerRequest::post("/internal/mcp-closed", &closed) else {
                return;
            };
            if let Err(failure) = me.peers.send(&peer, &request).await {
                tracing::debug!(server = %peer.server_id, ?failure, "the end of an MCP session could not be told");
            }
        });
    }
}
