//! One of our own calls, from its encoded request to its answer.

use std::time::Duration;

use oubliette_protocol::{ByteCharge, relay::method};
use serde_json::{json, value::RawValue};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::{CallError, RpcPeer, calls::RawAnswer, message::notification_line};

/// An encoded call that is registered but not sent yet. Dropping it removes the call.
pub struct PreparedCall {
    pub(crate) guard: CallGuard,
    pub(crate) line: Vec<u8>,
    pub(crate) charge: ByteCharge,
    pub(crate) answer: oneshot::Receiver<RawAnswer>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) cancel: Option<CancellationToken>,
}

impl std::fmt::Debug for PreparedCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PreparedCall")
            .field("id", &self.guard.id)
            .finish_non_exhaustive()
    }
}

impl PreparedCall {
    /// Sends the call and waits for its answer. Dropping the future cancels the call on both sides.
    pub async fn send_and_wait(self) -> Result<Box<RawValue>, CallError> {
        let Self {
            mut guard,
            line,
            charge,
            answer,
            timeout,
            cancel,
        } = self;
        let answered = async {
            let sent = guard.peer.queue().send(line, None, Some(charge)).await;
            sent.map_err(|_| guard.peer.close_reason())?;
            guard.sent = true;
            answer
                .await
                .unwrap_or_else(|_| Err(guard.peer.close_reason().into()))
        };
        let cancelled = async {
            match &cancel {
                Some(token) => token.cancelled().await,
                None => std::future::pending().await,
            }
        };
        let expired = async {
            match timeout {
                Some(timeout) => tokio::time::sleep(timeout).await,
                None => std::future::pending().await,
            }
        };
        // Biased: an answer that has arrived wins over a timeout or cancellation at the same instant.
        tokio::select! {
            biased;
            answer = answered => answer,
            () = cancelled => Err(CallError::Cancelled),
            () = expired => Err(CallError::Timeout),
        }
    }
}

/// Removes a pending call when dropped, and sends `cancel` if its request was sent and not answered.
pub(crate) struct CallGuard {
    pub(crate) peer: RpcPeer,
    pub(crate) id: u64,
    pub(crate) sent: bool,
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        if self.peer.calls().remove(self.id) && self.sent {
            let params = json!({ "id": self.id });
            if let Ok(line) = notification_line(method::CANCEL, &params, usize::MAX) {
                self.peer.queue().send_now(line, None);
            }
        }
    }
}
